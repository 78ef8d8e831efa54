"""Workers forked straight from the notebook process.

Everything the notebook has is there in the worker, and nothing is pickled. What makes a fork
unsafe is `preflight`'s business; this file cures what can be cured just before forking.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from nbaccel.launch import preflight, wire, worker
from nbaccel.launch.openmp import pause_pools
from nbaccel.launch.reaping import reap

_REAP_POLL_S = 0.02


class ForkStarter:
    """Starts workers by forking this process. See `starter.Starter`.

    Args:
        inheritance: What each worker takes along.
    """

    name = "fork"

    def __init__(self, inheritance: worker.Inheritance) -> None:
        self._inheritance = inheritance
        self._children: dict[int, int] = {}
        self.ours: list[int] = []
        """The notebook's own ends of all connections: a child closes them."""
        # The first optimizer of a process imports it (a second): once here, not once per worker.
        importlib.import_module("torch._dynamo")
        pause_pools()
        preflight.end_bar_monitors()

    def start(self, ends: worker.Ends) -> int:
        """Fork a worker that owns these ends; returns its process id."""
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # So that a child which hangs before it gets to register this itself can tell where.
        faulthandler.register(worker.STACK_SIGNAL, file=ends.stack, all_threads=True)
        gc.freeze()  # a collection in the child would write to every page it shares with us
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of every fork with threads; preflight has judged these.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        finally:
            if os.getpid() == parent:
                gc.unfreeze()
                faulthandler.unregister(worker.STACK_SIGNAL)
        if pid == 0:
            for fd in self.ours:
                os.close(fd)
            worker.main(ends, parent, self._inheritance)
        self._children[pid] = os.pidfd_open(pid)
        return pid

    def sentinels(self) -> Sequence[int]:
        """A descriptor per child, readable once it has ended."""
        return list(self._children.values())

    def collect(self) -> Sequence[wire.Ended]:
        """Children that have ended since the last call, reaped."""
        ended = [found for pid in self._children if (found := reap(pid)) is not None]
        for gone in ended:
            os.close(self._children.pop(gone.pid))
        return ended

    def close(self) -> None:
        """Close what is left of the sentinels."""
        while self._children:
            os.close(self._children.popitem()[1])
