"""Implementations by name, imported when first asked for and not before.

``capabilities`` says what exists and where; this file goes and gets it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nbaccel.abc.device import Device
from nbaccel.capabilities import DEVICES, device_row
from nbaccel.errors import InternalError, PlatformUnsupported

__all__ = ["device", "load"]


def device(name: str) -> Device:
    """The implementation of a device.

    Args:
        name: As in its capability row.

    Returns:
        An object without state.

    Raises:
        PlatformUnsupported: This version has no implementation of it.
    """
    row = device_row(name)
    if not row.path:
        driven = ", ".join(other.name for other in DEVICES if other.path)
        raise PlatformUnsupported(
            f"Device {name!r} cannot be used: {row.meaning}. Workers would have nothing to "
            f"compute on. Use one of {driven}."
        )
    kind = load(row.path)
    if not (isinstance(kind, type) and issubclass(kind, Device)):
        raise InternalError(
            f"{row.path} is no Device: got {kind!r}. "
            "The capability row names the wrong thing. Please report this as a bug."
        )
    return kind()


def load(path: str) -> Any:
    """The object that a capability row names.

    Args:
        path: ``module:name``, or ``module``.

    Returns:
        The object; its module is imported if it was not.

    Raises:
        InternalError: There is no such object.
    """
    module, _, name = path.partition(":")
    try:
        found = import_module(module)
        return getattr(found, name) if name else found
    except (AttributeError, ModuleNotFoundError) as error:
        raise InternalError(
            f"{path} cannot be loaded: {error}. "
            "A capability row names what is not there. Please report this as a bug."
        ) from error
