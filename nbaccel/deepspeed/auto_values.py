"""``"auto"`` values filled in by the rules that transformers and Accelerate publish, with reasons.

DeepSpeed has no ``"auto"``: it replaces it by its default, or fails on it. What a key becomes
follows from the model, the optimizer, the schedule and the run; a value in the file that
contradicts the run is reported, with both values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError, MissingBackend
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import BATCH_SIZES
from nbaccel.config.field_rules import FieldMistake
from nbaccel.config.mistakes import shown
from nbaccel.config.nested_keys import drop_at, put_at, value_at
from nbaccel.deepspeed.config_keys import removed_text
from nbaccel.deepspeed.load_config import auto_keys, load_settings
from nbaccel.deepspeed.schema import Schema, deepspeed_schema
from nbaccel.deepspeed.training_facts import TrainingFacts, defaults_of, gathered, hidden_size
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig, old_forms
from nbaccel.plan.launch_plan import Choice, choices_table

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AUTO_KEYS", "Resolved", "UndecidedKey", "resolve_auto"]


class _UnknownValue(Exception):
    """No argument decides a value; the text says what would."""


class UndecidedKey(FieldMistake):
    """The message about a key whose ``"auto"`` nothing decides."""

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, text: str, path: str = "", reason: str = "") -> Self:  # noqa: D102
        new_mistake = super().__new__(cls, text, path)
        new_mistake.reason = reason
        return new_mistake


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
        choice_count = len(self.choices)
        return choices_table(f"DeepSpeed configuration, {choice_count} filled in", self.choices, ())


@dataclass(frozen=True, slots=True)
class _KnownValues:
    """The values from which the rules decide."""

    facts: TrainingFacts
    model: object | None
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: frozenset[str] = frozenset()
    """Facts that were not given: a stand-in for an optimizer has them as defaults."""

    @property
    def stage(self) -> int:
        value = value_at(self.settings, f"{ZERO}.stage")
        return value if isinstance(value, int) else 0


_AutoAnswer = tuple[Any, str]


def _said_by_run(
    name: str, text: str, default_value: Any = None, reason: str = ""
) -> Callable[[_KnownValues], _AutoAnswer]:
    """A rule: the run's value, or a published default."""

    def rule(known_values: _KnownValues) -> _AutoAnswer:
        decided_value = getattr(known_values.facts, name)
        if decided_value is not None:
            # JSON has no tuples, so that betas of a file are a list.
            return list(decided_value) if isinstance(
                decided_value, tuple
            ) else decided_value, f"the run's {text}"
        if reason:
            return default_value, reason
        raise _UnknownValue(f"nothing says the {text}; give {name}")

    return rule


def _micro_batch_size(values: _KnownValues) -> _AutoAnswer:
    facts = values.facts
    if facts.micro_batch_size is not None:
        return facts.micro_batch_size, "the run's batch size per process"
    total_batch = value_at(values.settings, "train_batch_size")
    accumulation_steps, _ = _accumulation_steps(values)
    if isinstance(total_batch, int) and total_batch % (accumulation_steps * facts.world_size) == 0:
        batch_share = total_batch // (accumulation_steps * facts.world_size)
        return (
            batch_share,
            f"train_batch_size {total_batch} / ({accumulation_steps} accumulated * "
            f"{facts.world_size})",
        )
    raise _UnknownValue(
        f"nothing says the batch size per process (train_batch_size={total_batch!r}); give "
        "micro_batch_size"
    )


def _accumulation_steps(known_values: _KnownValues) -> _AutoAnswer:
    file_value = value_at(known_values.settings, "gradient_accumulation_steps")
    if isinstance(file_value, int):
        return file_value, "the file's value"
    if known_values.facts.accumulation_steps is not None:
        return known_values.facts.accumulation_steps, "the run's accumulation"
    return 1, "nothing is accumulated unless the run says so"


def _total_batch_size(known_values: _KnownValues) -> _AutoAnswer:
    file_value = value_at(known_values.settings, "train_micro_batch_size_per_gpu")
    micro_batch = file_value if isinstance(file_value, int) else _micro_batch_size(known_values)[0]
    accumulation_steps = _accumulation_steps(known_values)[0]
    world_size = known_values.facts.world_size
    return (
        micro_batch * accumulation_steps * world_size,
        f"{micro_batch} per process * {accumulation_steps} accumulated * {world_size} processes",
    )


def _from_nothing(values: _KnownValues) -> _AutoAnswer:
    return 0, "a warm-up starts from nothing"


def _precision_rule(section_name: str) -> Callable[[_KnownValues], _AutoAnswer]:
    def rule(known_values: _KnownValues) -> _AutoAnswer:
        value = known_values.facts.mixed_precision or "no"
        # In FP8 only the matrix products are computed, in a model that is in bfloat16.
        precision = "bf16" if value == "fp8" else value
        return precision == section_name, f"the run's mixed precision is {value!r}"

    return rule


def _from_width(formula: Callable[[int], int], text: str) -> Callable[[_KnownValues], _AutoAnswer]:
    def rule(known_values: _KnownValues) -> _AutoAnswer:
        if known_values.model is None:
            raise _UnknownValue(f"it is {text}, by the model's hidden size; give the model")
        width, source = hidden_size(known_values.model)
        if width is None:
            raise _UnknownValue(
                f"{type(known_values.model).__name__} has no hidden size and no linear layer"
            )
        return formula(width), f"{text}, hidden size {width} from {source}"

    return rule


def _warmup_peak_rate(values: _KnownValues) -> _AutoAnswer:
    """The end of a warm-up: the file's learning rate takes precedence over a stand-in's default."""
    rate = value_at(values.settings, "optimizer.params.lr")
    # A DummyOptim's default rate is not the file's, with which the optimizer is made.
    if isinstance(rate, float) and "learning_rate" in values.defaults:
        return rate, "the file's learning rate"
    return _said_by_run("learning_rate", "learning rate")(values)


def _warmup_steps(values: _KnownValues) -> _AutoAnswer:
    steps = values.facts.warmup_steps
    total_steps = values.facts.total_steps
    if steps is None:
        return 1, "no warm-up; DeepSpeed takes no 0"
    if steps < 1 and steps > 0:
        if total_steps is None:
            raise _UnknownValue(f"warmup_steps={steps} is a share of all steps; give total_steps")
        return max(1, math.ceil(total_steps * steps)), f"{steps} of {total_steps} steps"
    reason = "the run's warm-up" if steps >= 1 else "no warm-up; DeepSpeed takes no 0"
    return max(1, int(steps)), reason


# Key by key: the rule, and whether a value in the file must agree with what the run says.
_AUTO_RULES: dict[str, tuple[Callable[[_KnownValues], _AutoAnswer], str]] = {
    f"{ZERO}.stage": (
        _said_by_run("zero_stage", "ZeRO stage", 2, "Accelerate's default"),
        "zero_stage",
    ),
    f"{ZERO}.offload_optimizer.device": (
        _said_by_run(
            "offload_optimizer", "place of optimizer state", "none", "Accelerate's default"
        ),
        "",
    ),
    f"{ZERO}.offload_param.device": (
        _said_by_run("offload_param", "place of parameters", "none", "Accelerate's default"),
        "",
    ),
    f"{ZERO}.offload_optimizer.nvme_path": (
        _said_by_run("nvme_path", "folder on the fast disk"),
        "",
    ),
    f"{ZERO}.offload_param.nvme_path": (_said_by_run("nvme_path", "folder on the fast disk"), ""),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": (
        _said_by_run("gather_16bit_weights", "choice", False, "Accelerate's default"),
        "",
    ),
    # These three formulas are those of transformers' `HfTrainerDeepSpeedConfig`.
    f"{ZERO}.reduce_bucket_size": (_from_width(lambda width: width * width, "hidden * hidden"), ""),
    f"{ZERO}.stage3_prefetch_bucket_size": (
        _from_width(lambda width: int(0.9 * width * width), "0.9 * hidden * hidden"),
        "",
    ),
    f"{ZERO}.stage3_param_persistence_threshold": (
        _from_width(lambda width: 10 * width, "10 * hidden"),
        "",
    ),
    "gradient_accumulation_steps": (_accumulation_steps, "accumulation_steps"),
    "train_micro_batch_size_per_gpu": (_micro_batch_size, "micro_batch_size"),
    "train_batch_size": (_total_batch_size, "micro_batch_size"),
    "gradient_clipping": (
        _said_by_run("max_grad_norm", "largest norm", 1.0, "Accelerate's default"),
        "max_grad_norm",
    ),
    "optimizer.params.lr": (_said_by_run("learning_rate", "learning rate"), "learning_rate"),
    "optimizer.params.betas": (
        _said_by_run("betas", "betas", [0.9, 0.999], "the default of Adam"),
        "betas",
    ),
    "optimizer.params.eps": (_said_by_run("eps", "epsilon", 1e-8, "the default of Adam"), "eps"),
    "optimizer.params.weight_decay": (
        _said_by_run("weight_decay", "weight decay", 0.0, "none unless the run says so"),
        "weight_decay",
    ),
    "scheduler.params.warmup_min_lr": (_from_nothing, ""),
    "scheduler.params.warmup_max_lr": (_warmup_peak_rate, "learning_rate"),
    "scheduler.params.total_num_steps": (
        _said_by_run("total_steps", "number of steps"),
        "total_steps",
    ),
    "scheduler.params.warmup_num_steps": (_warmup_steps, "warmup_steps"),
    "fp16.enabled": (_precision_rule("fp16"), "mixed_precision"),
    "bf16.enabled": (_precision_rule("bf16"), "mixed_precision"),
}

AUTO_KEYS = tuple(_AUTO_RULES)
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
    file_settings, _ = old_forms(load_settings(config))
    # What `facts` has was given, whatever the default of a stand-in is.
    unsaid_facts = {
        fact_name
        for fact_name in defaults_of(optimizer, scheduler)
        if getattr(facts, fact_name, None) is None
    }
    known_values = _KnownValues(
        gathered(facts, run, optimizer, scheduler), model, file_settings, frozenset(unsaid_facts)
    )
    mistakes = list(_file_contradictions(known_values))
    auto_choices: list[Choice] = []
    waiting_keys = set(auto_keys(file_settings))
    # In the order of the rules: later ones use what earlier ones decided.
    for config_key in [config_key for config_key in _AUTO_RULES if config_key in waiting_keys]:
        # Keys that nothing decides are collected, so that one error names all of them.
        try:
            decided_value, reason = _AUTO_RULES[config_key][0](known_values)
        except _UnknownValue as error:
            text = (
                f'{config_key}="auto" cannot be filled in: {error}. DeepSpeed would fall back to '
                "its default or fail. Alternatively, write a value in its place."
            )
            mistakes.append(UndecidedKey(text, config_key, str(error)))
            continue
        put_at(file_settings, config_key, decided_value)
        auto_choices.append(Choice(config_key, _plain_choice(decided_value), reason))
    for config_key in sorted(waiting_keys - set(_AUTO_RULES)):
        if (auto_choice := _left_open(config_key, file_settings)) is not None:
            auto_choices.append(auto_choice)
        else:
            mistakes.append(_unfillable_key(config_key, file_settings))
    auto_choices += _added_precision(known_values)
    if mistakes:
        raise ConfigError(*mistakes)
    return Resolved(ZeroConfig.from_dict(file_settings), tuple(auto_choices))


def _left_open(key: str, settings: dict[str, Any]) -> Choice | None:
    """DeepSpeed's models replace ``"auto"`` by their default; so it is left out here."""
    key_schema = _installed_schema()
    value = None if key_schema is None else key_schema.default(key)
    if value is None:
        return None
    drop_at(settings, key)
    return Choice(key, _plain_choice(value.value), "DeepSpeed's own default")


def _unfillable_key(config_key: str, settings: Mapping[str, Any]) -> FieldMistake:
    # A section that DeepSpeed has removed is the mistake, not its "auto".
    key_schema = _installed_schema()
    name = config_key.partition(".")[0]
    if key_schema is not None and name in key_schema.removed:
        return FieldMistake(removed_text(name, settings[name], key_schema), name)
    message_text = (
        f'{config_key}="auto" is not filled in by any library: transformers and Accelerate do not '
        "accept it there. Give a value, or leave it out."
    )
    return UndecidedKey(message_text, config_key, message_text)


def _installed_schema() -> Schema | None:
    """The keys of the installed DeepSpeed; None where there is none."""
    try:
        return deepspeed_schema()
    except MissingBackend:
        return None


def _added_precision(values: _KnownValues) -> Iterator[Choice]:
    """The section of the run's precision, where the file has none, which would mean float32."""
    precision = values.facts.mixed_precision
    name = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(precision or "")
    if name and name not in values.settings:
        reason = f"the run's mixed precision is {precision!r}, and the file has no {name} section"
        values.settings[name] = {"enabled": True}
        yield Choice(f"{name}.enabled", "True", reason)
        if name == "fp16":  # as Accelerate does
            values.settings[name]["auto_cast"] = True
            yield Choice("fp16.auto_cast", "True", reason)


def _file_contradictions(known_values: _KnownValues) -> Iterator[str]:
    for config_key, (rule, fact_name) in _AUTO_RULES.items():
        file_value = value_at(known_values.settings, config_key)
        if (
            not fact_name
            or file_value is None
            or file_value == "auto"
            or getattr(known_values.facts, fact_name) is None
        ):
            continue
        # A default that the user did not write contradicts nothing.
        if fact_name in known_values.defaults:
            continue
        # A share of an unknown number of steps cannot be compared with the file's number.
        if (
            fact_name == "warmup_steps"
            and known_values.facts.total_steps is None
            and _is_share(known_values)
        ):
            continue
        # Without the file's batch sizes, from which the rule would compute the file's own value.
        run_value, reason = rule(
            _KnownValues(known_values.facts, known_values.model, _open_sizes(known_values.settings))
        )
        is_same = (
            list(file_value) == run_value
            if isinstance(run_value, list)
            else file_value == run_value
        )
        if not is_same:
            yield (
                f"{config_key} is {shown(file_value)} in the file and {shown(run_value)} by the "
                f"run ({reason}). One of them would be ignored. Change one, or write "
                '"auto" in the file.'
            )


def _open_sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings in which the run alone decides the batch."""
    return {key: value for key, value in settings.items() if key not in BATCH_SIZES}


def _is_share(values: _KnownValues) -> bool:
    return values.facts.warmup_steps is not None and 0 < values.facts.warmup_steps < 1


def _plain_choice(value: Any) -> str | int:
    # A `bool` is an `int`, and should be shown as a word.
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)
