"""What a function and its arguments lead to: modules, and the part that cannot be pickled.

Each is named by the path that a user would write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from nbaccel.base.frames import kind_name
from nbaccel.transfer import pickling
from nbaccel.transfer.free_names import globals_read
from nbaccel.transfer.pickling import travels_by_value

_Parts = Iterator[tuple[str, Any]]

_LONG_LIST_ITEMS = 1000

_MAX_VISITS = 20_000  # from a function or its arguments at most: tens of milliseconds

_WEAK_TYPES = (weakref.ProxyType, weakref.CallableProxyType, weakref.ReferenceType)
"""To be asked for by `type`: `isinstance` raises for a reference to what is gone."""

_OPAQUE_TYPES = (torch.Tensor, np.ndarray, np.generic, str, bytes, bytearray, int, float, complex)
"""What holds no modules. (`bool` is an `int`.)"""


def find_modules(args: tuple[Any, ...]) -> list[tuple[str, nn.Module]]:
    """Every outermost module in the arguments, also in containers, with its path."""
    modules: dict[int, tuple[str, nn.Module]] = {}
    for argument in _numbered("args", args):
        for path, module in _modules_behind([argument], _contents):
            modules.setdefault(id(module), (path, module))
    return list(modules.values())


def reached_modules(
    function: Callable[..., Any], args: tuple[Any, ...]
) -> list[tuple[str, nn.Module]]:
    """The modules that a function reaches, but for those in imported modules; nearest first."""
    name = getattr(function, "__name__", type(function).__name__)
    return _modules_behind([(name, function), *_numbered("args", args)], _parts)


def outermost_modules(modules: Iterable[nn.Module], known: Iterable[nn.Module]) -> list[nn.Module]:
    """Those with tensors that are part of no known module and of no other one among them."""
    seen = {id(submodule) for module in known for submodule in module.modules()}
    outermost = []
    for module in modules:
        if id(module) not in seen:
            seen.update(id(submodule) for submodule in module.modules())
            if [*module.parameters(), *module.buffers()]:
                outermost.append(module)
    return outermost


def _modules_behind(
    starts: Iterable[tuple[str, Any]], parts: Callable[[str, Any], _Parts]
) -> list[tuple[str, nn.Module]]:
    """The modules that steps lead to, each by the path of fewest steps."""
    unvisited = deque(starts)
    modules: dict[int, tuple[str, nn.Module]] = {}
    # Kept, so that no other object gets the id of one that was seen.
    seen: dict[int, Any] = {}
    while unvisited and len(seen) < _MAX_VISITS:
        path, value = unvisited.popleft()
        if id(value) in seen or type(value) in _WEAK_TYPES:
            continue
        is_long = isinstance(value, (list, tuple)) and len(value) > _LONG_LIST_ITEMS
        # A long list that starts with a number or text is a data set, not worth so many look-ups.
        if isinstance(value[0] if is_long else value, _OPAQUE_TYPES):
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            modules[id(value)] = (path, value)
        else:
            unvisited.extend(parts(path, value))
    return list(modules.values())


def _numbered(path: str, values: Iterable[Any]) -> _Parts:
    return ((f"{path}[{position}]", value) for position, value in enumerate(values))


def _contents(path: str, value: Any) -> _Parts:
    """What is in a container or dataclass."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from _numbered(path, value)
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{path}.element{position}", item) for position, item in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield f"{path}.{field.name}", getattr(value, field.name)


def _parts(path: str, value: Any, *, in_words: bool = False) -> _Parts:
    """What one object leads to: variables of a function with words that say where they are from."""
    if isinstance(value, types.MethodType):
        holder = path.rpartition(".")[0] or f"{type(value.__self__).__name__}.{path}.__self__"
        yield holder, value.__self__
        yield path, value.__func__
    elif isinstance(value, functools.partial):
        yield path, value.func
        yield from _numbered(f"{path}.args", value.args)
        yield from _contents(f"{path}.keywords", value.keywords)
    elif isinstance(value, types.FunctionType):
        if travels_by_value(value):
            for name, words, inner in _variables(value, path):
                yield f"{name} ({words})" if in_words and words else name, inner
    elif isinstance(value, type):
        if travels_by_value(value):
            yield from ((f"{path}.{name}", member) for name, member in vars(value).items())
    elif not isinstance(value, types.ModuleType):
        yield from _contents(path, value)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            # A copy, because a thread of the user's may set attributes meanwhile.
            yield from ((f"{path}.{name}", item) for name, item in dict(attributes).items())
        # The class too: a method of it may read a global module.
        if type(value).__module__ != "builtins":
            yield type(value).__name__, type(value)


def _variables(function: types.FunctionType, path: str) -> Iterator[tuple[str, str, Any]]:
    """The variables from outside that a function's body names, and its defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        # An empty closure cell raises ValueError: the variable has no value yet.
        with contextlib.suppress(ValueError):
            yield name, f"which {path} closes over", cell.cell_contents
    for name in sorted(globals_read(function.__code__)):
        if name in function.__globals__:
            yield name, f"a global that {path} uses", function.__globals__[name]
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"{function.__name__}'s default", "", value
    # A decorator of an imported package hides the cell's function behind one that is passed over.
    wrapped = inspect.unwrap(function)
    if wrapped is not function:
        yield function.__name__, "", wrapped


_MAX_SEARCH_DEPTH = 6  # each level pickles all parts again


def pickles(value: Any, namespace: Mapping[str, Any] | None = None) -> bool:
    """Whether it can be pickled by itself, for a receiver that has this namespace or none."""
    try:
        pickling.prepare(value, pickling.Sender(namespace=namespace)).drop()
    except Exception:  # whatever is raised, it does not pickle
        return False
    return True


def find_culprit(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The innermost object that does not pickle, as `args[1]['lock'] (a _thread.lock)`."""
    name = getattr(function, "__name__", "the function")
    for path, value in [(name, function), *_numbered("args", args)]:
        if not pickles(value):
            return find_in(value, path)
    return _with_type(name, function)


def find_in(value: Any, path: str, namespace: Mapping[str, Any] | None = None) -> str:
    """The innermost part of a value that does not pickle, as `path['lock'] (a _thread.lock)`."""
    for _ in range(_MAX_SEARCH_DEPTH):
        parts = () if type(value) in _WEAK_TYPES else _parts(path, value, in_words=True)
        culprit = next((part for part in parts if not pickles(part[1], namespace)), None)
        if culprit is None:
            break
        path, value = culprit
    return _with_type(path, value)


def _with_type(path: str, value: Any) -> str:
    return f"{path} (a {kind_name(type(value))})"
