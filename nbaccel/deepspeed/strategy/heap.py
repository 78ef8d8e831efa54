"""Memory that is freed goes back to the system, where that matters.

glibc keeps freed blocks of up to 32 MiB in its heaps (``mallopt(3)``, M_MMAP_THRESHOLD): gradients
and gathered parameters are freed in each step, and the system counts more than there are tensors.
Other C libraries return what is freed, and nothing is changed there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["return_all", "return_at_once"]

_M_MMAP_THRESHOLD = -3
_RETURNED_FROM = 1 << 20
"""Bytes from which a block is returned when it is freed. To fetch it anew takes time, more for many
small ones: activations of small models are below, gradients of large ones above."""


def return_all() -> None:
    """Return what was freed until now, such as the model's first tensors, which an engine replaces.

    These are 4 bytes for each parameter, in every process.
    """
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def return_at_once() -> None:
    """From now on return large blocks when they are freed, for the rest of this process."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(ctypes.c_int(_M_MMAP_THRESHOLD), ctypes.c_int(_RETURNED_FROM))


def _of_glibc(name: str) -> Callable[..., Any] | None:
    found = ctypes.CDLL(None)
    return getattr(found, name, None) if hasattr(found, "gnu_get_libc_version") else None
