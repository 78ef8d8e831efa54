"""DeepSpeed itself, imported when first needed, without its greeting to machines without a GPU."""

from __future__ import annotations

import logging
from typing import Any

from nbaccel._optional import require

__all__ = ["load"]

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
        MissingBackend: It is not installed, or cannot be imported.
    """
    # Whatever device is chosen is told by nbaccel's own plan, with the reason.
    logging.getLogger("DeepSpeed").addFilter(_is_no_greeting)
    return require(module, extra="deepspeed", why=why)
