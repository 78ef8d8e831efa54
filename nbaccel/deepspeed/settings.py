"""The settings of a DeepSpeed configuration on which memory depends, read with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.errors import ConfigError

__all__ = ["Settings", "read_settings"]

# States of each parameter that an optimizer keeps, by DeepSpeed's name for it in lower case.
_STATES = {"adagrad": 1, "lion": 1, "muon": 1, "sgd": 0}
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "bfp16": 2}
_PLACES = ("none", "cpu", "nvme")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What of a configuration decides about memory.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        precision: ``fp32``, ``fp16`` or ``bf16``: what the model computes in.
        parameter_bytes: Bytes of one parameter in it.
        gradient_bytes: Bytes of one gradient while they are accumulated.
        master_bytes: Bytes of one parameter as the optimizer keeps it.
        state_bytes: Bytes of one number of an optimizer's state.
        num_states: Such numbers for each parameter: two for Adam.
        torch_optimizer: Whether the optimizer is torch's, or the caller's, not DeepSpeed's own.
        optimizer_place: Where the optimizer's states are: ``none`` (on the device), ``cpu``,
            ``nvme``.
        parameter_place: Where the parameters are while they are not used.
        reduce_bucket: Gradients that are reduced at once.
        contiguous: Whether those are copied into a buffer.
        overlap: Whether there are two such buffers, so that one is filled meanwhile.
        sub_group: Parameters that ZeRO-3's optimizer updates at once.
        prefetch: Parameters that ZeRO-3 fetches ahead.
        persist: Tensors of at most so many parameters stay whole in ZeRO-3.
        live: Parameters that ZeRO-3 keeps whole at once in its passes.
        swap_buffer: Parameters that one of the buffers holds through which NVMe is read.
        num_swap_buffers: How many of them there are.
        num_state_buffers: Buffers through which the optimizer is swapped, each for a group of
            parameters.
        unknown: Settings left to "auto", counted as DeepSpeed's defaults.
    """

    stage: int
    precision: str
    parameter_bytes: int
    gradient_bytes: int
    master_bytes: int
    state_bytes: int
    num_states: int
    torch_optimizer: bool
    optimizer_place: str
    parameter_place: str
    reduce_bucket: int
    contiguous: bool
    overlap: bool
    sub_group: int
    prefetch: int
    persist: int
    live: int
    swap_buffer: int
    num_swap_buffers: int
    num_state_buffers: int
    unknown: tuple[str, ...] = ()


class _Reader:
    """Reads keys of one section, and remembers which of them say "auto"."""

    def __init__(self, section: Mapping[str, Any], path: str, unknown: list[str]) -> None:
        self._section = section
        self._path = path
        self._unknown = unknown

    def get(self, key: str, default: Any) -> Any:
        value = self._section.get(key, default)
        if value == "auto":
            self._unknown.append(f"{self._path}{key}")
            return default
        return default if value is None else value

    def section(self, key: str) -> _Reader:
        found = self._section.get(key)
        inside = found if isinstance(found, Mapping) else {}
        return _Reader(inside, f"{self._path}{key}.", self._unknown)

    def place(self, key: str) -> str:
        place = str(self.section(key).get("device", "none")).rpartition(".")[2]
        if place not in _PLACES:
            raise ConfigError(
                f"{self._path}{key}.device is {place!r}: memory can be on {', '.join(_PLACES)} "
                "only, so the estimate would count it nowhere. Use one of them."
            )
        return place


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Read what decides about memory.

    Args:
        config: A configuration as DeepSpeed reads it. What else is in it is not looked at.

    Returns:
        The settings, with DeepSpeed's defaults for what is not there.

    Raises:
        ConfigError: A stage or a place that DeepSpeed does not have.
    """
    unknown: list[str] = []
    top = _Reader(config, "", unknown)
    zero = top.section("zero_optimization")
    stage = _stage(zero)
    precision = _precision(top)
    size = _BYTES[precision]
    low = top.section("bf16" if precision == "bf16" else "fp16")
    low_master = bool(low.get(f"{precision}_master_weights_and_grads", False))
    optimizer = top.section("optimizer")
    param_buffers = zero.section("offload_param")
    accumulated = top.section("data_types").get("grad_accum_dtype", precision)
    return Settings(
        stage=stage,
        precision=precision,
        parameter_bytes=size,
        gradient_bytes=_BYTES.get(str(accumulated), size),
        master_bytes=size if low_master else 4,
        state_bytes=size if low.get("bf16_optimizer_states", False) else 4,
        num_states=_STATES.get(str(optimizer.get("type", "Adam")).lower(), 2),
        torch_optimizer=_is_torchs(top, stage),
        # DeepSpeed ignores both below the stages that have them; NVMe below stage 3 becomes cpu.
        optimizer_place=_optimizer_place(zero.place("offload_optimizer"), stage),
        parameter_place=zero.place("offload_param") if stage == 3 else "none",
        reduce_bucket=int(zero.get("reduce_bucket_size", 5e8)),
        contiguous=bool(zero.get("contiguous_gradients", True)),
        overlap=bool(zero.get("overlap_comm", stage == 3)),
        sub_group=int(zero.get("sub_group_size", 1e9)),
        prefetch=int(zero.get("stage3_prefetch_bucket_size", 5e7)),
        persist=int(zero.get("stage3_param_persistence_threshold", 1e5)),
        live=int(zero.get("stage3_max_live_parameters", 1e9)),
        swap_buffer=int(param_buffers.get("buffer_size", 1e8)),
        num_swap_buffers=int(param_buffers.get("buffer_count", 5)),
        num_state_buffers=int(zero.section("offload_optimizer").get("buffer_count", 4)),
        unknown=tuple(dict.fromkeys(unknown)),
    )


def _is_torchs(top: _Reader, stage: int) -> bool:
    """Whether it is not one that DeepSpeed makes from the file, or makes of it to offload it."""
    optimizer = top.section("optimizer")
    place = top.section("zero_optimization").place("offload_optimizer")
    if _optimizer_place(place, stage) != "none" and top.get("zero_force_ds_cpu_optimizer", True):
        return False
    named = optimizer.get("type", None)
    return named is None or bool(optimizer.section("params").get("torch_adam", False))


def _stage(zero: _Reader) -> int:
    stage = zero.get("stage", 0)
    if str(stage) not in ("0", "1", "2", "3"):
        raise ConfigError(
            f"zero_optimization.stage is {stage!r}: DeepSpeed has stages 0 to 3, and memory "
            "depends on which it is. Use one of them."
        )
    return int(stage)


def _precision(top: _Reader) -> str:
    for name, section in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        if top.section(section).get("enabled", False):
            return name
    return "fp32"


def _optimizer_place(place: str, stage: int) -> str:
    if stage == 0:
        return "none"
    return "cpu" if place == "nvme" and stage < 3 else place
