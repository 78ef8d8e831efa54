"""The template's last part, once all is imported: it forks workers on request and reaps them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Sequence
from typing import NoReturn

from nbaccel.transfer import memfd
from nbaccel.workers import messaging, worker
from nbaccel.workers.reaping import end_descendants, reap


class ForkServer:
    """Forks this process, which has one thread, until the notebook is gone."""

    def __init__(self, channel_fd: int, parent: Sequence[int]) -> None:
        self._channel = messaging.Channel.from_fd(channel_fd)
        self._parent = parent
        self._workers: set[int] = set()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            # `set_wakeup_fd` refuses a blocking end, and `_collect` empties the other one.
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        # Any handler: Python writes to the wakeup descriptor only for signals that have one.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        worker.find_libraries()

    def serve(self, left_out: dict[str, str]) -> NoReturn:
        """Report ready, serve until the notebook hangs up or dies, and leave."""
        try:
            self._channel.send(messaging.Ready(left_out))
            self._loop()
        finally:
            end_descendants()
            os._exit(0)

    def _loop(self) -> None:
        watched = [self._channel.fileno(), self._woken.fileno(), *self._parent]
        while True:
            readable, _, _ = select.select(watched, [], [])
            if self._woken.fileno() in readable:
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
            worker.set_before_fork(message.threads)
            pid = self._fork(descriptors)
            self._workers.add(pid)
            self._channel.send(messaging.Forked(pid))
        # Those of `Word.DISPOSE`, too.
        memfd.close_all(descriptors)
        return True

    def _fork(self, descriptors: list[int]) -> int:
        template = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        signal.set_wakeup_fd(-1)
        # A child that held this end would hide the end of the template from the notebook.
        for own_end in (self._channel, self._woken, self._waker):
            own_end.close()
        memfd.close_all(self._parent)
        channel, stdout, stderr, stack = descriptors
        ends = messaging.WorkerEnds(channel=channel, stdout=stdout, stderr=stderr, stack=stack)
        return worker.run_worker(ends, template)

    def _collect(self) -> None:
        # Emptied before reaping: a child that ends in between writes again and is found next time.
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                continue
        # All are looked at, because several SIGCHLD may be merged into one.
        for pid in tuple(self._workers):
            ended = reap(pid)
            if ended is not None:
                self._workers.discard(pid)
                # Before the report: the notebook takes it as the end of all the worker had started.
                end_descendants(kept_ids=self._workers)
                # The notebook is gone: the loop is about to return.
                with contextlib.suppress(OSError):
                    self._channel.send(ended)
