"""Workers forked straight from the notebook process.

Everything the notebook has is there in the worker, and nothing is pickled. What makes a fork
unsafe is found out in `fork_safety`; this file cures what can be cured just before forking.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from nbaccel.workers import fork_safety, messaging, worker
from nbaccel.workers.reaping import reap
from nbaccel.workers.start_method import Starter


class ForkStarter(Starter):
    """Starts workers by forking this process."""

    def __init__(self, call: worker.WorkerCall | None = None, *, is_asked: bool = True) -> None:
        self._call = call
        self._children: set[int] = set()
        self.ours: list[int] = []
        """The notebook's own ends of all connections: a child closes them."""
        if is_asked:
            # The first optimizer of a process imports it (a second): once here, not in each worker.
            importlib.import_module("torch._dynamo")
        fork_safety.pause_pools()
        fork_safety.end_bar_monitors()

    def start(self, ends: messaging.WorkerEnds) -> int:
        """Fork a worker that owns these ends; returns its process id."""
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            # What is still buffered would be printed by the child as well.
            stream.flush()
        # Registered before the fork, so that a child which hangs at once can still be asked where.
        faulthandler.register(messaging.STACK_SIGNAL, file=ends.stack, all_threads=True)
        # A collection in the child would write to every page it shares with this process.
        gc.freeze()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of every fork with threads; `fork_safety` has judged these.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        finally:
            # The child runs the `finally` too, and must keep both.
            if os.getpid() == parent:
                gc.unfreeze()
                faulthandler.unregister(messaging.STACK_SIGNAL)
        if pid == 0:
            for descriptor in self.ours:
                os.close(descriptor)
            worker.run_worker(ends, parent, is_fork=True, forked_call=self._call)
        self._children.add(pid)
        return pid

    def collect(self) -> Sequence[messaging.Ended]:
        """Children that have ended since the last call, reaped."""
        ended = [one for one in map(reap, self._children) if one is not None]
        self._children.difference_update(one.pid for one in ended)
        return ended
