"""A DeepSpeed configuration checked before any process starts: every mistake, all at once.

DeepSpeed ignores most keys it does not know, so that a typo trains something else. Here a key is
compared with those that the installed DeepSpeed reads, a value with its kind and DeepSpeed's
models, and combinations with those that were found to run. What would work nowhere is refused; what
would not work on this machine is advice where nothing says that it is to be run here.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nbaccel.base.errors import ConfigError
from nbaccel.base.optional_packages import is_installed
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.field_rules import FieldMistake, mistakes_in
from nbaccel.config.given_values import drop_at, has_key, shown, value_at
from nbaccel.deepspeed import library
from nbaccel.deepspeed.auto_values import AUTO_KEYS
from nbaccel.deepspeed.combinations import (
    batch_mistakes,
    combination_mistakes,
    device_mistakes,
    doubts,
    maker_mistakes,
)
from nbaccel.deepspeed.config_keys import key_findings
from nbaccel.deepspeed.cpp_operations import missing_tools
from nbaccel.deepspeed.room import folder_mistakes, shortage
from nbaccel.deepspeed.schema import Schema, deepspeed_schema
from nbaccel.deepspeed.zero_config import (
    AUTO,
    ZERO,
    ZeroConfig,
    auto_keys,
    load_settings,
    old_forms,
)
from nbaccel.plan import Inventory, inspect_machine

_MONITOR_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Section → the module that DeepSpeed imports for it, which is its package's name, too."""


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
        check_tools: Whether to look for what this machine needs to build its C++ parts, to write
            where it swaps to, and to log.

    Returns:
        The configuration with warnings.

    Raises:
        ConfigError: Mistakes, all of them.
        MissingBackend: DeepSpeed is not installed.
    """
    schema = deepspeed_schema()
    settings, notes = old_forms(load_settings(config))
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
    if isinstance(config, ZeroConfig) and config.to_dict() == settings:
        checked = config  # its values were checked when it was made
    else:
        checked, wrong_values = _typed_config(settings)
        keys += wrong_values
    mistakes: list[str] = [
        *keys,
        *_model_mistakes(checked, schema, known_mistakes=keys),
        *combination_mistakes(checked, world_size=world_size),
    ]
    # Parts of names, which a misspelt key has, too: the right key is missing then, and a message
    # about sizes that do not multiply out would only repeat that.
    if not any(word in key.path for word in ("batch_size", "accumulation") for key in keys):
        mistakes += batch_mistakes(checked, world_size=world_size, open_ends=allow_auto)
    mistakes += maker_mistakes(checked, schema)
    here = [*device_mistakes(checked, schema, device=device)]
    if check_tools:
        here += missing_tools(checked, device=device)
        here += folder_mistakes(checked)
        here += _missing_monitors(checked)
    if runs_here:
        mistakes += here
    else:
        advice += (f"On this machine: {text}" for text in here)
    # Last, since DeepSpeed's reader stops at its first mistake.
    if not mistakes:
        mistakes += _refused_by_deepspeed(checked)
    if mistakes:
        raise ConfigError(*mistakes)
    return Checked(checked, (*advice, *doubts(checked, device=device)))


def check_run(run: RunConfig, device: str) -> None:
    """Check a run's DeepSpeed configuration, before any process starts."""
    settings = engine_config(run)
    if run.deepspeed and settings is not None:
        check_config(settings, run=run, device=device, allow_auto=True)
    if device == "cpu" and run.num_nodes == 1 and (text := shortage(run.num_processes or 1)):
        # A warning only, since training works without the shared memory.
        warnings.warn(text, stacklevel=2)


def _missing_monitors(config: ZeroConfig) -> Iterator[str]:
    """The sections that are turned on without their package."""
    for section, package in _MONITOR_PACKAGES.items():
        if config.is_on(section) and not is_installed(package):
            yield (
                f"{section}.enabled cannot be true without the package {package}, which is not "
                "installed. Every process would fail when DeepSpeed makes its engine. Install it: "
                f"pip install {package}, or leave {section} out."
            )


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
        defaults = schema.defaults(key)
        if key in AUTO_KEYS:
            text = (
                f'{key} is still "auto". DeepSpeed would replace it by its default, or fail. '
                "Resolve it with resolve_auto, or give a value."
            )
            if not allow_auto:
                yield FieldMistake(text, key)
        elif defaults:
            yield f'{key}="auto" leaves it to DeepSpeed, whose default is {defaults[0]!r}.'
        else:
            text = (
                f'{key} cannot be "auto". Neither DeepSpeed nor a trainer fills that key in. Give '
                "a value, or leave it out."
            )
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
    settings = config.to_dict()
    if config.stage == AUTO:  # what depends on it is judged when it is resolved
        del settings[ZERO]
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
