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

from nbaccel.transfer.pickling import WEAK_TYPES

# Deeper nesting than anyone writes by hand; keeps odd objects from costing seconds.
_MAX_NESTING_DEPTH = 8

_LONG_LIST_ITEMS = 1000  # a list of more numbers is a data set, not a container of modules

_MAX_VISITS = 20_000
"""Objects visited from a function at most, which takes tens of milliseconds."""


_OPAQUE_TYPES = (torch.Tensor, np.ndarray, np.generic, str, bytes, bytearray, int, float, complex)
"""What holds no modules. (`bool` is an `int`.)"""


def find_modules(args: tuple[Any, ...]) -> list[tuple[str, nn.Module]]:
    """Every module in the arguments, once, with the path a user would write.

    Looks into lists, tuples, sets, mappings and dataclasses. A module inside another module belongs
    to the outer one.
    """
    modules: dict[int, tuple[str, nn.Module]] = {}
    seen_ids: set[int] = set()
    for position, argument in enumerate(args):
        for source_path, module in _walk_arguments(
            argument, f"args[{position}]", seen_ids, _MAX_NESTING_DEPTH
        ):
            modules.setdefault(id(module), (source_path, module))
    return list(modules.values())


def _walk_arguments(
    holder: Any, source_path: str, seen_ids: set[int], depth_left: int
) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(holder, nn.Module):
        yield source_path, holder
        return
    if depth_left == 0 or id(holder) in seen_ids or _is_plain_data(holder):
        return
    for step, value in _held_values(holder):
        seen_ids.add(id(holder))
        yield from _walk_arguments(value, source_path + step, seen_ids, depth_left - 1)


def _is_plain_data(holder: Any) -> bool:
    """A long list that starts with a number or text: a data set, not worth a million look-ups."""
    is_long = isinstance(holder, (list, tuple)) and len(holder) > _LONG_LIST_ITEMS
    return is_long and isinstance(holder[0], (int, float, complex, str, bytes))


def _held_values(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, Mapping):
        yield from ((f"[{step!r}]", value) for step, value in holder.items())
    elif isinstance(holder, (list, tuple)):
        yield from ((f"[{position}]", value) for position, value in enumerate(holder))
    elif isinstance(holder, (set, frozenset)):
        yield from ((f".element{position}", value) for position, value in enumerate(holder))
    elif dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        for field in dataclasses.fields(holder):
            if hasattr(holder, field.name):
                yield f".{field.name}", getattr(holder, field.name)


def outermost_modules(
    modules: Iterable[nn.Module], known_modules: Iterable[nn.Module]
) -> list[nn.Module]:
    """Those with tensors that are part of no known module and of no other one among them."""
    seen_ids = {id(submodule) for module in known_modules for submodule in module.modules()}
    found_modules = []
    for module in modules:
        if id(module) not in seen_ids:
            seen_ids.update(id(submodule) for submodule in module.modules())
            if any(True for _ in _parameters_and_buffers(module)):
                found_modules.append(module)
    return found_modules


def _parameters_and_buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def reached_modules(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> list[tuple[str, nn.Module]]:
    """The modules that a function reaches through globals, closures, objects and its arguments.

    What is reached by few steps comes first. Code and data of imported modules are passed over:
    workers import these themselves.
    """
    variable_name = getattr(function, "__name__", type(function).__name__)
    unvisited: deque[tuple[str, Any]] = deque([(variable_name, function)])
    unvisited.extend((f"args[{position}]", argument) for position, argument in enumerate(args))
    found_modules: dict[int, tuple[str, nn.Module]] = {}
    seen_ids: set[int] = set()
    while unvisited and len(seen_ids) < _MAX_VISITS:
        source_path, holder = unvisited.popleft()
        if id(holder) in seen_ids or type(holder) in WEAK_TYPES:
            continue
        if isinstance(holder, _OPAQUE_TYPES) or _is_plain_data(holder):
            continue
        seen_ids.add(id(holder))
        if isinstance(holder, nn.Module):
            found_modules[id(holder)] = (source_path, holder)
        else:
            unvisited.extend(_reached_from(source_path, holder))
    return list(found_modules.values())


def _reached_from(source_path: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """What one object leads to, each with its path."""
    if isinstance(holder, types.MethodType):
        yield _owner_path(source_path, holder), holder.__self__
        yield source_path, holder.__func__
    elif isinstance(holder, functools.partial):
        yield source_path, holder.func
        yield from (
            (f"{source_path}.args[{position}]", argument)
            for position, argument in enumerate(holder.args)
        )
        yield from (
            (f"{source_path}.keywords[{keyword!r}]", argument)
            for keyword, argument in holder.keywords.items()
        )
    elif isinstance(holder, types.FunctionType):
        if _is_of_a_cell(holder):
            yield from _outer_variables(holder)
    elif isinstance(holder, type):
        if _is_of_a_cell(holder):
            yield from (
                (f"{source_path}.{variable_name}", class_member)
                for variable_name, class_member in vars(holder).items()
            )
    elif not isinstance(holder, types.ModuleType):
        yield from (
            (source_path + path_step, held_value) for path_step, held_value in _held_values(holder)
        )
        # The class too: a method of it may read a global module.
        if type(holder).__module__ != "builtins":
            yield type(holder).__name__, type(holder)
        yield from (
            (f"{source_path}.{variable_name}", held_value)
            for variable_name, held_value in _instance_attributes(holder).items()
        )


def _owner_path(source_path: str, bound_method: types.MethodType) -> str:
    owner_path = source_path.rpartition(".")[0]
    return owner_path or f"{type(bound_method.__self__).__name__}.{source_path}.__self__"


def _instance_attributes(holder: Any) -> Mapping[str, Any]:
    table = getattr(holder, "__dict__", None)
    return dict(table) if isinstance(table, dict) else {}


def _outer_variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables from outside that a function's body names, and its defaults."""
    for variable_name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=False
    ):
        # An empty closure cell raises ValueError: the variable has no value yet.
        with contextlib.suppress(ValueError):
            yield variable_name, cell.cell_contents
    for variable_name in _global_names(function.__code__):
        if variable_name in function.__globals__:
            yield variable_name, function.__globals__[variable_name]
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((f"{function.__name__}'s default", holder) for holder in values)
    # A decorator of an imported package hides the cell's function behind one that is passed over.
    wrapped_function = inspect.unwrap(function)
    if wrapped_function is not function:
        yield function.__name__, wrapped_function


def _global_names(code_object: types.CodeType) -> Iterator[str]:
    yield from code_object.co_names
    for code_constant in code_object.co_consts:
        if isinstance(code_constant, types.CodeType):
            yield from _global_names(code_constant)


def _is_of_a_cell(holder: Any) -> bool:
    """Whether it travels by value: no worker could import it."""
    module = sys.modules.get(getattr(holder, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or "<locals>" in holder.__qualname__:
        return True
    return bool(holder.__qualname__ == "<lambda>")
