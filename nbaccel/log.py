"""Logging under the name ``nbaccel``, with the rank in front where there is one.

Nothing is configured here: no level, no handler that writes. Messages are turned on as with any
library: ``logging.getLogger("nbaccel").setLevel("DEBUG")`` and a handler.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TextIO

from nbaccel import env, frames

__all__ = ["ROOT_LOGGER_NAME", "get_logger", "notice_stream", "write_notice"]

ROOT_LOGGER_NAME = "nbaccel"

if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    # Subscripting works at run time only from Python 3.11 on.
    _LoggerAdapter = logging.LoggerAdapter


class _RankAdapter(_LoggerAdapter):
    """Puts ``[rank 1]`` before a message.

    The rank is read from the environment at each message and kept nowhere: a launch in this
    very process sets and restores it, and nothing must survive a launch.
    """

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        rank_text = env.read("RANK")
        return (msg if rank_text is None else f"[rank {rank_text}] {msg}"), kwargs


def get_logger(logger_name: str = ROOT_LOGGER_NAME) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of a module of nbaccel.

    Args:
        logger_name: The module's ``__name__``; a name outside the package is put under it.

    Returns:
        A logger whose messages carry the rank inside a worker.
    """
    root_logger = logging.getLogger(ROOT_LOGGER_NAME)
    if not any(isinstance(handler, logging.NullHandler) for handler in root_logger.handlers):
        # Without any handler Python would print warnings to stderr by itself.
        root_logger.addHandler(logging.NullHandler())
    is_inside = logger_name == ROOT_LOGGER_NAME or logger_name.startswith(f"{ROOT_LOGGER_NAME}.")
    return _RankAdapter(
        logging.getLogger(logger_name if is_inside else f"{ROOT_LOGGER_NAME}.{logger_name}"), {}
    )


def notice_stream() -> TextIO:
    """Where text goes that is no error: a notebook paints standard error as one."""
    has_cells = getattr(frames.running_shell(), "kernel", None) is not None
    return sys.stdout if has_cells else sys.stderr


def write_notice(notice_text: str) -> None:
    """Tell the user something that is no error.

    Args:
        notice_text: Lines with their ends.
    """
    text_stream = notice_stream()
    text_stream.write(notice_text)
    text_stream.flush()
