"""The template's last part, once all is imported: it forks workers on request and reaps them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from typing import NoReturn

from nbaccel.transfer import memfd
from nbaccel.workers import messaging, worker
from nbaccel.workers.reaping import end_descendants
from nbaccel.workers.worker_processes import reap


class ForkServer:
    """Forks this process, which has one thread, until the notebook is gone."""

    def __init__(self, channel_fd: int, parent: Sequence[int]) -> None:
        self._channel = messaging.Channel.from_fd(channel_fd)
        self._parent = parent
        self._reports: dict[int, messaging.Channel] = {}  # worker → where its end is told
        # `set_wakeup_fd` refuses a blocking end, and `_collect` empties the other one.
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._waker)
        # Any handler: Python writes to the wakeup descriptor only for signals that have one.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        worker.find_libraries()

    def serve(self) -> NoReturn:
        """Serve until the notebook hangs up or dies, and leave."""
        try:
            self._loop()
        finally:
            end_descendants()
            os._exit(0)

    def _loop(self) -> None:
        watched = [self._channel.fileno(), self._woken, *self._parent]
        while True:
            readable, _, _ = select.select(watched, [], [])
            if self._woken in readable:
                self._collect()
            if self._channel.fileno() in readable and not self._serve_one():
                return
            if any(descriptor in readable for descriptor in self._parent):
                return

    def _serve_one(self) -> bool:
        try:
            message, descriptors = self._channel.receive()
        except EOFError:
            return False
        if isinstance(message, messaging.Fork):
            if message.threads:
                worker.tell_libraries(message.threads)
            report = messaging.Channel.from_fd(descriptors.pop())
            pid = self._fork(report, descriptors)
            self._reports[pid] = report
            self._report(pid, pid)
        # Those of `Word.DISPOSE`, too.
        memfd.close_all(descriptors)
        return True

    def _fork(self, report: messaging.Channel, descriptors: list[int]) -> int:
        template = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        signal.set_wakeup_fd(-1)
        # A child that held these ends would hide the end of the template from the notebook.
        for channel in (self._channel, report, *self._reports.values()):
            channel.close()
        memfd.close_all([self._woken, self._waker, *self._parent])
        return worker.run_worker(messaging.WorkerEnds(*descriptors), template)

    def _collect(self) -> None:
        # Emptied before reaping: a child that ends in between writes again and is found next time.
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 4096):
                continue
        # All are looked at, because several SIGCHLD may be merged into one.
        for pid in tuple(self._reports):
            ended = reap(pid)
            if ended is not None:
                # Before the report: the notebook takes it as the end of all the worker had started.
                end_descendants(kept_ids=self._reports.keys() - {pid})
                self._report(pid, ended)
                self._reports.pop(pid).close()

    def _report(self, pid: int, news: int | messaging.Ended) -> None:
        # Who has asked for the worker waits for it no more.
        with contextlib.suppress(OSError):
            self._reports[pid].send(news)
