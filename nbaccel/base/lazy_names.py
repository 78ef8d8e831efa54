"""Names of a package that are imported when they are first used (PEP 562).

A package lists them once, as imports under ``if TYPE_CHECKING:``, each ``as`` itself, which tells
type checkers that it is handed on; here the same block is read from its source. Modules that only
hand names on, at once, list them as such imports, too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


def names_handed_on(file_path: str) -> dict[str, str]:
    """Name → module of what a package imports for type checkers."""
    tree = ast.parse(Path(file_path).read_text(encoding="utf-8"))
    blocks = (block.body for block in tree.body if isinstance(block, ast.If))
    return {name: home for body in blocks for name, home in _imported_as(body)}


def hand_on(module: dict[str, Any], *own_names: str) -> None:
    """Let a module's ``__all__`` be what it imports, each ``as`` itself, and some names of its own.

    Not assigned in the module: type checkers, and what reads the source for the documentation,
    take an ``__all__`` that is computed for an empty one.
    """
    tree = ast.parse(Path(module["__file__"]).read_text(encoding="utf-8"))
    module["__all__"] = [*(name for name, _ in _imported_as(tree.body)), *own_names]


def name_own(module: dict[str, Any], *others: str) -> None:
    """Let a module's ``__all__`` be the functions and classes that it defines, and some others."""
    is_own = {name: getattr(value, "__module__", "") for name, value in module.items()}
    own_names = [name for name, home in is_own.items() if home == module["__name__"]]
    module["__all__"] = [*(name for name in own_names if not name.startswith("_")), *others]


def _imported_as(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.asname:
                    yield alias.asname, str(statement.module)


def lazy_names(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """What a package calls ``__getattr__``."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
