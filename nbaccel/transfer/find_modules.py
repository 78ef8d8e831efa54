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

_LONG_LIST_ITEMS = 1000  # a list of more numbers is a data set, not a container of modules

_MAX_VISITS = 20_000
"""Objects visited from a function or its arguments at most, which takes tens of milliseconds."""


_OPAQUE_TYPES = (torch.Tensor, np.ndarray, np.generic, str, bytes, bytearray, int, float, complex)
"""What holds no modules. (`bool` is an `int`.)"""


def find_modules(args: tuple[Any, ...]) -> list[tuple[str, nn.Module]]:
    """Every module in the arguments, once, with the path a user would write.

    Looks into lists, tuples, sets, mappings and dataclasses. A module inside another module belongs
    to the outer one.
    """
    modules: dict[int, tuple[str, nn.Module]] = {}
    for argument in _numbered(args):
        for source_path, module in _modules_behind([argument], _held_values):
            modules.setdefault(id(module), (source_path, module))
    return list(modules.values())


def _numbered(args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [(f"args[{position}]", argument) for position, argument in enumerate(args)]


def _modules_behind(
    starts: Iterable[tuple[str, Any]],
    steps_from: Callable[[str, Any], Iterator[tuple[str, Any]]],
) -> list[tuple[str, nn.Module]]:
    """The modules that steps lead to, each by the path of fewest steps."""
    unvisited = deque(starts)
    found_modules: dict[int, tuple[str, nn.Module]] = {}
    # Kept, so that no other object gets the id of one that was seen.
    seen_objects: dict[int, Any] = {}
    while unvisited and len(seen_objects) < _MAX_VISITS:
        source_path, holder = unvisited.popleft()
        if id(holder) in seen_objects or type(holder) in WEAK_TYPES:
            continue
        if isinstance(holder, _OPAQUE_TYPES) or _is_plain_data(holder):
            continue
        seen_objects[id(holder)] = holder
        if isinstance(holder, nn.Module):
            found_modules[id(holder)] = (source_path, holder)
        else:
            unvisited.extend(steps_from(source_path, holder))
    return list(found_modules.values())


def _is_plain_data(holder: Any) -> bool:
    """A long list that starts with a number or text: a data set, not worth a million look-ups."""
    is_long = isinstance(holder, (list, tuple)) and len(holder) > _LONG_LIST_ITEMS
    return is_long and isinstance(holder[0], (int, float, complex, str, bytes))


def _held_values(source_path: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """What is in a container or dataclass."""
    if isinstance(holder, Mapping):
        yield from ((f"{source_path}[{step!r}]", value) for step, value in holder.items())
    elif isinstance(holder, (list, tuple)):
        yield from ((f"{source_path}[{position}]", value) for position, value in enumerate(holder))
    elif isinstance(holder, (set, frozenset)):
        yield from (
            (f"{source_path}.element{position}", value) for position, value in enumerate(holder)
        )
    elif dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        for field in dataclasses.fields(holder):
            if hasattr(holder, field.name):
                yield f"{source_path}.{field.name}", getattr(holder, field.name)


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
    return _modules_behind([(variable_name, function), *_numbered(args)], _reached_from)


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
        yield from _held_values(source_path, holder)
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
