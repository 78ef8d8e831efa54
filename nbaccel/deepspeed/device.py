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

__all__ = ["Wish", "check_gpu", "read_wish", "refuse_busy"]

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
    running = _ask(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    pids = [process.pid for process in running]
    mode = _ask(nvml, nvml.NVML_COMPUTEMODE_DEFAULT, nvml.nvmlDeviceGetComputeMode, handle)
    refuse_busy(
        gpu,
        holders=pids,
        exclusive=mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        prohibited=mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
    )


def refuse_busy(
    gpu: Gpu, *, holders: Sequence[int], exclusive: bool = False, prohibited: bool = False
) -> None:
    """Refuse a GPU on which this process could not start to compute.

    Args:
        gpu: The GPU, with the memory that is free now.
        holders: Ids of the processes that compute on it, this one included if it does.
        exclusive: Whether its compute mode admits one process at a time.
        prohibited: Whether its compute mode admits none.

    Raises:
        UnsafeMoment: Its mode keeps this process out, or too little of its memory is free.
    """
    others = [pid for pid in holders if pid != os.getpid()]
    alone = exclusive and bool(others)
    if alone or prohibited:
        why = "one process at a time may use it" if alone else "nobody may compute on it"
        raise UnsafeMoment(
            f"cuda:{gpu.index} ({gpu.name}) is busy: its compute mode says that {why}"
            f"{_held_by(others)}. CUDA would refuse to start. Wait, use another device, or set the "
            "mode with nvidia-smi --compute-mode=DEFAULT."
        )
    if gpu.total_bytes and gpu.free_bytes < _LEAST_BYTES and os.getpid() not in holders:
        raise UnsafeMoment(
            f"cuda:{gpu.index} ({gpu.name}) is busy: {format_bytes(gpu.free_bytes)} of "
            f"{format_bytes(gpu.total_bytes)} are free{_held_by(others)}. A CUDA context alone "
            f"needs {format_bytes(_LEAST_BYTES)}. End what holds it, or use another device."
        )


def _held_by(others: Sequence[int]) -> str:
    """Who holds the card; NVML names nobody of another container."""
    if not others:
        return ""
    return "; held by " + ", ".join(f"process {pid} {_command(pid)}".rstrip() for pid in others)


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
