"""User code that forks: a child that comes to the end of it is not the worker, and must not go on.

It would hand over a result, write weights and read the worker's messages: the launch would hang.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["own_process"]


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Run a block of user code. Only the process that has begun it comes out of it.

    A child that returns from it, or raises, ends as a script would: what it raised is printed.
    """
    mine = os.getpid()
    try:
        yield
    except BaseException as error:  # whatever a child raises, it ends here
        if os.getpid() == mine:
            raise
        _leave(error)
    if os.getpid() != mine:
        _leave(None)


def _leave(error: BaseException | None) -> None:
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the user, or nobody reads
            stream.flush()
    os._exit(status)
