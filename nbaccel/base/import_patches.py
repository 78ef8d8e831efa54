"""Changing a module of another package when it is imported, or at once where it has been."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["patch_module"]

PatchModule = Callable[[ModuleType], None]


def patch_module(module_name: str, patch: PatchModule) -> None:
    """Change a module, now or when it is imported. The module is not imported for it."""
    if (module := sys.modules.get(module_name)) is not None:
        patch(module)
    else:
        sys.meta_path.insert(0, _ModulePatcher(module_name, patch))


class _ModulePatcher(MetaPathFinder):
    """Patches a module when it is imported: unpickling a method looks it up at once."""

    def __init__(self, module_name: str, patch: PatchModule) -> None:
        self._module_name = module_name
        self._patch = patch

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        # PathFinder itself, because importlib.util.find_spec would call this finder again.
        module_spec = PathFinder.find_spec(name, path) if name == self._module_name else None
        if module_spec is None or module_spec.loader is None:
            return None
        load_module = module_spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load_module(module)
            self._patch(module)

        module_spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return module_spec
