"""Logging under the name ``nbaccel``, with the rank in front where there is one.

Where nobody has set up logging, warnings are written as notices, each once. As soon as there is a
handler, for ``nbaccel`` or for all, messages are its alone.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

from nbaccel.base import env, frames

ROOT_LOGGER_NAME = "nbaccel"


# Subscripting works at run time only from Python 3.11 on.
class _RankAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Puts ``[rank 1]`` before a message, as the environment says: a launch here restores it."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        text = env.read("RANK")
        return (msg if text is None else f"[rank {text}] {msg}"), kwargs


class _NoticeHandler(logging.Handler):
    """Writes warnings, each text once in a process, where nobody else would."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._written: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        handlers = logging.getLogger(ROOT_LOGGER_NAME).handlers
        if logging.getLogger().handlers or len(handlers) > 1:
            return
        # In a worker the console says whose line it is, and shows one that all ranks write once.
        text = record.getMessage().removeprefix(f"[rank {env.read('RANK')}] ")
        if text not in self._written:
            self._written.add(text)
            write_notice(f"nbaccel: {text}\n")


def get_logger(logger_name: str = ROOT_LOGGER_NAME) -> logging.LoggerAdapter[logging.Logger]:
    """The logger of a module of nbaccel."""
    root_logger = logging.getLogger(ROOT_LOGGER_NAME)
    if not any(isinstance(handler, _NoticeHandler) for handler in root_logger.handlers):
        root_logger.addHandler(_NoticeHandler())
    is_inside = logger_name == ROOT_LOGGER_NAME or logger_name.startswith(f"{ROOT_LOGGER_NAME}.")
    return _RankAdapter(
        logging.getLogger(logger_name if is_inside else f"{ROOT_LOGGER_NAME}.{logger_name}"), {}
    )


def notice_stream() -> TextIO:
    """Where text goes that is no error: a notebook paints standard error as one."""
    has_cells = getattr(frames.running_shell(), "kernel", None) is not None
    return sys.stdout if has_cells else sys.stderr


def write_notice(text: str) -> None:
    """Tell the user something that is no error."""
    text_stream = notice_stream()
    text_stream.write(text)
    text_stream.flush()


def progress_bar(**options: Any) -> Any:
    """A bar of tqdm without its thread, which outlives the bar and makes forks unsafe."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0

    return Bar(**options)
