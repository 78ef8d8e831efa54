"""Implementations by name, imported when first asked for and not before.

``capabilities`` says what exists and where; this file goes and gets it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nbaccel.abc.device import Device
from nbaccel.abc.precision import Precision
from nbaccel.abc.strategy import Strategy
from nbaccel.capabilities import (
    DEVICES,
    PRECISIONS,
    STRATEGIES,
    device_row,
    precision_row,
    strategy_row,
)
from nbaccel.config import RunConfig
from nbaccel.errors import InternalError, PlatformUnsupported

__all__ = [
    "check_strategy",
    "device",
    "enter_worker",
    "load",
    "precision",
    "shared_memories",
    "strategy",
]


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
    kind: type[Device] = _class(row.path, Device)
    return kind()


def precision(name: str) -> type[Precision]:
    """The implementation of a precision.

    Args:
        name: As in its capability row.

    Returns:
        A class whose objects are made from a device, `AutocastKwargs` and `GradScalerKwargs`.

    Raises:
        PlatformUnsupported: This version has no implementation of it.
    """
    row = precision_row(name)
    if not row.path:
        there = ", ".join(other.name for other in PRECISIONS if other.path)
        raise PlatformUnsupported(
            f"mixed_precision={name!r} ({row.meaning}) cannot be trained in through Accelerator "
            "in this version: every layer would compute in another format than was asked for. "
            f"Use one of {there} (bf16 is the nearest), or convert the layers yourself with "
            "torchao or TransformerEngine before `prepare`, under 'bf16'."
        )
    kind: type[Precision] = _class(row.path, Precision)
    return kind


def strategy(name: str) -> type[Strategy]:
    """The implementation of a strategy.

    Args:
        name: As in its capability row.

    Returns:
        A class; what its constructor takes is its own.
    """
    kind: type[Strategy] = _class(strategy_row(name).path, Strategy)
    return kind


def check_strategy(name: str, device: str, run: RunConfig | None = None) -> None:
    """Refuse, before a process starts, what cannot train in it.

    Args:
        name: As in its capability row.
        device: Type of the device.
        run: What was asked, for mistakes in what it says to the strategy's library.

    Raises:
        ConfigError: The run's configuration of the library holds mistakes.
        MissingBackend: The library, or something that it needs, is not installed.
        PlatformUnsupported: The machine lacks a tool.
    """
    row = strategy_row(name)
    if row.check:
        load(row.check)(device)
    if row.judge and run is not None:
        load(row.judge)(run, device)


def enter_worker(device: str) -> None:
    """Let the libraries of all strategies prepare this worker for their use.

    Args:
        device: Type of the device that it computes on.
    """
    for row in STRATEGIES:
        if row.enter:
            load(row.enter)(device)


def shared_memories() -> list[Any]:
    """The modules that know the shared memory which strategies' libraries make in workers."""
    return [load(row.memory) for row in STRATEGIES if row.memory]


def _class(path: str, contract: type[object]) -> Any:
    kind = load(path)
    if not (isinstance(kind, type) and issubclass(kind, contract)):
        raise InternalError(
            f"{path} is no {contract.__name__}: got {kind!r}. "
            "The capability row names the wrong thing. Please report this as a bug."
        )
    return kind


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
