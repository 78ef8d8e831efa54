"""Finding the modules in a call's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_MAX_DEPTH = 8  # deeper nesting than anyone writes by hand; keeps odd objects from costing seconds

_LONG = 1000


def find_modules(args: tuple[Any, ...]) -> list[tuple[str, nn.Module]]:
    """Every module in the arguments, once, with the path a user would write.

    Looks into lists, tuples, sets, mappings and dataclasses. A module inside another module belongs
    to the outer one.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    seen: set[int] = set()
    for i, arg in enumerate(args):
        for path, module in _walk(arg, f"args[{i}]", seen, _MAX_DEPTH):
            found.setdefault(id(module), (path, module))
    return list(found.values())


def _walk(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
        return
    if depth == 0 or id(value) in seen or _is_plain_data(value):
        return
    for key, child in _children(value):
        seen.add(id(value))
        yield from _walk(child, path + key, seen, depth - 1)


def _is_plain_data(value: Any) -> bool:
    """A long list that starts with a number or text: a data set, not worth a million look-ups."""
    long = isinstance(value, (list, tuple)) and len(value) > _LONG
    return long and isinstance(value[0], (int, float, complex, str, bytes))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f".element{i}", child) for i, child in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            if hasattr(value, f.name):
                yield f".{f.name}", getattr(value, f.name)
