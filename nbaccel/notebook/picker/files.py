"""A configuration from a file or pasted text, and mistakes sorted to where they belong."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel._optional import is_installed
from nbaccel.capabilities import strategy_row
from nbaccel.config import RunConfig
from nbaccel.config.exchange import each_once, read_yaml
from nbaccel.deepspeed.config import ZeroConfig
from nbaccel.errors import ConfigError
from nbaccel.notebook.picker.choices import by_name
from nbaccel.plan import Inventory

__all__ = ["mistakes_by_setting", "read_source"]


def read_source(
    source: str | Path | Mapping[str, Any], config: RunConfig, inventory: Inventory
) -> tuple[RunConfig, tuple[str, ...]]:
    """Read a DeepSpeed configuration or a run's.

    Args:
        source: A path, the text itself, or what is in it.
        config: What a DeepSpeed configuration is laid over.
        inventory: The machine.

    Returns:
        The run, and what is worth knowing about it.

    Raises:
        ConfigError: It cannot be read, or holds mistakes, all of them.
    """
    settings = source if isinstance(source, Mapping) else _parsed(source)
    names = set(RunConfig.model_fields)
    if set(settings) <= names and not _is_engine(settings):
        return RunConfig(**{str(name): value for name, value in settings.items()}), ()
    remarks: tuple[str, ...] = ()
    if is_installed(strategy_row("deepspeed").library):
        from nbaccel.deepspeed.checking import check_config

        checked = check_config(
            settings, inventory=inventory, allow_auto=True, check_tools=False, run=config
        )
        remarks = checked.warnings
        settings = checked.config.to_dict()
    else:
        settings = ZeroConfig.from_dict(settings).to_dict()
        remarks = ("DeepSpeed is not installed: keys were not compared with those it knows.",)
    return config.changed(deepspeed=settings), remarks


def mistakes_by_setting(error: ConfigError) -> dict[str, list[str]]:
    """Mistakes, by the choice that each names first.

    Args:
        error: What was raised.

    Returns:
        Name of a choice → messages; under ``""`` those that name none.
    """
    # What a section's own messages leave out goes behind whole names.
    keys = {name.rpartition(".")[2]: name for name in reversed(by_name()) if "." in name}
    keys |= {key: name for name in by_name() for key in (name, by_name()[name].deepspeed_key)}
    found: dict[str, list[str]] = {}
    for text in error.mistakes:
        word = re.split(r"[\s=:]", text, maxsplit=1)[0].rstrip(".,")
        found.setdefault(keys.get(word, "") if word else "", []).append(text)
    return found


def _is_engine(settings: Mapping[str, Any]) -> bool:
    """Whether what could be either is DeepSpeed's: its one shared key, all alone."""
    return set(settings) == {"gradient_accumulation_steps"}


def _parsed(source: str | Path) -> Mapping[str, Any]:
    text, what = _text(source)
    if not text.strip():
        raise ConfigError(
            f"{what} is empty: got {text!r}. It would change nothing. Give a DeepSpeed "
            "configuration or a RunConfig, as JSON or YAML."
        )
    try:
        found = json.loads(text, object_pairs_hook=each_once(what))
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("{"):
            raise ConfigError(
                f"{what} is no JSON: {error}. A setting half read would train something else. "
                "Correct the text there."
            ) from error
        try:
            found = read_yaml(text)
        except ValueError as trouble:
            raise ConfigError(
                f"{what} is neither JSON nor YAML: {trouble}. A setting half read would train "
                "something else. Correct the text there."
            ) from trouble
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{what} holds no settings: got {str(found)[:60]!r}. Settings need names. Give a "
            'DeepSpeed configuration, {"zero_optimization": {"stage": 2}} for example, or the '
            "path of a file."
        )
    return found


def _text(source: str | Path) -> tuple[str, str]:
    """The text, and what to call it."""
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("{")):
        return source, "What was pasted"
    path = Path(source).expanduser()
    looks_like_path = isinstance(source, Path) or bool(path.suffix) or "/" in source
    try:
        if path.is_file() or looks_like_path:
            return path.read_text(encoding="utf-8"), f"{str(path)!r}"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}. Nothing was changed. Give the path of a JSON "
            "or YAML file, or paste its text."
        ) from error
    return str(source), "What was pasted"
