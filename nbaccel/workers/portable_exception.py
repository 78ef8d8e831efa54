"""What is sent of a worker's exception: its type, its arguments, its attributes.

[Note: not pickled whole] Pickle rebuilds an exception by calling its class with `args`. That fails
for every class whose `__init__` takes other arguments than it hands on, and `except MyError` in the
notebook would not see it. So the parts are sent separately, and no `__init__` runs on arrival.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbaccel.base.units import shorten_text
from nbaccel.workers.wrapped_errors import unwrap_error

_MOST_CHARS = 1_000_000
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
        for error_class in self.kind.__mro__:
            if issubclass(error_class, Exception) and error_class is not Exception:
                yield PortableException(error_class, (), {}, {})

    def revive(self, base_class: type[BaseException], class_names: dict[str, Any]) -> BaseException:
        """A new exception that is of this type and of `base_class`."""
        class_name = f"{base_class.__name__}[{self.kind.__name__}]"
        joined_class = type(class_name, (base_class, self.kind), class_names)
        # The `__new__` that the joined type inherits is that of `base_class`, which Python refuses
        # where the other type has a memory layout of its own (OSError, UnicodeError,
        # ExceptionGroup).
        native_class = next(
            parent_class
            for parent_class in self.kind.__mro__
            if not parent_class.__flags__ & _HEAP_TYPE
        )
        try:
            revived_error: BaseException = native_class.__new__(joined_class, *self.args)
        # MemoryError has a `__new__` of its own, but the common layout.
        except TypeError:
            revived_error = base_class.__new__(joined_class, *self.args)
        revived_error.__dict__.update(self.attributes)
        for slot_name, attribute_value in self.slots.items():
            # Some slots are read-only.
            with contextlib.suppress(AttributeError, TypeError):
                setattr(revived_error, slot_name, attribute_value)
        return revived_error


def take_error(taken_error: BaseException) -> PortableException:
    """Take an exception apart; traceback, causes and notes are described elsewhere."""
    original_error = unwrap_error(taken_error)
    # Of an error that torch has raised again, the parts have stayed in the process it came from.
    if original_error is not None:
        return PortableException(original_error.kind, (), {}, {})
    kept_attributes = {
        attribute_name: _shortened(attribute_value)
        for attribute_name, attribute_value in vars(taken_error).items()
        # Notes are part of the failure record, which shows them.
        if attribute_name != "__notes__"
    }
    slot_values = {
        attribute_name: _shortened(attribute_value)
        for attribute_name, attribute_value in _slot_names(taken_error)
    }
    return PortableException(
        type(taken_error), tuple(map(_shortened, taken_error.args)), kept_attributes, slot_values
    )


def _shortened(value: Any) -> Any:
    """A message of a hundred megabytes is not sent whole: handlers need the type."""
    return shorten_text(value, _MOST_CHARS) if type(value) is str else value


def _slot_names(error: BaseException) -> Iterator[tuple[str, Any]]:
    for owner_class in type(error).__mro__:
        for attribute_name, class_attribute in vars(owner_class).items():
            if (
                isinstance(class_attribute, _SLOT_TYPES)
                and not attribute_name.startswith("_")
                and attribute_name != "args"
            ):
                # A slot that was never set raises.
                with contextlib.suppress(AttributeError):
                    yield attribute_name, getattr(error, attribute_name)
