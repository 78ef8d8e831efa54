"""A DeepSpeed configuration checked before any process starts: every mistake, all at once.

DeepSpeed ignores most keys it does not know, so that a typo trains something else. Here a key is
compared with those that the installed DeepSpeed reads, a value with its kind and DeepSpeed's
models, and combinations with those that were found to run.
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
from nbaccel.config import RunConfig
from nbaccel.config.deepspeed_document import engine_config
from nbaccel.config.field_rules import FieldMistake, mistakes_in
from nbaccel.config.mistakes import shown
from nbaccel.deepspeed import library
from nbaccel.deepspeed.auto_values import AUTO_KEYS
from nbaccel.deepspeed.combinations import (
    batch_mistakes,
    combination_mistakes,
    doubts,
    maker_mistakes,
    sharing_mistakes,
)
from nbaccel.deepspeed.config_keys import Finding, key_findings, missing_monitors
from nbaccel.deepspeed.cpp_operations import missing_tools
from nbaccel.deepspeed.field_types import AUTO
from nbaccel.deepspeed.load_config import auto_keys, load_settings
from nbaccel.deepspeed.room import folder_mistakes, shortage
from nbaccel.deepspeed.schema import Schema, deepspeed_schema, quiet_logger
from nbaccel.deepspeed.zero_config import ZERO, ZeroConfig, old_forms
from nbaccel.plan import Inventory, inspect_machine

__all__ = ["Checked", "check_config", "check_run"]


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration in which no mistake was found.

    Attributes:
        config: The configuration.
        warnings: Settings that work but may not do what is expected.
    """

    config: ZeroConfig
    warnings: tuple[str, ...] = ()


def check_config(
    config: Mapping[str, Any] | str | Path | ZeroConfig,
    *,
    world_size: int | None = None,
    run: RunConfig | None = None,
    inventory: Inventory | None = None,
    allow_auto: bool = False,
    check_tools: bool = True,
) -> Checked:
    """Check a DeepSpeed configuration against DeepSpeed and this machine.

    Args:
        config: A dictionary, the path of a JSON file, or a :class:`ZeroConfig`.
        world_size: Processes that share the batch; taken from ``run`` where left out.
        run: How it will be run; decides the device.
        inventory: The machine; this one where left out.
        allow_auto: Whether ``"auto"`` may stand where ``resolve_auto`` fills it in.
        check_tools: Whether this machine must be able to build what it needs, to write where it
            swaps to, and have the packages that it logs through.

    Returns:
        The configuration with warnings.

    Raises:
        ConfigError: Mistakes, all of them.
        MissingBackend: DeepSpeed is not installed.
    """
    key_schema = deepspeed_schema()
    config_settings, warning_notes = old_forms(load_settings(config))
    if world_size is None and run is not None and run.num_processes is not None:
        world_size = run.num_processes * run.num_nodes
    device = _device_of_run(run, inventory)
    key_notes = [
        *key_findings(config_settings, key_schema),
        *_auto_findings(config_settings, key_schema, allow_auto),
    ]
    keys = [key_note.text for key_note in key_notes if key_note.is_mistake]
    warning_notes += tuple(key_note.text for key_note in key_notes if not key_note.is_mistake)
    if isinstance(config, ZeroConfig) and config.to_dict() == config_settings:
        # Its values were checked when it was made.
        checked_config = config
        wrong_values = list[FieldMistake]()
    else:
        checked_config, wrong_values = _typed_config(config_settings)
    keys += wrong_values
    all_mistakes: list[str] = [
        *keys,
        *_model_mistakes(checked_config, key_schema, known_mistakes=keys),
    ]
    all_mistakes += combination_mistakes(checked_config, device=device)
    # Parts of names, which a misspelt key has, too: the right key is missing then, and a message
    # about sizes that do not multiply out would only repeat that.
    size_words = ("batch_size", "accumulation")
    if not any(
        size_word in field_mistake.path for size_word in size_words for field_mistake in keys
    ):
        all_mistakes += batch_mistakes(checked_config, world_size=world_size, open_ends=allow_auto)
    all_mistakes += sharing_mistakes(checked_config, world_size=world_size)
    all_mistakes += maker_mistakes(checked_config, key_schema, device=device)
    if check_tools:
        all_mistakes += missing_tools(checked_config, device=device)
        all_mistakes += folder_mistakes(checked_config)
        all_mistakes += missing_monitors(checked_config)
    # Last, since DeepSpeed's reader stops at its first mistake.
    if not all_mistakes:
        all_mistakes += _refused_by_deepspeed(checked_config)
    if all_mistakes:
        raise ConfigError(*all_mistakes)
    return Checked(checked_config, (*warning_notes, *doubts(checked_config, device=device)))


def check_run(run: RunConfig, device: str) -> None:
    """Check a run's DeepSpeed configuration, before any process starts."""
    settings = engine_config(run)
    if run.deepspeed and settings is not None:
        on_device = run.changed(device=device)
        check_config(settings, run=on_device, allow_auto=True)
    if device == "cpu" and run.num_nodes == 1 and (text := shortage(run.num_processes or 1)):
        # A warning only, since training works without the shared memory.
        warnings.warn(text, stacklevel=2)


def _device_of_run(config: RunConfig | None, machine_inventory: Inventory | None) -> str:
    if config is not None and config.device != AUTO:
        return config.device
    return "cuda" if (machine_inventory or inspect_machine()).gpus else "cpu"


# ------------------------------------------------------------------------------ values
def _typed_config(config_settings: dict[str, Any]) -> tuple[ZeroConfig, list[FieldMistake]]:
    """The configuration without its wrong values, and what is wrong with those."""
    try:
        return ZeroConfig.from_dict(config_settings), []
    except ConfigError as error:
        # The other checks go on without the wrong values, so that all mistakes are reported at
        # once.
        remaining_settings = copy.deepcopy(config_settings)
        values = mistakes_in(error)
        taken_out = [
            _without_key(remaining_settings, field_mistake.path) for field_mistake in values
        ]
        # A mistake whose key cannot be found would be met again, without end.
        if not all(taken_out):
            remaining_settings = {}
        zero_config, later_mistakes = _typed_config(remaining_settings)
        return zero_config, [*values, *later_mistakes]


def _without_key(settings: dict[str, Any], path: str) -> bool:
    *holder_keys, last_key = path.split(".")
    inner_section: Any = settings
    for holder_key in holder_keys:
        inner_section = inner_section.get(holder_key) if isinstance(inner_section, dict) else None
    return (
        isinstance(inner_section, dict)
        and inner_section.pop(last_key, inner_section) is not inner_section
    )


def _auto_findings(
    config_settings: Mapping[str, Any], key_schema: Schema, allow_auto: bool
) -> Iterator[Finding]:
    for config_key in auto_keys(config_settings):
        if config_key.partition(".")[0] in key_schema.removed:
            continue  # reported already, with a remedy
        if config_key in AUTO_KEYS:
            if not allow_auto:
                text = (
                    f'{config_key} is still "auto". DeepSpeed would replace it by its default, or '
                    "fail. Resolve it with resolve_auto, or give a value."
                )
                yield Finding(FieldMistake(text, config_key))
        elif (key_default := key_schema.default(config_key)) is not None:
            text = (
                f'{config_key}="auto" leaves it to DeepSpeed, whose default is '
                f"{key_default.value!r}."
            )
            yield Finding(FieldMistake(text, config_key), is_mistake=False)
        else:
            text = (
                f'{config_key} cannot be "auto". Neither DeepSpeed nor a trainer fills that key '
                "in. Give a value, or leave it out."
            )
            yield Finding(FieldMistake(text, config_key))


def _model_mistakes(
    zero_config: ZeroConfig, key_schema: Schema, *, known_mistakes: list[FieldMistake]
) -> Iterator[str]:
    """What DeepSpeed's models refuse, unless it is among the known mistakes."""
    config_settings = zero_config.to_dict()
    for section_path, model in key_schema.models.items():
        config_section: Any = config_settings
        for step in section_path.split("."):
            config_section = (
                config_section.get(step) if isinstance(config_section, Mapping) else None
            )
        parent_path = section_path.rpartition(".")[0]
        if not isinstance(config_section, Mapping) or parent_path in key_schema.models:
            continue  # its parent's model looks at it
        section_values = {
            key_name: key_value
            for key_name, key_value in config_section.items()
            if key_value != AUTO
        }
        try:
            with quiet_logger():
                model(**section_values)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                value_path = ".".join((section_path, *map(str, detail["loc"])))
                is_unknown = detail["type"] == "extra_forbidden" or detail["input"] == AUTO
                # What depends on a stage that is still open is judged when it is resolved.
                is_early = not detail["loc"] and zero_config.stage == AUTO
                if not (is_unknown or is_early) and not any(
                    known_mistake.path.startswith(value_path) for known_mistake in known_mistakes
                ):
                    yield (
                        f"{value_path} is refused by DeepSpeed: got "
                        f"{shown(detail['input'])}. It says: "
                        f"{detail['msg']}. Correct the value."
                    )


def _refused_by_deepspeed(config: ZeroConfig) -> Iterator[str]:
    """What DeepSpeed's reader refuses, which counts one process here."""
    settings = config.to_dict()
    if config.stage == AUTO:  # what depends on it is judged when it is resolved
        del settings[ZERO]
    for config_key in tuple(auto_keys(settings)):
        _without_key(settings, config_key)
    # Sizes that are right for several processes do not multiply out for the one it counts.
    for config_key in ("train_batch_size", "gradient_accumulation_steps"):
        settings.pop(config_key, None)
    settings.setdefault("train_micro_batch_size_per_gpu", 1)
    config_reader = library.load_module("deepspeed.runtime.config", why="DeepSpeed")
    try:
        with quiet_logger():
            config_reader.DeepSpeedConfig(settings)
    except Exception as error:  # whatever it raises is what the user would meet later
        yield (
            f"DeepSpeed refuses this configuration: {' '.join(str(error).split())}. "
            f"Training could not start. It read {shown(settings)}; change what it names."
        )
