"""Changing a module of another package when it is imported, or at once where it has been."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PatchModule = Callable[[ModuleType], None]


def patch_module(module_name: str, patch: PatchModule) -> None:
    """Change a module, now or when it is imported. The module is not imported for it."""
    if (module := sys.modules.get(module_name)) is not None:
        patch(module)
        return
    for finder in sys.meta_path:
        # One finder for all patches of a module: the first one finds it, and no other is asked.
        if isinstance(finder, _ModulePatcher) and finder.module_name == module_name:
            finder.patches.append(patch)
            return
    sys.meta_path.insert(0, _ModulePatcher(module_name, patch))


class _ModulePatcher(MetaPathFinder):
    """Patches a module when it is imported: unpickling a method looks it up at once."""

    def __init__(self, module_name: str, patch: PatchModule) -> None:
        self.module_name = module_name
        self.patches = [patch]

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        # PathFinder itself, because importlib.util.find_spec would call this finder again.
        module_spec = PathFinder.find_spec(name, path) if name == self.module_name else None
        if module_spec is None or module_spec.loader is None:
            return None
        load_module = module_spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load_module(module)
            for patch in self.patches:
                patch(module)

        module_spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return module_spec
