"""DeepSpeed's own forms of settings: its document in a ``RunConfig``, and filters of hosts.

Stage, precision and accumulation are settings of the run, too: they are taken out of the document,
so that nothing is said twice, and put back where DeepSpeed reads them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from nbaccel.base.errors import ConfigError
from nbaccel.config.field_rules import FieldMistake, FieldRule, refuse_mistakes
from nbaccel.config.given_values import closest, drop_at, numbers_read, read_whole, value_at
from nbaccel.config.text_forms import read_source

_ZERO_SECTION = "zero_optimization"
_AUTO_WORD = "auto"
_HALF_FORMATS = ("fp16", "bf16")
_PART_SECTIONS = ("optimizer", "scheduler")
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ARGUMENT_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": f"{_ZERO_SECTION}.stage",
    "offload_optimizer_device": f"{_ZERO_SECTION}.offload_optimizer.device",
    "offload_param_device": f"{_ZERO_SECTION}.offload_param.device",
    "offload_optimizer_nvme_path": f"{_ZERO_SECTION}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{_ZERO_SECTION}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO_SECTION}.stage3_gather_16bit_weights_on_model_save",
}
"""Argument of Accelerate's plugin, and key of its files → where DeepSpeed's document has it."""
DOCUMENT_NAME = "A DeepSpeed configuration"
_HALF_RULE = FieldRule(
    must="a section", why="It turns the format on or off", do='Write for example {"enabled": true}'
)
SECTION_RULES = {
    _ZERO_SECTION: FieldRule(
        must="a section", why="It holds the stage", do='Write for example {"stage": 2}'
    ),
    **dict.fromkeys(_HALF_FORMATS, _HALF_RULE),
}
"""Sections that are taken apart here, and their rules."""
_ENABLED_RULE = FieldRule(
    must="true or false", why="It decides the number format", do="Give one of them"
)
DEFAULT_STAGE = 2  # Accelerate's, where nothing says one, and for ``"auto"``


def read_document(value: Any) -> Any:
    """A DeepSpeed configuration as plain JSON values, in the current form."""
    read_settings = read_source(value, DOCUMENT_NAME)
    if not isinstance(read_settings, dict):
        return read_settings
    document = tidied_settings(read_settings)
    if endless_keys := [*_infinite_keys(document)]:
        text = f"{endless_keys[0]} is infinite, for which JSON has no word. Give 1000000000."
        raise ConfigError(FieldMistake(text, endless_keys[0]))
    return document


def _infinite_keys(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for entry_key, inner_value in value.items():
            yield from _infinite_keys(inner_value, f"{path}.{entry_key}" if path else entry_key)
    elif isinstance(value, list):
        for inner_value in value:
            yield from _infinite_keys(inner_value, path)
    # NaN has been refused by the reader.
    elif isinstance(value, float) and math.isinf(value):
        yield path


def tidied_settings(config_settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration whose stage and precision have proper types, and sections their new names."""
    if "bfloat16" in config_settings:
        config_settings.setdefault("bf16", config_settings.pop("bfloat16"))
    if isinstance(config_settings.get(_ZERO_SECTION), bool):
        config_settings[_ZERO_SECTION] = {"stage": int(config_settings[_ZERO_SECTION])}
    # Numbers as text and whole floats, of which both are compared with integers later.
    zero_section = config_settings.get(_ZERO_SECTION)
    for holder, number_key in ((zero_section, "stage"), (config_settings, BATCH_SIZES[-1])):
        if isinstance(holder, dict) and isinstance(value := holder.get(number_key), (str, float)):
            holder[number_key] = read_whole(value)
    for section_name in _PART_SECTIONS:
        part_section = config_settings.get(section_name)
        if isinstance(part_section, dict) and "params" in part_section:
            part_section["params"] = numbers_read(part_section["params"])
    mistakes = [
        FieldMistake(rule.refusal(name, config_settings[name]), name)
        for name, rule in SECTION_RULES.items()
        if not isinstance(config_settings.get(name, {}), (dict, type(None)))
    ]
    halves = {name: config_settings.get(name) for name in _HALF_FORMATS}
    for name, section in halves.items():
        mistakes += _read_enabled(section, f"{name}.enabled")
    if all(isinstance(one, dict) and one.get("enabled") is True for one in halves.values()):
        text = "fp16.enabled and bf16.enabled are both true, and only one can be. Turn one off."
        mistakes.append(FieldMistake(text, "fp16.enabled"))
    refuse_mistakes(mistakes)
    return config_settings


def _read_enabled(section: Any, key: str) -> list[FieldMistake]:
    """Replace the text of a truth value by the value; mistakes where it is none."""
    if not isinstance(section, dict) or (value := section.get("enabled")) in (None, _AUTO_WORD):
        return []
    word = value.strip().lower() if isinstance(value, str) else value
    if word in ("true", "false"):
        section["enabled"] = word = word == "true"
    if isinstance(word, bool):
        return []
    return [FieldMistake(_ENABLED_RULE.refusal(key, value), key)]


def taken_out(config_document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take out of a DeepSpeed configuration the settings that a run has, too."""
    settings: dict[str, Any] = {}
    stage = value_at(config_document, f"{_ZERO_SECTION}.stage", _AUTO_WORD)
    if stage != _AUTO_WORD:
        settings["zero_stage"] = stage
    switches = {name: value_at(config_document, f"{name}.enabled", ...) for name in _HALF_FORMATS}
    turned_on = [name for name, switch in switches.items() if switch is True]
    # One of them turned off leaves the other open; only both together mean float32.
    if turned_on or [*switches.values()] == [False] * len(_HALF_FORMATS):
        settings["mixed_precision"] = next(iter(turned_on), "no")
    steps = config_document.get("gradient_accumulation_steps")
    if steps not in (None, _AUTO_WORD):
        settings["gradient_accumulation_steps"] = steps
    remaining_document = copy.deepcopy(dict(config_document))
    drop_at(remaining_document, f"{_ZERO_SECTION}.stage")
    drop_at(remaining_document, "gradient_accumulation_steps")
    for name, switch in switches.items():
        if switch is not ...:
            drop_at(remaining_document, f"{name}.enabled")
    return remaining_document, settings


def stage_left_open(document: Mapping[str, Any]) -> int:
    """The ZeRO stage of a run where neither it nor its DeepSpeed configuration decides one."""
    return DEFAULT_STAGE if value_at(document, f"{_ZERO_SECTION}.stage") == _AUTO_WORD else 0


def disagreements(document: Mapping[str, Any], given_settings: Mapping[str, Any]) -> list[str]:
    """Contradictions between a run and its DeepSpeed configuration."""
    decided_settings = taken_out(document)[1]
    mistakes = [
        f"{setting_name}={given_settings[setting_name]!r} contradicts the DeepSpeed configuration, "
        f'which says {decided_value!r}. Leave one out, or write "auto" there.'
        for setting_name, decided_value in decided_settings.items()
        if setting_name in given_settings and given_settings[setting_name] != decided_value
    ]
    # A section that only turns its own precision off decides none, and still contradicts that one.
    precision = given_settings.get("mixed_precision")
    is_off = value_at(document, f"{precision}.enabled") is False
    if is_off and "mixed_precision" not in decided_settings:
        mistakes.append(
            f"mixed_precision={precision!r} contradicts the DeepSpeed configuration, where "
            f'{precision}.enabled is False. Leave one out, or write "auto" there.'
        )
    return mistakes


# `Any` is a `RunConfig` here, whose module imports this one.
def engine_config(run_config: Any) -> dict[str, Any] | None:
    """The DeepSpeed configuration of a run, complete with the run's settings."""
    if run_config.deepspeed is None and not run_config.zero_stage:
        return None
    open_settings: dict[str, Any] = copy.deepcopy(dict(run_config.deepspeed or {}))
    zero_section = open_settings.pop(_ZERO_SECTION, None) or {}
    config: dict[str, Any] = {_ZERO_SECTION: {"stage": run_config.zero_stage or 0, **zero_section}}
    for section_name in _HALF_FORMATS:
        format_section = open_settings.pop(section_name, None)
        if run_config.mixed_precision == section_name:
            config[section_name] = {"enabled": True, **(format_section or {})}
        elif format_section:
            # Its other keys are kept, but it must not turn its precision on.
            config[section_name] = {"enabled": False, **format_section}
    config |= open_settings
    if run_config.gradient_accumulation_steps is not None:
        config["gradient_accumulation_steps"] = run_config.gradient_accumulation_steps
    # Known only where the training is prepared; DeepSpeed would refuse or take its default.
    for open_key in (*BATCH_SIZES, "gradient_clipping"):
        config.setdefault(open_key, _AUTO_WORD)
    return config


_SLOT_HELP = "Name slots by number, as in worker-1:0,1@worker-2"


def slots_by_host(filter_text: str) -> dict[str, tuple[int, ...]]:
    """The hosts that a filter names, each with the numbers of its slots; none stand for all."""
    words_by_host: dict[str, list[str]] = {}
    mistakes = []
    for part in filter_text.split("@"):
        host_name, colon, slots_text = (word.strip() for word in part.strip().partition(":"))
        if not host_name:
            mistakes.append(
                f"{filter_text!r} names a host without a name. Write worker-1@worker-2."
            )
            continue
        words = [word.strip() for word in slots_text.split(",")] if colon else []
        if host_name in words_by_host and not (words and words_by_host[host_name]):
            mistakes.append(f"host {host_name!r} is named twice in {filter_text!r}. Leave one out.")
        words_by_host[host_name] = [*words_by_host.get(host_name, ()), *words]
    for host_name, words in words_by_host.items():
        mistakes += _slot_mistakes(host_name, words)
    refuse_mistakes(dict.fromkeys(mistakes))
    return {name: tuple(sorted(map(int, words))) for name, words in words_by_host.items()}


def _slot_mistakes(name: str, words: list[str]) -> Iterator[str]:
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            yield f"slot {word!r} of host {name!r} is no number of a device. {_SLOT_HELP}."
        elif [int(other) for other in words if other.isdecimal()].count(int(word)) > 1:
            yield f"slot {int(word)} of host {name!r} is named twice. Name it once."


def read_host_filter(value: Any) -> Any:
    """A filter as it is stored; other values are left to the type's check."""
    if isinstance(value, str) and value:
        slots_by_host(value)
    return value


def kept_slots(
    num_slots: Mapping[str, int], *, include: str | None = None, exclude: str | None = None
) -> dict[str, tuple[int, ...]]:
    """The slots that are left of each host, in the order of the hosts; others are left out."""
    every_slot = {host_name: tuple(range(number)) for host_name, number in num_slots.items()}
    setting_name, text = ("include", include) if include else ("exclude", exclude)
    if not text:
        return every_slot
    # An @ separates hosts here, so a filter cannot write a user.
    full_names = {name.rpartition("@")[2]: name for name in num_slots}
    named: dict[str, tuple[int, ...]] = {}
    mistakes = []
    for host_name, numbers in slots_by_host(text).items():
        full_name = full_names.get(host_name)
        if full_name is None:
            remedy = closest(host_name, full_names).lstrip() or f"It has {', '.join(full_names)}."
            mistakes.append(
                f"{setting_name} names host {host_name!r}, which is not in the hostfile. It would "
                f"silently have no effect. {remedy} Name hosts as the file does, without a user."
            )
            continue
        mistakes += [
            f"{setting_name} names slot {number} of host {host_name!r}, which has "
            f"slots={num_slots[full_name]}: 0 to {num_slots[full_name] - 1}. Name another slot."
            for number in numbers
            if number >= num_slots[full_name]
        ]
        named[full_name] = numbers or every_slot[full_name]
    refuse_mistakes(mistakes)
    takes = setting_name == "include"
    left = {}
    for name, numbers in every_slot.items():
        kept = tuple(number for number in numbers if (number in named.get(name, ())) == takes)
        if kept:
            left[name] = kept
    if not left:
        raise ConfigError(
            f"{setting_name}={text!r} leaves no slot of {', '.join(num_slots)}. Leave fewer out."
        )
    return left


Contradiction: TypeAlias = tuple[tuple[str, ...], str]  # the settings, and the message


# `Any` is a `RunConfig` here, whose module imports this one.
def filter_contradictions(config: Any) -> Iterator[Contradiction]:
    """What a run's filters contradict."""
    name = "include" if config.include is not None else "exclude"
    text = getattr(config, name)
    if text is None:
        return
    if config.include is not None and config.exclude is not None:
        yield (
            ("include", "exclude"),
            f"include={config.include!r} contradicts exclude={config.exclude!r}: one says what "
            "is taken, the other what is left out. Leave one of them out.",
        )
    if config.hostfile is None:
        yield (
            ("include", "exclude", "hostfile"),
            f"{name}={text!r} needs hostfile=...: it chooses among the hosts of that "
            "file. Nothing would be chosen. Give the file; devices of this machine alone are "
            'chosen by variables={"CUDA_VISIBLE_DEVICES": "0,1"}, or nbaccel launch --gpu-ids.',
        )
    devices = (config.variables or {}).get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        yield (
            ("include", "exclude", "variables"),
            f"CUDA_VISIBLE_DEVICES={devices!r} in variables (gpu_ids of a file) contradicts "
            "include and exclude, which choose the devices of each host. One would silently "
            "override the other. Leave one of them out.",
        )
