"""NVIDIA GPUs: one for each worker, or shared in turn; and the cards, as the driver reports them.

A CUDA context cannot be forked: its copy fails in the first call. So nothing here touches CUDA
outside a worker, and :meth:`CudaDevice.hazards` finds a context by the traces it leaves.

NVML, the library behind ``nvidia-smi``, knows every card and never creates a CUDA context; the
rules of ``CUDA_VISIBLE_DEVICES`` are followed here. Where it cannot be asked (containers, WSL,
ROCm), torch is, in a process that ends with its answer; once, because that takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from nbaccel.base import env
from nbaccel.base.optional_packages import installed_version, require
from nbaccel.base.units import count_noun
from nbaccel.plan.contracts.device import Device
from nbaccel.plan.inventory import Gpu

if TYPE_CHECKING:
    import torch

    from nbaccel.plan.inventory import Inventory


class CudaDevice(Device):
    """Workers compute on NVIDIA GPUs."""

    name: ClassVar[str] = "cuda"
    after_fork: ClassVar[str] = "a forked worker could not use the GPU at all"

    def detect(self, environ: Mapping[str, str]) -> dict[str, Any]:
        setting = environ.get("CUDA_VISIBLE_DEVICES")
        cards, note = find_cards()
        if cards or not is_worth_it():
            gpus = visible_gpus(cards, setting)
        else:
            gpus, note = probe_gpus()
        if cards and not gpus:
            names = count_noun(len(cards), "GPU")
            note = f"CUDA_VISIBLE_DEVICES={setting!r} shows none of {names}"
            if setting is None:
                note = f"{names} in MIG mode without a MIG device"
        # CUDA counts the fastest first, unless it is told to count as NVML does.
        is_same_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        is_mixed = len({gpu.compute_capability for gpu in gpus}) > 1
        return {
            "gpus": gpus,
            "gpu_note": note,
            "gpu_setting": setting,
            "gpu_order_known": is_same_order or not is_mixed,
        }

    def units(self, inventory: Inventory) -> tuple[Gpu, ...]:
        return inventory.gpus

    def refusal(self, inventory: Inventory) -> str:
        if not inventory.gpus:
            return (
                'device="cuda" needs a GPU: got a machine without one that can be used '
                f"({inventory.gpu_note or 'none found'}). Workers would fail in their first CUDA "
                'call. Give device="cpu", or "auto" to take what there is.'
            )
        if remedy := self.idle_reason(inventory):
            return (
                'device="cuda" needs a CUDA build of PyTorch, or workers would fail in their first '
                f"CUDA call: {remedy}."
            )
        return ""

    def idle_reason(self, inventory: Inventory) -> str:
        # Read from the version: asking `torch.cuda` would need torch imported in the notebook.
        if not inventory.torch_version.endswith("+cpu"):
            return ""
        return (
            f"torch {inventory.torch_version} is built for CPUs only. "
            "Install a CUDA build of PyTorch"
        )

    def hazards(self) -> tuple[str, ...]:
        # A torch that is still being imported has no `cuda` yet.
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            what = "torch has a CUDA context"
        elif driver_in_use():
            what = "a library other than torch uses the CUDA driver"
        else:
            return ()
        return (f"{what} in this process: in a forked worker the first CUDA call would fail",)

    def driver_meter(self) -> Meter | None:
        try:
            return Meter()
        except Exception:  # without the library or a driver there is nothing to read
            return None

    def is_available(self) -> bool:
        return bool(self._call("is_available"))

    def capability(self, device: torch.device) -> tuple[int, int]:
        import torch

        return torch.cuda.get_device_capability(device)


def driver_in_use(process: Path = Path("/proc/self")) -> bool:
    """Whether a process has the CUDA driver initialised, by the traces it leaves."""
    if "/libcuda.so" in env.read_file(process / "maps"):
        for entry in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile, as this listing's own is
                # The driver's own devices, and the one it has under WSL.
                if os.readlink(entry).startswith(("/dev/nvidia", "/dev/dxg")):
                    return True
    return False


DEVICE_NODES = ("nvidia0", "dxg", "kfd")  # of NVIDIA's driver, of WSL, of AMD's driver

_ASK_S = 60
_SCRIPT = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    found.append([properties.name, total, free, properties.major, properties.minor])
print(json.dumps(found))
"""


def is_worth_it(folder: Path = Path("/dev"), torch_version: str | None = None) -> bool:
    """Whether there are device nodes of GPUs, and a torch that could use them."""
    if not any((folder / name).exists() for name in DEVICE_NODES):
        return False
    version = installed_version("torch") if torch_version is None else torch_version
    return bool(version) and not version.endswith("+cpu")


@functools.cache
def probe_gpus(interpreter: Sequence[str] = (sys.executable,)) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that torch sees."""
    try:
        command = [*interpreter, "-c", _SCRIPT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
        answers = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return (), f"a process that asked torch for GPUs failed: {error}"
    gpus = tuple(
        Gpu(
            index=index,
            name=name,
            total_bytes=total,
            free_bytes=free,
            compute_capability=(major, minor),
        )
        for index, (name, total, free, major, minor) in enumerate(answers)
    )
    return gpus, "" if gpus else "torch sees no GPU"


_LEADING_NUMBER = re.compile(r"\s*([+-]?\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A physical card."""

    gpu: Gpu  # the card as a whole; its index is that of NVML
    partitioned: bool = False  # whether it is in MIG mode, in which only its parts can be used
    parts: tuple[Gpu, ...] = ()  # its MIG devices


def visible_gpus(cards: Sequence[Card], setting: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA will show, numbered as CUDA will number them."""
    if setting is None:
        # CUDA prefers whole GPUs, and shows a process one MIG device at most.
        whole_gpus = [card.gpu for card in cards if not card.partitioned]
        gpus = whole_gpus or [device for card in cards for device in card.parts][:1]
    elif setting.startswith(("GPU-", "MIG-")):
        gpus = _gpus_by_uuid(cards, setting)
    else:
        gpus = _gpus_by_number(cards, setting)
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))


def find_cards() -> tuple[tuple[Card, ...], str]:
    """All cards of this machine."""
    try:
        with _driver("Finding GPUs") as nvml:
            return tuple(_read_cards(nvml)), ""
    except Exception as error:  # no library, no driver, or one that does not fit the kernel module
        return (), str(error)


def driver_version() -> str:
    """The driver and the newest CUDA that it serves, without a CUDA context; empty for none."""
    try:
        with _driver("Asking for the driver's version") as nvml:
            # CUDA's number for 12.4 is 12040.
            number = nvml.nvmlSystemGetCudaDriverVersion()
            cuda_version = f"{number // 1000}.{number % 1000 // 10}"
            return f"{nvml.nvmlSystemGetDriverVersion()}, CUDA {cuda_version}"
    except Exception:  # without the library or a driver there is nothing to read
        return ""


@contextlib.contextmanager
def _driver(why: str) -> Iterator[ModuleType]:
    """The module by which NVML is asked, in a block in which it is initialised."""
    nvml = require("pynvml", extra="", why=why)
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        # NVML counts initialisations, so this one is closed even if a `Meter` is open.
        nvml.nvmlShutdown()


class Meter:
    """Reads what each process holds on the machine's GPUs, as the driver counts it."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._nvml = self._open.enter_context(_driver("Weighing what workers hold on GPUs"))

    def read(self) -> dict[int, int]:
        """Process id → bytes on all cards; only of processes that the driver reports."""
        held_bytes: dict[int, int] = {}
        nvml = self._nvml
        for index in range(_ask_driver(nvml, 0, nvml.nvmlDeviceGetCount)):
            handle = _ask_driver(nvml, None, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                continue
            for process in _ask_driver(nvml, (), nvml.nvmlDeviceGetComputeRunningProcesses, handle):
                if process.usedGpuMemory:  # None where the driver may not report it
                    held_bytes[process.pid] = held_bytes.get(process.pid, 0) + process.usedGpuMemory
        return held_bytes

    def close(self) -> None:
        """Shut NVML down again."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._open.close()


def _gpus_by_number(cards: Sequence[Card], setting: str) -> list[Gpu]:
    gpus: list[Gpu] = []
    seen_numbers: set[int] = set()
    for entry in setting.split(","):
        # CUDA reads the number at the start and ignores what follows it.
        number_match = _LEADING_NUMBER.match(entry)
        card_number = int(number_match.group(1)) if number_match else -1
        if card_number in seen_numbers:
            return []
        if not 0 <= card_number < len(cards):
            break
        seen_numbers.add(card_number)
        card = cards[card_number]
        if card.partitioned:
            return gpus or list(card.parts[:1])
        gpus.append(card.gpu)
    return gpus


def _gpus_by_uuid(cards: Sequence[Card], setting: str) -> list[Gpu]:
    gpus: list[Gpu] = []
    names_parts = setting.startswith("MIG-")
    nameable = [card.gpu for card in cards if not card.partitioned]
    if names_parts:
        nameable = [device for card in cards for device in card.parts]
    for entry in (entry.strip() for entry in setting.split(",")):
        if entry.startswith("MIG-") != names_parts:
            break
        matching_gpus = [gpu for gpu in nameable if gpu.uuid.startswith(entry)]
        if len(matching_gpus) != 1:  # unknown, or more than one begins like that
            break
        if matching_gpus[0] in gpus:
            return []
        gpus.append(matching_gpus[0])
    return gpus[:1] if names_parts else gpus


def _read_cards(nvml: ModuleType) -> Iterator[Card]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        gpu = _gpu_of_handle(nvml, handle, index, (int(major), int(minor)))
        # The first is the mode in force, the second the one after the next reset.
        partitioned = _ask_driver(nvml, (0, 0), nvml.nvmlDeviceGetMigMode, handle)[0] == 1
        count = nvml.nvmlDeviceGetMaxMigDeviceCount
        part_of = nvml.nvmlDeviceGetMigDeviceHandleByIndex
        num_slots = _ask_driver(nvml, 0, count, handle) if partitioned else 0
        parts = tuple(
            _gpu_of_handle(nvml, part, slot, gpu.compute_capability)
            for slot in range(num_slots)
            # Slots may be empty.
            if (part := _ask_driver(nvml, None, part_of, handle, slot)) is not None
        )
        yield Card(gpu=gpu, partitioned=partitioned, parts=parts)


def _gpu_of_handle(nvml: ModuleType, handle: Any, index: int, capability: tuple[int, int]) -> Gpu:
    # GPUs that share the host's memory report none.
    memory_info = _ask_driver(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        index=index,
        name=_ask_driver(nvml, "NVIDIA GPU", nvml.nvmlDeviceGetName, handle),
        total_bytes=int(memory_info.total) if memory_info else 0,
        free_bytes=int(memory_info.free) if memory_info else 0,
        compute_capability=capability,
        uuid=nvml.nvmlDeviceGetUUID(handle),
    )


def _ask_driver(nvml: ModuleType, answer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Answer of NVML, or ``answer`` where this card does not know."""
    try:
        return function(*args)
    except nvml.NVMLError:
        return answer
