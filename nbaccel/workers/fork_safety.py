"""What a fork of this process could not live with, found without starting anything.

Asked of a notebook before it is forked (`hazards`), and of a template after each import
(`ProcessState`).

A running OpenMP pool does not survive a fork: the child waits for threads that do not exist. OpenMP
5.0 (section 3.2.44, omp_pause_resource_all) lets a program give the pool up; the next parallel
region builds a new one. It must be asked of every OpenMP runtime in the process, and scikit-learn,
torch and others bring their own copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.base.units import count_noun
from nbaccel.plan import registry
from nbaccel.workers.reaping import child_processes

_KERNEL_MODULES = ("ipykernel", "IPython", "tornado", "zmq", "debugpy", "pydevd", "_pydevd")
_KERNEL_NAMES = ("IOPub", "Heartbeat", "Control", "Shell channel", "IPythonHistorySavingThread")

# Python names a thread without a name after its function: ipykernel 7.4 has two such threads. The
# other is jupyter_core's, which waits for coroutines.
_KERNEL_TARGETS = ("(_watch_pipe_fd)", " - runner")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """One fact that makes a fork of this process unsafe."""

    fact: str
    consequence: str
    is_fatal: bool
    """Whether workers would certainly hang or crash; otherwise they may."""

    def __str__(self) -> str:
        return f"{self.fact}: {self.consequence}"


def hazards() -> tuple[Hazard, ...]:
    """Everything in this process that a forked worker could not live with.

    An OpenMP pool and tqdm's monitor are not among them: they are ended just before the fork. Only
    a pool that cannot be ended is.
    """
    return tuple(_find_hazards())


def _find_hazards() -> Iterator[Hazard]:
    for device in registry.possible_devices():
        for fact in device.hazards():
            yield Hazard(fact=fact, consequence=device.after_fork, is_fatal=True)
    if _has_process_group():
        yield Hazard(
            fact="a torch.distributed process group is alive in the notebook",
            consequence="a forked worker inherits it without its threads and hangs; end it with "
            "torch.distributed.destroy_process_group()",
            is_fatal=True,
        )
    for path in pools_that_stay():
        yield Hazard(
            fact=f"threads of {os.path.basename(path)}, an OpenMP runtime that cannot give them up",
            consequence="a forked worker hangs in its first parallel operation; a newer torch "
            "brings a runtime that can",
            is_fatal=True,
        )
    # Not fatal: whether a lock is held at the moment of the fork cannot be known.
    names = [thread.name for thread in threading.enumerate() if _is_foreign(thread)]
    if names:
        yield Hazard(
            fact=f"{len(names)} thread(s) of yours are running ({', '.join(names[:4])})",
            consequence="a lock that one of them holds at the fork stays locked for ever in the "
            "worker",
            is_fatal=False,
        )


def has_native_threads() -> bool:
    """Whether a library has threads beside Python's (polars, TensorFlow): a fork would miss them.

    OpenMP's are ended for it.
    """
    pause_pools()
    return bool(lasting_threads([thread.native_id or 0 for thread in threading.enumerate()]))


def end_bar_monitors() -> None:
    """End the thread that tqdm starts with the first bar of a process, and keeps.

    It takes the lock of all bars from time to time, and a fork would inherit the lock taken. The
    next bar starts a new monitor.
    """
    for thread in threading.enumerate():
        if _is_bar_monitor(thread):
            thread.exit()  # type: ignore[attr-defined]


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized())


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether it is a thread of the user's, not of the kernel or the one that launches."""
    if thread in (threading.main_thread(), threading.current_thread()) or _is_bar_monitor(thread):
        return False
    if thread.name.startswith(_KERNEL_NAMES) or thread.name.endswith(_KERNEL_TARGETS):
        return False
    return not type(thread).__module__.startswith(_KERNEL_MODULES)


def _is_bar_monitor(thread: threading.Thread) -> bool:
    return type(thread).__module__ == "tqdm._monitor"


# ------------------------------------------------------------------------- OpenMP

_PAUSE_HARD = 2  # omp_pause_hard: give up everything
_POOL_SETTLE_S = 0.3  # a pool's threads spin for some milliseconds before they sleep
_SLEEP_POLL_S = 0.02
_PAUSE_FUNCTION = "omp_pause_resource_all"
_RUNTIME_PATH = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")


def _loaded_runtimes() -> dict[str, list[tuple[int, int]]]:
    """OpenMP libraries mapped into this process → the addresses at which they are mapped."""
    runtimes: dict[str, list[tuple[int, int]]] = {}
    with open("/proc/self/maps") as memory_maps:
        for line in memory_maps:
            addresses, *_, path = line.rstrip("\n").split(maxsplit=5)
            if _RUNTIME_PATH.search(path):
                first, end = addresses.split("-")
                runtimes.setdefault(path, []).append((int(first, 16), int(end, 16)))
    return runtimes


def pools_that_stay() -> list[str]:
    """Runtimes that have no way to give up their threads, and have some.

    The libgomp that torch 2.6 brings is from before OpenMP 5.0. A thread of its pool sleeps in its
    code, and the system tells where each thread of this process sleeps.
    """
    return [
        path
        for path, ranges in _loaded_runtimes().items()
        if not hasattr(ctypes.CDLL(path), _PAUSE_FUNCTION) and _has_threads(ranges)
    ]


def pause_pools() -> None:
    """Give up the thread pools of all OpenMP runtimes that can.

    Call it in the thread that ran parallel code (in a notebook, the main one), right before a fork.
    """
    for path in _loaded_runtimes():
        pause = getattr(ctypes.CDLL(path), _PAUSE_FUNCTION, None)
        if pause is not None:
            pause(_PAUSE_HARD)


def _has_threads(code_ranges: Collection[tuple[int, int]]) -> bool:
    deadline = time.monotonic() + _POOL_SETTLE_S
    while True:
        # A sleeping thread of a pool waits in the runtime's code; a running one is looked at again.
        addresses = [_sleep_address(int(thread)) for thread in os.listdir("/proc/self/task")]
        asleep = [address for address in addresses if address]
        if any(first <= address < end for address in asleep for first, end in code_ranges):
            return True
        if None not in addresses or time.monotonic() > deadline:
            return False
        time.sleep(_SLEEP_POLL_S)


def _sleep_address(thread: int) -> int | None:
    """The address at which a thread sleeps; 0 for this one and those gone, None if it runs."""
    if thread == threading.get_native_id():
        return 0
    try:
        with open(f"/proc/self/task/{thread}/syscall") as file:
            words = file.read().split()
    # The thread has ended, or the system has no such file.
    except OSError:
        return 0
    return None if words[0] == "running" else int(words[-1], 16)


# ------------------------------------------------------------------------- after an import

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
                fact for device in registry.known_devices() for fact in device.hazards()
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
    threads = []
    for thread in os.listdir("/proc/self/task"):
        # It may have ended.
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            if not file.read().startswith(_WITHOUT_HARM):
                threads.append(int(thread))
    return threads


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
        child = os.fork()
    if child == 0:
        os._exit(0)
    # Other code of this process may have waited for it.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def lasting_threads(own_ids: Collection[int]) -> set[int]:
    """Threads that would be missed in a fork, those of C code included."""
    if set(native_threads()) - set(own_ids):
        _trial_fork()
    # A thread that has been joined is still listed until the system has removed it.
    deadline = time.monotonic() + _SETTLE_S
    while (others := set(native_threads()) - set(own_ids)) and time.monotonic() < deadline:
        time.sleep(_SETTLE_STEP_S)
    return others


def _signal_masks() -> tuple[int, ...]:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return tuple(int(fields[name], 16) & _STANDARD_SIGNALS for name in _SIGNAL_MASKS)


def _shared_descriptors() -> Iterator[tuple[str, str]]:
    for descriptor, target in open_descriptors():
        key = f"{descriptor} {target}"
        if target.startswith(("pipe:", "socket:", "anon_inode:[eventpoll]")):
            yield key, "a socket, a pipe or an event loop"
        elif not target.startswith(_IN_MEMORY):
            with contextlib.suppress(OSError):
                # Each process would read on from where another one is.
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    yield key, target
