"""A DeepSpeed configuration inside a ``RunConfig``: each fact stands in one place only.

DeepSpeed's file and the run's own settings speak of the same things: the stage, the precision, how
many batches make a step. Here they are taken out of the file, so that two places cannot contradict
each other, and put back where DeepSpeed reads them. What the keys mean is DeepSpeed's folder's
business; this file knows no more of them than these.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.config.json_text import plain_object, read_file, read_object
from nbaccel.config.mistakes import shown
from nbaccel.config.plain import numbers_read, whole
from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    from nbaccel.config.run import RunConfig

__all__ = ["BATCH_SIZES", "attempted", "engine_config", "read", "settled", "taken_out", "tidied"]

_ZERO = "zero_optimization"
_AUTO = "auto"
_HALF = ("fp16", "bf16")
_MADE = ("optimizer", "scheduler")
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_WHAT = "A DeepSpeed configuration"
_SECTIONS = {
    _ZERO: 'It holds the stage and what goes with it. Write for example {"stage": 2}.',
    "fp16": 'It turns float16 on or off. Write for example {"enabled": true}.',
    "bf16": 'It turns bfloat16 on or off. Write for example {"enabled": true}.',
}
"""Sections that are taken apart here, and what to write there."""
_AUTO_STAGE = 2
"""What Accelerate makes of ``"auto"``."""


def read(value: Any) -> Any:
    """A DeepSpeed configuration as plain JSON values, in today's form.

    Args:
        value: A mapping, an object with ``to_dict`` (``ZeroConfig``), JSON text, or the path of a
            JSON file.

    Returns:
        A mapping, or the value for a validator to refuse.

    Raises:
        ConfigError: The file cannot be read, it or the text holds no JSON object, or what a run
            has settings for (stage, precision) is wrong in it.
    """
    if callable(getattr(value, "to_dict", None)):
        value = value.to_dict()
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = read_object(value, _WHAT)
    elif isinstance(value, (str, Path)):
        value = read_file(value)
    if not isinstance(value, Mapping):
        return value
    found = tidied(plain_object(value, _WHAT))
    if endless := [*_endless(found)]:
        raise ConfigError(
            f"{endless[0]} is infinite, and workers get the configuration as JSON, which has no "
            "word for it. They would be told something else. Give a large number: 1000000000."
        )
    return found


def _endless(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _endless(entry, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for entry in value:
            yield from _endless(entry, path)
    elif isinstance(value, float) and math.isinf(value):
        yield path


def tidied(settings: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which the stage and the precision are written as they are meant.

    DeepSpeed takes ``"true"`` for true, and has older words for some sections; who looks for
    ``True`` would pass over them, and train something else.

    Args:
        settings: Plain values; changed and returned.

    Returns:
        The same configuration.

    Raises:
        ConfigError: What stands there cannot be meant; every mistake.
    """
    if "bfloat16" in settings:
        old = settings.pop("bfloat16")
        settings.setdefault("bf16", old)
    if isinstance(settings.get(_ZERO), bool):
        settings[_ZERO] = {"stage": int(settings[_ZERO])}
    for holder, name in ((settings.get(_ZERO), "stage"), (settings, BATCH_SIZES[-1])):
        if isinstance(holder, dict) and isinstance(text := holder.get(name), (str, float)):
            holder[name] = whole(text)
    for name in _MADE:
        section = settings.get(name)
        if isinstance(section, dict) and "params" in section:
            section["params"] = numbers_read(section["params"])
    mistakes = [
        f"{name} must be a section: got {shown(settings[name])}. {meaning}"
        for name, meaning in _SECTIONS.items()
        if not isinstance(settings.get(name, {}), (dict, type(None)))
    ]
    mistakes += filter(None, [_read_enabled(settings.get(name), name) for name in _HALF])
    if all(_is_on(settings.get(name)) for name in _HALF):
        mistakes.append(
            "fp16.enabled and bf16.enabled are both true. Training has one number format, and "
            "DeepSpeed refuses two. Turn one of them off."
        )
    if mistakes:
        raise ConfigError(*mistakes)
    return settings


def _read_enabled(section: Any, name: str) -> str:
    """Make the text of a truth value one; what is wrong where it is none."""
    if not isinstance(section, dict) or (value := section.get("enabled")) in (None, _AUTO):
        return ""
    word = value.strip().lower() if isinstance(value, str) else value
    if word in ("true", "false"):
        section["enabled"] = word = word == "true"
    if isinstance(word, bool):
        return ""
    return (
        f"{name}.enabled must be true or false: got {shown(value)}. It decides in which number "
        "format the model is trained. Give one of them."
    )


def _is_on(section: Any) -> bool:
    return isinstance(section, dict) and section.get("enabled") is True


def taken_out(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a DeepSpeed configuration says of settings that a run has, too.

    Args:
        config: A DeepSpeed configuration, as :func:`read` gives it.

    Returns:
        The configuration without them, and the settings: only those that it decides, ``"auto"``
        decides nothing but that there is a stage.
    """
    rest: dict[str, Any] = copy.deepcopy(dict(config))
    said: dict[str, Any] = {}
    zero = rest.get(_ZERO)
    if isinstance(zero, dict):
        stage = zero.pop("stage", _AUTO)
        if stage != _AUTO:
            said["zero_stage"] = stage
        if not zero:
            del rest[_ZERO]
    enabled = {}
    for name in _HALF:
        section = rest.get(name)
        if isinstance(section, dict) and "enabled" in section:
            enabled[name] = section.pop("enabled")
            if not section:
                del rest[name]
    if True in enabled.values():
        said["mixed_precision"] = next(name for name, on in enabled.items() if on is True)
    elif [*enabled.values()] == [False] * len(_HALF):
        said["mixed_precision"] = "no"
    steps = rest.pop("gradient_accumulation_steps", None)
    if steps not in (None, _AUTO):
        said["gradient_accumulation_steps"] = steps
    return rest, said


def attempted(value: Any) -> set[str]:
    """The settings of a run that a DeepSpeed configuration decides.

    Args:
        value: Whatever was given for one.

    Returns:
        Their names; none where it cannot be read, which is for the validator to tell.
    """
    try:
        found = read(value)
    except ValueError:
        return set()
    return set(taken_out(found)[1]) if isinstance(found, Mapping) else set()


def settled(run: RunConfig) -> tuple[dict[str, Any], list[str]]:
    """Settle what a run's DeepSpeed configuration says with what was said beside it.

    Args:
        run: Settings that are right alone, with a configuration among them.

    Returns:
        The settings to change, and contradictions, one message each.
    """
    given = run.deepspeed or {}
    rest, said = taken_out(given)
    changes: dict[str, Any] = {"deepspeed": rest}
    mistakes = []
    for name, value in said.items():
        mine = getattr(run, name)
        if name not in run.model_fields_set or mine is None:
            changes[name] = value
        elif mine != value:
            mistakes.append(
                f"{name}={mine!r} contradicts the DeepSpeed configuration, which says {value!r}. "
                'One of them would be ignored. Leave one out, or write "auto" there.'
            )
    mistakes += _turned_off(run, given) if "mixed_precision" not in said else []
    if run.zero_stage is None and "zero_stage" not in changes:
        zero = given.get(_ZERO)
        is_auto = isinstance(zero, Mapping) and zero.get("stage") == _AUTO
        changes["zero_stage"] = _AUTO_STAGE if is_auto else 0
    return changes, mistakes


def _turned_off(run: RunConfig, given: Mapping[str, Any]) -> list[str]:
    """The precision of a run that its file turns off."""
    name = run.mixed_precision
    section = given.get(name)
    if "mixed_precision" not in run.model_fields_set or not isinstance(section, Mapping):
        return []
    if section.get("enabled") is not False:
        return []
    return [
        f"mixed_precision={name!r} contradicts the DeepSpeed configuration, where {name}.enabled "
        'is False. One of them would be ignored. Leave one out, or write "auto" there.'
    ]


def engine_config(run: RunConfig) -> dict[str, Any] | None:
    """The DeepSpeed configuration of a run, complete: what the run says is in it, too.

    Args:
        run: What the user said.

    Returns:
        What DeepSpeed's JSON file would hold, with ``"auto"`` where the training decides; None
        where DeepSpeed is not to train.
    """
    if run.deepspeed is None and not run.zero_stage:
        return None
    config: dict[str, Any] = copy.deepcopy(dict(run.deepspeed or {}))
    rest = config.pop(_ZERO, None) or {}
    whole: dict[str, Any] = {_ZERO: {"stage": run.zero_stage or 0, **rest}}
    for name in _HALF:
        section = config.pop(name, None)
        if run.mixed_precision == name:
            whole[name] = {"enabled": True, **(section or {})}
        elif section:
            whole[name] = {"enabled": False, **section}
    whole |= config
    if run.gradient_accumulation_steps is not None:
        whole["gradient_accumulation_steps"] = run.gradient_accumulation_steps
    for name in (*BATCH_SIZES, "gradient_clipping"):
        whole.setdefault(name, _AUTO)
    return whole
