"""A process that works for the notebook beside its workers: forked from the template like one.

The relay is such: it waits, keeps connections, and can be ended at any time, which the notebook's
own process must not have to do.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence
from typing import Any

from nbaccel.base.errors import StartupFailed
from nbaccel.transfer import memfd
from nbaccel.workers import time_limits
from nbaccel.workers.template_starter import TemplateStarter
from nbaccel.workers.worker_handle import connect

__all__ = ["HelperProcess"]

_TAIL_CHARS = 2000
_END_LOOK_S = 0.1


class HelperProcess:
    """A running helper, and the channel to it."""

    def __init__(self, first_message: Any, file_descriptors: Sequence[int] = ()) -> None:
        self._on_end = contextlib.ExitStack()
        try:
            starter = TemplateStarter("cpu")
            self._on_end.callback(starter.close)
            self.channel, pipes, helper_ends = connect()
            self._on_end.callback(memfd.close_all, pipes)
            self._error_pipe = next(end for end, name in pipes.items() if name == "stderr")
            with memfd.closing_files(*helper_ends.all()):
                process_id = starter.start(helper_ends)
            self._on_end.callback(_await_end, starter, process_id)
            self._on_end.callback(self.channel.close)
            self.channel.send(first_message, file_descriptors)
        except BaseException:  # an interrupt must leave no process behind either
            self._on_end.close()
            raise

    def error_text(self) -> str:
        """The end of what it has written to its error stream since this was last asked."""
        try:
            return (
                os.read(self._error_pipe, 1 << 16).decode(errors="replace").strip()[-_TAIL_CHARS:]
            )
        except BlockingIOError:
            return ""

    def close(self) -> None:
        """Hang up, and wait until it has left; one that does not is killed."""
        self._on_end.close()


def _await_end(starter: TemplateStarter, process_id: int) -> None:
    deadline = time.monotonic() + time_limits.UNWIND_S
    # The template has ended, and the helper with it.
    with contextlib.suppress(StartupFailed):
        while process_id not in [ended.pid for ended in starter.collect()]:
            if time.monotonic() >= deadline:
                starter.kill(process_id)
                return
            select.select(starter.sentinels(), [], [], _END_LOOK_S)
