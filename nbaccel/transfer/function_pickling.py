"""How functions of cells, and modules that the other side has, are pickled.

A function whose globals are the notebook's namespace gets the *receiver's* namespace as its
globals: what it reads is looked up there, when it runs. So does one that a worker's cell
defined, on its way to the notebook. Nothing of what it reads is put into it.

[Note: cells of closures] Functions that share a variable (`nonlocal`) share it on the other side.
So a closure's cell is made empty first and filled when the function that holds it exists, which is
also what ends the recursion for a function that calls itself.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import InternalError
from nbaccel.transfer import pickling
from nbaccel.transfer.free_names import globals_read

ModulePlace = tuple[str, str]
"""Key of a module, and the dotted name of a part of it (`""`: the module itself)."""

_SPECIAL_ATTRIBUTES = (
    "__defaults__",
    "__kwdefaults__",
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotations__",
    "__type_params__",
)


# ------------------------------------------------------------------------- at the sender's


class _CellStandIn:
    """Stands for a closure's cell while pickling, so that it can be made before it is filled."""


class Reducer:
    """Called for every object of a pickle. It also notes what the pickle depends on."""

    def __init__(
        self,
        namespace: Mapping[str, Any],
        find_place: Callable[[Any], ModulePlace | None] | None = None,
    ) -> None:
        self.names: set[str] = set()
        """Names of the namespace that functions in the pickle read."""
        self.modules: set[str] = set()
        """Keys of modules that the pickle refers to."""
        self._namespace = namespace
        self._places = find_place
        self._cells: dict[int, tuple[types.CellType, _CellStandIn]] = {}

    def __call__(self, value: Any) -> Any:
        """How to pickle an object, or `NotImplemented`."""
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value) if value.__globals__ is self._namespace else NotImplemented
        if kind is _CellStandIn:
            return _empty_cell, ()
        if self._places is not None and isinstance(value, (torch.Tensor, nn.Module)):
            place = self._places(value)
            if place is not None:
                self.modules.add(place[0])
                return _known, place
        return NotImplemented

    def _function(self, function: types.FunctionType) -> Any:
        self.names |= globals_read(function.__code__) & self._namespace.keys()
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        contents = []
        for cell, empty in zip(function.__closure__ or (), cells, strict=True):
            # An empty closure cell raises ValueError: the variable has no value yet.
            with contextlib.suppress(ValueError):
                contents.append((empty, cell.cell_contents))
        special_attributes = {name: getattr(function, name, None) for name in _SPECIAL_ATTRIBUTES}
        state = (contents, special_attributes, dict(function.__dict__))
        made_of = (function.__code__, function.__name__, tuple(cells))
        # The state has its own setter, because functions have no __setstate__.
        return _make_function, made_of, state, None, None, _finish_function

    def _cell(self, cell: types.CellType) -> _CellStandIn:
        """The one stand-in of this cell; the cell itself is kept, so that its id stays its own."""
        return self._cells.setdefault(id(cell), (cell, _CellStandIn()))[1]


def travels_by_value(kind: type) -> bool:
    """Whether a class is pickled with its code, because no import leads to it: one of a cell."""
    name = kind.__module__
    return name == "__main__" or name not in sys.modules or "<locals>" in kind.__qualname__


# ------------------------------------------------------------------------- at the receiver's


# What the pickle calls on the receiving side. The pickle contains their names, so both sides must
# have the same ones.


def _empty_cell() -> types.CellType:
    return types.CellType()


def _make_function(
    code: types.CodeType, name: str, cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    return types.FunctionType(
        code, pickling.current_receiver().namespace, name, None, cells or None
    )


def _finish_function(
    function: types.FunctionType,
    state: tuple[list[tuple[types.CellType, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    contents, special_attributes, attributes = state
    for cell, value in contents:
        cell.cell_contents = value
    for name, value in special_attributes.items():
        # __type_params__ exists from Python 3.12 on.
        if hasattr(function, name):
            setattr(function, name, value)
    function.__dict__.update(attributes)


def _known(key: str, path: str) -> Any:
    find_module = pickling.current_receiver().find_module
    if find_module is None:
        raise InternalError(f"{key}.{path} was named to a process that has received no modules.")
    part: Any = find_module(key)
    for name in path.split(".") if path else ():
        part = getattr(part, name)
    return part
