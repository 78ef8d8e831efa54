r"""What is sent of a worker's exception: its type, its arguments, its attributes.

[Note: not pickled whole] Pickle rebuilds an exception by calling its class with `args`. That fails
for every class whose `__init__` takes other arguments than it hands on, and `except MyError` in the
notebook would not see it. So the parts are sent separately, and no `__init__` runs on arrival.

An error that torch raises again for another process or thread is sent as the original:

    DataLoader worker    KeyError('x') ─► ExceptionWrapper: its class, its traceback as text
    rank                 KeyError("Caught KeyError in DataLoader worker process 0.\nOriginal ...")
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from nbaccel.base.frames import Frame
from nbaccel.base.units import shorten_text

_MOST_CHARS = 1_000_000
_TRACEBACK_BLOCK = re.compile(r"^Traceback \(most recent call last\):\n", re.MULTILINE)
_TRACEBACK_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a `class` statement
_SLOT_TYPES = (types.MemberDescriptorType, types.GetSetDescriptorType)


@dataclass(frozen=True)
class PortableException:
    """An exception, taken apart."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    """Its `__dict__`."""
    slots: dict[str, Any]
    """What its class keeps elsewhere: `OSError.errno`, `StopIteration.value`."""

    def in_reserve(self) -> Iterator[PortableException]:
        """This, and what can be sent in its place if it cannot be pickled, in decreasing detail."""
        yield self
        for kind in self.kind.__mro__:
            if issubclass(kind, Exception) and kind is not Exception:
                yield PortableException(kind, (), {}, {})

    def revive(self, base: type[BaseException], names: dict[str, Any]) -> BaseException:
        """A new exception that is of this type and of `base`."""
        joined = type(f"{base.__name__}[{self.kind.__name__}]", (base, self.kind), names)
        # The `__new__` that the joined type inherits is that of `base`, which Python refuses where
        # the other type has a memory layout of its own (OSError, UnicodeError, ExceptionGroup).
        native = next(kind for kind in self.kind.__mro__ if not kind.__flags__ & _HEAP_TYPE)
        try:
            revived: BaseException = native.__new__(joined, *self.args)
        # MemoryError has a `__new__` of its own, but the common layout.
        except TypeError:
            revived = base.__new__(joined, *self.args)
        revived.__dict__.update(self.attributes)
        for name, value in self.slots.items():
            # Some slots are read-only.
            with contextlib.suppress(AttributeError, TypeError):
                setattr(revived, name, value)
        return revived


def take_error(error: BaseException) -> PortableException:
    """Take an exception apart; traceback, causes and notes are described elsewhere."""
    original = unwrap_error(error)
    # Of an error that torch has raised again, the parts have stayed in the process it came from.
    if original is not None:
        return PortableException(original.kind, (), {}, {})
    # Notes are part of the failure record, which shows them.
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    return PortableException(
        type(error),
        tuple(map(_shortened, error.args)),
        {name: _shortened(value) for name, value in attributes.items()},
        {name: _shortened(value) for name, value in _slots_of(error)},
    )


def _shortened(value: Any) -> Any:
    """A message of a hundred megabytes is not sent whole: handlers need the type."""
    return shorten_text(value, _MOST_CHARS) if type(value) is str else value


def _slots_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    for owner in type(error).__mro__:
        for name, attribute in vars(owner).items():
            if isinstance(attribute, _SLOT_TYPES) and not name.startswith("_") and name != "args":
                # A slot that was never set raises.
                with contextlib.suppress(AttributeError):
                    yield name, getattr(error, name)


# ------------------------------------------------------------------------- raised again by torch


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedError:
    """What an exception was in the process that it comes from."""

    kind: type[BaseException]
    message: str
    frames: tuple[Frame, ...]
    where: str
    """Such as `in DataLoader worker process 0`."""


def unwrap_error(error: BaseException) -> WrappedError | None:
    """Take apart what torch has raised for another process or thread."""
    wrapper = _torch_wrapper(error.__traceback__)
    # By its text: an error whose class takes more than a text is raised as a RuntimeError.
    if wrapper is None or not str(error).startswith(f"Caught {wrapper.exc_type.__name__} "):
        return None
    blocks = _TRACEBACK_BLOCK.split(wrapper.exc_msg)
    if len(blocks) < 2:
        return None
    # The last block, because the causes of an error come before it.
    lines = blocks[-1].rstrip("\n").split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("  ")), len(lines))
    return WrappedError(
        kind=wrapper.exc_type,
        message=_without_type("\n".join(lines[end:]), wrapper.exc_type),
        frames=tuple(
            Frame(file=match["file"], line=int(match["line"]), function=match["function"])
            for match in map(_TRACEBACK_FRAME.match, lines[:end])
            if match
        ),
        where=wrapper.where,
    )


def _torch_wrapper(traceback: TracebackType | None) -> Any:
    """The wrapper whose `reraise` is the innermost call."""
    # Without torch there is no wrapper to find, and importing it takes seconds.
    if traceback is None or "torch" not in sys.modules:
        return None
    from nbaccel.base import torch_private

    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    holder = traceback.tb_frame.f_locals.get("self")
    return holder if torch_private.is_exception_wrapper(holder) else None


def _without_type(text: str, kind: type[BaseException]) -> str:
    """`ValueError: bad` → `bad`."""
    name, _, message = text.partition(": ")
    return message if name.rpartition(".")[2] == kind.__name__ else text.removeprefix(name)
