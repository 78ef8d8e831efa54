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
from nbaccel.transfer import memfd, pickling
from nbaccel.transfer.free_names import globals_read

__all__ = ["Reducer", "open_payload", "travels_by_value"]


ModulePlace = tuple[str, str]
"""Key of a module, and the dotted name of a part of it (`""`: the module itself)."""

_FUNCTION_ATTRIBUTES = (
    "__defaults__",
    "__kwdefaults__",
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotations__",
    "__type_params__",
)


def open_payload(
    packed_object: memfd.PackedObject, file_descriptor: int, namespace: dict[str, Any]
) -> dict[str, Any]:
    """Open what `Namespace.pack` made in a worker: the values by name."""
    values: dict[str, Any] = pickling.unpack(
        packed_object, file_descriptor, {}, namespace=namespace
    )
    return values


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
        self.sources: dict[str, list[str]] = {}
        self._namespace = namespace
        self._places = find_place
        self._cells: dict[int, tuple[types.CellType, _CellStandIn]] = {}

    def __call__(self, pickled_object: Any) -> Any:
        """How to pickle an object, or `NotImplemented`."""
        object_type = type(pickled_object)
        if object_type is types.FunctionType:
            return (
                self._function(pickled_object)
                if pickled_object.__globals__ is self._namespace
                else NotImplemented
            )
        if object_type is _CellStandIn:
            return _empty_cell, ()
        if self._places is not None and isinstance(pickled_object, (torch.Tensor, nn.Module)):
            module_place = self._places(pickled_object)
            if module_place is not None:
                self.modules.add(module_place[0])
                return _known, module_place
        return NotImplemented

    def _function(self, cell_function: types.FunctionType) -> Any:
        pickling.note_source(cell_function, self.sources)
        self.names |= globals_read(cell_function.__code__) & self._namespace.keys()
        cell_stand_ins = [self._cell(cell) for cell in cell_function.__closure__ or ()]
        cell_contents = []
        for cell, stand_in in zip(cell_function.__closure__ or (), cell_stand_ins, strict=True):
            # An empty closure cell raises ValueError: the variable has no value yet.
            with contextlib.suppress(ValueError):
                cell_contents.append((stand_in, cell.cell_contents))
        function_attributes = {
            name: getattr(cell_function, name, None) for name in _FUNCTION_ATTRIBUTES
        }
        state = (cell_contents, function_attributes, dict(cell_function.__dict__))
        made_of = (cell_function.__code__, cell_function.__name__, tuple(cell_stand_ins))
        # The state has its own setter, because functions have no __setstate__.
        return _make_function, made_of, state, None, None, _finish_function

    def _cell(self, closure_cell: types.CellType) -> _CellStandIn:
        """The one stand-in of this cell; the cell itself is kept, so that its id stays its own."""
        return self._cells.setdefault(id(closure_cell), (closure_cell, _CellStandIn()))[1]


def travels_by_value(object_type: type) -> bool:
    """Whether a class is pickled with its code, because no import leads to it: one of a cell."""
    name = object_type.__module__
    return name == "__main__" or name not in sys.modules or "<locals>" in object_type.__qualname__


# ------------------------------------------------------------------------- at the receiver's


# What the pickle calls on the receiving side. The pickle contains their names, so both sides must
# have the same ones.


def _empty_cell() -> types.CellType:
    return types.CellType()


def _make_function(
    code_object: types.CodeType, name: str, closure_cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    return types.FunctionType(
        code_object, pickling.current_receiver().namespace, name, None, closure_cells or None
    )


def _finish_function(
    cell_function: types.FunctionType,
    state: tuple[list[tuple[types.CellType, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    cell_contents, function_attributes, attributes = state
    for cell, value in cell_contents:
        cell.cell_contents = value
    for name, value in function_attributes.items():
        # __type_params__ exists from Python 3.12 on.
        if hasattr(cell_function, name):
            setattr(cell_function, name, value)
    cell_function.__dict__.update(attributes)


def _known(key: str, part_path: str) -> Any:
    find_module = pickling.current_receiver().find_module
    if find_module is None:
        raise InternalError(
            f"{key}.{part_path} was named to a process that has received no modules."
        )
    module_part: Any = find_module(key)
    for name in part_path.split(".") if part_path else ():
        module_part = getattr(module_part, name)
    return module_part
