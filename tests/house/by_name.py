"""Where code asks for a backend by its name, found in the syntax tree.

A backend is told apart by its row or its contract. What counts is therefore not how a variable is
called, but that a name of a row stands where code decides: beside a comparison, in a `case`, among
the keys of a dictionary that is looked up at once, or as the argument of a look-up.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbaccel.config.capabilities import DEVICES, FP8_BACKENDS, PRECISIONS, STRATEGIES

_GROUP_BACKENDS = {
    backend for row in DEVICES for backend in (row.group_backend, row.shared_group_backend)
}
# "no" is float32, and the word for nothing: a format, not a backend.
NAMES = {
    row.name for rows in (DEVICES, STRATEGIES, PRECISIONS, FP8_BACKENDS) for row in rows
} | _GROUP_BACKENDS
NAMES -= {"no"}
_LOOKUPS = {
    "check_strategy",
    "device",
    "device_row",
    "known_device",
    "precision",
    "precision_row",
    "strategy",
    "strategy_row",
}
_STARTS = {"startswith", "endswith", "partition"}


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each place, by its line.

    Args:
        tree: A module's.

    Yields:
        The line and the names that stand there.
    """
    for node in ast.walk(tree):
        names = NAMES & {*_names_in(node)}
        if names and not _asks_for_host_memory(node):
            yield node.lineno, ", ".join(sorted(names))


def _names_in(node: ast.AST) -> Iterator[str]:
    """The words by which a node decides."""
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            yield from _words(side)
    elif isinstance(node, ast.MatchValue):
        yield from _words(node.value)
    elif isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Dict):
            yield from _keys(node.value)
        yield from _words(node.slice) if _is_table(node.value) else ()
    elif isinstance(node, ast.Call):
        yield from _names_in_call(node)


def _names_in_call(node: ast.Call) -> Iterator[str]:
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called in _LOOKUPS | _STARTS and ast.unparse(function) != "torch.device":
        for argument in node.args:
            yield from _words(argument)
    if called == "get" and isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Dict):
            yield from _keys(function.value)
        if _is_table(function.value) and node.args:
            yield from _words(node.args[0])


def _is_table(node: ast.expr) -> bool:
    """Whether it is one of the tables by name, as `{row.name: row for row in DEVICES}` is."""
    return isinstance(node, ast.DictComp)


def _keys(node: ast.Dict) -> Iterator[str]:
    for key in node.keys:
        if key is not None:
            yield from _words(key)


def _words(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        for item in node.elts:
            yield from _words(item)
    elif isinstance(node, ast.Dict):
        yield from _keys(node)


def _asks_for_host_memory(node: ast.AST) -> bool:
    """Whether it is `tensor.device.type == "cpu"`: where torch keeps it, not what computes."""
    if not isinstance(node, ast.Compare):
        return False
    sides = (node.left, *node.comparators)
    words = {word for side in sides for word in _words(side)}
    return words <= {"cpu", "meta"} and any(ast.unparse(side).endswith(".type") for side in sides)
