"""What of a process a fork of it could not live with: compared before and after an import."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.base.units import count_noun
from nbaccel.plan import registry
from nbaccel.workers.reaping import child_processes

__all__ = ["ProcessState", "lasting_threads", "native_threads", "open_descriptors"]


# Those above are glibc's own: it handles two of them as soon as a process has a thread.
_STANDARD_SIGNALS = (1 << 31) - 1
_SIGNAL_MASKS = ("SigBlk", "SigIgn", "SigCgt")

_WITHOUT_HARM = ("jemalloc_bg_thd", "ZMQbg")
_IN_MEMORY = ("/memfd:", "/dev/shm/")  # noqa: S108 - nothing is written there
_SETTLE_S = 0.3
_SETTLE_STEP_S = 0.002


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """Threads, signal handlers, descriptors, children and devices of this process.

    Attributes:
        num_threads: Threads of libraries, which a fork does not take along.
        signals: What Python does on each, and those that are blocked, ignored and handled, by C
            code, too.
        descriptors: What processes that are forked would share → what it is.
        children: Process ids.
        device_facts: What devices say against a fork.
    """

    num_threads: int
    signals: tuple[Any, ...]
    descriptors: Mapping[str, str]
    children: frozenset[int]
    device_facts: frozenset[str]

    @classmethod
    def now(cls) -> ProcessState:
        """That of this process. It must have no threads of its own but this one and the main."""
        return cls(
            num_threads=len(lasting_threads({os.getpid(), threading.get_native_id()})),
            signals=(*map(signal.getsignal, sorted(signal.valid_signals())), *_signal_masks()),
            descriptors=dict(_shared_descriptors()),
            children=frozenset(child_processes(os.getpid())),
            device_facts=frozenset(
                hazard_fact
                for device in registry.known_devices()
                for hazard_fact in device.hazards()
            ),
        )

    def changes_since(self, earlier: ProcessState) -> list[str]:
        """What a fork could not live with, and was not there earlier: clauses with "it"."""
        changes = []
        if new_threads := self.num_threads - earlier.num_threads:
            changes.append(f"it starts {count_noun(new_threads, 'thread')}")
        if self.signals != earlier.signals:
            changes.append("it changes how signals are handled")
        new_descriptors = self.descriptors.keys() - earlier.descriptors.keys()
        kept = sorted({self.descriptors[key] for key in new_descriptors})
        changes += [f"it keeps {what} open" for what in kept]
        if new_children := self.children - earlier.children:
            changes.append(f"it starts other programs ({len(new_children)})")
        changes += sorted(self.device_facts - earlier.device_facts)
        return changes


def native_threads() -> list[int]:
    """Ids of the threads of this process, those of C code included.

    Without jemalloc's (pyarrow brings it), which it ends before a fork and starts anew at once, and
    a kernel's ZeroMQ, which workers do not use.
    """
    return [
        int(thread_id)
        for thread_id in os.listdir("/proc/self/task")
        if not _name_of_thread(thread_id).startswith(_WITHOUT_HARM)
    ]


def _name_of_thread(thread_id: str) -> str:
    # Empty for one that has ended.
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread_id}/comm") as file:
        return file.read().strip()
    return ""


def open_descriptors() -> Iterator[tuple[int, str]]:
    """All descriptors of this process."""
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
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child_id = os.fork()
    if child_id == 0:
        os._exit(0)
    # Other code of this process may have waited for it.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child_id, 0)


def lasting_threads(own_ids: Collection[int]) -> set[int]:
    """Threads that would be missed in a fork, those of C code included."""
    if set(native_threads()) - set(own_ids):
        _trial_fork()
    # A thread that has been joined is still listed until the system has removed it.
    deadline = time.monotonic() + _SETTLE_S
    while (other_ids := set(native_threads()) - set(own_ids)) and time.monotonic() < deadline:
        time.sleep(_SETTLE_STEP_S)
    return other_ids


def _signal_masks() -> tuple[int, ...]:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return tuple(int(fields[name], 16) & _STANDARD_SIGNALS for name in _SIGNAL_MASKS)


def _shared_descriptors() -> Iterator[tuple[str, str]]:
    for file_descriptor, target in open_descriptors():
        key = f"{file_descriptor} {target}"
        if target.startswith(("pipe:", "socket:", "anon_inode:[eventpoll]")):
            yield key, "a socket, a pipe or an event loop"
        elif not target.startswith(_IN_MEMORY):
            with contextlib.suppress(OSError):
                # Each process would read on from where another one is.
                if stat.S_ISREG(os.fstat(file_descriptor).st_mode):
                    yield key, target
