"""Logging under the name ``nbaccel``, with the rank in front where there is one.

Nothing is configured here: no level, no handler that writes. Whoever wants the messages turns
them on as with any library: ``logging.getLogger("nbaccel").setLevel("DEBUG")`` and a handler.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from nbaccel import env

__all__ = ["ROOT", "get_logger"]

ROOT = "nbaccel"

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    # Subscripting works at run time only from Python 3.11 on.
    _Adapter = logging.LoggerAdapter


class _RankAdapter(_Adapter):
    """Puts ``[rank 1]`` before a message.

    The rank is read from the environment at each message and kept nowhere: a launch in this
    very process sets and restores it, and nothing must survive a launch.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        rank = env.read("RANK")
        return (msg if rank is None else f"[rank {rank}] {msg}"), kwargs


def get_logger(name: str = ROOT) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of a module of nbaccel.

    Args:
        name: The module's ``__name__``; a name outside the package is put under it.

    Returns:
        A logger whose messages carry the rank inside a worker.
    """
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        # Without any handler Python would print warnings to stderr by itself.
        root.addHandler(logging.NullHandler())
    inside = name == ROOT or name.startswith(f"{ROOT}.")
    return _RankAdapter(logging.getLogger(name if inside else f"{ROOT}.{name}"), {})
