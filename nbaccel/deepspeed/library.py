"""DeepSpeed itself, imported when first needed, without its greeting to machines without a GPU."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from importlib import metadata
from typing import Any

from nbaccel._optional import require
from nbaccel.deepspeed import building
from nbaccel.errors import MissingBackend

__all__ = ["OLDEST", "check_version", "load", "older_than", "refusal"]

OLDEST = (0, 18, 5)
"""The oldest release that the tests have been run with; `pyproject.toml` declares the same."""

_GREETING = "Setting accelerator to CPU."


def _is_no_greeting(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_GREETING)


def load(module: str, *, why: str) -> Any:
    """A module of DeepSpeed.

    Args:
        module: Its full name.
        why: What needs it, to begin an error with.

    Returns:
        The module.

    Raises:
        MissingBackend: It is not installed, cannot be imported, or is too old.
    """
    check_version()
    # Whatever device is chosen is told by nbaccel's own plan, with the reason.
    logging.getLogger("DeepSpeed").addFilter(_is_no_greeting)
    found = require(module, extra="deepspeed", why=why)
    building.announce()
    return found


def check_version() -> None:
    """Refuse a DeepSpeed that would fail in mid-training, without importing it.

    Raises:
        MissingBackend: The one that is installed is too old.
    """
    installed = _installed()
    if installed is not None and (told := refusal(installed)):
        raise MissingBackend(told, name="deepspeed")


def refusal(version: str) -> str:
    """Why a version of DeepSpeed cannot be used.

    Args:
        version: As it calls itself.

    Returns:
        The sentence; empty where it can be used, or nothing can be said of it.
    """
    numbers = _numbers(version)
    if numbers is None or numbers >= OLDEST:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"DeepSpeed {version} is installed, and nbaccel works with {oldest} and newer. Older ones "
        "leave the optimizer's state and float32 weights out of checkpoints of stage 0 in bf16, "
        "and the oldest cannot be left again. Install a newer one: "
        f'pip install "deepspeed>={oldest}"'
    )


def older_than(*numbers: int) -> str:
    """The version that is installed, where it is older than this one; empty elsewhere."""
    installed = _installed()
    found = _numbers(installed) if installed is not None else None
    return installed if installed and found is not None and found < numbers else ""


def _numbers(version: str) -> tuple[int, ...] | None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if found is None else tuple(int(part or 0) for part in found.groups())


@lru_cache(maxsize=1)
def _installed() -> str | None:
    """The version that would be imported; None where nothing says it."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None
