"""How functions of cells, and modules that the other side has, are pickled.

A function whose globals are the notebook's namespace gets the *receiver's* namespace as its
globals: what it reads is looked up there, when it runs. So does one that a worker's cell
defined, on its way to the notebook. Nothing of what it reads is put into it.

[Note: cells of closures] Functions that share a variable (`nonlocal`) share it on the other side.
So a closure's cell is made empty first and filled when the function that holds it exists, which is
also what makes a function that calls itself come to an end.
"""

from __future__ import annotations

import contextlib
import contextvars
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbaccel.errors import InternalError
from nbaccel.launch.sharing import parcel

__all__ = ["Reducer", "arriving", "open_parcel", "travels_by_value"]

Place = tuple[str, str]
"""Key of a module, and the dotted name of a part of it (`""`: the module itself)."""

_ATTRIBUTES = (
    "__defaults__",
    "__kwdefaults__",
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotations__",
    "__type_params__",
)
_READS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))


def open_parcel(box: parcel.Parcel, fd: int, namespace: dict[str, Any]) -> dict[str, Any]:
    """Open what `Namespace.pack` made in a worker: the values by name.

    Args:
        box: The record that came with the descriptor.
        fd: The parcel's memory file; the caller closes it.
        namespace: The notebook's, which functions in the parcel get as their globals.
    """
    with arriving(namespace):
        values: dict[str, Any] = parcel.unpack(box, fd, {})
    return values


# ------------------------------------------------------------------------- at the sender's


class _Cell:
    """Stands for a closure's cell while pickling, so that it can be made before it is filled."""


class Reducer:
    """Asked for every object of a pickle. It also notes what the pickle depends on.

    Args:
        namespace: Functions with these globals travel as described above.
        places: Finds the parts of modules that are named instead of being sent; asked only when a
            module or tensor is met.
    """

    def __init__(
        self, namespace: Mapping[str, Any], places: Callable[[Any], Place | None] | None = None
    ) -> None:
        self.names: set[str] = set()
        """Names of the namespace that functions in the pickle read."""
        self.modules: set[str] = set()
        """Keys of modules that the pickle refers to."""
        self.sources: dict[str, list[str]] = {}
        self._namespace = namespace
        self._places = places
        self._cells: dict[int, tuple[types.CellType, _Cell]] = {}

    def __call__(self, obj: Any) -> Any:
        """How to pickle an object, or `NotImplemented`."""
        kind = type(obj)
        if kind is types.FunctionType:
            return self._function(obj) if obj.__globals__ is self._namespace else NotImplemented
        if kind is _Cell:
            return _empty_cell, ()
        if self._places is not None and isinstance(obj, (torch.Tensor, nn.Module)):
            place = self._places(obj)
            if place is not None:
                self.modules.add(place[0])
                return _known, place
        return NotImplemented

    def _function(self, function: types.FunctionType) -> Any:
        parcel.note_source(function, self.sources)
        self.names |= globals_read(function.__code__) & self._namespace.keys()
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        contents = []
        for cell, stand_in in zip(function.__closure__ or (), cells, strict=True):
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                contents.append((stand_in, cell.cell_contents))
        attributes = {name: getattr(function, name, None) for name in _ATTRIBUTES}
        state = (contents, attributes, dict(function.__dict__))
        made_of = (function.__code__, function.__name__, tuple(cells))
        return _make_function, made_of, state, None, None, _finish_function

    def _cell(self, cell: types.CellType) -> _Cell:
        """The one stand-in of this cell; the cell itself is kept, so that its id stays its own."""
        return self._cells.setdefault(id(cell), (cell, _Cell()))[1]


@functools.lru_cache(maxsize=4096)
def globals_read(code: types.CodeType) -> frozenset[str]:
    """The global names that code may read, that of the functions inside it included."""
    found = {
        str(step.argval) for step in dis.get_instructions(code) if step.opname in _READS
    }  # LOAD_NAME: the body of a class inside
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= globals_read(constant)
    return frozenset(found)


def travels_by_value(kind: type) -> bool:
    """Whether a class is pickled with its code, because no import leads to it: one of a cell."""
    module = kind.__module__
    return module == "__main__" or module not in sys.modules or "<locals>" in kind.__qualname__


# ------------------------------------------------------------------------- at the receiver's


@dataclass(frozen=True, slots=True)
class _Arrival:
    namespace: dict[str, Any]
    module: Callable[[str], nn.Module] | None


_ARRIVAL: contextvars.ContextVar[_Arrival] = contextvars.ContextVar("nbaccel-arrival")


@contextlib.contextmanager
def arriving(
    namespace: dict[str, Any], module: Callable[[str], nn.Module] | None = None
) -> Iterator[None]:
    """What is unpickled meanwhile belongs to this namespace.

    Args:
        namespace: The globals that functions of cells get.
        module: Finds the module that a key names.
    """
    token = _ARRIVAL.set(_Arrival(namespace, module))
    try:
        yield
    finally:
        _ARRIVAL.reset(token)


# What the pickle calls on the receiving side. Their names are part of the pickle, so of the wire.


def _empty_cell() -> types.CellType:
    return types.CellType()


def _make_function(
    code: types.CodeType, name: str, closure: tuple[types.CellType, ...]
) -> types.FunctionType:
    return types.FunctionType(code, _ARRIVAL.get().namespace, name, None, closure or None)


def _finish_function(
    function: types.FunctionType,
    state: tuple[list[tuple[types.CellType, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    contents, attributes, own = state
    for cell, value in contents:
        cell.cell_contents = value
    for name, value in attributes.items():
        if hasattr(function, name):
            setattr(function, name, value)
    function.__dict__.update(own)


def _known(key: str, path: str) -> Any:
    find = _ARRIVAL.get().module
    if find is None:
        raise InternalError(f"{key}.{path} was named to a process that knows no modules.")
    found: Any = find(key)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found
