"""DeepSpeed itself, imported when first needed, without its greeting to machines without a GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from typing import Any

from packaging.version import InvalidVersion, Version

from nbaccel.base.errors import MissingBackend
from nbaccel.base.optional_packages import require
from nbaccel.deepspeed import build_notice

OLDEST = "0.18.5"
"""The oldest release that the tests have been run with; `pyproject.toml` declares the same."""

_GREETING_TEXT = "Setting accelerator to CPU."


@contextlib.contextmanager
def quiet_logger(level: int = logging.CRITICAL + 1) -> Iterator[None]:
    """A block in which DeepSpeed's logger is silent: it logs every configuration it reads."""
    logger = logging.getLogger("DeepSpeed")
    level_before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(level_before)


def _is_no_greeting(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_GREETING_TEXT)


def load_module(module: str, *, why: str) -> Any:
    """A module of DeepSpeed."""
    check_version()
    # nbaccel's plan says which device is chosen, with the reason.
    logging.getLogger("DeepSpeed").addFilter(_is_no_greeting)
    loaded_module = require(module, extra="deepspeed", why=why)
    # Only after the import, when the module that compiles operations may have been loaded.
    build_notice.announce()
    return loaded_module


def check_version() -> None:
    """Refuse a DeepSpeed that would fail in the middle of a training, without importing it."""
    if version := older_than(OLDEST):
        raise MissingBackend(
            f"DeepSpeed {version} is installed, and nbaccel works with {OLDEST} and newer. Older "
            "ones leave the optimizer's state and float32 weights out of checkpoints of stage 0 in "
            "bf16, and the oldest cannot be shut down in a running process. Install a newer one: "
            f'pip install "deepspeed>={OLDEST}"',
            name="deepspeed",
        )


def older_than(release: str) -> str:
    """The version that is installed, where it is older than this one; empty elsewhere."""
    version = _installed_version()
    try:
        return version if version and Version(version) < Version(release) else ""
    except InvalidVersion:  # of a build from source
        return ""


# Cached: each launch and each plugin asks, and reading metadata takes milliseconds.
@lru_cache(maxsize=1)
def _installed_version() -> str | None:
    """The version that would be imported; None where no metadata says it."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None
