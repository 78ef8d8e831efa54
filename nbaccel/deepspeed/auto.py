"""``"auto"`` values filled in by the rules that transformers and Accelerate publish, with reasons.

DeepSpeed knows no ``"auto"``: it drops it for its own default, or fails on it. What a key becomes
follows from the model, the optimizer, the schedule and the run; a value in the file that says
something else than the run is told, with both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbaccel.config import RunConfig
from nbaccel.config.dotted import drop, put, value_at
from nbaccel.config.engine import BATCH_SIZES
from nbaccel.config.mistakes import shown
from nbaccel.deepspeed.config import ZERO, ZeroConfig, old_forms
from nbaccel.deepspeed.facts import TrainingFacts, defaults_of, gathered, hidden_size
from nbaccel.deepspeed.keys import removed_text
from nbaccel.deepspeed.reading import auto_keys, load_settings
from nbaccel.deepspeed.schema import Schema, deepspeed_schema
from nbaccel.errors import ConfigError, MissingBackend
from nbaccel.plan.plan import Choice, table

__all__ = ["AUTO_KEYS", "Resolved", "resolve_auto"]


class _Unknown(Exception):
    """A value that nothing given decides; its text says what would."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without ``"auto"``.

    Attributes:
        config: The configuration.
        choices: Each key that was filled in, with its reason.
    """

    config: ZeroConfig
    choices: tuple[Choice, ...] = ()

    def explain(self) -> str:
        """What was filled in, as a table.

        Returns:
            Text for a fixed-width font.
        """
        count = len(self.choices)
        return table(f"DeepSpeed configuration, {count} filled in", self.choices, ())


@dataclass(frozen=True, slots=True)
class _Known:
    """What the rules look at."""

    facts: TrainingFacts
    model: object | None
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: frozenset[str] = frozenset()
    """Facts that nobody said: what stands for an optimizer has them as defaults."""

    @property
    def stage(self) -> int:
        found = value_at(self.settings, f"{ZERO}.stage")
        return found if isinstance(found, int) else 0


_Answer = tuple[Any, str]


def _said(
    name: str, what: str, default: Any = None, reason: str = ""
) -> Callable[[_Known], _Answer]:
    """A rule: what the run says, or a published default."""

    def rule(known: _Known) -> _Answer:
        found = getattr(known.facts, name)
        if found is not None:
            return list(found) if isinstance(found, tuple) else found, f"the run's {what}"
        if reason:
            return default, reason
        raise _Unknown(f"nothing says the {what}; give {name}")

    return rule


def _micro(known: _Known) -> _Answer:
    facts = known.facts
    if facts.micro_batch_size is not None:
        return facts.micro_batch_size, "the run's batch size per process"
    total = value_at(known.settings, "train_batch_size")
    steps, _ = _steps(known)
    if isinstance(total, int) and total % (steps * facts.world_size) == 0:
        share = total // (steps * facts.world_size)
        return share, f"train_batch_size {total} / ({steps} accumulated * {facts.world_size})"
    raise _Unknown(
        f"nothing says the batch size per process (train_batch_size={total!r}); "
        "give micro_batch_size"
    )


def _steps(known: _Known) -> _Answer:
    given = value_at(known.settings, "gradient_accumulation_steps")
    if isinstance(given, int):
        return given, "the file's value"
    if known.facts.accumulation_steps is not None:
        return known.facts.accumulation_steps, "the run's accumulation"
    return 1, "nothing is accumulated unless the run says so"


def _total(known: _Known) -> _Answer:
    given = value_at(known.settings, "train_micro_batch_size_per_gpu")
    micro = given if isinstance(given, int) else _micro(known)[0]
    steps, world = _steps(known)[0], known.facts.world_size
    return micro * steps * world, f"{micro} per process * {steps} accumulated * {world} processes"


def _from_nothing(known: _Known) -> _Answer:
    return 0, "a warm-up starts from nothing"


def _precision(name: str) -> Callable[[_Known], _Answer]:
    def rule(known: _Known) -> _Answer:
        asked = known.facts.mixed_precision or "no"
        # fp8 products run inside a bfloat16 model.
        wanted = "bf16" if asked == "fp8" else asked
        return wanted == name, f"the run's mixed precision is {asked!r}"

    return rule


def _from_width(formula: Callable[[int], int], text: str) -> Callable[[_Known], _Answer]:
    def rule(known: _Known) -> _Answer:
        if known.model is None:
            raise _Unknown(f"it is {text}, by the model's hidden size; give the model")
        width, where = hidden_size(known.model)
        if width is None:
            raise _Unknown(f"{type(known.model).__name__} has no hidden size and no linear layer")
        return formula(width), f"{text}, hidden size {width} from {where}"

    return rule


def _peak_rate(known: _Known) -> _Answer:
    """What a warm-up ends at: the file's own learning rate before a default that nobody said."""
    own = value_at(known.settings, "optimizer.params.lr")
    if isinstance(own, float) and "learning_rate" in known.defaults:
        return own, "the file's learning rate"
    return _said("learning_rate", "learning rate")(known)


def _warmup_steps(known: _Known) -> _Answer:
    asked, total = known.facts.warmup_steps, known.facts.total_steps
    if asked is None:
        return 1, "no warm-up; DeepSpeed takes no 0"
    if asked < 1 and asked > 0:
        if total is None:
            raise _Unknown(f"warmup_steps={asked} is a share of all steps; give total_steps")
        return max(1, math.ceil(total * asked)), f"{asked} of {total} steps"
    reason = "the run's warm-up" if asked >= 1 else "no warm-up; DeepSpeed takes no 0"
    return max(1, int(asked)), reason


# Key by key: the rule, and whether a value in the file must agree with what the run says.
_RULES: dict[str, tuple[Callable[[_Known], _Answer], str]] = {
    f"{ZERO}.stage": (_said("zero_stage", "ZeRO stage", 2, "Accelerate's default"), "zero_stage"),
    f"{ZERO}.offload_optimizer.device": (
        _said("offload_optimizer", "place of optimizer state", "none", "Accelerate's default"),
        "",
    ),
    f"{ZERO}.offload_param.device": (
        _said("offload_param", "place of parameters", "none", "Accelerate's default"),
        "",
    ),
    f"{ZERO}.offload_optimizer.nvme_path": (_said("nvme_path", "folder on the fast disk"), ""),
    f"{ZERO}.offload_param.nvme_path": (_said("nvme_path", "folder on the fast disk"), ""),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": (
        _said("gather_16bit_weights", "choice", False, "Accelerate's default"),
        "",
    ),
    f"{ZERO}.reduce_bucket_size": (_from_width(lambda width: width * width, "hidden * hidden"), ""),
    f"{ZERO}.stage3_prefetch_bucket_size": (
        _from_width(lambda width: int(0.9 * width * width), "0.9 * hidden * hidden"),
        "",
    ),
    f"{ZERO}.stage3_param_persistence_threshold": (
        _from_width(lambda width: 10 * width, "10 * hidden"),
        "",
    ),
    "gradient_accumulation_steps": (_steps, "accumulation_steps"),
    "train_micro_batch_size_per_gpu": (_micro, "micro_batch_size"),
    "train_batch_size": (_total, "micro_batch_size"),
    "gradient_clipping": (
        _said("max_grad_norm", "largest norm", 1.0, "Accelerate's default"),
        "max_grad_norm",
    ),
    "optimizer.params.lr": (_said("learning_rate", "learning rate"), "learning_rate"),
    "optimizer.params.betas": (
        _said("betas", "betas", [0.9, 0.999], "the default of Adam"),
        "betas",
    ),
    "optimizer.params.eps": (_said("eps", "epsilon", 1e-8, "the default of Adam"), "eps"),
    "optimizer.params.weight_decay": (
        _said("weight_decay", "weight decay", 0.0, "none unless the run says so"),
        "weight_decay",
    ),
    "scheduler.params.warmup_min_lr": (_from_nothing, ""),
    "scheduler.params.warmup_max_lr": (_peak_rate, "learning_rate"),
    "scheduler.params.total_num_steps": (_said("total_steps", "number of steps"), "total_steps"),
    "scheduler.params.warmup_num_steps": (_warmup_steps, "warmup_steps"),
    "fp16.enabled": (_precision("fp16"), "mixed_precision"),
    "bf16.enabled": (_precision("bf16"), "mixed_precision"),
}

AUTO_KEYS = tuple(_RULES)
"""The keys for which transformers or Accelerate take ``"auto"``."""


def resolve_auto(
    config: Mapping[str, Any] | str | Path | ZeroConfig,
    *,
    facts: TrainingFacts | None = None,
    run: RunConfig | None = None,
    model: object | None = None,
    optimizer: object | None = None,
    scheduler: object | None = None,
) -> Resolved:
    """Fill in every ``"auto"``, and hold the file against the run.

    Args:
        config: A dictionary, the path of a JSON file, or a :class:`ZeroConfig`.
        facts: What is known of the training; it goes before the other sources.
        run: How it will be run: processes, precision and stage.
        model: The model; its hidden size decides buckets.
        optimizer: A torch or dummy optimizer; its defaults stand for the run's.
        scheduler: A dummy schedule with its numbers of steps.

    Returns:
        The configuration, and each decision with its reason.

    Raises:
        ConfigError: Values that nothing decides, and contradictions, all of them.
    """
    settings, _ = old_forms(load_settings(config))
    unsaid = {
        name for name in defaults_of(optimizer, scheduler) if getattr(facts, name, None) is None
    }
    known = _Known(gathered(facts, run, optimizer, scheduler), model, settings, frozenset(unsaid))
    mistakes = list(_contradictions(known))
    choices: list[Choice] = []
    waiting = set(auto_keys(settings))
    # In the order of the rules: later ones look at what earlier ones decided.
    for key in [key for key in _RULES if key in waiting]:
        try:
            value, reason = _RULES[key][0](known)
        except _Unknown as error:
            mistakes.append(
                f'{key}="auto" cannot be filled in: {error}. DeepSpeed would fall back to its own '
                "default or fail. Or write a value in its place."
            )
            continue
        put(settings, key, value)
        choices.append(Choice(key, _plain(value), reason))
    for key in sorted(waiting - set(_RULES)):
        if (choice := _left_open(key, settings)) is not None:
            choices.append(choice)
        else:
            mistakes.append(_filled_in_by_nobody(key, settings))
    choices += _added(known)
    if mistakes:
        raise ConfigError(*mistakes)
    return Resolved(ZeroConfig.from_dict(settings), tuple(choices))


def _left_open(key: str, settings: dict[str, Any]) -> Choice | None:
    """DeepSpeed's own models drop ``"auto"`` for their default; so it is left out here."""
    found = _schema()
    default = None if found is None else found.default(key)
    if default is None:
        return None
    drop(settings, key)
    return Choice(key, _plain(default.value), "DeepSpeed's own default")


def _filled_in_by_nobody(key: str, settings: Mapping[str, Any]) -> str:
    found = _schema()
    section = key.partition(".")[0]
    if found is not None and section in found.removed:
        return removed_text(section, settings[section], found)
    return (
        f'{key}="auto" is filled in by nobody. transformers and Accelerate do not take it there. '
        "Give a value, or leave it out."
    )


def _schema() -> Schema | None:
    """What the installed DeepSpeed knows; None where there is none to ask."""
    try:
        return deepspeed_schema()
    except MissingBackend:
        return None


def _added(known: _Known) -> Iterator[Choice]:
    """The section of the run's precision, where the file has none: else it would be float32."""
    asked = known.facts.mixed_precision
    name = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(asked or "")
    if name and name not in known.settings:
        reason = f"the run's mixed precision is {asked!r}, and the file has no {name} section"
        known.settings[name] = {"enabled": True}
        yield Choice(f"{name}.enabled", "True", reason)
        if name == "fp16":  # as Accelerate does
            known.settings[name]["auto_cast"] = True
            yield Choice("fp16.auto_cast", "True", reason)


def _contradictions(known: _Known) -> Iterator[str]:
    for key, (rule, name) in _RULES.items():
        mine = value_at(known.settings, key)
        if not name or mine is None or mine == "auto" or getattr(known.facts, name) is None:
            continue
        if name in known.defaults:
            continue
        if name == "warmup_steps" and known.facts.total_steps is None and _is_share(known):
            continue
        theirs, reason = rule(_Known(known.facts, known.model, _open_sizes(known.settings)))
        same = list(mine) == theirs if isinstance(theirs, list) else mine == theirs
        if not same:
            yield (
                f"{key} is {shown(mine)} in the file and {shown(theirs)} by the run ({reason}). "
                'One of them would be ignored. Change one, or write "auto" in the file.'
            )


def _open_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which the run alone decides the batch."""
    return {key: value for key, value in settings.items() if key not in BATCH_SIZES}


def _is_share(known: _Known) -> bool:
    return known.facts.warmup_steps is not None and 0 < known.facts.warmup_steps < 1


def _plain(value: Any) -> str | int:
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)
