"""A DeepSpeed configuration checked before any process starts: every mistake, all at once.

DeepSpeed ignores most keys it does not know, so that a typo trains something else. Here a key is
held against what the installed DeepSpeed itself asks for, a value against its kind and DeepSpeed's
own models, and what goes together against what was found to run.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nbaccel.config import RunConfig
from nbaccel.config.engine import engine_config
from nbaccel.config.mistakes import shown
from nbaccel.deepspeed import library
from nbaccel.deepspeed.auto import AUTO_KEYS
from nbaccel.deepspeed.combinations import (
    batch_mistakes,
    combination_mistakes,
    doubts,
    maker_mistakes,
    sharing_mistakes,
)
from nbaccel.deepspeed.config import ZERO, ZeroConfig, old_forms
from nbaccel.deepspeed.keys import Finding, key_findings
from nbaccel.deepspeed.kinds import AUTO
from nbaccel.deepspeed.monitors import missing_monitors
from nbaccel.deepspeed.ops import missing_tools
from nbaccel.deepspeed.reading import auto_keys, load_settings
from nbaccel.deepspeed.schema import Schema, deepspeed_schema, quiet
from nbaccel.deepspeed.shared_memory import shortage
from nbaccel.deepspeed.swap_space import folder_mistakes
from nbaccel.errors import ConfigError
from nbaccel.plan import Inventory, inspect_machine

__all__ = ["Checked", "check_config", "check_run"]


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration in which no mistake was found.

    Attributes:
        config: The configuration.
        warnings: What will work and may disappoint.
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
    schema = deepspeed_schema()
    settings, notes = old_forms(load_settings(config))
    if world_size is None and run is not None and run.num_processes is not None:
        world_size = run.num_processes * run.num_nodes
    device = _device(run, inventory)
    findings = [*key_findings(settings, schema), *_auto_findings(settings, schema, allow_auto)]
    mistakes = [found.text for found in findings if found.is_mistake]
    notes += tuple(found.text for found in findings if not found.is_mistake)
    checked, wrong = _typed(settings)
    mistakes += wrong
    mistakes += _model_mistakes(checked, schema, known=mistakes)
    mistakes += combination_mistakes(checked, device=device)
    if not any("batch_size" in text or "accumulation" in text for text in mistakes):
        mistakes += batch_mistakes(checked, world_size=world_size, open_ends=allow_auto)
    mistakes += sharing_mistakes(checked, world_size=world_size)
    mistakes += maker_mistakes(checked, schema, device=device)
    if check_tools:
        mistakes += missing_tools(checked, device=device)
        mistakes += folder_mistakes(checked)
        mistakes += missing_monitors(checked)
    if not mistakes:
        mistakes += _refused(checked)
    if mistakes:
        raise ConfigError(*mistakes)
    return Checked(checked, (*notes, *doubts(checked, device=device)))


def check_run(run: RunConfig, device: str) -> None:
    """Check what a run says to DeepSpeed beside the stage, before any process starts.

    Args:
        run: What was asked. One that names a stage alone is right by its making, and DeepSpeed
            need not be imported for it.
        device: What the processes compute on.

    Raises:
        ConfigError: Mistakes, all of them.
        MissingBackend: DeepSpeed is not installed.
    """
    settings = engine_config(run)
    if run.deepspeed and settings is not None:
        on_device = run.changed(device=device)
        check_config(settings, run=on_device, allow_auto=True)
    if device == "cpu" and run.num_nodes == 1 and (lacking := shortage(run.num_processes or 1)):
        warnings.warn(lacking, stacklevel=2)


def _device(run: RunConfig | None, inventory: Inventory | None) -> str:
    if run is not None and run.device != AUTO:
        return run.device
    return "cuda" if (inventory or inspect_machine()).gpus else "cpu"


# ------------------------------------------------------------------------------ values
def _typed(settings: dict[str, Any]) -> tuple[ZeroConfig, list[str]]:
    """The configuration without its wrong values, and what is wrong with those."""
    try:
        return ZeroConfig.from_dict(settings), []
    except ConfigError as error:
        rest = copy.deepcopy(settings)
        taken = [_without(rest, mistake.partition(" ")[0]) for mistake in error.mistakes]
        if not all(taken):
            rest = {}
        config, more = _typed(rest)
        return config, [*error.mistakes, *more]


def _without(settings: dict[str, Any], path: str) -> bool:
    *holders, key = path.split(".")
    inner: Any = settings
    for holder in holders:
        inner = inner.get(holder) if isinstance(inner, dict) else None
    return isinstance(inner, dict) and inner.pop(key, inner) is not inner


def _auto_findings(
    settings: Mapping[str, Any], schema: Schema, allow_auto: bool
) -> Iterator[Finding]:
    for key in auto_keys(settings):
        if key.partition(".")[0] in schema.removed:
            continue  # told already, with what to do
        if key in AUTO_KEYS:
            if not allow_auto:
                yield Finding(
                    f'{key} is still "auto". DeepSpeed would drop it for its default, or fail on '
                    "it. Resolve it with resolve_auto, or give a value."
                )
        elif (default := schema.default(key)) is not None:
            yield Finding(
                f'{key}="auto" leaves it to DeepSpeed, whose default is {default.value!r}.',
                is_mistake=False,
            )
        else:
            yield Finding(
                f'{key} cannot be "auto". Neither DeepSpeed nor a trainer fills that key in. '
                "Give a value, or leave it out."
            )


def _model_mistakes(config: ZeroConfig, schema: Schema, *, known: list[str]) -> Iterator[str]:
    """What DeepSpeed's own models refuse and nobody has told yet."""
    settings = config.to_dict()
    for path, model in schema.models.items():
        section: Any = settings
        for step in path.split("."):
            section = section.get(step) if isinstance(section, Mapping) else None
        parent = path.rpartition(".")[0]
        if not isinstance(section, Mapping) or parent in schema.models:
            continue  # its parent's model looks at it
        values = {k: v for k, v in section.items() if v != AUTO}
        try:
            with quiet():
                model(**values)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                where = ".".join((path, *map(str, detail["loc"])))
                unknown = detail["type"] == "extra_forbidden" or detail["input"] == AUTO
                # What depends on a stage that is still open is judged when it is resolved.
                early = not detail["loc"] and config.stage == AUTO
                if not (unknown or early) and not any(text.startswith(where) for text in known):
                    yield (
                        f"{where} is refused by DeepSpeed: got {shown(detail['input'])}. It says: "
                        f"{detail['msg']}. Correct the value."
                    )


def _refused(config: ZeroConfig) -> Iterator[str]:
    """What DeepSpeed's reader refuses, as the last word. It knows one process here."""
    settings = config.to_dict()
    if config.stage == AUTO:  # what depends on it is judged when it is resolved
        del settings[ZERO]
    for key in tuple(auto_keys(settings)):
        _without(settings, key)
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        settings.pop(key, None)
    settings.setdefault("train_micro_batch_size_per_gpu", 1)
    reader = library.load("deepspeed.runtime.config", why="DeepSpeed")
    try:
        with quiet():
            reader.DeepSpeedConfig(settings)
    except Exception as error:  # whatever it raises is what the user would meet later
        yield (
            f"DeepSpeed refuses this configuration: {' '.join(str(error).split())}. "
            f"Training could not start. It read {shown(settings)}; change what it names."
        )
