"""What a fork of this process could not live with, found without starting anything.

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
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from nbaccel.base.errors import UnsafeFork
from nbaccel.base.log import write_notice
from nbaccel.plan import registry

_KERNEL_MODULES = ("ipykernel", "IPython", "tornado", "zmq", "debugpy", "pydevd", "_pydevd")
# The kernel's; and that of a `multiprocessing.Queue`, which is made to be forked.
_SAFE_NAMES = (
    *("IOPub", "Heartbeat", "Control", "Shell channel", "IPythonHistorySavingThread"),
    "QueueFeederThread",
)

# Threads without a name have their function's: ipykernel 7.4's, and jupyter_core's for coroutines.
_KERNEL_TARGETS = ("(_watch_pipe_fd)", " - runner")


def hazards() -> dict[str, bool]:
    """What a forked worker could not live with, each with whether it would certainly hang."""
    found = {
        f"{fact}: {device.after_fork}": True
        for device in registry.possible_devices()
        for fact in device.hazards()
    }
    if has_process_group():
        found[
            "a torch.distributed process group is alive in the notebook: a forked worker lacks its "
            "threads and hangs; end it with torch.distributed.destroy_process_group()"
        ] = True
    # torch 2.6 brings one. Where it may use one thread, that is the caller's own.
    too_old = [
        path
        for path, pause in _openmp_runtimes().items()
        if pause is None and ctypes.CDLL(path).omp_get_max_threads() > 1
    ]
    for path in too_old if too_old and has_native_threads() else ():
        found[
            f"threads of {os.path.basename(path)}, an OpenMP runtime that cannot give them up: a "
            "forked worker hangs in its first parallel operation; a newer torch brings one that can"
        ] = True
    names = [thread.name for thread in threading.enumerate() if _is_foreign(thread)]
    if names:
        # Not certain: whether a lock is held at the moment of the fork cannot be known.
        found[
            f"{len(names)} thread(s) of yours are running ({', '.join(names[:4])}): a lock that "
            "one of them holds at the fork stays locked for ever in the worker"
        ] = False
    return found


def judge_fork() -> None:
    """Report what makes a fork of this process unsafe."""
    found = hazards()
    fatal = [hazard for hazard, is_certain in found.items() if is_certain]
    if fatal:
        raise UnsafeFork(
            "start_method='fork' cannot work in this notebook as it is now:\n"
            + "\n".join(f"  {hazard}" for hazard in fatal)
            + "\nUse start_method='template' (the default): its workers are forked from a clean "
            "process, so no restart of the notebook is needed."
        )
    for hazard in found:
        write_notice(f"nbaccel: {hazard}. start_method='template' is safe from that.\n")


def has_native_threads() -> bool:
    """Whether a library has threads beside Python's (polars, TensorFlow); OpenMP's are ended."""
    pause_pools()
    return bool(lasting_threads([thread.native_id or 0 for thread in threading.enumerate()]))


def end_bar_monitors() -> None:
    """End tqdm's thread, so that no fork inherits the lock of all bars; the next bar starts one."""
    for thread in threading.enumerate():
        if _is_bar_monitor(thread):
            thread.exit()  # type: ignore[attr-defined]


def has_process_group() -> bool:
    """Whether this process is in one; torch is not imported for it."""
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized())


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether it is a thread of the user's, not of the kernel or the one that launches."""
    if thread in (threading.main_thread(), threading.current_thread()) or _is_bar_monitor(thread):
        return False
    if thread.name.startswith(_SAFE_NAMES) or thread.name.endswith(_KERNEL_TARGETS):
        return False
    return not type(thread).__module__.startswith(_KERNEL_MODULES)


def _is_bar_monitor(thread: threading.Thread) -> bool:
    return type(thread).__module__ == "tqdm._monitor"


_PAUSE_HARD = 2  # omp_pause_hard: give up everything
_RUNTIME_PATH = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")


def _openmp_runtimes() -> dict[str, Any]:
    """OpenMP libraries of this process → what makes them give up their threads, if they can."""
    with open("/proc/self/maps") as memory_maps:
        paths = {line.rstrip("\n").split(maxsplit=5)[-1] for line in memory_maps}
    return {
        path: getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        for path in paths
        if _RUNTIME_PATH.search(path)
    }


def pause_pools() -> None:
    """Give up the pools of all OpenMP runtimes that can: in the thread that ran parallel code."""
    for pause in _openmp_runtimes().values():
        if pause is not None:
            pause(_PAUSE_HARD)


# ------------------------------------------------------------------------- after an import

# jemalloc (pyarrow brings it) ends its own before a fork, and no worker uses a kernel's ZeroMQ.
_WITHOUT_HARM = ("jemalloc_bg_thd", "ZMQbg")
_SETTLE_S = 0.3
_SETTLE_STEP_S = 0.002


def device_facts() -> frozenset[str]:
    """What devices say against a fork of this process."""
    return frozenset(fact for device in registry.devices() for fact in device.hazards())


def native_threads() -> list[int]:
    """Ids of the threads of this process, those of C code included, but for those without harm."""
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


def lasting_threads(own_ids: Collection[int]) -> set[int]:
    """Threads that would be missed in a fork, those of C code included."""
    if set(native_threads()) - set(own_ids):
        # A child that leaves: libraries that can be forked (OpenBLAS) end their threads.
        with warnings.catch_warnings():
            # Python 3.12 warns of every fork with threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(0)
        # Other code of this process may have waited for it.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    # A thread that has been joined is still listed until the system has removed it.
    deadline = time.monotonic() + _SETTLE_S
    while (others := set(native_threads()) - set(own_ids)) and time.monotonic() < deadline:
        time.sleep(_SETTLE_STEP_S)
    return others
