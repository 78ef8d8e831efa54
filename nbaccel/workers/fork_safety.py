"""What makes a fork of this process unsafe, found without starting anything; OpenMP's threads.

A running pool does not survive a fork: the child waits for threads that do not exist. OpenMP 5.0
(section 3.2.44, omp_pause_resource_all) lets a program give the pool up; the next parallel region
builds a new one. It must be asked of every OpenMP runtime in the process, and scikit-learn, torch
and others bring their own copies.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from nbaccel.plan import registry
from nbaccel.workers import forkable_state

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
    for known_device in registry.possible_devices():
        for hazard_fact in known_device.hazards():
            yield Hazard(fact=hazard_fact, consequence=known_device.after_fork, is_fatal=True)
    if _has_process_group():
        yield Hazard(
            fact="a torch.distributed process group is alive in the notebook",
            consequence="a forked worker inherits it without its threads and hangs; end it with "
            "torch.distributed.destroy_process_group()",
            is_fatal=True,
        )
    for library_path in pools_that_stay():
        yield Hazard(
            fact=(
                f"threads of {os.path.basename(library_path)}, an OpenMP runtime that cannot give "
                "them up"
            ),
            consequence="a forked worker hangs in its first parallel operation; a newer torch "
            "brings a runtime that can",
            is_fatal=True,
        )
    # Not fatal: whether a lock is held at the moment of the fork cannot be known.
    thread_names = [
        foreign_thread.name
        for foreign_thread in threading.enumerate()
        if _is_foreign(foreign_thread)
    ]
    if thread_names:
        yield Hazard(
            fact=(
                f"{len(thread_names)} thread(s) of yours are running "
                f"({', '.join(thread_names[:4])})"
            ),
            consequence="a lock that one of them holds at the fork stays locked for ever in the "
            "worker",
            is_fatal=False,
        )


def has_native_threads() -> bool:
    """Whether a library has threads beside Python's (polars, TensorFlow): a fork would miss them.

    OpenMP's are ended for it.
    """
    pause_pools()
    python_ids = [live_thread.native_id or 0 for live_thread in threading.enumerate()]
    return bool(forkable_state.lasting_threads(python_ids))


def end_bar_monitors() -> None:
    """End the thread that tqdm starts with the first bar of a process, and keeps.

    It takes the lock of all bars from time to time, and a fork would inherit the lock taken. The
    next bar starts a new monitor.
    """
    for live_thread in threading.enumerate():
        if _is_bar_monitor(live_thread):
            live_thread.exit()  # type: ignore[attr-defined]


def _has_process_group() -> bool:
    torch_distributed = sys.modules.get("torch.distributed")
    return bool(
        torch_distributed
        and torch_distributed.is_available()
        and torch_distributed.is_initialized()
    )


def _is_foreign(live_thread: threading.Thread) -> bool:
    """Whether it is a thread of the user's, not of the kernel or the one that launches."""
    if live_thread in (threading.main_thread(), threading.current_thread()):
        return False
    if live_thread.name.startswith(_KERNEL_NAMES) or live_thread.name.endswith(_KERNEL_TARGETS):
        return False
    if _is_bar_monitor(live_thread):
        return False
    return not type(live_thread).__module__.startswith(_KERNEL_MODULES)


def _is_bar_monitor(live_thread: threading.Thread) -> bool:
    return type(live_thread).__module__ == "tqdm._monitor"


_PAUSE_HARD = 2  # omp_pause_hard: give up everything
_POOL_SETTLE_S = 0.3  # a pool's threads spin for some milliseconds before they sleep
_SLEEP_POLL_S = 0.02
_PAUSE_FUNCTION = "omp_pause_resource_all"
_RUNTIME_PATH = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")


def loaded_runtimes() -> list[str]:
    """Paths of the OpenMP libraries mapped into this process."""
    with open("/proc/self/maps") as memory_maps:
        library_paths = {
            line.split(maxsplit=5)[5].strip()
            for line in memory_maps
            if line.count(" ") > 4 and "/" in line
        }
    return sorted(
        library_path for library_path in library_paths if _RUNTIME_PATH.search(library_path)
    )


def pools_that_stay() -> list[str]:
    """Runtimes that have no way to give up their threads, and have some.

    The libgomp that torch 2.6 brings is from before OpenMP 5.0. A thread of its pool sleeps in its
    code, and the system tells where each thread of this process sleeps.
    """
    unpausable_paths = [
        library_path
        for library_path in loaded_runtimes()
        if not hasattr(ctypes.CDLL(library_path), _PAUSE_FUNCTION)
    ]
    return [library_path for library_path in unpausable_paths if _has_threads(library_path)]


def pause_pools() -> list[str]:
    """Give up the thread pools of all OpenMP runtimes; returns those that refused.

    Call it in the thread that ran parallel code (in a notebook, the main one), right before a fork.
    """
    refused_paths = []
    for library_path in loaded_runtimes():
        function = getattr(ctypes.CDLL(library_path), _PAUSE_FUNCTION, None)
        if function is None or function(_PAUSE_HARD) != 0:
            refused_paths.append(library_path)
    return refused_paths


def _has_threads(path: str) -> bool:
    code_ranges = _code_of(path)
    deadline = time.monotonic() + _POOL_SETTLE_S
    while True:
        # A sleeping thread of a pool waits in the runtime's code; a running one is looked at again.
        sleep_addresses = [
            _sleep_address(int(thread_id)) for thread_id in os.listdir("/proc/self/task")
        ]
        if any(
            range_start <= sleep_address < range_end
            for sleep_address in sleep_addresses
            if sleep_address
            for range_start, range_end in code_ranges
        ):
            return True
        if None not in sleep_addresses or time.monotonic() > deadline:
            return False
        time.sleep(_SLEEP_POLL_S)


def _code_of(path: str) -> list[tuple[int, int]]:
    """The addresses at which a library is mapped."""
    with open("/proc/self/maps") as memory_maps:
        address_ranges = [
            line.split()[0].split("-") for line in memory_maps if line.rstrip().endswith(path)
        ]
    return [(int(range_start, 16), int(range_end, 16)) for range_start, range_end in address_ranges]


def _sleep_address(thread_id: int) -> int | None:
    """The address at which a thread sleeps; 0 for this one and those gone, None if it runs."""
    if thread_id == threading.get_native_id():
        return 0
    try:
        with open(f"/proc/self/task/{thread_id}/syscall") as file:
            words = file.read().split()
    # The thread has ended, or the system has no such file.
    except OSError:
        return 0
    return None if words[0] == "running" else int(words[-1], 16)
