"""Which part of a call cannot be pickled: named as the user would write it."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

_MAX_DEPTH = 6

Test = Callable[[Any], bool]


def find(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The innermost object that does not pickle, as `args[1]['lock'] (a _thread.lock)`."""
    name = getattr(function, "__name__", "the function")
    for path, value in [*_of_function(function, name), *_items(args, "args")]:
        if not _pickles(value):
            return find_in(value, path)
    return _tell(name, function)


def find_in(value: Any, path: str, *, pickles: Test | None = None) -> str:
    """The innermost part of a value that does not pickle, as `path['lock'] (a _thread.lock)`.

    Args:
        value: Something that does not pickle.
        path: How the user would write it.
        pickles: Tells whether a part does; by default, whether cloudpickle takes it.
    """
    return _innermost(value, path, _MAX_DEPTH, pickles or _pickles)


def _innermost(value: Any, path: str, depth: int, pickles: Test) -> str:
    for inner_path, inner in _parts(value, path) if depth else ():
        if not pickles(inner):
            return _innermost(inner, inner_path, depth - 1, pickles)
    return _tell(path, value)


def _tell(path: str, value: Any) -> str:
    kind = type(value)
    plain = kind.__module__ in ("builtins", "__main__")
    return f"{path} (a {kind.__qualname__ if plain else f'{kind.__module__}.{kind.__qualname__}'})"


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"{path}[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, (list, tuple)):
        yield from _items(value, path)
    elif callable(value) and hasattr(value, "__code__"):
        yield from _of_function(value, path)
    elif hasattr(value, "__dict__"):
        yield from ((f"{path}.{k}", v) for k, v in vars(value).items())


def _items(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield from ((f"{path}[{i}]", v) for i, v in enumerate(values))


def _of_function(function: Any, path: str) -> Iterator[tuple[str, Any]]:
    code = getattr(function, "__code__", None)
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False
    ):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield f"{name} (which {path} closes over)", cell.cell_contents
    namespace = getattr(function, "__globals__", {})
    for name in getattr(code, "co_names", ()):
        if name in namespace:
            yield f"{name} (a global that {path} uses)", namespace[name]


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.Pickler(io.BytesIO(), protocol=5, buffer_callback=_drop).dump(value)
    except Exception:  # whatever it is, it does not pickle: that is the answer
        return False
    return True


def _drop(block: pickle.PickleBuffer) -> None:
    block.release()
