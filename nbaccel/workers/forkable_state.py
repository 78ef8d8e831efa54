"""What of a process a fork of it could not live with: compared before and after an import."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nbaccel.base.units import count_noun
from nbaccel.plan import registry
from nbaccel.workers.reaping import child_processes

__all__ = ["ProcessState", "name_of_thread", "native_threads", "open_descriptors", "open_files"]


# Those above are glibc's own: it handles two of them as soon as a process has a thread.
_STANDARD_SIGNALS = (1 << 31) - 1
_SIGNAL_MASKS = ("SigBlk", "SigIgn", "SigCgt")

_STARTED_ANEW = "jemalloc_bg_thd"
_IN_MEMORY = ("/memfd:", "/dev/shm/")  # noqa: S108 - nothing is written there
_SETTLE_S = 0.3
_SETTLE_STEP_S = 0.002


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """Threads, signal handlers, connections, children and devices of this process.

    Attributes:
        num_threads: Threads that a fork does not take along.
        handlers: What Python does on each signal.
        masks: Signals that are blocked, ignored and handled, C code's included.
        connections: Open sockets of the network.
        ends: Pipes, other sockets and what waits for events: processes that are forked share them.
        files: Paths of open files: processes that are forked read on from where another one is.
        children: Process ids.
        device_facts: What devices say against a fork.
    """

    num_threads: int
    handlers: tuple[Any, ...]
    masks: tuple[int, ...]
    connections: frozenset[str]
    ends: frozenset[str]
    files: frozenset[str]
    children: frozenset[int]
    device_facts: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        """That of this process. It has to be single-threaded but for threads of libraries."""
        return cls(
            num_threads=_lasting_threads(),
            handlers=tuple(map(signal.getsignal, sorted(signal.valid_signals()))),
            masks=_signal_masks(),
            connections=frozenset(_network_sockets()),
            ends=frozenset(_shared_ends()),
            files=open_files(),
            children=frozenset(child_processes(os.getpid())),
            device_facts=frozenset(
                hazard_fact
                for device in registry.known_devices()
                for hazard_fact in device.hazards()
            ),
        )

    def changes_since(self, earlier: ProcessState) -> list[str]:
        """What a fork could not live with, and was not there earlier: clauses with "it".

        Args:
            earlier: The state before.
        """
        changes = []
        if new_threads := self.num_threads - earlier.num_threads:
            changes.append(f"it starts {count_noun(new_threads, 'thread')}")
        if self.handlers != earlier.handlers or self.masks != earlier.masks:
            changes.append("it changes how signals are handled")
        if new_connections := self.connections - earlier.connections:
            changes.append(f"it opens {count_noun(len(new_connections), 'network connection')}")
        if self.ends - earlier.ends and not new_connections:
            changes.append("it keeps a pipe, a socket or an event loop open")
        if new_files := sorted(self.files - earlier.files):
            changes.append(f"it keeps {new_files[0]} open")
        if new_children := self.children - earlier.children:
            changes.append(f"it starts other programs ({len(new_children)})")
        changes += sorted(self.device_facts - earlier.device_facts)
        return changes


def native_threads() -> list[int]:
    """Ids of the threads of this process, those of C code included.

    Without jemalloc's (pyarrow brings it), which it ends before a fork and starts anew at once.
    """
    return [
        int(thread_id)
        for thread_id in os.listdir("/proc/self/task")
        if not name_of_thread(int(thread_id)).startswith(_STARTED_ANEW)
    ]


def name_of_thread(thread_id: int) -> str:
    """What the system calls a thread; empty for one that has ended.

    Args:
        thread_id: Its native id.
    """
    try:
        with open(f"/proc/self/task/{thread_id}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def open_files() -> frozenset[str]:
    """Paths of the regular files that this process has open, those in memory left out."""
    paths = set()
    for file_descriptor, path in open_descriptors():
        with contextlib.suppress(OSError):
            is_file = stat.S_ISREG(os.fstat(file_descriptor).st_mode)
            if is_file and not path.startswith(_IN_MEMORY):
                paths.add(path)
    return frozenset(paths)


def open_descriptors() -> Iterator[tuple[int, str]]:
    """All descriptors of this process.

    Yields:
        The descriptor, and what it is of: a path, or ``socket:[1]`` with the inode.
    """
    for name in os.listdir("/proc/self/fd"):
        # It may have been closed meanwhile, and that of the folder itself is.
        with contextlib.suppress(OSError):
            yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _trial_fork() -> None:
    """Fork a child that leaves at once.

    Libraries that can be forked end their threads before that and start them again when they are
    needed (pthread_atfork): OpenBLAS, which numpy and scipy bring, does. What is left afterwards
    are threads of others.
    """
    child_id = os.fork()
    if child_id == 0:
        os._exit(0)
    # Other code of this process may have waited for it.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child_id, 0)


def _lasting_threads() -> int:
    if len(native_threads()) > 1:
        _trial_fork()
    # A thread that has been joined is still listed until the system has removed it.
    deadline = time.monotonic() + _SETTLE_S
    while (num_threads := len(native_threads())) > 1 and time.monotonic() < deadline:
        time.sleep(_SETTLE_STEP_S)
    return num_threads


def _signal_masks() -> tuple[int, ...]:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return tuple(int(fields[name], 16) & _STANDARD_SIGNALS for name in _SIGNAL_MASKS)


def _shared_ends() -> list[str]:
    return [
        f"{file_descriptor} {target}"
        for file_descriptor, target in open_descriptors()
        if target.startswith(("pipe:", "socket:", "anon_inode:[eventpoll]"))
    ]


def _network_sockets() -> list[str]:
    sockets = []
    for file_descriptor, target in open_descriptors():
        if target.startswith("socket:"):
            # A copy: the object closes its descriptor.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(file_descriptor)) as open_socket,
            ):
                if open_socket.family in (socket.AF_INET, socket.AF_INET6):
                    sockets.append(target)
    return sockets
