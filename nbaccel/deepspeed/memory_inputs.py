"""The settings of a DeepSpeed configuration that memory depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.base.errors import ConfigError

# States of each parameter that an optimizer keeps, by DeepSpeed's name for it in lower case.
_OPTIMIZER_STATES = {"adagrad": 1, "lion": 1, "muon": 1, "sgd": 0}
_BYTES_OF_FORMAT = {"fp32": 4, "fp16": 2, "bf16": 2, "bfp16": 2}
_KNOWN_PLACES = ("none", "cpu", "nvme")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryInputs:
    """The settings of a configuration that decide about memory.

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


class _MemoryInputsReader:
    """Reads keys of one section, and records which of them are "auto"."""

    def __init__(
        self, section_values: Mapping[str, Any], section_path: str, unknown_keys: list[str]
    ) -> None:
        self._section = section_values
        self._path = section_path
        self._unknown = unknown_keys

    def get(self, section_key: str, default: Any) -> Any:
        value = self._section.get(section_key, default)
        if value == "auto":
            self._unknown.append(f"{self._path}{section_key}")
            return default
        # A key that is null in the file is left to DeepSpeed, as one that is not there.
        return default if value is None else value

    def section(self, section_key: str) -> _MemoryInputsReader:
        inner_value = self._section.get(section_key)
        inner_section = inner_value if isinstance(inner_value, Mapping) else {}
        return _MemoryInputsReader(inner_section, f"{self._path}{section_key}.", self._unknown)

    def place(self, section_key: str) -> str:
        # The last part of a dotted name, since it may be an enumeration of DeepSpeed's.
        place = str(self.section(section_key).get("device", "none")).rpartition(".")[2]
        if place not in _KNOWN_PLACES:
            raise ConfigError(
                f"{self._path}{section_key}.device is {place!r}: memory can be on "
                f"{', '.join(_KNOWN_PLACES)} only, so the estimate would count it nowhere. Use one "
                "of them."
            )
        return place


def read_settings(plain_config: Mapping[str, Any]) -> MemoryInputs:
    """Read what decides about memory."""
    unknown_keys: list[str] = []
    top_reader = _MemoryInputsReader(plain_config, "", unknown_keys)
    zero_reader = top_reader.section("zero_optimization")
    stage = _stage_of(zero_reader)
    precision_name = _precision_of_config(top_reader)
    number_bytes = _BYTES_OF_FORMAT[precision_name]
    low_section = top_reader.section("bf16" if precision_name == "bf16" else "fp16")
    low_master = bool(low_section.get(f"{precision_name}_master_weights_and_grads", False))
    optimizer = top_reader.section("optimizer")
    param_buffers = zero_reader.section("offload_param")
    # DeepSpeed accumulates in the format of the model unless the configuration names another.
    accumulation_format = top_reader.section("data_types").get("grad_accum_dtype", precision_name)
    return MemoryInputs(
        stage=stage,
        precision=precision_name,
        parameter_bytes=number_bytes,
        gradient_bytes=_BYTES_OF_FORMAT.get(str(accumulation_format), number_bytes),
        master_bytes=number_bytes if low_master else 4,
        state_bytes=number_bytes if low_section.get("bf16_optimizer_states", False) else 4,
        num_states=_OPTIMIZER_STATES.get(str(optimizer.get("type", "Adam")).lower(), 2),
        torch_optimizer=_is_torchs(top_reader, stage),
        # DeepSpeed ignores both below the stages that have them; NVMe below stage 3 becomes cpu.
        optimizer_place=_optimizer_place(zero_reader.place("offload_optimizer"), stage),
        parameter_place=zero_reader.place("offload_param") if stage == 3 else "none",
        reduce_bucket=int(zero_reader.get("reduce_bucket_size", 5e8)),
        contiguous=bool(zero_reader.get("contiguous_gradients", True)),
        overlap=bool(zero_reader.get("overlap_comm", stage == 3)),
        sub_group=int(zero_reader.get("sub_group_size", 1e9)),
        prefetch=int(zero_reader.get("stage3_prefetch_bucket_size", 5e7)),
        persist=int(zero_reader.get("stage3_param_persistence_threshold", 1e5)),
        live=int(zero_reader.get("stage3_max_live_parameters", 1e9)),
        swap_buffer=int(param_buffers.get("buffer_size", 1e8)),
        num_swap_buffers=int(param_buffers.get("buffer_count", 5)),
        num_state_buffers=int(zero_reader.section("offload_optimizer").get("buffer_count", 4)),
        unknown=tuple(dict.fromkeys(unknown_keys)),
    )


def _is_torchs(top_reader: _MemoryInputsReader, stage: int) -> bool:
    """Whether the optimizer is torch's: not made from the file, nor replaced for offloading."""
    optimizer = top_reader.section("optimizer")
    offload_place = top_reader.section("zero_optimization").place("offload_optimizer")
    if _optimizer_place(offload_place, stage) != "none" and top_reader.get(
        "zero_force_ds_cpu_optimizer", True
    ):
        return False
    name = optimizer.get("type", None)
    return name is None or bool(optimizer.section("params").get("torch_adam", False))


def _stage_of(zero_reader: _MemoryInputsReader) -> int:
    stage = zero_reader.get("stage", 0)
    if str(stage) not in ("0", "1", "2", "3"):
        raise ConfigError(
            f"zero_optimization.stage is {stage!r}: DeepSpeed has stages 0 to 3, and memory "
            "depends on which it is. Use one of them."
        )
    return int(stage)


def _precision_of_config(top_reader: _MemoryInputsReader) -> str:
    # "bfloat16" is an old name of the section, which DeepSpeed still reads.
    for format_name, section_name in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        if top_reader.section(section_name).get("enabled", False):
            return format_name
    return "fp32"


def _optimizer_place(place: str, stage: int) -> str:
    if stage == 0:
        return "none"
    return "cpu" if place == "nvme" and stage < 3 else place
