"""DeepSpeed itself, imported when first needed, without its greeting to machines without a GPU."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from importlib import metadata
from typing import Any

from nbaccel.base.errors import MissingBackend
from nbaccel.base.optional_packages import require
from nbaccel.config.capabilities import StrategyRow, strategy_row
from nbaccel.deepspeed import build_notice, private_api

OLDEST = (0, 18, 5)
"""The oldest release that the tests have been run with; `pyproject.toml` declares the same."""

_GREETING_TEXT = "Setting accelerator to CPU."


def _is_no_greeting(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_GREETING_TEXT)


def row() -> StrategyRow:
    """The capability row of training with DeepSpeed."""
    return strategy_row("deepspeed")


def load_module(module: str, *, why: str) -> Any:
    """A module of DeepSpeed."""
    check_version()
    # nbaccel's plan says which device is chosen, with the reason.
    logging.getLogger("DeepSpeed").addFilter(_is_no_greeting)
    loaded_module = require(module, extra="deepspeed", why=why)
    # Only after the import, when the module that compiles operations may have been loaded.
    build_notice.announce()
    private_api.warn_of_missing()
    return loaded_module


def check_version() -> None:
    """Refuse a DeepSpeed that would fail in the middle of a training, without importing it."""
    installed_version = _installed_version()
    if installed_version is not None and (text := refusal(installed_version)):
        raise MissingBackend(text, name="deepspeed")


def refusal(version: str) -> str:
    """Why a version of DeepSpeed cannot be used."""
    version_numbers = _version_numbers(version)
    if version_numbers is None or version_numbers >= OLDEST:
        return ""
    oldest_version = ".".join(map(str, OLDEST))
    return (
        f"DeepSpeed {version} is installed, and nbaccel works with {oldest_version} and newer. "
        "Older ones leave the optimizer's state and float32 weights out of checkpoints of stage 0 "
        "in bf16, and the oldest cannot be shut down in a running process. Install a newer one: "
        f'pip install "deepspeed>={oldest_version}"'
    )


def older_than(*numbers: int) -> str:
    """The version that is installed, where it is older than this one; empty elsewhere."""
    installed_version = _installed_version()
    installed_numbers = (
        _version_numbers(installed_version) if installed_version is not None else None
    )
    return (
        installed_version
        if installed_version and installed_numbers is not None and installed_numbers < numbers
        else ""
    )


def _version_numbers(text: str) -> tuple[int, ...] | None:
    # A suffix, as of a build from source (0.19.8+abc), does not matter.
    version_match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return (
        None
        if version_match is None
        else tuple(int(version_part or 0) for version_part in version_match.groups())
    )


# Cached: each launch and each plugin asks, and reading metadata takes milliseconds.
@lru_cache(maxsize=1)
def _installed_version() -> str | None:
    """The version that would be imported; None where no metadata says it."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None
