"""How long one optimizer step may take: an estimate to compare ways to train, not a promise.

    step = max(computing, exchanging) + what waits for the host and the disk

Computing is the model's floating-point operations over a share of what the device's data sheet
says; exchanged volumes are those of Rajbhandari et al. 2020 (ZeRO, section 7): twice the gradients
for data parallelism and ZeRO-1 and -2, half as much again where parameters are sharded, too. An
Adam step on the host reads and writes its states, so memory's bandwidth decides (Ren et al. 2021,
ZeRO-Offload, section 5); states on disk are read and written once a step (Rajbhandari et al. 2021,
ZeRO-Infinity, section 5).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nbaccel.base.units import format_seconds
from nbaccel.config.capabilities import DEVICES, device_row, precision_row
from nbaccel.plan.inventory import Gpu, Inventory

__all__ = [
    "SHORTEST_S",
    "StepTime",
    "StepWork",
    "Traffic",
    "computes_in_bf16",
    "estimate_step",
    "processor_speed",
]

_REACHED_SHARE = 0.4
"""Of the data sheet's operations per second, in training of transformers (Narayanan et al. 2021,
Megatron-LM, table 1: 0.44 to 0.52 on A100)."""
_GIGA = 1e9
SHORTEST_S = 0.001
"""Shorter steps are not told: what Python does between operations decides about them."""

# Dense tera operations per second of NVIDIA's data sheets: float32, and 16-bit floats on tensor
# cores (float16 where there is no bfloat16). By the first name that is contained, newest first.
_TERAFLOPS: tuple[tuple[str, float, float], ...] = (
    ("B200", 80, 2250),
    ("H200", 67, 989),
    ("H100 PCIe", 51, 756),
    ("H100", 67, 989),
    ("A100", 19.5, 312),
    ("A10G", 35, 70),
    ("A10", 31, 125),
    ("A30", 10.3, 165),
    ("A40", 37, 150),
    ("L40S", 92, 362),
    ("L40", 90, 181),
    ("L4", 30, 121),
    ("T4", 8.1, 65),
    ("V100", 15.7, 125),
    ("P100", 9.3, 18.7),
    ("RTX 4090", 82, 165),
    ("RTX 3090", 35.6, 71),
)
_FP8_FACTOR = 2.0
"""FP8 tensor cores compute twice as fast as those for 16 bits (data sheets of H100 and L4)."""
_SWITCHED_NAMES = ("B200", "H200", "H100 80GB HBM3", "SXM")
"""Cards that NVLink joins. Others exchange over PCIe."""

# Bytes per second that are reached, not those of data sheets.
_NVLINK_RATE = 150 * _GIGA
_PCIE_RATE = 10 * _GIGA
_HOST_EXCHANGE_RATE = 2 * _GIGA  # gloo, over shared memory or the loopback interface
_CORE_MEMORY_RATE = 8 * _GIGA
_HOST_MEMORY_RATE = 80 * _GIGA  # of all cores together: more of them wait for the memory
_DISK_RATE = 1.5 * _GIGA
_ADAM_BYTES = 28
"""Read and written per parameter in one Adam step: weight, gradient, two moments, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What a way to train sends between processes, to the host and to the disk.

    Attributes:
        shards_parameters: Whether parameters are gathered for each pass.
        optimizer_place: ``none`` (the device), ``cpu`` or ``nvme``.
        parameter_place: The same of parameters.
    """

    shards_parameters: bool = False
    optimizer_place: str = "none"
    parameter_place: str = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What is computed in one optimizer step.

    Attributes:
        forward_flops: Floating-point operations of the forward pass of one process's batch.
        recomputes: Whether activations are computed again in the backward pass.
        passes: Batches of one optimizer step.
        trained: Parameters that are trained.
        total: All parameters.
        value_bytes: Bytes of one number in the format of the computation.
        precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
    """

    forward_flops: float
    recomputes: bool
    passes: int
    trained: int
    total: int
    value_bytes: int
    precision: str

    @property
    def flops(self) -> float:
        """Operations of one process: the backward pass takes twice the forward pass."""
        return self.forward_flops * (4 if self.recomputes else 3) * self.passes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """An estimate in its parts, in seconds.

    Attributes:
        computing: Forward and backward passes.
        exchanging: What processes send each other; it overlaps with computing.
        optimizer: The optimizer step, where it runs on the host.
        moving: Between device, host and disk.
    """

    computing: float
    exchanging: float = 0.0
    optimizer: float = 0.0
    moving: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of one optimizer step."""
        return max(self.computing, self.exchanging) + self.optimizer + self.moving

    @property
    def words(self) -> str:
        """The parts in a clause: ``1.2 s computing, 0.4 s of the optimizer on the CPU``."""
        if self.total < SHORTEST_S:
            return "too short to estimate: what Python does between operations decides"
        parts = [
            (self.computing, "computing"),
            (self.exchanging, "exchanging, beside it"),
            (self.optimizer, "of the optimizer on the CPU"),
            (self.moving, "moving data between device, host and disk"),
        ]
        return ", ".join(
            f"{format_seconds(seconds)} {words}"
            for seconds, words in parts
            if seconds >= 0.01 * self.total
        )


def estimate_step(
    work: StepWork, traffic: Traffic, machine: Inventory, *, num_processes: int, num_nodes: int = 1
) -> StepTime | None:
    """Estimate one optimizer step."""
    gpus = machine.gpus[:num_processes]
    speed = _device_speed(gpus, work.precision) if gpus else processor_speed(machine.cpu_cores)
    if not speed:
        return None
    # More processes than devices, and all of them on a CPU, compute in turn.
    sharing_processes = num_processes if not gpus else -(-num_processes // len(gpus))
    if not gpus and work.precision != "no":
        speed *= _cpu_share_in(work.precision)
    world_size = num_processes * num_nodes
    trained_bytes = work.trained * work.value_bytes
    volume = 2 * trained_bytes
    if traffic.shards_parameters:
        volume = (2 * work.total * work.value_bytes + trained_bytes) * work.passes
    exchanged = volume * (world_size - 1) / world_size
    own_share = work.trained / world_size
    return StepTime(
        computing=work.flops * sharing_processes / (speed * _REACHED_SHARE),
        exchanging=exchanged / _exchange_rate(gpus),
        optimizer=0.0
        if traffic.optimizer_place == "none"
        # All processes of a host share its memory.
        else own_share * _ADAM_BYTES * num_processes / _memory_rate(machine.cpu_cores),
        moving=_moving_seconds(work, traffic, own_share, num_processes, world_size),
    )


def _moving_seconds(
    work: StepWork, traffic: Traffic, own_share: float, num_processes: int, world_size: int
) -> float:
    seconds = 0.0
    if traffic.optimizer_place != "none":
        # Gradients to the host, and new parameters back.
        seconds += 2 * own_share * work.value_bytes / _PCIE_RATE
    if traffic.optimizer_place == "nvme":
        # float32 weights and two moments, read and written.
        seconds += 2 * 3 * 4 * own_share * num_processes / _DISK_RATE
    if traffic.parameter_place != "none":
        # For the forward and for the backward pass.
        part_bytes = 2 * work.passes * work.total * work.value_bytes / world_size
        seconds += part_bytes / _PCIE_RATE
        if traffic.parameter_place == "nvme":
            seconds += part_bytes * num_processes / _DISK_RATE
    return seconds


def _device_speed(gpus: Sequence[Gpu], precision: str) -> float:
    """Operations per second of the slowest card; 0 where one is not known."""
    speeds = [_card_speed(gpu, precision) for gpu in gpus]
    return min(speeds)


def _card_speed(gpu: Gpu, precision: str) -> float:
    for name, full_speed, half_speed in _TERAFLOPS:
        if name in gpu.name:
            has_backends = precision_row(precision).has_backends
            # What is not computed in 8 bits is computed in bfloat16.
            native_from = precision_row("bf16" if has_backends else precision).imitated_below
            # (0, 0) stands for a card whose kind is not known.
            is_imitated = (0, 0) < gpu.compute_capability < native_from
            tera = full_speed if precision == "no" or is_imitated else half_speed
            # Ampere and older have no tensor cores for 8 bits.
            if has_backends and gpu.compute_capability >= (8, 9):
                tera *= _FP8_FACTOR
            return tera * 1e12
    return 0.0


def _memory_rate(num_cores: int) -> float:
    return min(_HOST_MEMORY_RATE, max(1, num_cores) * _CORE_MEMORY_RATE)


def _exchange_rate(gpus: Sequence[Gpu]) -> float:
    if not gpus:
        return _HOST_EXCHANGE_RATE
    is_switched = all(any(name in gpu.name for name in _SWITCHED_NAMES) for gpu in gpus)
    return _NVLINK_RATE if is_switched else _PCIE_RATE


# Floating-point operations of a core in one cycle, in float32: vectors of 16 or 8 or 4 numbers,
# two fused multiply-adds at once.
_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("asimd", 16))
_USUAL_FREQUENCY = 2.5e9
_HOST_DEVICE = next(row.name for row in DEVICES if row.in_host_memory)
_HALF_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


@functools.cache
def _processor() -> tuple[float, frozenset[str]]:
    """A core's cycles per second, and what it can do, as Linux tells it.

    It is not measured: a computation would start thread pools in the notebook.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return _USUAL_FREQUENCY, frozenset()
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip().lower(), value.strip())
    try:
        frequency = float(facts.get("cpu mhz", "")) * 1e6
    except ValueError:  # ARM's kernels do not tell it
        frequency = _USUAL_FREQUENCY
    abilities = facts.get("flags", "") or facts.get("features", "")
    return frequency or _USUAL_FREQUENCY, frozenset(abilities.split())


def processor_speed(num_cores: int) -> float:
    """What the cores can compute in float32."""
    frequency, abilities = _processor()
    per_cycle = next((count for name, count in _PER_CYCLE if name in abilities), 8)
    # Hyper-threads share the units: two of them compute as much as one core.
    return frequency * per_cycle * max(1, num_cores) / 2


def computes_in_bf16() -> bool:
    """Whether this processor has instructions for bfloat16."""
    return bool(_processor()[1] & set(_HALF_INSTRUCTIONS))


def _cpu_share_in(precision: str) -> float:
    """Speed in 16 bits, as a share of that in float32: without instructions it is imitated."""
    is_imitated = precision in dict(device_row(_HOST_DEVICE).slow)
    # No processor has instructions for 8-bit floats: they are emulated.
    is_imitated |= precision_row(precision).has_backends
    return 2.0 if computes_in_bf16() and not is_imitated else 0.5
