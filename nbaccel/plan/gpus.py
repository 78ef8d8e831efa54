"""NVIDIA GPUs as CUDA will show them to a worker, found without waking CUDA.

NVML, the library behind ``nvidia-smi``, knows every card and never creates a CUDA context.
Which of them a process sees, and under which number, is decided by ``CUDA_VISIBLE_DEVICES``,
whose rules are followed here. Cards are counted in PCI order; where different cards are mixed,
``CUDA_DEVICE_ORDER=PCI_BUS_ID`` makes CUDA count the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

from nbaccel._optional import require
from nbaccel.errors import MissingBackend

__all__ = ["Card", "Gpu", "Meter", "find_cards", "visible"]

_T = TypeVar("_T")
_LEADING_NUMBER = re.compile(r"\s*([+-]?\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU, or a part of one, that a process can use.

    Attributes:
        index: Its number for CUDA in this process, from 0: ``cuda:<index>``.
        name: The product's name.
        total_bytes: Its memory; 0 where the driver does not say.
        free_bytes: Memory that nobody uses now; 0 where the driver does not say.
        compute_capability: Version of its architecture: (8, 9) for Ada, (9, 0) for Hopper.
        uuid: Its identity, which does not depend on what is visible.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    uuid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A physical card.

    Attributes:
        gpu: The card as a whole; its index is that of NVML.
        partitioned: Whether it is in MIG mode, in which only its parts can be used.
        parts: Its MIG devices.
    """

    gpu: Gpu
    partitioned: bool = False
    parts: tuple[Gpu, ...] = ()


def visible(cards: Sequence[Card], setting: str | None) -> tuple[Gpu, ...]:
    """What CUDA will show, numbered as CUDA will number it.

    Args:
        cards: All cards, in NVML's order.
        setting: ``CUDA_VISIBLE_DEVICES``; None where it is unset.

    Returns:
        The GPUs by their CUDA number. The first entry that CUDA does not know ends the list,
        an entry given twice empties it, and a MIG device is never beside another device.
    """
    if setting is None:
        whole = [card.gpu for card in cards if not card.partitioned]
        return _numbered(whole or [part for card in cards for part in card.parts][:1])
    if setting.startswith(("GPU-", "MIG-")):
        return _numbered(_by_uuid(cards, setting))
    return _numbered(_by_number(cards, setting))


def find_cards() -> tuple[tuple[Card, ...], str]:
    """All cards of this machine.

    Returns:
        The cards in NVML's order, and why there are none where there are none.
    """
    try:
        nvml = require("pynvml", extra="", why="Finding GPUs")
    except MissingBackend as error:
        return (), str(error)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:  # no driver, or one that does not fit the kernel module
        return (), str(error)
    try:
        return tuple(_cards(nvml)), ""
    except nvml.NVMLError as error:
        return (), str(error)
    finally:
        nvml.nvmlShutdown()


class Meter:
    """Says what each process holds on the machine's GPUs, as the driver counts it.

    Args:
        nvml: The library, initialised.
    """

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml

    @classmethod
    def open(cls) -> Meter | None:
        """A meter to be closed after use; None where there is no driver to ask."""
        try:
            nvml = require("pynvml", extra="", why="Weighing what workers hold on GPUs")
            nvml.nvmlInit()
        except Exception:  # without the library or a driver, nobody holds anything on a GPU
            return None
        return cls(nvml)

    def read(self) -> dict[int, int]:
        """Process id → bytes on all cards; only of processes that the driver tells of."""
        held: dict[int, int] = {}
        nvml = self._nvml
        for index in range(_ask(nvml, 0, nvml.nvmlDeviceGetCount)):
            card = _ask(nvml, None, nvml.nvmlDeviceGetHandleByIndex, index)
            found = _ask(nvml, (), nvml.nvmlDeviceGetComputeRunningProcesses, card) if card else ()
            for process in found:
                if process.usedGpuMemory:  # None where the driver must not tell
                    held[process.pid] = held.get(process.pid, 0) + process.usedGpuMemory
        return held

    def close(self) -> None:
        """Let go of the driver."""
        _ask(self._nvml, None, self._nvml.nvmlShutdown)


def _by_number(cards: Sequence[Card], setting: str) -> list[Gpu]:
    chosen: list[Gpu] = []
    seen: set[int] = set()
    for entry in setting.split(","):
        # CUDA reads the number at the start and ignores what follows it.
        match = _LEADING_NUMBER.match(entry)
        number = int(match.group(1)) if match else -1
        if number in seen:
            return []
        if not 0 <= number < len(cards):
            break
        seen.add(number)
        card = cards[number]
        if card.partitioned:
            return chosen or list(card.parts[:1])
        chosen.append(card.gpu)
    return chosen


def _by_uuid(cards: Sequence[Card], setting: str) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in (entry.strip() for entry in setting.split(",")):
        if entry.startswith("MIG-") != setting.startswith("MIG-"):
            break
        found = [gpu for gpu in _named(cards, entry) if gpu.uuid.startswith(entry)]
        if len(found) != 1:  # unknown, or more than one begins like that
            break
        if found[0] in chosen:
            return []
        chosen.append(found[0])
    return chosen[:1] if setting.startswith("MIG-") else chosen


def _named(cards: Sequence[Card], entry: str) -> list[Gpu]:
    if entry.startswith("MIG-"):
        return [part for card in cards for part in card.parts]
    return [card.gpu for card in cards if not card.partitioned]


def _numbered(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))


def _cards(nvml: ModuleType) -> Iterator[Card]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu = _gpu(nvml, handle, index, _capability(nvml, handle))
        partitioned = _ask(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)[0] == 1
        yield Card(
            gpu=gpu,
            partitioned=partitioned,
            parts=tuple(_parts(nvml, handle, gpu)) if partitioned else (),
        )


def _parts(nvml: ModuleType, card: Any, whole: Gpu) -> Iterator[Gpu]:
    for slot in range(_ask(nvml, 0, nvml.nvmlDeviceGetMaxMigDeviceCount, card)):
        handle = _ask(nvml, None, nvml.nvmlDeviceGetMigDeviceHandleByIndex, card, slot)
        if handle is not None:  # slots may be empty
            yield _gpu(nvml, handle, slot, whole.compute_capability)


def _gpu(nvml: ModuleType, handle: Any, index: int, capability: tuple[int, int]) -> Gpu:
    # GPUs that share the host's memory have none of their own to report.
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        index=index,
        name=_text(_ask(nvml, "NVIDIA GPU", nvml.nvmlDeviceGetName, handle)),
        total_bytes=int(memory.total) if memory else 0,
        free_bytes=int(memory.free) if memory else 0,
        compute_capability=capability,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
    )


def _capability(nvml: ModuleType, handle: Any) -> tuple[int, int]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return int(major), int(minor)


def _ask(nvml: ModuleType, default: _T, question: Callable[..., Any], *args: Any) -> _T | Any:
    """Answer of NVML, or ``default`` where this card does not know."""
    try:
        return question(*args)
    except nvml.NVMLError:
        return default


def _text(value: str | bytes) -> str:
    # Older bindings give bytes.
    return value.decode() if isinstance(value, bytes) else value
