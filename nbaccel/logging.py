"""Logging that knows about several processes: ``get_logger``, as Accelerate's users call it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from nbaccel.base import env
from nbaccel.state import PartialState
from nbaccel.train import distributed

__all__ = ["MultiProcessAdapter", "get_logger"]


# Subscripting works at run time only from Python 3.11 on.
class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger that logs once for all processes.

    Every call takes two more keywords: `main_process_only` (True: process 0 alone logs) and
    `in_order` (False; True: all log, each in its turn, whatever `main_process_only` says).

    A message touches neither the device nor the process group, unless it is `in_order`.
    """

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """See `logging.Logger.log`; adds `main_process_only` and `in_order`."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # Whoever wraps a logger gives the number of frames that it would give to logging's own.
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        text, options = self.process(msg, kwargs)
        if in_order:
            state = PartialState()
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self.logger.log(level, text, *args, **options)
                # It is a collective: every process waits in every round, also if it has logged.
                state.wait_for_everyone()
        elif not main_only or distributed.rank() == 0:
            self.logger.log(level, text, *args, **options)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the number of the process before a message."""
        return f"[RANK {distributed.rank()}] {msg}", kwargs

    def warning_once(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Warn, but not a second time with the same words."""
        warned_keys = self.logger.__dict__.setdefault("_nbaccel_said", set())
        if (message_key := (str(msg), repr(args))) not in warned_keys:
            warned_keys.add(message_key)
            self.warning(msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for training code, whose level is `log_level`, or ``ACCELERATE_LOG_LEVEL``."""
    logger = logging.getLogger(name)
    level_name = log_level or env.read("ACCELERATE_LOG_LEVEL")
    if level_name:
        logger.setLevel(level_name.upper())
        logger.root.setLevel(level_name.upper())
    return MultiProcessAdapter(logger, {})
