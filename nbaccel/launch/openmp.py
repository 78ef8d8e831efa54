"""OpenMP thread pools and forks.

A running pool does not survive a fork: the child waits for threads that do not exist. OpenMP 5.0
(section 3.2.44, omp_pause_resource_all) lets a program give the pool up; the next parallel region
builds a new one. It must be asked of every OpenMP runtime in the process, and scikit-learn, torch
and others bring their own copies.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time

_HARD = 2  # omp_pause_hard: give up everything
_SETTLE_S = 0.3  # a pool's threads spin for some milliseconds before they sleep
_POLL_S = 0.02
_PAUSE = "omp_pause_resource_all"
_RUNTIME = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")


def loaded_runtimes() -> list[str]:
    """Paths of the OpenMP libraries mapped into this process."""
    with open("/proc/self/maps") as maps:
        paths = {
            line.split(maxsplit=5)[5].strip()
            for line in maps
            if line.count(" ") > 4 and "/" in line
        }
    return sorted(path for path in paths if _RUNTIME.search(path))


def pools_that_stay() -> list[str]:
    """Runtimes that have no way to give up their threads, and have some.

    The libgomp that torch 2.6 brings is from before OpenMP 5.0. A thread of its pool sleeps in its
    code, and the system tells where each thread of this process sleeps.
    """
    old = [path for path in loaded_runtimes() if not hasattr(ctypes.CDLL(path), _PAUSE)]
    return [path for path in old if _has_threads(path)]


def pause_pools() -> list[str]:
    """Give up the thread pools of all OpenMP runtimes; returns those that refused.

    Call it in the thread that ran parallel code (in a notebook, the main one), right before a fork.
    """
    refused = []
    for path in loaded_runtimes():
        pause = getattr(ctypes.CDLL(path), _PAUSE, None)
        if pause is None or pause(_HARD) != 0:
            refused.append(path)
    return refused


def _has_threads(path: str) -> bool:
    code = _code_of(path)
    deadline = time.monotonic() + _SETTLE_S
    while True:
        places = [_place(int(task)) for task in os.listdir("/proc/self/task")]
        if any(start <= place < end for place in places if place for start, end in code):
            return True
        if None not in places or time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _code_of(path: str) -> list[tuple[int, int]]:
    """The addresses at which a library is mapped."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(path)]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def _place(task: int) -> int | None:
    """The address at which a thread sleeps; 0 for this one and those gone, None if it runs."""
    if task == threading.get_native_id():
        return 0
    try:
        with open(f"/proc/self/task/{task}/syscall") as told:
            words = told.read().split()
    except OSError:
        return 0
    return None if words[0] == "running" else int(words[-1], 16)
