"""Configuration files: the command's own, and Accelerate's of any version, read as a ``RunConfig``.

Every key of Accelerate's has a line in the result: what it became, or why it has no effect. A key
that would train something else when left out is a mistake; all mistakes are reported together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from nbaccel.base import atomic, env
from nbaccel.base.errors import ConfigError
from nbaccel.config.capabilities import DEVICES, FP8_BACKENDS, PRECISIONS, words_of_rows
from nbaccel.config.deepspeed_document import ARGUMENT_KEYS, DEFAULT_STAGE
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.fp8 import Fp8Config
from nbaccel.config.given_values import closest, put_at, shown
from nbaccel.config.handlers import FSDP_VARIABLES, sharding_word
from nbaccel.config.run_config import RunConfig, merged_settings
from nbaccel.config.text_forms import read_yaml_settings

_NOT_ASKED = "distributed_type does not use it"
_DEFAULT = "the default"
_TRUTH_WORDS = {"true": True, "yes": True, "false": False, "no": False}
_FILE_DECIDES = "DeepSpeed's file decides"


class MappedKey(NamedTuple):
    """One key of a file."""

    key: str  # with dots, where it is in a section
    value: Any  # what the file says
    outcome: str  # the setting that it became, or why it has no effect
    is_used: bool  # whether it became one


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration file that was read.

    Attributes:
        config: The settings.
        path: The file; None for a default file that is not there.
        is_accelerate: Whether it has Accelerate's form.
        mapped_keys: What each of Accelerate's keys became; empty for a file of ours.
    """

    config: RunConfig
    path: Path | None = None
    is_accelerate: bool = False
    mapped_keys: tuple[MappedKey, ...] = ()


class _Reading:
    """Collects settings, variables and mistakes while the keys of a file are read."""

    def __init__(self, given: Mapping[str, Any], folder: Path) -> None:
        self.given = given
        self.folder = folder
        self.settings: dict[str, Any] = {}
        self.variables: dict[str, str] = {}
        self.mapped_keys: list[MappedKey] = []
        self.mistakes: list[str] = []
        self.origins: dict[str, str] = {}  # the file's key of a setting with another name there

    def read(
        self,
        entries: Mapping[str, Any],
        readers: Mapping[str, _ReadKey],
        *,
        section: str = "",
        prefix: str = "",
    ) -> None:
        """Hand each key to its reader; older versions wrote some keys without their prefix."""
        for name, value in entries.items():
            key = f"{section}.{name}" if section else str(name)
            full_name = f"{prefix}{str(name).removeprefix(prefix)}"
            if full_name not in readers:
                self.mistakes.append(
                    f"{key}={shown(value)} is no key of Accelerate's files. It would be silently "
                    f"ignored.{closest(full_name, readers) or ' Remove it.'}"
                )
            elif value is None or value in ({}, [], ""):
                self.note_unused(key, value, "empty")
            else:
                readers[full_name](self, key, value)

    def use(self, key: str, value: Any, outcome: str) -> None:
        """Note what a key became."""
        self.mapped_keys.append(MappedKey(key, value, outcome, is_used=True))

    def note_unused(self, key: str, value: Any, reason: str) -> None:
        """Note why a key has no effect."""
        self.mapped_keys.append(MappedKey(key, value, reason, is_used=False))

    def set(self, name: str, value: Any, key: str, given: Any = None) -> None:
        """Take a setting of `RunConfig` from a key."""
        self.settings[name] = value
        self.use(key, value if given is None else given, f"{name}={value}")

    def truth(self, key: str, value: Any) -> bool:
        """A truth value, also one that was written as text."""
        if isinstance(value, str) and value.strip().lower() in _TRUTH_WORDS:
            return _TRUTH_WORDS[value.strip().lower()]
        if not isinstance(value, bool):
            self.mistakes.append(f"{key}={shown(value)} must be true or false.")
        return value is True

    def mapping(self, key: str, value: Any) -> dict[str, Any]:
        """A section; empty, and a mistake, where it is none."""
        if isinstance(value, Mapping):
            return {str(name): inner_value for name, inner_value in value.items()}
        self.mistakes.append(f"{key}={shown(value)} must be a section, names with values below it.")
        return {}

    def is_of_type(self, distributed_type: str) -> bool:
        """Whether the file asks for this kind of training."""
        return str(self.given.get("distributed_type")).strip().upper() == distributed_type

    def note_section(self, key: str, value: Any, reason: str = _NOT_ASKED) -> None:
        """Note why no key of a section has an effect."""
        for entry_key, entry_value in self.mapping(key, value).items():
            self.note_unused(f"{key}.{entry_key}", entry_value, reason)

    def complete_settings(self) -> dict[str, Any]:
        """The settings for `RunConfig`, variables included."""
        settings = self.settings | ({"variables": self.variables} if self.variables else {})
        if "hostfile" in settings:
            # One command starts the workers on all hosts, and counts them together.
            num_nodes = settings.pop("num_nodes", 1)
            settings.pop("node_rank", None)
            if isinstance(settings.get("num_processes"), int):
                settings["num_processes"] *= num_nodes
        return settings


_ReadKey: TypeAlias = Callable[[_Reading, str, Any], None]


def _as_setting(name: str) -> _ReadKey:
    def read(reading: _Reading, key: str, value: Any) -> None:
        reading.origins[name] = key
        reading.set(name, value, key)

    return read


def _into(section: str, name: str, convert: Callable[[Any], Any] = lambda value: value) -> _ReadKey:
    def read(reading: _Reading, key: str, value: Any) -> None:
        converted = convert(value)
        put_at(reading.settings.setdefault(section, {}), name, converted)
        reading.use(key, value, f"{section}: {name}={converted}")

    return read


def _as_variable(name: str) -> _ReadKey:
    def read(reading: _Reading, key: str, value: Any) -> None:
        reading.variables[name] = str(value).lower() if isinstance(value, bool) else str(value)
        reading.use(key, value, f"variables: {name}")

    return read


def _without_effect(reason: str) -> _ReadKey:
    return lambda reading, key, value: reading.note_unused(key, value, reason)


def _if_true(read: _ReadKey) -> _ReadKey:
    """A reader of a truth value, of which false is the default."""

    def read_true(reading: _Reading, key: str, value: Any) -> None:
        if reading.truth(key, value):
            read(reading, key, value)
        else:
            reading.note_unused(key, value, _DEFAULT)

    return read_true


def setting_of(mistake: str) -> str:
    """The setting that a message begins with."""
    return mistake.partition(" ")[0].partition("=")[0].rstrip(":")


def is_accelerate_file(settings: Mapping[str, Any]) -> bool:
    """Whether settings are those of a file that Accelerate reads."""
    return any(key in _KEY_READERS and key not in RunConfig.model_fields for key in settings)


def _accelerates_config(
    file_settings: Mapping[str, Any], file_path: Path, changes: Mapping[str, Any]
) -> LoadedConfig:
    reading = _read_keys(file_settings, file_path, changes)
    source_name = f"Accelerate's file {file_path}"
    mistakes = [f"{source_name}: {mistake}" for mistake in reading.mistakes]
    config = RunConfig()
    try:
        config = RunConfig(**merged_settings(reading.complete_settings(), changes))
    except ConfigError as error:
        for mistake in error.mistakes:
            name = setting_of(mistake)
            key = reading.origins.get(name, name)
            origin = f" In this file it is {key}." if key != name else ""
            mistakes.append(mistake if name in changes else f"{source_name}: {mistake}{origin}")
    refuse_mistakes(mistakes)
    keys = tuple(reading.mapped_keys)
    return LoadedConfig(config=config, path=file_path, is_accelerate=True, mapped_keys=keys)


def _read_keys(
    file_settings: Mapping[str, Any], file_path: Path, changes: Mapping[str, Any]
) -> _Reading:
    file_settings = dict(file_settings)
    # Accelerate counts the processes of all machines, so these two are read together.
    if str(num_nodes := changes.get("num_nodes", "")).isdecimal():
        file_settings["num_machines"] = int(num_nodes)
    if "num_processes" in changes:
        file_settings.pop("num_processes", None)
    reading = _Reading(file_settings, folder=file_path.parent)
    reading.read(file_settings, _KEY_READERS)
    return reading


def _read_environment(reading: _Reading, key: str, value: Any) -> None:
    if str(value) == "LOCAL_MACHINE":
        reading.note_unused(key, value, _DEFAULT)
        return
    reading.mistakes.append(
        f"{key}={shown(value)} starts jobs at Amazon SageMaker, which nbaccel does not: it would "
        "train on this machine instead. Use accelerate launch for it."
    )


def _read_type(reading: _Reading, key: str, value: Any) -> None:
    # YAML 1.1 reads a bare NO as False.
    type_name = "NO" if value is False else str(value).strip().upper()
    types = {"MULTI_GPU": "cuda", "TPU": "tpu", "XLA": "tpu"}
    is_known = type_name in types or type_name.startswith("MULTI_")
    device_name = types.get(type_name, type_name.removeprefix("MULTI_").lower())
    if type_name == "NO":
        reading.settings.setdefault("num_processes", 1)
        reading.use(key, value, "num_processes=1")
    elif type_name in ("FSDP", "DEEPSPEED"):
        reading.set("strategy", type_name.lower(), key, value)
    elif is_known and device_name in [row.name for row in DEVICES]:
        reading.settings.setdefault("device", device_name)
        reading.use(key, value, f"device={device_name}")
    else:
        remedy = "Use FSDP or DEEPSPEED" if type_name == "MEGATRON_LM" else "Choose another one"
        reading.mistakes.append(
            f"{key}={shown(value)} is not supported: nbaccel would train in another way. {remedy}."
        )


def _read_gpu_ids(reading: _Reading, key: str, value: Any) -> None:
    if str(value).strip().lower() == "all":
        reading.note_unused(key, value, _DEFAULT)
    else:
        _as_variable("CUDA_VISIBLE_DEVICES")(reading, key, str(value).replace(" ", ""))


def _read_num_processes(reading: _Reading, key: str, value: Any) -> None:
    num_nodes = reading.given.get("num_machines") or 1
    is_counted = isinstance(value, int) and isinstance(num_nodes, int) and num_nodes > 0
    if value == -1:
        reading.note_unused(key, value, "the plan chooses")
    elif not is_counted or value % num_nodes:
        reading.mistakes.append(
            f"{key}={shown(value)} cannot be divided by num_machines={shown(num_nodes)}: "
            "Accelerate counts the processes of all machines. Give a multiple."
        )
    else:
        reading.settings["num_processes"] = value // num_nodes
        per_node = f" on each of {num_nodes} nodes" if num_nodes > 1 else ""
        reading.use(key, value, f"num_processes={value // num_nodes}{per_node}")


def _read_precision(reading: _Reading, key: str, value: Any) -> None:
    precision = "no" if value is False else str(value).strip().lower()
    section = reading.given.get("deepspeed_config")
    has_document = isinstance(section, Mapping) and _DOCUMENT_KEY in section
    if has_document and reading.is_of_type("DEEPSPEED") and precision == "no":
        reading.note_unused(key, value, _FILE_DECIDES)
    else:
        reading.set("mixed_precision", precision, key, value)


def _read_fp16(reading: _Reading, key: str, value: Any) -> None:
    """Accelerate's key before version 0.6."""
    if reading.given.get("mixed_precision") is not None or not reading.truth(key, value):
        reading.note_unused(key, value, "mixed_precision decides")
    else:
        reading.set("mixed_precision", "fp16", key, value)


def _read_parallelism(reading: _Reading, key: str, value: Any) -> None:
    for entry_key, entry_value in reading.mapping(key, value).items():
        dotted_key = f"{key}.{entry_key}"
        is_several = isinstance(entry_value, int) and entry_value > 1
        if is_several and not entry_key.endswith("dp_shard_size"):
            reading.mistakes.append(
                f"{dotted_key}={entry_value} mixes parallelisms, which this version does not do: "
                "it would train in another way. Set it to 1; FSDP shards over all processes."
            )
        else:
            reading.note_unused(dotted_key, entry_value, "FSDP shards over all processes")


def _read_tpu_env(reading: _Reading, key: str, value: Any) -> None:
    for entry in value if isinstance(value, list) else [value]:
        name, separator, text = str(entry).partition("=")
        if separator:
            reading.variables[name.strip()] = text.strip()
    reading.use(key, value, "variables")


_DOCUMENT_KEY = "deepspeed_config_file"
_STARTED_ON_EACH = ("standard", "nossh")  # Launchers of DeepSpeed that do not reach other machines
# What a file of DeepSpeed's own says, too.
_DOCUMENT_READERS: Mapping[str, _ReadKey] = {
    **{name: _into("deepspeed", key) for name, key in ARGUMENT_KEYS.items()},
    **{name: _as_setting(name) for name in ("zero_stage", "gradient_accumulation_steps")},
}
_DEEPSPEED_READERS: Mapping[str, _ReadKey] = {
    **_DOCUMENT_READERS,
    "zero3_init_flag": _as_variable("ACCELERATE_DEEPSPEED_ZERO3_INIT"),
    "deepspeed_moe_layer_cls_names": _as_variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    "deepspeed_multinode_launcher": _without_effect("nbaccel launch is started on each machine"),
    "deepspeed_hostfile": _without_effect("give nbaccel launch --hostfile"),
    "deepspeed_inclusion_filter": _without_effect("give nbaccel launch --include"),
    "deepspeed_exclusion_filter": _without_effect("give nbaccel launch --exclude"),
}
_HOST_SETTINGS = {
    "deepspeed_hostfile": "hostfile",
    "deepspeed_inclusion_filter": "include",
    "deepspeed_exclusion_filter": "exclude",
}


def _read_deepspeed(reading: _Reading, key: str, value: Any) -> None:
    """Read ``deepspeed_config``: a file of DeepSpeed, or Accelerate's fields."""
    if not reading.is_of_type("DEEPSPEED"):
        reading.note_section(key, value)
        return
    entries = reading.mapping(key, value).items()
    section = {name: None if str(one).lower() == "none" else one for name, one in entries}
    launcher = str(section.get("deepspeed_multinode_launcher") or "pdsh")
    if section.get("deepspeed_hostfile") and launcher not in _STARTED_ON_EACH:
        # One command, on one machine, starts the workers of all hosts.
        for file_key, name in _HOST_SETTINGS.items():
            if section.get(file_key):
                reading.set(name, section.pop(file_key), f"{key}.{file_key}")
    readers = _DEEPSPEED_READERS
    if document := section.pop(_DOCUMENT_KEY, None):
        reading.settings["deepspeed"] = _document_path(reading, str(document))
        reading.use(f"{key}.{_DOCUMENT_KEY}", document, "deepspeed: the file's content")
        readers = {**readers, **dict.fromkeys(_DOCUMENT_READERS, _without_effect(_FILE_DECIDES))}
    else:
        section.setdefault("zero_stage", DEFAULT_STAGE)
    reading.read(section, readers, section=key)


def _document_path(reading: _Reading, document: str) -> str:
    """A path in the file, which counts from the working folder, or else from the file's."""
    beside = reading.folder / document
    try:
        is_beside = beside.is_file() and not reading.folder.samefile(".")
    except OSError:  # a name that is too long; the setting itself says that there is no such file
        is_beside = False
    return str(beside) if is_beside else document


def _plain_truth(value: Any) -> Any:
    is_truth = isinstance(value, str) and value.strip().lower() in ("true", "false")
    return value.strip().lower() == "true" if is_truth else value


def _read_resharding(reading: _Reading, key: str, value: Any) -> None:
    # `accelerate config` writes FSDP1's words under the name that FSDP2 has for it.
    value = _plain_truth(value)
    name = "reshard_after_forward" if isinstance(value, bool) else "sharding_strategy"
    _into("fsdp", name, sharding_word)(reading, key, value)


def _read_least_params(reading: _Reading, key: str, value: Any) -> None:
    if value == 0:
        reading.note_unused(key, value, _DEFAULT)
    else:
        _into("fsdp", "min_num_params", _plain_truth)(reading, key, value)


def _refuse_offloaded_activations(reading: _Reading, key: str, value: Any) -> None:
    reading.mistakes.append(
        f"{key}=true is not supported: this version recomputes activations and does not move them "
        "to host memory, so it would need more. Set it to false."
    )


_FSDP_READERS: Mapping[str, _ReadKey] = {
    **{f"fsdp_{name}": _into("fsdp", name, _plain_truth) for name in FSDP_VARIABLES},
    "fsdp_transformer_layer_cls_to_wrap": _into("fsdp", "transformer_cls_names_to_wrap"),
    "fsdp_offload_params": _into("fsdp", "cpu_offload", _plain_truth),
    "fsdp_auto_wrap_policy": _into("fsdp", "auto_wrap_policy", lambda value: str(value).lower()),
    "fsdp_sharding_strategy": _into("fsdp", "sharding_strategy", sharding_word),
    "fsdp_reshard_after_forward": _read_resharding,
    "fsdp_min_num_params": _read_least_params,
    **dict.fromkeys(
        (
            *("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch"),
            *("fsdp_use_orig_params", "fsdp_sync_module_states"),
        ),
        _without_effect("fully_shard does it by itself"),
    ),
    "fsdp_version": lambda reading, key, value: reading.use(
        key, value, "fully_shard, which is version 2, trains in any case"
    ),
    "fsdp_activation_checkpointing_offload": _if_true(_refuse_offloaded_activations),
}


def _read_fsdp(reading: _Reading, key: str, value: Any) -> None:
    if not reading.is_of_type("FSDP"):
        reading.note_section(key, value)
        return
    section = reading.mapping(key, value)
    reading.read(section, _FSDP_READERS, section=key, prefix="fsdp_")
    settings = reading.settings.pop("fsdp", {})
    if settings.get("sharding_strategy") == "NO_SHARD":
        reading.settings["strategy"] = "auto"
        return
    if str(section.get("fsdp_version", section.get("version", 1))) == "1":
        # Version 1 writes whole weights where nothing is said, and version 2 shards.
        settings.setdefault("state_dict_type", "FULL_STATE_DICT")
    if settings:
        reading.settings["fsdp"] = settings


_DYNAMO_READERS: Mapping[str, _ReadKey] = {
    "dynamo_backend": _into("dynamo", "backend", lambda value: str(value).lower()),
    "dynamo_mode": _into("dynamo", "mode"),
    "dynamo_use_fullgraph": _into("dynamo", "fullgraph"),
    "dynamo_use_dynamic": _into("dynamo", "dynamic"),
    "dynamo_use_regional_compilation": _into("dynamo", "use_regional_compilation"),
}


def _read_dynamo(reading: _Reading, key: str, value: Any) -> None:
    """Read ``dynamo_config``, or ``dynamo_backend`` of older versions."""
    if key == "dynamo_backend":
        # YAML 1.1 reads a bare NO as False.
        reading.read({key: "NO" if value is False else value}, _DYNAMO_READERS)
    else:
        reading.read(reading.mapping(key, value), _DYNAMO_READERS, section=key, prefix="dynamo_")
    # Without a backend nothing is compiled, whatever the others say.
    if reading.settings.get("dynamo", {}).get("backend", "no") in ("no", "false"):
        reading.settings.pop("dynamo", None)


def _fp8_backend(value: Any) -> Any:
    names = words_of_rows(FP8_BACKENDS) | {row.name: row.name for row in FP8_BACKENDS}
    return names.get(str(value).lower().replace("-", ""), value)


def _read_block_scaling(reading: _Reading, key: str, value: Any) -> None:
    recipe = "mxfp8" if reading.truth(key, value) else "auto"
    _into("fp8", "recipe", lambda _: recipe)(reading, key, value)


_FP8_READERS: Mapping[str, _ReadKey] = {
    f"fp8_{name.removeprefix('fp8_')}": read
    for name, read in {
        **{name: _into("fp8", name) for name in Fp8Config.model_fields},
        # What `accelerate config` asks for has other names than what `accelerate launch` reads.
        "amax_history_length": _into("fp8", "amax_history_len"),
        "amax_compute_algorithm": _into("fp8", "amax_compute_algo"),
        "optimization_level": _into("fp8", "opt_level"),
        "backend": _into("fp8", "backend", _fp8_backend),
        # Some files have one truth value for all three.
        "override_linear_precision": _into(
            *("fp8", "override_linear_precision"),
            lambda value: [value] * 3 if isinstance(value, bool) else value,
        ),
        "use_mxfp8_block_scaling": _read_block_scaling,
    }.items()
}


def _read_fp8(reading: _Reading, key: str, value: Any) -> None:
    precisions = [row.name for row in PRECISIONS if row.has_backends]
    if str(reading.given.get("mixed_precision")).lower() not in precisions:
        reading.note_section(key, value, "mixed_precision is not fp8")
        return
    reading.settings["fp8"] = {}
    reading.read(reading.mapping(key, value), _FP8_READERS, section=key, prefix="fp8_")


_OF_TPU_PODS = "accelerate tpu-config reads it, which sets up TPU hosts; nbaccel has no such part"

_KEY_READERS: Mapping[str, _ReadKey] = {
    "compute_environment": _read_environment,
    "distributed_type": _read_type,
    "use_cpu": _if_true(lambda reading, key, value: reading.set("device", "cpu", key, value)),
    "gpu_ids": _read_gpu_ids,
    "num_processes": _read_num_processes,
    "num_machines": _as_setting("num_nodes"),
    "machine_rank": _as_setting("node_rank"),
    "main_process_ip": _as_setting("master_addr"),
    "main_process_port": _as_setting("use_port"),
    "rdzv_backend": _as_setting("rdzv_backend"),
    "same_network": _without_effect("nodes meet at master_addr, wherever they are"),
    "num_cpu_threads_per_process": _as_setting("threads_per_process"),
    "mixed_precision": _read_precision,
    "fp16": _read_fp16,
    "downcast_bf16": _if_true(_without_effect("torch_xla has dropped it: mixed_precision decides")),
    "fp8_config": _read_fp8,
    "deepspeed_config": _read_deepspeed,
    "fsdp_config": _read_fsdp,
    "dynamo_config": _read_dynamo,
    "dynamo_backend": _read_dynamo,
    "parallelism_config": _read_parallelism,
    # `distributed_type: MEGATRON_LM` itself is refused.
    "megatron_lm_config": _without_effect(_NOT_ASKED),
    "enable_cpu_affinity": _if_true(
        _without_effect("the system places threads; set_numa_affinity() in your script binds them")
    ),
    "debug": _if_true(_as_variable("ACCELERATE_DEBUG_MODE")),
    "main_training_function": _without_effect(
        "nbaccel launch runs the whole script, on TPUs as elsewhere"
    ),
    "mpirun_config": _without_effect(
        "mpirun starts the processes there; nbaccel starts them itself on each node"
    ),
    "ipex_config": _without_effect("PyTorch has Intel's extension built in"),
    "tpu_env": _read_tpu_env,
    **dict.fromkeys(
        (
            *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm"),
            *("command_file", "commands"),
        ),
        _without_effect(_OF_TPU_PODS),
    ),
    **dict.fromkeys(
        (
            *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region"),
            *("base_job_name", "pytorch_version", "transformers_version", "py_version"),
            *("sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
        ),
        _without_effect("it belongs to Amazon SageMaker"),
    ),
}


CONFIG_VARIABLE = "NBACCEL_CONFIG"
_SCHEMA_NAME = "run_config.schema.json"


def accelerate_path() -> Path:
    """Where Accelerate keeps its file."""
    cache = env.read("XDG_CACHE_HOME") or "~/.cache"
    home = Path(env.read("HF_HOME") or f"{cache}/huggingface").expanduser()
    return home / "accelerate/default_config.yaml"


def default_config_path() -> Path:
    """Where the command keeps its file: ``NBACCEL_CONFIG``, or in the user's cache folder."""
    if named_path := env.read(CONFIG_VARIABLE):
        return Path(named_path).expanduser()
    folder = env.read("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() / "nbaccel" / "default_config.yaml"


def load_config_file(
    path: str | Path | None = None, changes: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Read a configuration file, of nbaccel or of Accelerate.

    Args:
        path: The file; None for the default file, which need not be there.
        changes: Settings that replace the file's, before all are judged together.

    Returns:
        The settings, and what became of Accelerate's keys.

    Raises:
        ConfigError: It cannot be read, or settings in it are wrong; all mistakes.
    """
    changes = changes or {}
    file_path = Path(path).expanduser() if path is not None else default_config_path()
    if path is None and not file_path.exists():
        return LoadedConfig(config=RunConfig(**changes))
    settings = _read_settings(file_path)
    if is_accelerate_file(settings):
        return _accelerates_config(settings, file_path, changes)
    try:
        return LoadedConfig(config=RunConfig(**merged_settings(settings, changes)), path=file_path)
    except ConfigError as error:
        mistakes = [
            mistake if setting_of(mistake) in changes else f"{file_path}: {mistake}"
            for mistake in error.mistakes
        ]
        raise ConfigError(*mistakes) from error


def peek_config_file(path: str | Path | None = None) -> LoadedConfig:
    """What a configuration file says, whatever is wrong with it: values may be anything."""
    file_path = Path(path).expanduser() if path is not None else default_config_path()
    settings = _read_settings(file_path)
    is_accelerate = is_accelerate_file(settings)
    if is_accelerate:
        settings = _read_keys(settings, file_path, {}).complete_settings()
    known_names = RunConfig.model_fields.keys() & settings.keys()
    config = RunConfig.model_construct(**{name: settings[name] for name in known_names})
    return LoadedConfig(config=config, path=file_path, is_accelerate=is_accelerate)


def _read_settings(file_path: Path) -> dict[str, Any]:
    """What a file says by name."""
    source_name = f"The configuration file {file_path}"
    try:
        text = file_path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source_name} cannot be read: {error}. Nothing would be launched as it says. Give "
            "the path of a file that is there, or write one with nbaccel config."
        ) from error
    return read_yaml_settings(text, source_name)


def schema_path() -> Path:
    """Where the schema is, which editors complete and check files by."""
    return default_config_path().parent / _SCHEMA_NAME


def schema_text() -> str:
    """The JSON schema of a configuration file."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return f"{json.dumps({**dialect, **RunConfig.model_json_schema()}, indent=2)}\n"


def config_text(config: RunConfig) -> str:
    """A configuration as a file has it, with the line that names its schema."""
    text = config.to_yaml()
    schema_uri = schema_path().absolute().as_uri()
    # An empty mapping would be written as `{}`, which reads like a mistake.
    text = "" if text.strip() == "{}" else text
    return f"# yaml-language-server: $schema={schema_uri}\n{text}"


def write_config_file(config: RunConfig, path: Path) -> None:
    """Write a configuration file and the schema that it names; each appears whole or not at all."""
    try:
        for file, text in ((schema_path(), schema_text()), (path, config_text(config))):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(file, text)
    except OSError as error:
        raise ConfigError(
            f"The configuration cannot be written: {error}. Give another file with --config_file."
        ) from error
