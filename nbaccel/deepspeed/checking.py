"""A DeepSpeed configuration checked before any process starts: every mistake, all at once.

DeepSpeed ignores most keys it does not know, so that a typo trains something else: they are held
against those that it reads. What would work nowhere is refused; what would not work on this machine
is advice where nothing says that it is to be run here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nbaccel.base.errors import ConfigError
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import BATCH_SIZES, engine_config
from nbaccel.config.field_rules import FieldMistake, mistakes_in
from nbaccel.config.given_values import closest, drop_at, has_key, shown
from nbaccel.deepspeed import library
from nbaccel.deepspeed.auto_values import AUTO_KEYS
from nbaccel.deepspeed.library import missing_tools, offloads_optimizer
from nbaccel.deepspeed.schema import Schema, deepspeed_schema, key_findings
from nbaccel.deepspeed.zero_config import (
    AUTO,
    ZERO,
    ZeroConfig,
    auto_keys,
    load_settings,
)
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
    settings = load_settings(config)
    if run is not None and run.num_processes is not None and world_size is None:
        world_size = run.num_processes * run.num_nodes
    if device is None and run is not None and run.device != AUTO:
        device = run.device
    runs_here = device is not None or inventory is not None
    if device is None:
        device = "cuda" if (inventory or inspect_machine()).gpus else "cpu"
    findings = [*key_findings(settings, schema), *_auto_findings(settings, schema, allow_auto)]
    keys = [finding for finding in findings if isinstance(finding, FieldMistake)]
    advice = [finding for finding in findings if not isinstance(finding, FieldMistake)]
    checked, wrong_values = _typed_config(settings)
    keys += wrong_values
    mistakes: list[str] = [*keys, *combination_mistakes(checked)]
    # Parts of names, which a misspelt key has, too: the right key is missing then, and a message
    # about sizes that do not multiply out would only repeat that.
    if not any(word in key.path for word in ("batch_size", "accumulation") for key in keys):
        mistakes += batch_mistakes(checked, world_size=world_size)
    mistakes += maker_mistakes(checked, schema)
    here = [*device_mistakes(checked, device=device)]
    if check_tools:
        here += missing_tools(checked, device=device)
    if runs_here:
        mistakes += here
    else:
        advice += [f"On this machine: {text}" for text in here]
    # Last, since DeepSpeed's reader stops at its first mistake.
    if not mistakes:
        mistakes += _refused_by_deepspeed(checked, allow_auto)
    if mistakes:
        raise ConfigError(*mistakes)
    return Checked(checked, tuple(advice))


def check_run(run: RunConfig, device: str) -> None:
    """Check a run's DeepSpeed configuration, before any process starts."""
    settings = engine_config(run)
    if run.deepspeed and settings is not None:
        check_config(settings, run=run, device=device, allow_auto=True)


# ------------------------------------------------------------------------------ values
def _typed_config(settings: dict[str, Any]) -> tuple[ZeroConfig, list[FieldMistake]]:
    """The configuration without its wrong values, and what is wrong with those."""
    try:
        return ZeroConfig.from_dict(settings), []
    except ConfigError as error:
        # The other checks go on without the wrong values, so that all mistakes are reported at
        # once. A mistake whose key cannot be found would be met again, without end.
        mistakes = mistakes_in(error)
        remaining = copy.deepcopy(settings)
        if not all(has_key(settings, mistake.path) for mistake in mistakes):
            remaining = {}
        for mistake in mistakes:
            drop_at(remaining, mistake.path)
        config, later_mistakes = _typed_config(remaining)
        return config, [*mistakes, *later_mistakes]


def _auto_findings(settings: Mapping[str, Any], schema: Schema, allow_auto: bool) -> Iterator[str]:
    for key in auto_keys(settings):
        if key.partition(".")[0] in schema.removed:
            continue  # reported already, with a remedy
        if key in AUTO_KEYS:
            text = (
                f'{key} is still "auto". DeepSpeed would replace it by its default, or fail. '
                "Resolve it with resolve_auto, or give a value."
            )
            if not allow_auto:
                yield FieldMistake(text, key)
        elif schema.replaces_auto(key):
            yield f'{key}="auto" leaves it to DeepSpeed\'s default.'
        else:
            text = (
                f'{key} cannot be "auto". Neither DeepSpeed nor a trainer fills that key in. Give '
                "a value, or leave it out."
            )
            yield FieldMistake(text, key)


def _refused_by_deepspeed(config: ZeroConfig, allow_auto: bool) -> Iterator[str]:
    """What DeepSpeed's reader refuses, which counts one process here."""
    if config.stage == AUTO:
        return  # what depends on it is judged when it is resolved
    settings = config.to_dict()
    # Sizes that are right for several processes do not multiply out for the one it counts.
    for key in (*auto_keys(settings), "train_batch_size", "gradient_accumulation_steps"):
        drop_at(settings, key)
    if allow_auto or config.train_batch_size is not None:
        settings.setdefault("train_micro_batch_size_per_gpu", 1)
    reader = library.load_module("deepspeed.runtime.config", why="DeepSpeed")
    try:
        with library.quiet_logger():
            reader.DeepSpeedConfig(settings)
    except Exception as error:  # whatever it raises is what the user would meet later
        told = str(error)
        if isinstance(error, ValidationError):
            told = f"{error.title}: " + "; ".join(
                f"{'.'.join(map(str, one['loc']))}={shown(one['input'])}: {one['msg']}"
                for one in error.errors(include_url=False)
            )
        yield (
            f"DeepSpeed refuses this configuration: {' '.join(told.split())}. "
            f"Training could not start. It read {shown(settings)}; change what it names."
        )


# ------------------------------------------------------------------------------ what goes together


def combination_mistakes(config: ZeroConfig) -> Iterator[str]:
    """Offloading that DeepSpeed's reader takes, and the stage does not have."""
    for name in ("offload_param", "offload_optimizer"):
        section = getattr(config, name)
        # `zero_stage` is 0 for "auto", for which offloading would be refused that may be right.
        if config.stage == AUTO or section is None or section.device not in ("cpu", "nvme"):
            continue
        key = f'{ZERO}.{name}.device="{section.device}"'
        least = 3 if name == "offload_param" or section.device == "nvme" else 1
        if config.zero_stage < least:
            yield (
                f"{key} needs stage {'3' if least == 3 else '1, 2 or 3'}: got stage "
                f"{config.zero_stage}. DeepSpeed would silently keep it elsewhere. Give such a "
                f"stage, or leave {name} out."
            )
        if section.device == "nvme" and not section.nvme_path:
            yield (
                f"{key} needs {ZERO}.{name}.nvme_path: got none. DeepSpeed would fail with a "
                "TypeError about a path. Give a folder on the fast disk."
            )


def batch_mistakes(config: ZeroConfig, *, world_size: int | None) -> Iterator[str]:
    """Where the batch sizes do not multiply out."""
    total, micro, steps = (
        size if isinstance(size := getattr(config, key), int) else None for key in BATCH_SIZES
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
        f"{' * '.join(factors)} = {product}, the samples of a step. Leave train_batch_size out, or "
        f"give {'' if is_exact else 'a multiple of '}{product}."
    )


# ------------------------------------------------------------------------------ optimizer, schedule


def maker_mistakes(config: ZeroConfig, schema: Schema) -> Iterator[str]:
    """What is wrong with the optimizer and the schedule that DeepSpeed is to make."""
    for key, section, example, own, known_types in (
        ("optimizer", config.optimizer, "AdamW", schema.own_optimizers, schema.optimizers),
        ("scheduler", config.scheduler, "WarmupLR", schema.own_schedulers, schema.schedulers),
    ):
        if section is None:
            continue
        name = section.type
        if name is None:
            # With further keys, the one that was meant has been named already.
            if key not in config.extra:
                yield (
                    f"{key}.type is missing: got {key}={section.named()!r}. Without a name "
                    f'DeepSpeed would silently make none. Give for example "type": "{example}".'
                )
            continue
        is_optimizer = key == "optimizer"
        # DeepSpeed compares its optimizers' names in lower case, and others as they are written.
        is_own = (name.lower() if is_optimizer else name) in own
        is_allowed = is_optimizer and config.zero_allow_untested_optimizer is True
        if not is_own and name not in known_types:
            yield (
                f"{key}.type={name!r} is no {key} of DeepSpeed {schema.version} or torch. It could "
                f"not be made.{closest(name, known_types) or f' Use {example}.'}"
            )
        elif config.zero_stage > 0 and not is_own and not is_allowed:
            remedy = 'Add "zero_allow_untested_optimizer": true' if is_optimizer else "Leave it out"
            yield (
                f"{key}.type={name!r} is torch's, and DeepSpeed refuses it for ZeRO's optimizer: "
                f"got stage {config.zero_stage}. {remedy}, or use {example}."
            )


# ------------------------------------------------------------------------------ on one device


def device_mistakes(config: ZeroConfig, *, device: str) -> Iterator[str]:
    """What works elsewhere, and not on this device."""
    if device != "cpu":
        return
    # The class itself: `get_accelerator` would choose a device for the life of this process.
    module = library.load_module("deepspeed.accelerator.cpu_accelerator", why="float16")
    if config.is_on("fp16") and not module.CPU_Accelerator().is_fp16_supported():
        yield (
            "fp16.enabled cannot be true on this CPU, which has no float16 arithmetic: got "
            "fp16.enabled=True. DeepSpeed says 'Type fp16 is not supported on your device'. Use "
            "bf16."
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
