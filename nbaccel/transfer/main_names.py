"""Classes and functions of the notebook under their names in a worker's `__main__`.

    notebook                                   worker
    __main__.Net is Net ── code of Net ──►     __main__.Net = Net
                                               pickle, by name ──► file, other rank, notebook

Every pickler but cloudpickle writes a class as a module and a name: `torch.save`, the collectives
of objects, the checkpoints of libraries. A worker's `__main__` is not the notebook's, so what
arrives by its code is bound there, as a fork would have it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["has_received", "receive_names", "with_name"]

_CODE_PARTS = 6
"""Length of cloudpickle's instructions for what travels by its code: the last is a setter."""


def with_name(code_object: Any, instructions: Any) -> Any:
    """Instructions for pickle that also bind the object in a worker's `__main__`."""
    if (
        getattr(code_object, "__module__", None) != "__main__"
        or not isinstance(instructions, tuple)
        or len(instructions) != _CODE_PARTS
        or _look_up(code_object.__qualname__) is not code_object
    ):
        return instructions
    *making, state, list_items, dict_items, set_state = instructions
    # Bound by the setter of its state: only then is the object complete.
    return *making, (set_state, state), list_items, dict_items, _finish_and_bind


def receive_names() -> None:
    """From now on, bind in this process's `__main__` what arrives."""
    _IN_WORKER.add(True)


def has_received(code_object: Any) -> bool:
    """Whether `__main__` has this class or function because it arrived here."""
    return _RECEIVED.get(code_object.__qualname__.partition(".")[0]) is code_object


_IN_WORKER: set[bool] = set()
_RECEIVED: dict[str, Any] = {}
"""What was bound, by its name."""


def _look_up(name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), sys.modules["__main__"])
    except AttributeError:
        return None


# Called by the pickle, which contains its name.
def _finish_and_bind(
    code_object: Any, setter_and_state: tuple[Callable[[Any, Any], Any], Any]
) -> None:
    set_state, state = setter_and_state
    set_state(code_object, state)
    if _IN_WORKER and _look_up(code_object.__qualname__) is not code_object:
        _bind(code_object)


def _bind(code_object: Any) -> None:
    names = vars(sys.modules["__main__"])
    outer_name, *inner_names = code_object.__qualname__.split(".")
    # What a cell of this worker has defined under the name stays: it is the worker's own.
    if outer_name in names and names[outer_name] is not _RECEIVED.get(outer_name):
        return
    bound_object = code_object
    # Of a class inside of another one only the path is needed; the outer one replaces it.
    for inner_name in reversed(inner_names):
        bound_object = types.SimpleNamespace(**{inner_name: bound_object})
    names[outer_name] = _RECEIVED[outer_name] = bound_object
