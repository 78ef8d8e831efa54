"""The template process: clean, single-threaded, everything imported; workers are forked from it.

    notebook ── channel ──► template ── fork ──► worker, worker, …
             ◄── Ready, Forked, Ended ──

It has never touched a GPU, an autograd engine or an OpenMP pool, whatever the notebook has done, so
a fork of it is safe. It exits when the notebook is gone or hangs up, and takes its workers along.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import NoReturn

# The first optimizer of a process imports torch._dynamo (one to two seconds): here it is paid once.
_PREIMPORTED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "numpy.random",
    "nbaccel.launch.worker",
    "nbaccel.devices.cpu",
    "nbaccel.devices.cuda",
    "nbaccel.pool.worker",
)
_FOR_NOTEBOOKS = (
    "IPython.core.interactiveshell",
    "IPython.core.displaypub",
    "nbaccel.pool.interactive",
)


def serve(channel_fd: int, parent: int, *, in_notebook: bool) -> NoReturn:
    """Import, report ready, then fork on request until the notebook is gone."""
    _die_with(parent)
    for name in _PREIMPORTED + (_FOR_NOTEBOOKS if in_notebook else ()):
        importlib.import_module(name)
    from nbaccel.launch import wire
    from nbaccel.launch.reaping import adopt_orphans

    adopt_orphans()
    channel = wire.Channel.from_fd(channel_fd)
    server = _Server(channel, parent)
    _rehearse()
    gc.collect()
    gc.freeze()  # a collection in a worker would write to every page it shares with this process
    channel.send(wire.Ready(os.getpid()))
    try:
        server.loop()
    finally:
        server.end_all()
        os._exit(0)


def _rehearse() -> None:
    """Hand a small model over once: what Python and torch set up at first use, workers inherit."""
    from torch import nn

    from nbaccel.launch.sharing import arena, home, memory, parcel

    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    sharing = arena.share([("model", model)])
    sender = parcel.Sender.create()
    (shared,) = sharing.arenas()
    key = sender.key(shared)
    packed, fd = parcel.pack((model, home.manifests(sharing, sender.keys)), sender)
    mappings = {key: memory.Mapping(shared.fd, shared.nbytes, private=True)}
    with memory.closing(fd):
        copy, (manifest,) = parcel.unpack(packed, fd, mappings)
    home.Homebound(rank=0, modules=[(manifest, copy)], mappings=mappings, staging={}).write()


def _die_with(parent: int) -> None:
    if os.getppid() != parent:
        sys.exit("the notebook process ended before its template process started")


class _Server:
    def __init__(self, channel: object, parent: int) -> None:
        from nbaccel.launch import wire

        self._wire = wire
        self._channel: wire.Channel = channel  # type: ignore[assignment]
        self._workers: set[int] = set()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wakeup fd is used
        self._parent = _open_process(parent)

    def loop(self) -> None:
        """Serve until the notebook hangs up or dies."""
        watched = [self._channel.fileno(), self._woken.fileno(), *self._parent]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._woken.fileno() in ready:
                self._collect()
            if self._channel.fileno() in ready and not self._serve_one():
                return
            if any(fd in ready for fd in self._parent):
                return

    def _serve_one(self) -> bool:
        try:
            message, fds = self._channel.receive()
        except EOFError:
            return False
        if isinstance(message, self._wire.Fork):
            pid = self._fork(fds)
            self._workers.add(pid)
            self._channel.send(self._wire.Forked(message.ticket, pid))
        for fd in fds:
            os.close(fd)
        return True

    def _fork(self, fds: list[int]) -> int:
        template = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        from nbaccel.launch import worker

        self._channel.close()
        self._woken.close()
        for fd in self._parent:
            os.close(fd)
        channel, stdout, stderr, stack = fds
        return worker.main(
            worker.Ends(channel=channel, stdout=stdout, stderr=stderr, stack=stack), template
        )

    def _collect(self) -> None:
        from nbaccel.launch.reaping import end_descendants, reap

        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                continue
        for pid in tuple(self._workers):
            ended = reap(pid)
            if ended is not None:
                self._workers.discard(pid)
                end_descendants(keep=self._workers)  # before anybody believes that it is over
                with contextlib.suppress(OSError):  # nobody listens: we are about to leave anyway
                    self._channel.send(ended)

    def end_all(self) -> None:
        """Kill all workers, and whatever they have started."""
        from nbaccel.launch.reaping import end_descendants

        end_descendants()


def _open_process(pid: int) -> list[int]:
    """A descriptor that becomes readable when the process ends, where the system has them."""
    try:
        return [os.pidfd_open(pid)]
    except (OSError, AttributeError):
        return []
