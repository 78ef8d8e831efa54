"""The device of a one-process DeepSpeed run: is it there, and is there room on it?

Looked at through NVML, before DeepSpeed or torch wake CUDA: what they say about a card that
somebody else fills comes late and without a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil

from nbaccel._optional import require
from nbaccel.errors import ConfigError, UnsafeMoment
from nbaccel.plan.gpus import Gpu
from nbaccel.units import format_bytes

__all__ = ["Wish", "check_gpu", "read_wish"]

_WISH = re.compile(r"(cpu|cuda)(?::(\d+))?")
_LEAST_BYTES = 512 * 1024**2
"""A CUDA context with NCCL takes about this much before the first tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """The device that was asked for.

    Attributes:
        kind: ``cpu`` or ``cuda``, as DeepSpeed calls its accelerators; None leaves it the choice.
        index: The device's number.
    """

    kind: str | None
    index: int = 0


def read_wish(device: object) -> Wish:
    """Read what was given as a device.

    Args:
        device: None, ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or a ``torch.device``.

    Returns:
        The wish.

    Raises:
        ConfigError: It is none of these.
    """
    if device is None:
        return Wish(kind=None)
    match = _WISH.fullmatch(str(device))
    if match is None:
        raise ConfigError(
            f"device={device!r} is none that a one-process DeepSpeed run can have here: it would "
            'be used under a wrong name. Use "cpu", "cuda" or "cuda:1", or None for what DeepSpeed '
            "chooses."
        )
    return Wish(
        kind=match.group(1), index=int(match.group(2) or 0) if match.group(1) == "cuda" else 0
    )


def check_gpu(index: int, gpus: Sequence[Gpu], note: str = "") -> None:
    """Refuse a GPU that is not there, or on which nothing can start.

    Args:
        index: Its CUDA number.
        gpus: The GPUs that CUDA shows to this process.
        note: Why there are none, where something is known.

    Raises:
        ConfigError: It is not there.
        UnsafeMoment: Somebody else has it for himself, or has filled it.
    """
    if index >= len(gpus):
        have = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in gpus)
        raise ConfigError(
            f'device="cuda:{index}" is not there: CUDA shows this process '
            f"{have or 'no GPU' + (f' ({note})' if note else '')}. DeepSpeed would fail at its "
            f"first tensor. Use {'one of these' if have else 'device=' + repr('cpu')}."
        )
    gpu = gpus[index]
    nvml = require("pynvml", extra="", why="Looking at a GPU")
    nvml.nvmlInit()
    try:
        _check_room(nvml, gpu)
    finally:
        nvml.nvmlShutdown()


def _check_room(nvml: ModuleType, gpu: Gpu) -> None:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    others = _others(nvml, handle)
    mode = _ask(nvml, nvml.NVML_COMPUTEMODE_DEFAULT, nvml.nvmlDeviceGetComputeMode, handle)
    alone = mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and bool(others)
    if alone or mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        why = "one process at a time may use it" if alone else "nobody may compute on it"
        raise UnsafeMoment(
            f"cuda:{gpu.index} ({gpu.name}) is busy: its compute mode says that {why}"
            f"{_held_by(others)}. CUDA would refuse to start. Wait, use another device, or set the "
            "mode with nvidia-smi --compute-mode=DEFAULT."
        )
    if gpu.total_bytes and gpu.free_bytes < _LEAST_BYTES and not _is_ours(nvml, handle):
        raise UnsafeMoment(
            f"cuda:{gpu.index} ({gpu.name}) is busy: {format_bytes(gpu.free_bytes)} of "
            f"{format_bytes(gpu.total_bytes)} are free{_held_by(others)}. A CUDA context alone "
            f"needs {format_bytes(_LEAST_BYTES)}. End what holds it, or use another device."
        )


def _others(nvml: ModuleType, handle: Any) -> list[Any]:
    found = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return [process for process in found if process.pid != os.getpid()]


def _is_ours(nvml: ModuleType, handle: Any) -> bool:
    found = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return any(process.pid == os.getpid() for process in found)


def _held_by(others: Sequence[Any]) -> str:
    """Who holds the card; NVML names nobody of another container."""
    if not others:
        return ""
    return "; held by " + ", ".join(
        f"process {process.pid} {_command(process.pid)}".rstrip() for process in others
    )


def _command(pid: int) -> str:
    try:
        return f"({' '.join(psutil.Process(pid).cmdline())[:60]})"
    except psutil.Error:  # ended meanwhile, or another user's
        return ""


def _ask(nvml: ModuleType, default: Any, question: Any, handle: Any) -> Any:
    try:
        return question(handle)
    except nvml.NVMLError:  # this card or driver does not tell
        return default
