"""Source files that were edited after the notebook imported them.

Workers import a local module from its file, so that they get the edited version, while the notebook
goes on with the one that it imported (jupyter/notebook#2395, joblib/joblib#1085).
"""

from __future__ import annotations

import os
import sys
import types
import weakref
from importlib.machinery import ModuleSpec

from nbaccel.base.log import write_notice
from nbaccel.workers.installed_modules import local_modules

__all__ = ["tell_of_edits"]

# Weak, so that it keeps no module alive. The spec is another one after a reload.
_KNOWN_VERSIONS: weakref.WeakKeyDictionary[types.ModuleType, tuple[ModuleSpec, int, int]] = (
    weakref.WeakKeyDictionary()
)
"""Module → its spec, when what was imported was written, and the last edit that was told."""


def tell_of_edits() -> bool:
    """Write a line for each local module whose file is newer than what this process has imported.

    Each edit is reported once.
    """
    has_edits = False
    for module_name in sorted(local_modules()):
        module = sys.modules.get(module_name)
        module_spec: ModuleSpec | None = getattr(module, "__spec__", None)
        if module is None or module_spec is None:
            continue
        source_time = _time_of(module.__file__)
        known_spec, imported_time, told_time = _KNOWN_VERSIONS.get(module, (None, 0, 0))
        if known_spec is not module_spec:
            # Python writes the bytecode file when it imports. Without one, edits count from here.
            imported_time = told_time = _time_of(module_spec.cached) or source_time
        has_edits |= source_time > imported_time
        if source_time > told_time:
            write_notice(
                f"nbaccel: {os.path.basename(str(module.__file__))} has been edited since the "
                f"notebook imported {module_name}. Workers that import it now run the edited "
                "version, and the notebook runs the old one unless %autoreload has replaced it. To "
                f"have one version everywhere: import importlib; importlib.reload({module_name})\n"
            )
        _KNOWN_VERSIONS[module] = (module_spec, imported_time, max(source_time, told_time))
    return has_edits


def _time_of(file_path: str | None) -> int:
    """When a file was written, in nanoseconds; 0 where there is none."""
    try:
        return os.stat(file_path or "").st_mtime_ns
    except OSError:
        return 0
