"""A DeepSpeed configuration inside a ``RunConfig``: each fact stands in one place only.

DeepSpeed's file and the run's own settings speak of the same things: the stage, the precision, how
many batches make a step. Here they are taken out of the file, so that two places cannot contradict
each other, and put back where DeepSpeed reads them. What the keys mean is DeepSpeed's folder's
business; this file knows no more of them than these.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.config.exchange import each_once

if TYPE_CHECKING:
    from nbaccel.config.run import RunConfig

__all__ = ["BATCH_SIZES", "attempted", "engine_config", "read", "settled", "taken_out"]

_ZERO = "zero_optimization"
_AUTO = "auto"
_HALF = ("fp16", "bf16")
BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_AUTO_STAGE = 2
"""What Accelerate makes of ``"auto"``."""


def read(value: Any) -> Any:
    """A DeepSpeed configuration as plain JSON values.

    Args:
        value: A mapping, an object with ``to_dict`` (``ZeroConfig``), JSON text, or the path of a
            JSON file.

    Returns:
        A mapping, or the value for a validator to refuse.

    Raises:
        ValueError: The file cannot be read, or it or the text holds no JSON.
    """
    if callable(getattr(value, "to_dict", None)):
        value = value.to_dict()
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _parsed(value)
    if isinstance(value, (str, Path)):
        try:
            return _parsed(Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{value!r} cannot be read: {error}") from error
    return _plain(value) if isinstance(value, Mapping) else value


def taken_out(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a DeepSpeed configuration says of settings that a run has, too.

    Args:
        config: A DeepSpeed configuration.

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
    if run.zero_stage is None and "zero_stage" not in changes:
        zero = given.get(_ZERO)
        is_auto = isinstance(zero, Mapping) and zero.get("stage") == _AUTO
        changes["zero_stage"] = _AUTO_STAGE if is_auto else 0
    return changes, mistakes


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


def _parsed(text: str) -> Any:
    return json.loads(text, object_pairs_hook=each_once("A DeepSpeed configuration"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
