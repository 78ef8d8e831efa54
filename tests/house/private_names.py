"""Private names of other packages, found in the syntax tree of what uses them."""

from __future__ import annotations

import ast
import functools

from tests.house.source import nodes

# Documented, in spite of the underscore.
_PUBLIC = {
    *("_asdict", "_fields", "_make", "_replace"),  # named tuples
    *("_current_frames", "_exit", "_getframe", "_thread"),  # os and sys; a module
    "_render_traceback_",  # IPython's protocol for errors
}
_BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


@functools.cache
def defined(tree: ast.Module) -> frozenset[str]:
    """The names that a module gives to its own functions, classes, fields and attributes."""
    names: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.Tuple) and all(isinstance(e, ast.Constant) for e in node.elts):
            names |= {e.value for e in node.elts if isinstance(e.value, str)}  # type: ignore[attr-defined]
    return frozenset(names)


def used(tree: ast.Module, inherited: frozenset[str]) -> list[tuple[int, str]]:
    """Line and name of each private name that is somebody else's."""
    own = defined(tree)
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("nbaccel"):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            parts = [
                p for a in node.names if not a.name.startswith("nbaccel") for p in a.name.split(".")
            ]
        elif isinstance(node, ast.Attribute):
            known = node.attr in own or (node.attr in inherited and _is_own(node.value))
            parts = [] if known else [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            parts = [name.value] if isinstance(name, ast.Constant) and name.value not in own else []
        elif (
            isinstance(node, ast.Subscript)
            and getattr(getattr(node.value, "func", None), "id", "") == "vars"
        ):
            parts = [node.slice.value] if isinstance(node.slice, ast.Constant) else []
        else:
            continue
        found += [(node.lineno, part) for part in parts if is_private(part) and part not in _PUBLIC]
    return found


def _is_own(value: ast.expr) -> bool:
    """Whether it is `self`, `cls` or `super()`."""
    if isinstance(value, ast.Call):
        bare = not value.args and not value.keywords
        return bare and isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")
