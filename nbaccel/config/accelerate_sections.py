"""Sections of Accelerate's configuration files: DeepSpeed, FSDP, torch.compile and FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbaccel.config.accelerate_file import FileReading
from nbaccel.config.capabilities import PRECISIONS
from nbaccel.config.capability_rows import Fp8Row
from nbaccel.config.fp8 import Fp8Config
from nbaccel.config.fsdp_settings import sharding_word
from nbaccel.config.mistakes import closest, shown
from nbaccel.config.nested_keys import put_at
from nbaccel.config.run_config import RunConfig

_NOT_ASKED = "distributed_type does not use it"


# ---------------------------------------------------------------------------- DeepSpeed
_DOCUMENT_KEY = "deepspeed_config_file"
_NO_DOCUMENT = (None, "", "none")
_DEFAULT_STAGE = 2
_STARTED_ON_EACH = ("standard", "nossh")
"""Launchers of DeepSpeed that do not reach other machines."""
_ZERO = "zero_optimization"
_DOCUMENT_KEYS = {
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
}
"""Accelerate's fields, and DeepSpeed's keys."""
_ENGINE_SETTINGS = {
    "zero_stage": "zero_stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_DEEPSPEED_VARIABLES = {
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
_LAUNCHER_KEYS = {
    "deepspeed_multinode_launcher": "nbaccel launch is started on each machine",
    "deepspeed_hostfile": "give nbaccel launch --hostfile",
    "deepspeed_inclusion_filter": "give nbaccel launch --include",
    "deepspeed_exclusion_filter": "give nbaccel launch --exclude",
}
_HOST_FILTERS = {
    "include": "deepspeed_inclusion_filter",
    "exclude": "deepspeed_exclusion_filter",
}
_DEEPSPEED_KEYS = (
    *(_DOCUMENT_KEY, *_ENGINE_SETTINGS, *_DOCUMENT_KEYS),
    *(*_DEEPSPEED_VARIABLES, *_LAUNCHER_KEYS),
)


def read_deepspeed(reading: FileReading, key: str, value: Any) -> None:
    """Read ``deepspeed_config``: a file of DeepSpeed, or Accelerate's fields."""
    if not reading.section(key, "DEEPSPEED"):
        _note_all(reading, key, value)
        return
    section = reading.mapping(key, value)
    _read_hostfile(reading, key, section)
    document = section.get(_DOCUMENT_KEY)
    if document not in _NO_DOCUMENT:
        reading.settings["deepspeed"] = _document_path(reading, str(document))
        reading.use(f"{key}.{_DOCUMENT_KEY}", document, "deepspeed: the file's content")
    else:
        section.setdefault("zero_stage", _DEFAULT_STAGE)
    for entry_key, entry_value in section.items():
        if entry_key != _DOCUMENT_KEY:
            _read_engine_key(reading, key, entry_key, entry_value)


def _read_hostfile(reading: FileReading, key: str, section: dict[str, Any]) -> None:
    """A file of hosts, with a launcher that is started on one machine for all of them."""
    hostfile = section.get("deepspeed_hostfile")
    is_used = "hostfile" in RunConfig.model_fields and hostfile not in _NO_DOCUMENT
    launcher = str(section.get("deepspeed_multinode_launcher", "pdsh"))
    if not is_used or launcher in _STARTED_ON_EACH:
        return
    del section["deepspeed_hostfile"]
    reading.settings["hostfile"] = hostfile
    reading.use(f"{key}.deepspeed_hostfile", hostfile, f"hostfile={hostfile}")
    for name, file_key in _HOST_FILTERS.items():
        text = section.get(file_key)
        if text not in _NO_DOCUMENT:
            del section[file_key]
            reading.settings[name] = text
            reading.use(f"{key}.{file_key}", text, f"{name}={text}")


def _document_path(reading: FileReading, document: str) -> str:
    """A path in the file, which counts from the working folder, or else from the file's."""
    beside = reading.folder / document
    try:
        is_beside = beside.is_file() and not reading.folder.samefile(".")
    except OSError:  # a name that is too long; the setting itself says that there is no such file
        is_beside = False
    return str(beside) if is_beside else document


def _read_engine_key(reading: FileReading, key: str, entry_key: str, value: Any) -> None:
    dotted_key = f"{key}.{entry_key}"
    has_document = reading.given[key].get(_DOCUMENT_KEY) not in _NO_DOCUMENT
    is_decided = has_document and entry_key in {**_ENGINE_SETTINGS, **_DOCUMENT_KEYS}
    if entry_key not in _DEEPSPEED_KEYS:
        _refuse_unknown(reading, dotted_key, value, _DEEPSPEED_KEYS)
    elif value is None or str(value).lower() == "none":
        reading.note_unused(dotted_key, value, "empty")
    elif is_decided:
        reading.note_unused(dotted_key, value, "DeepSpeed's file decides")
    elif entry_key in _ENGINE_SETTINGS:
        reading.settings[_ENGINE_SETTINGS[entry_key]] = value
        reading.use(dotted_key, value, f"{_ENGINE_SETTINGS[entry_key]}={value}")
    elif entry_key in _DOCUMENT_KEYS:
        document = reading.settings.setdefault("deepspeed", {})
        put_at(document, _DOCUMENT_KEYS[entry_key], value)
        reading.use(dotted_key, value, f"deepspeed: {_DOCUMENT_KEYS[entry_key]}")
    elif entry_key in _DEEPSPEED_VARIABLES:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        reading.variables[_DEEPSPEED_VARIABLES[entry_key]] = text
        reading.use(dotted_key, value, f"variables: {_DEEPSPEED_VARIABLES[entry_key]}")
    else:
        reading.note_unused(dotted_key, value, _LAUNCHER_KEYS[entry_key])


# --------------------------------------------------------------------------------- FSDP
_FSDP_SETTINGS = {
    "sharding_strategy": "sharding_strategy",
    "reshard_after_forward": "reshard_after_forward",
    "auto_wrap_policy": "auto_wrap_policy",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "min_num_params": "min_num_params",
    "offload_params": "cpu_offload",
    "ignored_modules": "ignored_modules",
    "state_dict_type": "state_dict_type",
    "activation_checkpointing": "activation_checkpointing",
    "cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
}
"""Accelerate's keys without ``fsdp_``, which older versions did not write, and the plugin's."""
_FSDP_BY_ITSELF = (
    *("backward_prefetch", "backward_prefetch_policy", "forward_prefetch"),
    *("use_orig_params", "sync_module_states"),
)
_FSDP_KEYS = (*_FSDP_SETTINGS, *_FSDP_BY_ITSELF, "version", "activation_checkpointing_offload")


def read_fsdp(reading: FileReading, key: str, value: Any) -> None:
    """Read ``fsdp_config``, of FSDP's versions 1 and 2."""
    if not reading.section(key, "FSDP"):
        _note_all(reading, key, value)
        return
    section = {
        entry_key.removeprefix("fsdp_"): entry_value
        for entry_key, entry_value in reading.mapping(key, value).items()
    }
    settings: dict[str, Any] = {}
    for entry_key, entry_value in section.items():
        _read_fsdp_key(reading, settings, f"{key}.fsdp_{entry_key}", entry_value)
    is_first_version = str(section.get("version", 1)) == "1"
    if settings.get("sharding_strategy") == "NO_SHARD":
        reading.settings["strategy"] = "auto"
        return
    if is_first_version:
        # Version 1 writes whole weights where nothing is said, and version 2 shards.
        settings.setdefault("state_dict_type", "FULL_STATE_DICT")
    if settings:
        reading.settings["fsdp"] = settings


def _read_fsdp_key(
    reading: FileReading, settings: dict[str, Any], dotted_key: str, value: Any
) -> None:
    entry_key = dotted_key.rpartition(".fsdp_")[2]
    if entry_key not in _FSDP_KEYS:
        _refuse_unknown(reading, dotted_key, value, [f"fsdp_{name}" for name in _FSDP_KEYS])
    elif value is None or value == "":
        reading.note_unused(dotted_key, value, "empty")
    elif entry_key == "version":
        reading.use(dotted_key, value, "fully_shard, which is version 2, trains in any case")
    elif entry_key == "activation_checkpointing_offload":
        _read_activation_offload(reading, dotted_key, value)
    elif entry_key in _FSDP_BY_ITSELF:
        reading.note_unused(dotted_key, value, "fully_shard does it by itself")
    elif entry_key == "min_num_params" and value == 0:
        reading.note_unused(dotted_key, value, "the default")
    else:
        setting_name, setting_value = _fsdp_setting(entry_key, value)
        settings[setting_name] = setting_value
        reading.use(dotted_key, value, f"fsdp: {setting_name}={setting_value}")


def _fsdp_setting(key: str, value: Any) -> tuple[str, Any]:
    name = _FSDP_SETTINGS[key]
    # `accelerate config` writes FSDP1's words under the name that FSDP2 has for it.
    if name == "reshard_after_forward" and not isinstance(value, bool):
        is_truth = str(value).strip().lower() in ("true", "false")
        if is_truth:
            return name, str(value).strip().lower() == "true"
        name = "sharding_strategy"
    if name == "sharding_strategy":
        return name, sharding_word(value)
    if name == "auto_wrap_policy":
        return name, str(value).lower()
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return name, value.strip().lower() == "true"
    return name, value


def _read_activation_offload(reading: FileReading, key: str, value: Any) -> None:
    if reading.truth(key, value):
        reading.refuse(
            key,
            f"{key}=true is not supported: this version recomputes activations and does "
            "not move them to host memory, so it would need more. Set it to false.",
        )
    else:
        reading.note_unused(key, value, "the default")


# ------------------------------------------------------------------------ torch.compile
_DYNAMO_SETTINGS = {
    "backend": "backend",
    "mode": "mode",
    "use_fullgraph": "fullgraph",
    "use_dynamic": "dynamic",
    "use_regional_compilation": "use_regional_compilation",
}


def read_dynamo(reading: FileReading, key: str, value: Any) -> None:
    """Read ``dynamo_config``, or ``dynamo_backend`` of older versions."""
    # YAML 1.1 reads a bare NO as False.
    word = "NO" if value is False else value
    section = {"backend": word} if key == "dynamo_backend" else reading.mapping(key, word)
    settings: dict[str, Any] = {}
    for entry_key, entry_value in section.items():
        entry_name = entry_key.removeprefix("dynamo_")
        dotted_key = key if key == "dynamo_backend" else f"{key}.{entry_key}"
        if entry_name not in _DYNAMO_SETTINGS:
            _refuse_unknown(
                reading, dotted_key, entry_value, [f"dynamo_{name}" for name in _DYNAMO_SETTINGS]
            )
            continue
        setting_name = _DYNAMO_SETTINGS[entry_name]
        is_backend = setting_name == "backend"
        settings[setting_name] = str(entry_value).lower() if is_backend else entry_value
        reading.use(dotted_key, entry_value, f"dynamo: {setting_name}={settings[setting_name]}")
    # Without a backend nothing is compiled, whatever the others say.
    if settings.get("backend", "no") not in ("no", "false"):
        reading.settings["dynamo"] = settings


# ---------------------------------------------------------------------------------- FP8
_FP8_NAMES = {
    # What `accelerate config` asks for has other names than what `accelerate launch` reads.
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}


def read_fp8(reading: FileReading, key: str, value: Any, rows: Sequence[Fp8Row]) -> None:
    """Read ``fp8_config``."""
    precisions = [row.name for row in PRECISIONS if row.has_backends]
    if str(reading.given.get("mixed_precision")).lower() not in precisions:
        _note_all(reading, key, value, "mixed_precision is not fp8")
        return
    settings: dict[str, Any] = {}
    for entry_key, entry_value in reading.mapping(key, value).items():
        dotted_key = f"{key}.{entry_key}"
        setting_name, setting_value = _fp8_setting(reading, dotted_key, entry_value, rows)
        if setting_name not in Fp8Config.model_fields:
            _refuse_unknown(reading, dotted_key, entry_value, Fp8Config.model_fields)
            continue
        settings[setting_name] = setting_value
        reading.use(dotted_key, entry_value, f"fp8: {setting_name}={setting_value}")
    reading.settings["fp8"] = settings


def _fp8_setting(
    reading: FileReading, dotted_key: str, value: Any, rows: Sequence[Fp8Row]
) -> tuple[str, Any]:
    entry_key = dotted_key.rpartition(".")[2]
    # Accelerate takes `fp8_backend`, too.
    entry_name = entry_key if entry_key == "fp8_format" else entry_key.removeprefix("fp8_")
    setting_name = _FP8_NAMES.get(entry_name, entry_name)
    if setting_name == "use_mxfp8_block_scaling":
        return "recipe", "mxfp8" if reading.truth(dotted_key, value) else "auto"
    if setting_name == "backend":
        return setting_name, _fp8_backend(value, rows)
    if setting_name == "override_linear_precision":
        return setting_name, _truth_values(value)
    return setting_name, value


def _fp8_backend(word: Any, rows: Sequence[Fp8Row]) -> Any:
    """The backend's name; ``MS-AMP`` and ``MSAMP`` are the same."""
    plain_word = _plain_word(str(word))
    return next(
        (row.name for row in rows if plain_word in map(_plain_word, (row.name, *row.words))), word
    )


def _plain_word(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def _truth_values(value: Any) -> Any:
    """Three truth values; YAML makes text of Python's tuple, and some files have one for all."""
    if isinstance(value, str):
        words = [word.strip().lower() for word in value.strip("()[] ").split(",")]
        value = [word == "true" if word in ("true", "false") else word for word in words]
    return [value] * 3 if isinstance(value, bool) else value


# -------------------------------------------------------------------------------- common
def _note_all(reading: FileReading, key: str, value: Any, reason: str = _NOT_ASKED) -> None:
    for entry_key, entry_value in reading.mapping(key, value).items():
        reading.note_unused(f"{key}.{entry_key}", entry_value, reason)


def _refuse_unknown(
    reading: FileReading,
    dotted_key: str,
    value: Any,
    known_keys: Sequence[str] | Mapping[str, Any],
) -> None:
    entry_key = dotted_key.rpartition(".")[2]
    reading.refuse(
        dotted_key,
        f"{dotted_key}={shown(value)} is no key of Accelerate's files. It would be silently "
        f"ignored.{closest(entry_key, known_keys) or ' Remove it.'}",
    )
