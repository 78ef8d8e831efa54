"""``"auto"`` values filled in by the rules that transformers and Accelerate publish, with reasons.

DeepSpeed has no ``"auto"``: it replaces it by its default, or fails on it. What a key becomes
follows from the model, the optimizer, the schedule and the run; a value in the file that
contradicts the run is reported, with both values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nbaccel.base.optional_packages import is_installed
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import BATCH_SIZES
from nbaccel.config.field_rules import FieldMistake, refuse_mistakes
from nbaccel.config.given_values import drop_at, plain_value, put_at, shown, value_at
from nbaccel.deepspeed.schema import deepspeed_schema
from nbaccel.deepspeed.zero_config import AUTO, ZERO, ZeroConfig, auto_keys, todays_settings
from nbaccel.plan.launch_plan import Choice, choices_table

_FACT_OF_ARGUMENT = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "betas",
    "eps": "eps",
    "warmup_num_steps": "warmup_steps",
    "total_num_steps": "total_steps",
}
"""Argument of an optimizer or a schedule → the fact that it tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFacts:
    """What is known of a training. ``None`` means not known.

    Attributes:
        world_size: Processes that share a batch.
        micro_batch_size: Samples per process and forward pass.
        accumulation_steps: Forward passes per optimizer step.
        max_grad_norm: Largest norm of gradients.
        mixed_precision: ``no``, ``fp16``, ``bf16`` or ``fp8``.
        learning_rate: The optimizer's, and what a warm-up ends at.
        weight_decay: The optimizer's.
        betas: The optimizer's.
        eps: The optimizer's.
        warmup_steps: Steps; below 1 a share of all of them.
        total_steps: Optimizer steps in all.
        zero_stage: ZeRO stage.
        offload_optimizer: ``none``, ``cpu`` or ``nvme``.
        offload_param: ``none``, ``cpu`` or ``nvme``.
        nvme_path: Folder on the fast disk.
        gather_16bit_weights: Whether saving gathers weights at stage 3.
    """

    world_size: int = 1
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    mixed_precision: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    warmup_steps: float | None = None
    total_steps: int | None = None
    zero_stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    nvme_path: str | None = None
    gather_16bit_weights: bool | None = None


def gathered(
    facts: TrainingFacts | None, run: RunConfig | None, makers: tuple[object, ...]
) -> TrainingFacts:
    """All facts; of several sources the first one that has a fact decides."""
    known: dict[str, Any] = {}
    if run is not None:
        known["zero_stage"] = run.zero_stage
        if run.num_processes is not None:
            known["world_size"] = run.num_processes * run.num_nodes
        # Its default must not contradict a file that turns a precision on.
        if "mixed_precision" in run.model_fields_set:
            known["mixed_precision"] = run.mixed_precision
    for maker in makers:
        # A torch optimizer has `defaults`; Accelerate's stand-ins have attributes, and `kwargs`.
        held = getattr(maker, "defaults", None)
        if not isinstance(held, dict):
            held = {**getattr(maker, "kwargs", {}), **getattr(maker, "__dict__", {})}
        for name, fact in _FACT_OF_ARGUMENT.items():
            if held.get(name) is not None:
                known[fact] = plain_value(held[name])
    facts = facts or TrainingFacts()
    # A field's default cannot be told from the same value that was given.
    given = {one.name for one in fields(facts) if getattr(facts, one.name) != one.default}
    return replace(facts, **{name: value for name, value in known.items() if name not in given})


def _only_defaults(facts: TrainingFacts | None, makers: tuple[object, ...]) -> frozenset[str]:
    """The facts that are only a stand-in's defaults: they fill in, and contradict nothing."""
    return frozenset(
        _FACT_OF_ARGUMENT[name]
        for maker in makers
        for name in ("lr", "weight_decay", "warmup_num_steps")
        if name not in getattr(maker, "given", (name,))
        and hasattr(maker, name)
        and getattr(facts, _FACT_OF_ARGUMENT[name], None) is None
    )


def made_in(model: Any) -> str | None:
    """The format in which a model's weights were made: ``bfloat16``; None where it is not known."""
    config = getattr(model, "config", None)
    # The second is from before transformers 5, whose attribute warns: so not by `getattr`.
    old_dtype = getattr(config, "__dict__", {}).get("torch_dtype")
    model_dtype = getattr(config, "dtype", None) or old_dtype
    return None if model_dtype is None else str(model_dtype).removeprefix("torch.")


def hidden_size(model: Any) -> tuple[int | None, str]:
    """The width of a model and where it was found: in its `config`, else its widest layer's."""
    config = getattr(model, "config", None)
    holders = {"config": config, "config.text_config": getattr(config, "text_config", None)}
    for path, holder in holders.items():
        if isinstance(width := getattr(holder, "hidden_size", None), int):
            return width, f"{path}.hidden_size"
        if widths := getattr(holder, "hidden_sizes", None):
            return max(widths), f"the largest of {path}.hidden_sizes"
    # By attributes, which quantized layers have, too. The larger side may be a vocabulary.
    layers = model.modules() if callable(getattr(model, "modules", None)) else ()
    sides = [
        min(layer.in_features, layer.out_features)
        for layer in layers
        if isinstance(getattr(layer, "in_features", None), int)
        and isinstance(getattr(layer, "out_features", None), int)
    ]
    return (max(sides), "the widest linear layer's smaller side") if sides else (None, "")


class _UnknownValue(Exception):
    """No argument decides a value; the text says what would."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without ``"auto"``.

    Attributes:
        config: The configuration.
        choices: Each key that was filled in, with its reason.
        warnings: Settings that work but may not do what is expected; empty unless checked.
    """

    config: ZeroConfig
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()

    def explain(self) -> str:
        """What was filled in, as a table.

        Returns:
            Text for a fixed-width font.
        """
        title = f"DeepSpeed configuration, {len(self.choices)} filled in"
        return choices_table(title, self.choices, ())


class _Known(NamedTuple):
    """The values from which the rules decide."""

    facts: TrainingFacts
    model: object | None
    settings: dict[str, Any]
    defaults: frozenset[str]  # facts that only a stand-in's defaults tell

    def number(self, key: str) -> int | None:
        """A whole number of the file, where it is decided."""
        value = value_at(self.settings, key)
        return value if isinstance(value, int) else None


_AutoAnswer = tuple[Any, str]
# In FP8 only the matrix products are computed, in a model that is in bfloat16.
_SECTION_OF = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


class _Rule(NamedTuple):
    """How a key's ``"auto"`` is decided, and the fact with which a value in the file must agree."""

    decide: Callable[[_Known], _AutoAnswer]
    fact: str = ""


def _said(
    name: str, meaning: str, default: Any = None, reason: str = "", *, must_agree: bool = True
) -> _Rule:
    """A rule: the run's value, or a published default."""

    def rule(known: _Known) -> _AutoAnswer:
        value = getattr(known.facts, name)
        if value is None and not reason:
            raise _UnknownValue(f"nothing says the {meaning}; give {name}")
        if value is None:
            return default, reason
        # JSON has no tuples, so that betas of a file are a list.
        return (list(value) if isinstance(value, tuple) else value), f"the run's {meaning}"

    return _Rule(rule, name if must_agree else "")


def _micro_batch(known: _Known) -> _AutoAnswer:
    facts = known.facts
    if facts.micro_batch_size is not None:
        return facts.micro_batch_size, "the run's batch size per process"
    total = known.number("train_batch_size")
    steps, _ = _accumulation(known)
    if total is not None and total % (steps * facts.world_size) == 0:
        reason = f"train_batch_size {total} / ({steps} accumulated * {facts.world_size})"
        return total // (steps * facts.world_size), reason
    given = value_at(known.settings, "train_batch_size")
    reason = f"nothing says the batch size per process (train_batch_size={given!r})"
    raise _UnknownValue(f"{reason}; give micro_batch_size")


def _accumulation(known: _Known) -> _AutoAnswer:
    if (steps := known.number("gradient_accumulation_steps")) is not None:
        return steps, "the file's value"
    if known.facts.accumulation_steps is not None:
        return known.facts.accumulation_steps, "the run's accumulation"
    return 1, "nothing is accumulated unless the run says so"


def _total_batch(known: _Known) -> _AutoAnswer:
    micro = known.number("train_micro_batch_size_per_gpu") or _micro_batch(known)[0]
    steps = _accumulation(known)[0]
    processes = known.facts.world_size
    text = f"{micro} per process * {steps} accumulated * {processes} processes"
    return micro * steps * processes, text


def _precision(section_name: str) -> _Rule:
    def rule(known: _Known) -> _AutoAnswer:
        value = known.facts.mixed_precision or "no"
        return _SECTION_OF.get(value) == section_name, f"the run's mixed precision is {value!r}"

    return _Rule(rule, "mixed_precision")


def _by_width(formula: Callable[[int], int], text: str) -> _Rule:
    def rule(known: _Known) -> _AutoAnswer:
        if known.model is None:
            raise _UnknownValue(f"it is {text}, by the model's hidden size; give the model")
        width, source = hidden_size(known.model)
        if width is None:
            name = type(known.model).__name__
            raise _UnknownValue(f"{name} has no hidden size and no linear layer")
        return formula(width), f"{text}, hidden size {width} from {source}"

    return _Rule(rule)


def _warmup_peak(known: _Known) -> _AutoAnswer:
    """The end of a warm-up: the file's learning rate takes precedence over a stand-in's default."""
    rate = value_at(known.settings, "optimizer.params.lr")
    if isinstance(rate, float) and "learning_rate" in known.defaults:
        return rate, "the file's learning rate"
    return _LEARNING_RATE.decide(known)


def _warmup_steps(known: _Known) -> _AutoAnswer:
    steps = known.facts.warmup_steps or 0
    total = known.facts.total_steps
    if not steps:
        return 1, "no warm-up; DeepSpeed takes no 0"
    if steps >= 1:
        return int(steps), "the run's warm-up"
    if total is None:
        raise _UnknownValue(f"warmup_steps={steps} is a share of all steps; give total_steps")
    return max(1, math.ceil(total * steps)), f"{steps} of {total} steps"


_BY_ACCELERATE = "Accelerate's default"
_LEARNING_RATE = _said("learning_rate", "learning rate")
_place_of = partial(_said, meaning="place", default="none", reason=_BY_ACCELERATE, must_agree=False)
_SWAP_FOLDER = _said("nvme_path", "folder on the fast disk", must_agree=False)
_RULES: dict[str, _Rule] = {
    f"{ZERO}.stage": _said("zero_stage", "ZeRO stage", 2, _BY_ACCELERATE),
    f"{ZERO}.offload_optimizer.device": _place_of("offload_optimizer"),
    f"{ZERO}.offload_param.device": _place_of("offload_param"),
    f"{ZERO}.offload_optimizer.nvme_path": _SWAP_FOLDER,
    f"{ZERO}.offload_param.nvme_path": _SWAP_FOLDER,
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": _said(
        "gather_16bit_weights", "choice", default=False, reason=_BY_ACCELERATE, must_agree=False
    ),
    # These three formulas are those of transformers' `HfTrainerDeepSpeedConfig`.
    f"{ZERO}.reduce_bucket_size": _by_width(lambda width: width * width, "hidden * hidden"),
    f"{ZERO}.stage3_prefetch_bucket_size": _by_width(
        lambda width: int(0.9 * width * width), "0.9 * hidden * hidden"
    ),
    f"{ZERO}.stage3_param_persistence_threshold": _by_width(
        lambda width: 10 * width, "10 * hidden"
    ),
    "gradient_accumulation_steps": _Rule(_accumulation, "accumulation_steps"),
    "train_micro_batch_size_per_gpu": _Rule(_micro_batch, "micro_batch_size"),
    "train_batch_size": _Rule(_total_batch, "micro_batch_size"),
    "gradient_clipping": _said("max_grad_norm", "largest norm", 1.0, _BY_ACCELERATE),
    "optimizer.params.lr": _LEARNING_RATE,
    "optimizer.params.betas": _said("betas", "betas", [0.9, 0.999], "the default of Adam"),
    "optimizer.params.eps": _said("eps", "epsilon", 1e-8, "the default of Adam"),
    "optimizer.params.weight_decay": _said(
        "weight_decay", "weight decay", 0.0, "none unless the run says so"
    ),
    "scheduler.params.warmup_min_lr": _Rule(lambda _: (0, "a warm-up starts from nothing")),
    "scheduler.params.warmup_max_lr": _Rule(_warmup_peak, "learning_rate"),
    "scheduler.params.total_num_steps": _said("total_steps", "number of steps"),
    "scheduler.params.warmup_num_steps": _Rule(_warmup_steps, "warmup_steps"),
    "fp16.enabled": _precision("fp16"),
    "bf16.enabled": _precision("bf16"),
}

AUTO_KEYS = tuple(_RULES)  # the keys for which transformers or Accelerate take ``"auto"``


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
    resolved, _ = resolve_decided(config, facts, run, model, (optimizer, scheduler), is_strict=True)
    return resolved


def resolve_decided(
    config: Mapping[str, Any] | str | Path | ZeroConfig,
    facts: TrainingFacts | None,
    run: RunConfig | None,
    model: object | None,
    makers: tuple[object, ...] = (),
    *,
    is_strict: bool = False,
) -> tuple[Resolved, dict[str, str]]:
    """A configuration without the keys that nothing decides, and the reason of each of those."""
    # A form and an estimate go on without them; where it is strict they are mistakes.
    settings, _ = todays_settings(config)
    known = _Known(gathered(facts, run, makers), model, settings, _only_defaults(facts, makers))
    mistakes = list(_contradictions(known))
    choices: list[Choice] = []
    undecided: dict[str, str] = {}
    waiting = set(auto_keys(settings))
    # In the order of the rules: later ones use what earlier ones decided.
    for key in (key for key in _RULES if key in waiting):
        try:
            value, reason = _RULES[key].decide(known)
        except _UnknownValue as error:
            undecided[key] = str(error)
            drop_at(settings, key)
            continue
        put_at(settings, key, value)
        choices.append(Choice(key, _plain_choice(value), reason))
    others = sorted(waiting - set(_RULES))
    schema = deepspeed_schema() if others and is_installed("deepspeed") else None
    for key in others:
        section = key.partition(".")[0]
        if schema is not None and section in schema.removed:
            # A section that DeepSpeed has removed is the mistake, not its "auto".
            mistakes.append(schema.removed_mistake(section, settings[section]))
            continue
        if defaults := schema.defaults(key) if schema else ():
            # DeepSpeed's models replace "auto" by their default; so it is left out here.
            choices.append(Choice(key, _plain_choice(defaults[0]), "DeepSpeed's own default"))
        else:
            undecided[key] = "transformers and Accelerate do not accept it there"
        drop_at(settings, key)
    choices += _added_precision(known)
    for key, reason in undecided.items() if is_strict else ():
        text = f'{key}="auto" cannot be filled in: {reason}. Write a value, or leave it out.'
        mistakes.append(FieldMistake(text, key))
    refuse_mistakes(mistakes)
    return Resolved(ZeroConfig.from_dict(settings), tuple(choices)), undecided


def _added_precision(known: _Known) -> Iterator[Choice]:
    """The section of the run's precision, where the file has none, which would mean float32."""
    precision = known.facts.mixed_precision
    name = _SECTION_OF.get(precision or "")
    if name and name not in known.settings:
        reason = f"the run's mixed precision is {precision!r}, and the file has no {name} section"
        # As Accelerate does.
        added = {"enabled": True, "auto_cast": True} if name == "fp16" else {"enabled": True}
        known.settings[name] = added
        for key in added:
            yield Choice(f"{name}.{key}", "True", reason)


def _contradictions(known: _Known) -> Iterator[str]:
    # Without the file's batch sizes, from which a rule would compute the file's own value.
    settings = {key: value for key, value in known.settings.items() if key not in BATCH_SIZES}
    by_run = known._replace(settings=settings, defaults=frozenset())
    for key, (decide, fact_name) in _RULES.items():
        in_file = value_at(known.settings, key)
        # A default that the user did not write contradicts nothing.
        is_said = fact_name and fact_name not in known.defaults
        if not is_said or in_file in (None, AUTO) or getattr(known.facts, fact_name) is None:
            continue
        try:
            value, reason = decide(by_run)
        except _UnknownValue:
            continue  # a share of an unknown number of steps
        if value != (list(in_file) if isinstance(value, list) else in_file):
            yield (
                f"{key} is {shown(in_file)} in the file and {shown(value)} by the run ({reason}). "
                'One of them would be ignored. Change one, or write "auto" in the file.'
            )


def _plain_choice(value: Any) -> str | int:
    # A `bool` is an `int`, and should be shown as a word.
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)
