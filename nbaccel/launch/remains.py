"""What travels of a worker's exception: its type, its arguments, its attributes.

[Note: not pickled whole] Pickle rebuilds an exception by calling its class with `args`. That fails
for every class whose `__init__` takes other arguments than it hands on, and `except MyError` in the
notebook would not see it. So the parts travel apart, and no `__init__` runs on arrival.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbaccel.launch.wrapped import unwrap
from nbaccel.units import shortened

_MOST_CHARS = 1_000_000
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a `class` statement
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


@dataclass(frozen=True)
class Remains:
    """An exception, taken apart."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    """Its `__dict__`."""
    slots: dict[str, Any]
    """What its class keeps elsewhere: `OSError.errno`, `StopIteration.value`."""

    def in_reserve(self) -> Iterator[Remains]:
        """This, and what can be sent in its place if it cannot: ever less of it."""
        yield self
        for kind in self.kind.__mro__:
            if issubclass(kind, Exception) and kind is not Exception:
                yield Remains(kind, (), {}, {})

    def revive(self, base: type[BaseException], names: dict[str, Any]) -> BaseException:
        """A new exception that is of this type and of `base`.

        Raises:
            Exception: Whatever Python raises where the two types cannot be joined.
        """
        name = f"{base.__name__}[{self.kind.__name__}]"
        joined = type(name, (base, self.kind), names)
        # The `__new__` that the joined type inherits is that of `base`, which Python refuses where
        # the other type has a memory layout of its own (OSError, UnicodeError, ExceptionGroup).
        native = next(c for c in self.kind.__mro__ if not c.__flags__ & _HEAP_TYPE)
        try:
            found: BaseException = native.__new__(joined, *self.args)
        except TypeError:  # MemoryError: it has a `__new__` of its own, but the common layout
            found = base.__new__(joined, *self.args)
        found.__dict__.update(self.attributes)
        for slot, value in self.slots.items():
            with contextlib.suppress(AttributeError, TypeError):  # some can only be read
                setattr(found, slot, value)
        return found


def take(error: BaseException) -> Remains:
    """Take an exception apart; traceback, causes and notes are described elsewhere."""
    original = unwrap(error)
    if original is not None:  # its parts have not come out of the process that it is from
        return Remains(original.kind, (), {}, {})
    attributes = {k: _short(v) for k, v in vars(error).items() if k != "__notes__"}
    slots = {name: _short(value) for name, value in _slots(error)}
    return Remains(type(error), tuple(map(_short, error.args)), attributes, slots)


def _short(value: Any) -> Any:
    """A message of a hundred megabytes does not travel: who handles it wants its type."""
    return shortened(value, _MOST_CHARS) if type(value) is str else value


def _slots(error: BaseException) -> Iterator[tuple[str, Any]]:
    for owner in type(error).__mro__:
        for name, found in vars(owner).items():
            if isinstance(found, _SLOTS) and not name.startswith("_") and name != "args":
                with contextlib.suppress(AttributeError):  # not set
                    yield name, getattr(error, name)
