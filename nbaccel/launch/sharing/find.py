"""Finding the modules in a call: in its arguments, and whatever else the function reaches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_MAX_DEPTH = 8  # deeper nesting than anyone writes by hand; keeps odd objects from costing seconds

_LONG = 1000

_MAX_VISITS = 20_000
"""Objects looked at for what a function reaches: tens of milliseconds at most."""

_OPAQUE = (torch.Tensor, np.ndarray, np.generic, str, bytes, bytearray, int, float, complex)
"""What holds no modules. (`bool` is an `int`.)"""


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


def outermost(modules: Iterable[nn.Module], known: Iterable[nn.Module]) -> list[nn.Module]:
    """Those with tensors that are part of no known module and of no other one among them.

    Args:
        modules: Candidates, a module before its parts.
        known: Modules that are taken care of.
    """
    seen = {id(part) for module in known for part in module.modules()}
    found = []
    for module in modules:
        if id(module) not in seen:
            seen.update(id(part) for part in module.modules())
            if any(True for _ in _tensors(module)):
                found.append(module)
    return found


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def reached(function: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, nn.Module]]:
    """The modules that a function reaches through globals, closures, objects and its arguments.

    What is reached by few steps comes first. Code and data of imported modules are passed over:
    workers import these themselves.

    Args:
        function: What is to be called.
        args: Its arguments.

    Returns:
        Each module once, with the path that a user would write.
    """
    name = getattr(function, "__name__", type(function).__name__)
    queue: deque[tuple[str, Any]] = deque([(name, function)])
    queue.extend((f"args[{i}]", arg) for i, arg in enumerate(args))
    found: dict[int, tuple[str, nn.Module]] = {}
    seen: set[int] = set()
    while queue and len(seen) < _MAX_VISITS:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, _OPAQUE) or _is_plain_data(value):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[id(value)] = (path, value)
        else:
            queue.extend(_reach(path, value))
    return list(found.values())


def _reach(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What one object leads to, each with its path."""
    if isinstance(value, types.MethodType):
        yield _owner(path, value), value.__self__
        yield path, value.__func__
    elif isinstance(value, functools.partial):
        yield path, value.func
        yield from ((f"{path}.args[{i}]", arg) for i, arg in enumerate(value.args))
        yield from ((f"{path}.keywords[{k!r}]", arg) for k, arg in value.keywords.items())
    elif isinstance(value, types.FunctionType):
        if _is_of_a_cell(value):
            yield from _variables(value)
    elif isinstance(value, type):
        if _is_of_a_cell(value):
            yield from ((f"{path}.{name}", member) for name, member in vars(value).items())
    elif not isinstance(value, types.ModuleType):
        yield from ((path + key, child) for key, child in _children(value))
        if type(value).__module__ != "builtins":
            yield type(value).__name__, type(value)
        yield from ((f"{path}.{name}", child) for name, child in _attributes(value).items())


def _owner(path: str, method: types.MethodType) -> str:
    owner = path.rpartition(".")[0]
    return owner or f"{type(method.__self__).__name__}.{path}.__self__"


def _attributes(value: Any) -> Mapping[str, Any]:
    found = getattr(value, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables from outside that a function's body names, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"{function.__name__}'s default", value) for value in defaults)
    wrapped = inspect.unwrap(function)
    if wrapped is not function:
        yield function.__name__, wrapped


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_of_a_cell(value: Any) -> bool:
    """Whether it travels by value: no worker could import it."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or "<locals>" in value.__qualname__:
        return True
    return bool(value.__qualname__ == "<lambda>")
