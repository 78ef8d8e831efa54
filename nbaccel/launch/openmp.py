"""OpenMP thread pools and forks.

A running pool does not survive a fork: the child waits for threads that do not exist. OpenMP 5.0
(section 3.2.44, omp_pause_resource_all) lets a program give the pool up; the next parallel region
builds a new one. It must be asked of every OpenMP runtime in the process, and scikit-learn, torch
and others bring their own copies.
"""

from __future__ import annotations

import ctypes
import re

_HARD = 2  # omp_pause_hard: give up everything
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


def pause_pools() -> list[str]:
    """Give up the thread pools of all OpenMP runtimes; returns those that refused.

    Call it in the thread that ran parallel code (in a notebook, the main one), right before a fork.
    """
    refused = []
    for path in loaded_runtimes():
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is None or pause(_HARD) != 0:
            refused.append(path)
    return refused
