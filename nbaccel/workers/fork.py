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
from nbaccel.workers.fork_safety import pause_pools
from nbaccel.workers.reaping import reap
from nbaccel.workers.start_method import LocalProcesses


class ForkStarter(LocalProcesses):
    """Starts workers by forking this process. See `start_method.Starter`."""

    name = "fork"
    status: int | None = None

    def __init__(self, call: worker.WorkerCall | None = None, *, is_asked: bool = True) -> None:
        self._call = call
        self._children: dict[int, int] = {}
        self.ours: list[int] = []
        """The notebook's own ends of all connections: a child closes them."""
        if is_asked:
            # The first optimizer of a process imports it (a second): once here, not in each worker.
            importlib.import_module("torch._dynamo")
        pause_pools()
        fork_safety.end_bar_monitors()

    def start(self, ends: messaging.WorkerEnds) -> int:
        """Fork a worker that owns these ends; returns its process id."""
        parent_id = os.getpid()
        for output_stream in (sys.stdout, sys.stderr):
            # What is still buffered would be printed by the child as well.
            output_stream.flush()
        # Registered before the fork, so that a child which hangs at once can still be asked where.
        faulthandler.register(messaging.STACK_SIGNAL, file=ends.stack, all_threads=True)
        # A collection in the child would write to every page it shares with this process.
        gc.freeze()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of every fork with threads; `fork_safety` has judged these.
                warnings.simplefilter("ignore", DeprecationWarning)
                process_id = os.fork()
        finally:
            # The child runs the `finally` too, and must keep both.
            if os.getpid() == parent_id:
                gc.unfreeze()
                faulthandler.unregister(messaging.STACK_SIGNAL)
        if process_id == 0:
            for descriptor_to_close in self.ours:
                os.close(descriptor_to_close)
            worker.run_worker(ends, parent_id, is_fork=True, forked_call=self._call)
        # A pidfd becomes readable when the child ends, so one `select` waits for messages and ends.
        self._children[process_id] = os.pidfd_open(process_id)
        return process_id

    def sentinels(self) -> Sequence[int]:
        """A descriptor per child, readable once it has ended."""
        return list(self._children.values())

    def collect(self) -> Sequence[messaging.Ended]:
        """Children that have ended since the last call, reaped."""
        exit_statuses = [
            waited_status
            for process_id in self._children
            if (waited_status := reap(process_id)) is not None
        ]
        for process in exit_statuses:
            os.close(self._children.pop(process.pid))
        return exit_statuses

    def close(self) -> None:
        """Close what is left of the sentinels."""
        while self._children:
            os.close(self._children.popitem()[1])
