"""What Python does when a process ends, in a worker, which leaves by ``os._exit``.

Libraries count on it: trackers finish their runs and end their own services, log files are flushed,
temporary folders go. A worker is a fork, so what its parent has registered is left to the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import signal
import sys
import threading
import time
import weakref
from typing import Any


def forget_inherited() -> None:
    """Leave to the parent what it has registered, such as the end of its temporary folders."""
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # Those that Python registers once in a process, and that now have work of this one only.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(multiprocessing.util._run_finalizers)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


_AGAIN_S = 0.2


class _TimeIsOver(BaseException):
    """Raised in the main thread: no library's `except Exception` may keep it."""


def run(limit_s: float = 0) -> None:
    """Wait for threads and call what was registered in this process; a second time does nothing."""
    began = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, _give_up)
    # Again and again: atexit goes on with the next function when one is interrupted.
    signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
    previous_hook = sys.unraisablehook
    sys.unraisablehook = _report_all_but_ours
    try:
        for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
            # They report their own errors, which must not cost the result.
            with contextlib.suppress(_TimeIsOver, Exception):
                step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
        sys.unraisablehook = previous_hook
    if 0 < limit_s <= time.monotonic() - began:
        sys.stderr.write(
            f"nbaccel: what libraries do when a process ends took more than {limit_s:g} s, and was "
            "given up: they may not have written all they had. End trackers and writers in the "
            "function itself.\n"
        )


def _give_up(_number: int, _frame: Any) -> None:
    raise _TimeIsOver


def _report_all_but_ours(unraisable: Any) -> None:
    if unraisable.exc_type is not _TimeIsOver:
        sys.__unraisablehook__(unraisable)
