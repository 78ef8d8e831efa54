"""Process groups in a live worker: joined when first needed, cut when stuck, begun anew after that.

[Note: joined on request] `dist.all_reduce(x)` in a cell needs no set-up: the first use of the
default group joins it, and the notebook asks the workers that are idle to join as well. (Those that
run the same cell come by themselves.) `init_process_group()` in a cell that is run twice finds the
group there and leaves it.

[Note: cutting] A rank whose peers have failed waits in C++ for ever, deaf to signals. Its second
thread then shuts down the sockets that belong to its groups, and the wait ends with an error. NCCL
has `abort` for that. Groups that were cut, or whose ranks have begun different numbers of
collectives, are of no more use: all ranks leave them, and the next use makes new ones under a new
prefix in the store. DDP models take these up in their next forward (`reattach`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from nbaccel.config.handlers import InitProcessGroupKwargs
from nbaccel.errors import ConfigError
from nbaccel.launch import rendezvous
from nbaccel.launch.sharing import shards
from nbaccel.pool import reattach
from nbaccel.pool.messages import GroupWanted
from nbaccel.topology import Topology
from nbaccel.train import arrival

__all__ = ["Groups"]

_CLOSING_S = 1.0  # gloo takes less than a millisecond to close what was shut down
_Wanted = Callable[[GroupWanted], None]


class Groups:
    """The process groups of one worker.

    Args:
        place: The worker's place.
        wanted: Tells the notebook that this rank is about to wait for all others.
    """

    def __init__(self, place: Topology, wanted: _Wanted) -> None:
        self._place = place
        self._wanted = wanted
        self._generation = 0
        self._made = 0
        self._sockets: set[int] = set()  # inodes of those that belong to groups
        self._before: set[int] | None = None  # while a group is being made
        self._left: list[Any] = []
        self._left_defaults: list[Any] = []
        self.left_for = ""
        """Why the groups before these were left, if so."""

    def watch(self) -> None:
        """Take part in how torch makes and finds groups. Once per worker."""
        rendezvous.meet_here(self._place, self._next_name)
        reattach.watch(lambda group: any(group is left for left in self._left_defaults))
        c10d = dist.distributed_c10d
        found, made = c10d._get_default_group, c10d._new_process_group_helper
        joined, destroyed = c10d.init_process_group, c10d.destroy_process_group

        def default_group() -> Any:
            if not dist.is_initialized():
                self.join()
            return found()

        def make(*args: Any, **kwargs: Any) -> Any:
            with self._noting_sockets():
                return made(*args, **kwargs)

        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():
                self._check_same(backend)
                return
            timeout = kwargs.get("timeout") or timedelta(seconds=arrival.timeout_s(None))
            self._wanted(
                GroupWanted(
                    generation=self._generation,
                    ordinal=self._made,
                    backend=backend,
                    timeout_s=timeout.total_seconds(),
                )
            )
            joined(backend, *args, **kwargs)

        def destroy_process_group(group: Any = None) -> None:
            destroyed(group)
            if not dist.is_initialized():
                self._close_sockets()
                shards.forget_groups()

        c10d._get_default_group = default_group
        c10d._new_process_group_helper = make
        for module in (c10d, dist):
            module.init_process_group = init_process_group  # type: ignore[attr-defined]
            module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]

    def _next_name(self) -> str:
        """Where the ranks of the next default group meet in the store."""
        self._made += 1
        return f"generation_{self._generation}/group_{self._made}"

    def join_others(self, wanted: GroupWanted) -> None:
        """Join the group that another rank is waiting in; not if this rank has been in it."""
        if (self._generation, self._made) == (wanted.generation, wanted.ordinal):
            self.join(wanted.backend, wanted.timeout_s)

    def join(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Join the default group, if this worker is in none yet."""
        if not dist.is_initialized():
            seconds = timeout_s or arrival.timeout_s(None)
            timeout = timedelta(seconds=seconds)
            settings = InitProcessGroupKwargs(backend=backend, timeout=timeout)
            if self._place.world_size > 1:
                arrival.arrive(settings=settings)
            else:  # alone, `arrive` sees no need for a group; a collective in a cell does
                dist.init_process_group(backend or "gloo", timeout=timeout)

    def sequence(self) -> tuple[tuple[str, int], ...]:
        """How many collectives each group has begun: equal on all ranks that are in step."""
        found = []
        for group, name in dist.distributed_c10d._pg_names.items():
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                count = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
                found.append((name, int(count)))
        return tuple(sorted(found))

    def cut(self) -> None:
        """Let a collective that will never complete fail. For the second thread."""
        for group in tuple(dist.distributed_c10d._pg_map):
            for device in tuple(group._device_types):
                backend = group._get_backend(device)
                # gloo's own `abort` does not reach a wait that has begun (torch 2.13).
                if backend.name() != "gloo" and hasattr(backend, "abort"):
                    backend.abort()
        mine = set(self._sockets)
        if self._before is not None:
            mine |= set(_sockets()) - self._before
        for inode, fd in _sockets().items():
            if inode in mine:
                _shut(fd, spared_port=self._place.master_port)

    def leave(self, generation: int, reason: str) -> None:
        """Drop every group; the next one is made in this generation.

        Args:
            generation: The same number on all ranks.
            reason: Why, for whoever meets an object that holds one of them.
        """
        self._generation = generation
        self._made = 0
        if dist.is_initialized():
            self.left_for = reason
            self._left += dist.distributed_c10d._pg_map
            self._left_defaults.append(dist.group.WORLD)
            with contextlib.suppress(RuntimeError, ValueError):  # they are broken: that is why
                dist.destroy_process_group()
            shards.forget_groups()
        self._close_sockets()

    def are_behind(self, tb: TracebackType | None) -> bool:
        """Whether an error comes of the use of a group that was left."""
        while tb is not None:
            held = tuple(tb.tb_frame.f_locals.values())
            if any(value is left for value in held for left in self._left):
                return True
            tb = tb.tb_next
        return False

    def _close_sockets(self) -> None:
        """Close what gloo leaves open: `process_groups.keep` keeps its objects, not their ports.

        Connections are shut down, and gloo's own threads close them. One that finds the null device
        where its peer has just hung up would end this process; see `docs/upstream.md`. The numbers
        of the rest stay taken, by the null device, so that these threads touch nothing else.
        """
        shut = {
            inode
            for inode, fd in _sockets().items()
            if inode in self._sockets and _shut(fd, spared_port=self._place.master_port)
        }
        deadline = time.monotonic() + _CLOSING_S
        while shut & _sockets().keys() and time.monotonic() < deadline:
            time.sleep(0.001)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for inode, fd in _sockets().items():
            if inode in self._sockets:
                os.dup2(null, fd, inheritable=False)
        os.close(null)
        self._sockets.clear()

    def _check_same(self, backend: str | None) -> None:
        have = str(dist.get_backend_config())
        if backend is not None and backend not in have:
            raise ConfigError(
                f"init_process_group({backend!r}): this worker is in a process group over {have} "
                "already, and a second default group cannot be had. Leave the call out, call "
                "dist.destroy_process_group() on all ranks first, or use dist.new_group for "
                "another backend."
            )

    @contextlib.contextmanager
    def _noting_sockets(self) -> Iterator[None]:
        """What is connected while a group is made belongs to it."""
        before = set(_sockets())
        outer, self._before = self._before, before if self._before is None else self._before
        try:
            yield
        finally:
            self._before = outer
            self._sockets |= set(_sockets()) - before


def _sockets() -> dict[int, int]:
    """Inode → descriptor of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def _shut(fd: int, *, spared_port: int) -> bool:
    """Shut a TCP connection down, unless this process serves the store over it.

    Returns:
        Whether it is, or was, such a connection.
    """
    with contextlib.suppress(OSError):  # closed meanwhile
        sock = socket.socket(fileno=os.dup(fd))
        with sock:
            internet = sock.family in (socket.AF_INET, socket.AF_INET6)
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not internet or listens or sock.getsockname()[1] == spared_port:
                return False
            with contextlib.suppress(OSError):  # shut already, by either side
                sock.shutdown(socket.SHUT_RDWR)
            return True
    return False
