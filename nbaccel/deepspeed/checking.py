"""A DeepSpeed configuration checked before any process starts: every mistake, all at once.

DeepSpeed ignores most keys it does not know, so that a typo trains something else, and passes on
values that fail in the first step. Here a key is compared with those that the installed DeepSpeed
reads, a value with its kind and DeepSpeed's models, and combinations with those that were found to
run. What would work nowhere is refused; what would not work on this machine is advice where nothing
says that it is to be run here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import BATCH_SIZES, engine_config
from nbaccel.config.field_rules import FieldMistake, mistakes_in, refuse_mistakes
from nbaccel.config.given_values import closest, drop_at, has_key, shown, value_at
from nbaccel.deepspeed import library
from nbaccel.deepspeed.auto_values import AUTO_KEYS
from nbaccel.deepspeed.library import missing_tools, offloads_optimizer
from nbaccel.deepspeed.schema import (
    Arguments,
    Schema,
    deepspeed_schema,
    key_findings,
    optimizer_arguments,
)
from nbaccel.deepspeed.zero_config import AUTO, ZERO, ZeroConfig, auto_keys, todays_settings
from nbaccel.plan import Inventory, inspect_machine


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration in which no mistake was found.

    Attributes:
        config: The configuration.
        warnings: Settings that work but may not do what is expected, or not on this machine.
    """

    config: ZeroConfig
    warnings: tuple[str, ...] = ()


def check_config(
    config: Mapping[str, Any] | str | Path | ZeroConfig,
    *,
    world_size: int | None = None,
    run: RunConfig | None = None,
    device: str | None = None,
    inventory: Inventory | None = None,
    allow_auto: bool = False,
    check_tools: bool = True,
) -> Checked:
    """Check a DeepSpeed configuration against DeepSpeed, and against the machine that will run it.

    What would work nowhere is refused. Of a configuration alone, what would not work on this
    machine (float16 on a CPU, missing tools) is among the warnings; it is refused where ``device``,
    a run with a device, or an ``inventory`` says that it is to be run there.

    Args:
        config: A dictionary, the path of a JSON file, or a :class:`ZeroConfig`.
        world_size: Processes that share the batch; taken from ``run`` where left out.
        run: How it will be run.
        device: What it will be run on, ``cpu`` or ``cuda``; taken from ``run`` where left out.
        inventory: The machine that it will be run on.
        allow_auto: Whether ``"auto"`` may stand where ``resolve_auto`` fills it in.
        check_tools: Whether to look for what this machine needs to build its C++ parts.

    Returns:
        The configuration with warnings.

    Raises:
        ConfigError: Mistakes, all of them.
        MissingBackend: DeepSpeed is not installed.
    """
    schema = deepspeed_schema()
    settings, notes = todays_settings(config)
    if run is not None and run.num_processes is not None and world_size is None:
        world_size = run.num_processes * run.num_nodes
    if device is None and run is not None and run.device != AUTO:
        device = run.device
    runs_here = device is not None or inventory is not None
    if device is None:
        device = "cuda" if (inventory or inspect_machine()).gpus else "cpu"
    findings = [*key_findings(settings, schema), *_auto_findings(settings, schema, allow_auto)]
    keys = [finding for finding in findings if isinstance(finding, FieldMistake)]
    advice = [*notes, *(finding for finding in findings if not isinstance(finding, FieldMistake))]
    checked, wrong_values = _typed_config(settings)
    keys += wrong_values
    mistakes: list[str] = [
        *keys,
        *_model_mistakes(checked, schema, known_mistakes=keys),
        *combination_mistakes(checked, world_size=world_size),
    ]
    # Parts of names: of a misspelt size that is known, the sum would only repeat the mistake.
    if not any(word in key.path for word in ("batch_size", "accumulation") for key in keys):
        mistakes += batch_mistakes(checked, world_size=world_size, open_ends=allow_auto)
    mistakes += maker_mistakes(checked, schema)
    here = [*device_mistakes(checked, device=device)]
    if check_tools:
        here += missing_tools(checked, device=device)
    if runs_here:
        mistakes += here
    else:
        advice += (f"On this machine: {text}" for text in here)
    # Last, since DeepSpeed's reader stops at its first mistake.
    if not mistakes:
        mistakes += _refused_by_deepspeed(checked)
    refuse_mistakes(mistakes)
    return Checked(checked, (*advice, *doubts(checked, device=device)))


def check_run(run: RunConfig, device: str) -> None:
    """Check a run's DeepSpeed configuration, before any process starts."""
    settings = engine_config(run)
    if run.deepspeed and settings is not None:
        check_config(settings, run=run, device=device, allow_auto=True)


def _typed_config(settings: dict[str, Any]) -> tuple[ZeroConfig, list[FieldMistake]]:
    """The configuration without its wrong values, and what is wrong with those."""
    try:
        return ZeroConfig.from_dict(settings), []
    except ConfigError as error:
        # The other checks go on without the wrong values. A key that cannot be found ends that.
        mistakes = mistakes_in(error)
        are_known = all(has_key(settings, mistake.path) for mistake in mistakes)
        remaining = copy.deepcopy(settings) if are_known else {}
        for mistake in mistakes:
            drop_at(remaining, mistake.path)
        config, later_mistakes = _typed_config(remaining)
        return config, [*mistakes, *later_mistakes]


def _auto_findings(settings: Mapping[str, Any], schema: Schema, allow_auto: bool) -> Iterator[str]:
    for key in auto_keys(settings):
        if key.partition(".")[0] in schema.removed:
            continue  # reported already, with a remedy
        text = f'{key} cannot be "auto", which nobody fills in. Give a value, or leave it out.'
        if key in AUTO_KEYS:
            text = f'{key} is still "auto". Resolve it with resolve_auto, or give a value.'
        if key not in AUTO_KEYS and (defaults := schema.defaults(key)):
            yield f'{key}="auto" leaves it to DeepSpeed, whose default is {defaults[0]!r}.'
        elif key not in AUTO_KEYS or not allow_auto:
            yield FieldMistake(text, key)


def _model_mistakes(
    config: ZeroConfig, schema: Schema, *, known_mistakes: list[FieldMistake]
) -> Iterator[str]:
    """What DeepSpeed's models refuse, unless it is among the known mistakes."""
    settings = config.to_dict()
    known_paths = tuple(mistake.path for mistake in known_mistakes)
    for section_path, model in schema.models.items():
        section = value_at(settings, section_path)
        if not isinstance(section, Mapping) or section_path.rpartition(".")[0] in schema.models:
            continue  # its parent's model looks at it
        try:
            with library.quiet_logger():
                model(**{key: value for key, value in section.items() if value != AUTO})
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                path = ".".join((section_path, *map(str, detail["loc"])))
                is_unknown = detail["type"] == "extra_forbidden" or detail["input"] == AUTO
                # What depends on a stage that is still open is judged when it is resolved.
                is_early = not detail["loc"] and config.stage == AUTO
                if is_unknown or is_early or any(known.startswith(path) for known in known_paths):
                    continue
                yield (
                    f"{path} is refused by DeepSpeed: got {shown(detail['input'])}. It says: "
                    f"{detail['msg']}. Correct the value."
                )


def _refused_by_deepspeed(config: ZeroConfig) -> Iterator[str]:
    """What DeepSpeed's reader refuses, which counts one process here."""
    if config.stage == AUTO:
        return  # what depends on it is judged when it is resolved
    settings = config.to_dict()
    # Sizes that are right for several processes do not multiply out for the one it counts.
    for key in (*auto_keys(settings), "train_batch_size", "gradient_accumulation_steps"):
        drop_at(settings, key)
    settings.setdefault("train_micro_batch_size_per_gpu", 1)
    reader = library.load_module("deepspeed.runtime.config", why="DeepSpeed")
    try:
        with library.quiet_logger():
            reader.DeepSpeedConfig(settings)
    except Exception as error:  # whatever it raises is what the user would meet later
        yield (
            f"DeepSpeed refuses this configuration: {' '.join(str(error).split())}. "
            f"Training could not start. It read {shown(settings)}; change what it names."
        )


def combination_mistakes(config: ZeroConfig, *, world_size: int | None = None) -> Iterator[str]:
    """What cannot go together on any machine, and DeepSpeed's reader takes."""
    if config.stage == AUTO:
        return  # `zero_stage` is 0 then, for which offloading would be refused that may be right
    stage = config.zero_stage
    for name in ("offload_param", "offload_optimizer"):
        section = getattr(config, name)
        if section is None or section.device not in ("cpu", "nvme"):
            continue
        key = f'{ZERO}.{name}.device="{section.device}"'
        is_swapped = section.device == "nvme"
        needed = 3 if name == "offload_param" or is_swapped else 1
        if stage < needed:
            stages = "stage 3" if needed == 3 else "stage 1, 2 or 3"
            fate = "write nothing to disk" if is_swapped else "move nothing"
            yield (
                f"{key} needs {stages}: got stage {stage}. DeepSpeed would ignore it, and {fate}. "
                f"Give such a stage, or leave {name} out."
            )
        if is_swapped and not section.nvme_path:
            yield (
                f"{key} needs {ZERO}.{name}.nvme_path: got none. DeepSpeed would fail with a "
                "TypeError about a path. Give a folder on the fast disk."
            )
    size = config.get(f"{ZERO}.zero_hpz_partition_size")
    if world_size is not None and isinstance(size, int) and stage == 3:
        fitting = [n for n in range(2, world_size + 1) if world_size % n == 0]
        if 1 < size < world_size and size not in fitting:
            yield (
                f"{ZERO}.zero_hpz_partition_size={size} does not divide {world_size} processes: "
                f"all would fail. Give {' or '.join(map(str, fitting))}, or leave it out."
            )


def batch_mistakes(config: ZeroConfig, *, world_size: int | None, open_ends: bool) -> Iterator[str]:
    """Where the batch sizes do not multiply out."""
    total, micro, steps = (
        size if isinstance(size := getattr(config, key), int) else None for key in BATCH_SIZES
    )
    if total is None and micro is None and not open_ends:
        yield (
            "train_batch_size and train_micro_batch_size_per_gpu are both missing: got "
            f"gradient_accumulation_steps={steps}. DeepSpeed needs one of them. Give the second."
        )
    # Without a total DeepSpeed multiplies the others, which cannot contradict each other.
    if total is None:
        return
    processes = world_size or 1
    # Ranks that share a sequence share its samples, too, and count as one.
    sharing = config.sequence_parallel_size
    if isinstance(sharing, int) and processes % sharing == 0:
        processes //= sharing
    product = (micro or 1) * (steps or 1) * processes
    # With a factor still open the total must at least be a multiple of the others.
    is_exact = None not in (micro, steps, world_size)
    if total == product or (total % product == 0 and not is_exact):
        return
    factors = [f"train_micro_batch_size_per_gpu={micro}"] if micro else []
    factors += [f"gradient_accumulation_steps={steps}"] if steps else []
    factors += [f"{processes} processes"] if world_size is not None else []
    yield (
        f"train_batch_size={total} {'is not' if is_exact else 'is no multiple of'} "
        f"{' * '.join(factors)} = {product}, the samples of a step. Leave it out, or give "
        f"{'' if is_exact else 'a multiple of '}{product}."
    )


# Names of transformers' `TrainingArguments`, which are copied into configurations.
_WRITTEN_WORDS = {"learning_rate": "lr", "warmup_steps": "warmup_num_steps"}


def maker_mistakes(config: ZeroConfig, schema: Schema) -> Iterator[str]:
    """What is wrong with the optimizer and the schedule that DeepSpeed is to make."""
    for key, section, noun, example, known_types in (
        ("optimizer", config.optimizer, "optimizer", "AdamW", schema.optimizers),
        ("scheduler", config.scheduler, "schedule", "WarmupLR", schema.schedulers),
    ):
        name = None if section is None else section.type
        if section is None or name is None:
            # With further keys, the one that was meant has been named already.
            if section is not None and key not in config.extra:
                yield (
                    f"{key}.type is missing: got {key}={section.named()!r}. DeepSpeed would make "
                    f'none. Give for example "type": "{example}".'
                )
            continue
        # DeepSpeed compares its optimizers' names in lower case, and others as they are written.
        is_own = name in schema.own_schedulers
        if key == "optimizer":
            is_own = name.lower() in schema.own_optimizers
        if not is_own and name not in known_types:
            yield (
                f"{key}.type={name!r} is no {noun} of DeepSpeed {schema.version} or torch. It "
                f"could not be made.{closest(name, known_types) or f' Use {example}.'}"
            )
            continue
        params = section.params or {}
        yield from value_mistakes(key, params)
        if config.zero_stage > 0 and not is_own:
            yield from _untested(config, key, name)
        if key == "optimizer" and "max_grad_norm" in params:
            yield (
                f"optimizer.params.max_grad_norm={params['max_grad_norm']!r} is no parameter of an "
                "optimizer any more, and DeepSpeed refuses it. Set gradient_clipping instead."
            )
            params = {key: value for key, value in params.items() if key != "max_grad_norm"}
        known = schema.schedulers.get(name)
        if key == "optimizer":
            known = optimizer_arguments(name, params, is_offloaded=offloads_optimizer(config))
        if known is not None:
            yield from _constructor_mistakes(key, name, params, known)


def _untested(config: ZeroConfig, key: str, name: str) -> Iterator[str]:
    """What is torch's own, where ZeRO has the optimizer."""
    got = f"got stage {config.zero_stage}"
    if key == "scheduler":
        yield (
            f"scheduler.type={name!r} is torch's, for which ZeRO's optimizer is no Optimizer: "
            f"{got}. Use one of DeepSpeed's, such as WarmupLR."
        )
    elif config.zero_allow_untested_optimizer is not True:
        yield (
            f"optimizer.type={name!r} is not tested with ZeRO: {got}. DeepSpeed refuses it unless "
            'the configuration allows it. Add "zero_allow_untested_optimizer": true, or use AdamW.'
        )


def _constructor_mistakes(
    section_name: str, maker: str, params: Mapping[str, Any], known: Arguments
) -> Iterator[str]:
    words = {word: meant for word, meant in _WRITTEN_WORDS.items() if meant in known.known}
    for name in () if known.open else sorted(set(params) - known.known):
        meant = closest(name, known.known, words) or f" It takes {sorted(known.known)}."
        yield (
            f"{section_name}.params.{name} is no argument of {known.owner}: got "
            f"{name}={params[name]!r}. DeepSpeed could not make {maker}.{meant}"
        )
    for name in sorted(known.needed - set(params)) if section_name == "scheduler" else ():
        yield (
            f"scheduler.params.{name} is missing: got {sorted(params)}, and {maker} has no default "
            f"for it. Give {name}."
        )


def _is_number(value: Any, least: float = 0, below: float = math.inf) -> bool:
    return type(value) in (int, float) and least <= value < below


def _is_rate(value: Any) -> bool:
    """Whether it is a rate for all parameter groups, or one for each."""
    rates = value if isinstance(value, list) else [value]
    return bool(rates) and all(map(_is_number, rates))


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(x, 0, 1) for x in value)


_RATE = (_is_rate, "a number of at least 0", "Give for example 3e-5")
_SMALL = (_is_number, "a number of at least 0", "Give for example 1e-8")
_STEPS = (
    lambda value: _is_number(value, 1) and value == int(value),
    "a whole number above 0",
    "Give for example 1000 (1 where there is no warm-up)",
)
_PARAMETER_RULES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "lr": _RATE,
    "betas": (_are_betas, "two numbers from 0 to below 1", "Give for example [0.9, 0.999]"),
    **dict.fromkeys(("eps", "weight_decay", "momentum"), _SMALL),
    **dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr"), _RATE),
    "lr_range_test_min_lr": _RATE,
    **dict.fromkeys(("warmup_num_steps", "total_num_steps"), _STEPS),
    "warmup_type": (("log", "linear").__contains__, "one of log, linear", "Give one of them"),
}
"""Parameter → what it must be, in code and in words, and what to write."""


def value_mistakes(section_name: str, params: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the values of an optimizer's or a schedule's parameters."""
    for name, value in params.items():
        fits, must, do = _PARAMETER_RULES.get(name, (None, "", ""))
        if fits is not None and value not in (None, AUTO) and not fits(value):
            yield (
                f"{section_name}.params.{name} must be {must}: got {shown(value)}. DeepSpeed "
                f"passes it on unchecked, and training would fail or diverge. {do}."
            )


def device_mistakes(config: ZeroConfig, *, device: str) -> Iterator[str]:
    """What works elsewhere, and not on this device."""
    if device != "cpu":
        return
    if config.is_on("fp16") and not _cpu_has_fp16():
        yield (
            "fp16.enabled cannot be true on this CPU, without float16: got True. DeepSpeed says "
            "'Type fp16 is not supported on your device'. Use bf16."
        )
    place = config.offload_optimizer and config.offload_optimizer.device
    # Older ones pinned no memory without a GPU, submitted nothing, and waited for it.
    if place == "nvme" and config.zero_stage == 3 and (old := library.older_than("0.19.6")):
        yield (
            f'{ZERO}.offload_optimizer.device="nvme" without a GPU needs DeepSpeed 0.19.6: got '
            f"{old}. It would end the process in C++ (_num_pending_ops > 0). Install it (pip "
            'install "deepspeed>=0.19.6"), or give device="cpu".'
        )
    name = (config.optimizer and config.optimizer.type) or ""
    remedy = {"lamb": "Use AdamW."}.get(name.lower(), "")
    if name.lower() == "lion" and not offloads_optimizer(config):
        remedy = f'Offload it: {ZERO}.offload_optimizer="cpu".'
    if remedy:
        yield (
            f"optimizer.type={name!r} cannot be made on the CPU. DeepSpeed says 'This op had not "
            f"been implemented on CPU backend'. {remedy}"
        )


def doubts(config: ZeroConfig, *, device: str) -> Iterator[str]:
    """Settings that work but may not do what is expected."""
    if config.zero_stage == 3 and config.stage3_gather_16bit_weights_on_model_save is not True:
        yield (
            f"{ZERO}.stage3_gather_16bit_weights_on_model_save is not set: save_16bit_model() "
            "returns False and writes nothing. Set it to true to save whole weights."
        )
    is_swapped = config.offload_param is not None and config.offload_param.device == "nvme"
    is_float32 = not config.is_on("bf16") and not config.is_on("fp16")
    if is_swapped and is_float32 and device == "cpu" and not _cpu_has_fp16():
        yield (
            f"{ZERO}.offload_param on nvme with float32 on a CPU without float16 arithmetic: "
            "DeepSpeed keeps the weights as bfloat16 there. Turn on bf16 to make that explicit."
        )


def _cpu_has_fp16() -> bool:
    """DeepSpeed's test of a CPU before it trains in float16, and before it allocates weights."""
    # The class itself: `get_accelerator` would choose a device for the life of this process.
    module = library.load_module("deepspeed.accelerator.cpu_accelerator", why="float16")
    return bool(module.CPU_Accelerator().is_fp16_supported())
