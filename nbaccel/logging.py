"""Logging that knows about several processes: ``get_logger``, as Accelerate's users call it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from nbaccel import env
from nbaccel.state import PartialState

__all__ = ["MultiProcessAdapter", "get_logger"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # subscripting works at run time only from Python 3.11 on


class MultiProcessAdapter(_Adapter):
    """A logger that speaks once for all processes.

    Every call takes two more keywords: `main_process_only` (True: process 0 alone speaks) and
    `in_order` (False: each process speaks in its turn, waiting for those before it).
    """

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """See `logging.Logger.log`; adds `main_process_only` and `in_order`."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        state = PartialState()
        if in_order and not main_only:
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self._speak(level, msg, args, kwargs)
                state.wait_for_everyone()
        elif not main_only or state.is_main_process:
            self._speak(level, msg, args, kwargs)

    def _speak(self, level: int, msg: Any, args: Any, kwargs: dict[str, Any]) -> None:
        text, found = self.process(msg, dict(kwargs))
        self.logger.log(level, text, *args, **{**found, "stacklevel": found["stacklevel"] + 1})

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before a message, where there are several."""
        rank = env.read("RANK")
        return (msg if rank is None else f"[RANK {rank}] {msg}"), kwargs


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger for training code.

    Args:
        name: Usually ``__name__``.
        log_level: ``"INFO"`` and the like; None reads ``ACCELERATE_LOG_LEVEL``, else leaves it.

    Returns:
        The logger.
    """
    logger = logging.getLogger(name)
    level = log_level or env.read("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
