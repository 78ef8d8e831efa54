"""Accelerate's configuration files, of any version, read as a ``RunConfig``.

Every key of a file has a line in the result: what it became, or why it has no effect. A key that
would train something else when left out is a mistake; all mistakes are reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config.accelerate_file import FileReading, MappedKey, setting_of
from nbaccel.config.accelerate_sections import read_deepspeed, read_dynamo, read_fp8, read_fsdp
from nbaccel.config.capabilities import DEVICES, FP8_BACKENDS
from nbaccel.config.mistakes import closest, shown
from nbaccel.config.run_config import RunConfig, merged_settings
from nbaccel.config.text_forms import read_yaml, unreadable

_OF_TPU_PODS = "accelerate tpu-config reads it, which sets up TPU hosts; nbaccel has no such part"
_OF_SAGEMAKER = "it belongs to Amazon SageMaker"
_OF_MPI = "mpirun starts the processes there; nbaccel starts them itself on each node"


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateFile:
    """What a configuration file of Accelerate says.

    Attributes:
        config: The settings.
        mapped_keys: Every key of the file, with what it became.
    """

    config: RunConfig
    mapped_keys: tuple[MappedKey, ...]


def is_accelerate_file(settings: Mapping[str, Any]) -> bool:
    """Whether settings are those of a file that Accelerate reads."""
    return any(key in _KEY_READERS and key not in RunConfig.model_fields for key in settings)


def read_accelerate_yaml(
    source: str | Path, changes: Mapping[str, Any] | None = None
) -> AccelerateFile:
    """Read a configuration file of Accelerate: YAML, or JSON, of any version.

    Args:
        source: The file's path, or its text.
        changes: Settings of `RunConfig` that replace the file's, before they are judged.

    Returns:
        The settings, and what each key became.

    Raises:
        ConfigError: It cannot be read, names something unknown, or asks for what nbaccel lacks;
            all mistakes.
    """
    is_text = isinstance(source, str) and ("\n" in source or ":" in source)
    file_path = None if is_text else Path(source)
    source_name = f"Accelerate's file {file_path}" if file_path else "Accelerate's configuration"
    try:
        text = str(source) if file_path is None else file_path.read_text(encoding="utf-8")
        file_settings = read_yaml(text)
    except OSError as error:
        raise ConfigError(
            f"{source_name} cannot be read: {error}. Nothing would be launched as it says. "
            "Give the path of a file that is there."
        ) from error
    except ValueError as error:
        raise unreadable(source_name, "YAML", error) from error
    if not isinstance(file_settings, dict):
        raise ConfigError(
            f"{source_name} holds no settings: got {shown(file_settings)}. Settings need names. "
            "Write it with accelerate config, or with nbaccel config."
        )
    reading = _read_keys(file_settings, file_path, changes or {})
    return _judged(reading, source_name, changes or {})


def unjudged_settings(file_settings: Mapping[str, Any], file_path: Path) -> dict[str, Any]:
    """What a file says as settings of `RunConfig`, whatever is wrong with it."""
    return _read_keys(file_settings, file_path, {}).complete_settings()


def _read_keys(
    file_settings: Mapping[str, Any], file_path: Path | None, changes: Mapping[str, Any]
) -> FileReading:
    file_settings = dict(file_settings)
    # Accelerate counts the processes of all machines, so these two are read together.
    if str(num_nodes := changes.get("num_nodes", "")).isdecimal():
        file_settings["num_machines"] = int(num_nodes)
    if "num_processes" in changes:
        file_settings.pop("num_processes", None)
    reading = FileReading(file_settings, folder=file_path.parent if file_path else Path())
    for key, value in file_settings.items():
        if key not in _KEY_READERS:
            reading.refuse(
                key,
                f"{key}={shown(value)} is no key of Accelerate's files. It would be silently "
                f"ignored.{closest(str(key), _KEY_READERS) or ' Remove it.'}",
            )
        elif value is None or value in ({}, [], ""):
            reading.note_unused(key, value, "empty")
        else:
            _KEY_READERS[key](reading, key, value)
    return reading


def _judged(reading: FileReading, source_name: str, changes: Mapping[str, Any]) -> AccelerateFile:
    mistakes = [f"{source_name}: {mistake}" for mistake in reading.mistakes]
    config = RunConfig()
    try:
        config = RunConfig(**merged_settings(reading.complete_settings(), changes))
    except ConfigError as error:
        mistakes += [
            mistake
            if setting_of(mistake) in changes
            else f"{source_name}: {mistake}{reading.origin_of(mistake)}"
            for mistake in error.mistakes
        ]
    if mistakes:
        raise ConfigError(*mistakes)
    return AccelerateFile(config=config, mapped_keys=tuple(reading.mapped_keys))


# ------------------------------------------------------------------------- where it runs
def _read_environment(reading: FileReading, key: str, value: Any) -> None:
    if str(value) == "LOCAL_MACHINE":
        reading.note_unused(key, value, "the default")
        return
    reading.refuse(
        key,
        f"{key}={shown(value)} starts jobs at Amazon SageMaker, which nbaccel does not: it would "
        "train on this machine instead. Use accelerate launch for it.",
    )


def _read_type(reading: FileReading, key: str, value: Any) -> None:
    # YAML 1.1 reads a bare NO as False.
    type_name = "NO" if value is False else str(value).strip().upper()
    device_name = _device_of_type(type_name)
    if type_name == "NO":
        reading.settings.setdefault("num_processes", 1)
        reading.use(key, value, "num_processes=1")
    elif type_name in ("FSDP", "DEEPSPEED"):
        reading.use(key, value, f"strategy={type_name.lower()}")
        reading.settings["strategy"] = type_name.lower()
    elif device_name:
        reading.settings.setdefault("device", device_name)
        reading.use(key, value, f"device={device_name}")
    else:
        remedy = "Use FSDP or DEEPSPEED" if type_name == "MEGATRON_LM" else "Choose another one"
        reading.refuse(
            key,
            f"{key}={shown(value)} is not supported: nbaccel would train in another way. {remedy}.",
        )


def _device_of_type(type_name: str) -> str:
    types = {"MULTI_GPU": "cuda", "TPU": "tpu", "XLA": "tpu"}
    device_name = types.get(type_name, type_name.removeprefix("MULTI_").lower())
    is_known = type_name in types or type_name.startswith("MULTI_")
    return device_name if is_known and device_name in [row.name for row in DEVICES] else ""


def _read_use_cpu(reading: FileReading, key: str, value: Any) -> None:
    if reading.truth(key, value):
        reading.settings["device"] = "cpu"
        reading.use(key, value, "device=cpu")
    else:
        reading.note_unused(key, value, "the default")


def _read_gpu_ids(reading: FileReading, key: str, value: Any) -> None:
    if str(value).strip().lower() == "all":
        reading.note_unused(key, value, "the default")
        return
    reading.variables["CUDA_VISIBLE_DEVICES"] = str(value).replace(" ", "")
    reading.use(key, value, "variables: CUDA_VISIBLE_DEVICES")


# --------------------------------------------------------------------- machines, processes
def _read_num_processes(reading: FileReading, key: str, value: Any) -> None:
    num_nodes = reading.given.get("num_machines") or 1
    is_counted = isinstance(value, int) and isinstance(num_nodes, int) and num_nodes > 0
    if value == -1:
        reading.note_unused(key, value, "the plan chooses")
    elif not is_counted or value % num_nodes:
        reading.refuse(
            key,
            f"{key}={shown(value)} cannot be divided by num_machines={shown(num_nodes)}: "
            "Accelerate counts the processes of all machines, and each must have as many. Give a "
            "multiple.",
        )
    else:
        reading.settings["num_processes"] = value // num_nodes
        per_node = f" on each of {num_nodes} nodes" if num_nodes > 1 else ""
        reading.use(key, value, f"num_processes={value // num_nodes}{per_node}")
        reading.origins["num_processes"] = key


def _read_same_network(reading: FileReading, key: str, value: Any) -> None:
    reading.note_unused(key, value, "nodes meet at master_addr, wherever they are")


def _read_affinity(reading: FileReading, key: str, value: Any) -> None:
    reason = "the default"
    if reading.truth(key, value):
        reason = "the system places threads; set_numa_affinity() in your script binds them"
    reading.note_unused(key, value, reason)


# ---------------------------------------------------------------------------- precision
def _read_precision(reading: FileReading, key: str, value: Any) -> None:
    precision = "no" if value is False else str(value).strip().lower()
    has_document = "deepspeed_config_file" in reading.section("deepspeed_config", "DEEPSPEED")
    if has_document and precision == "no":
        reading.note_unused(key, value, "DeepSpeed's file decides")
        return
    reading.settings["mixed_precision"] = precision
    reading.use(key, value, f"mixed_precision={precision}")


def _read_fp16(reading: FileReading, key: str, value: Any) -> None:
    """Accelerate's key before version 0.6."""
    if reading.given.get("mixed_precision") is not None or not reading.truth(key, value):
        reading.note_unused(key, value, "mixed_precision decides")
        return
    reading.settings["mixed_precision"] = "fp16"
    reading.use(key, value, "mixed_precision=fp16")


def _read_downcast(reading: FileReading, key: str, value: Any) -> None:
    is_asked = value is True or str(value).lower() in ("yes", "true")
    reading.note_unused(
        key,
        value,
        "torch_xla has dropped it: mixed_precision decides" if is_asked else "the default",
    )


# ------------------------------------------------------------------------------- others
def _read_parallelism(reading: FileReading, key: str, value: Any) -> None:
    for entry_key, entry_value in reading.mapping(key, value).items():
        dotted_key = f"{key}.{entry_key}"
        is_several = isinstance(entry_value, int) and entry_value > 1
        if is_several and not entry_key.endswith("dp_shard_size"):
            reading.refuse(
                dotted_key,
                f"{dotted_key}={entry_value} mixes parallelisms, which this version does not do: "
                "it would train in another way. Set it to 1; FSDP shards over all processes.",
            )
        else:
            reading.note_unused(dotted_key, entry_value, "FSDP shards over all processes")


def _read_megatron(reading: FileReading, key: str, value: Any) -> None:
    # `distributed_type: MEGATRON_LM` itself is refused.
    reading.note_unused(key, value, "distributed_type does not use it")


def _read_debug(reading: FileReading, key: str, value: Any) -> None:
    if reading.truth(key, value):
        reading.variables["ACCELERATE_DEBUG_MODE"] = "true"
        reading.use(key, value, "variables: ACCELERATE_DEBUG_MODE")
    else:
        reading.note_unused(
            key, value, "the default; NBACCEL_COLLECTIVE_CHECK says which calls are compared"
        )


def _read_tpu_env(reading: FileReading, key: str, value: Any) -> None:
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        name, separator, text = str(entry).partition("=")
        if separator:
            reading.variables[name.strip()] = text.strip()
    reading.use(key, value, "variables")


def _as_setting(name: str) -> Callable[[FileReading, str, Any], None]:
    """A reader of a key that is a setting of `RunConfig` under another name."""

    def read(reading: FileReading, key: str, value: Any) -> None:
        reading.settings[name] = value
        reading.origins[name] = key
        reading.use(key, value, f"{name}={value}")

    return read


def _without_effect(reason: str) -> Callable[[FileReading, str, Any], None]:
    """A reader of a key that nothing of nbaccel follows."""

    def read(reading: FileReading, key: str, value: Any) -> None:
        reading.note_unused(key, value, reason)

    return read


_KEY_READERS: Mapping[str, Callable[[FileReading, str, Any], None]] = {
    "compute_environment": _read_environment,
    "distributed_type": _read_type,
    "use_cpu": _read_use_cpu,
    "gpu_ids": _read_gpu_ids,
    "num_processes": _read_num_processes,
    "num_machines": _as_setting("num_nodes"),
    "machine_rank": _as_setting("node_rank"),
    "main_process_ip": _as_setting("master_addr"),
    "main_process_port": _as_setting("use_port"),
    "rdzv_backend": _as_setting("rdzv_backend"),
    "same_network": _read_same_network,
    "num_cpu_threads_per_process": _as_setting("threads_per_process"),
    "mixed_precision": _read_precision,
    "fp16": _read_fp16,
    "downcast_bf16": _read_downcast,
    "fp8_config": lambda reading, key, value: read_fp8(reading, key, value, FP8_BACKENDS),
    "deepspeed_config": read_deepspeed,
    "fsdp_config": read_fsdp,
    "dynamo_config": read_dynamo,
    "dynamo_backend": read_dynamo,
    "parallelism_config": _read_parallelism,
    "megatron_lm_config": _read_megatron,
    "enable_cpu_affinity": _read_affinity,
    "debug": _read_debug,
    "main_training_function": _without_effect(
        "nbaccel launch runs the whole script, on TPUs as elsewhere"
    ),
    "mpirun_config": _without_effect(_OF_MPI),
    "ipex_config": _without_effect("PyTorch has Intel's extension built in"),
    "tpu_env": _read_tpu_env,
    **dict.fromkeys(
        ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm"),
        _without_effect(_OF_TPU_PODS),
    ),
    **dict.fromkeys(("command_file", "commands"), _without_effect(_OF_TPU_PODS)),
    **dict.fromkeys(
        (
            *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region"),
            *("base_job_name", "pytorch_version", "transformers_version", "py_version"),
            *("sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
        ),
        _without_effect(_OF_SAGEMAKER),
    ),
}
