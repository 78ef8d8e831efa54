"""Waiting for a word of shared memory to change: the system call ``futex(2)`` of Linux.

A process that waits costs nothing and continues as soon as another one wakes it. Python and the C
library have no function for it. Where the call is not known or not permitted, `is_available` is
False, and whoever waits has to look again from time to time.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable

__all__ = ["is_available", "wait", "wake"]

# <asm/unistd.h>; the numbers are part of each architecture's stable interface.
_CALL_NUMBERS = {"x86_64": 202, "aarch64": 98}
# <linux/futex.h>; without FUTEX_PRIVATE_FLAG, because the word belongs to several processes.
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL_WAITERS = 0x7FFFFFFF


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ARGUMENT_TYPES = (
    ctypes.c_long,  # the system call's number
    ctypes.c_void_p,  # address of the word
    ctypes.c_int,  # operation
    ctypes.c_uint32,  # expected value, or how many to wake
    ctypes.c_void_p,  # how long to wait at most
    ctypes.c_void_p,
    ctypes.c_uint32,
)


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """``syscall(2)`` twice: once with Python's lock given up meanwhile, once with it held."""
    releasing = ctypes.CDLL(None).syscall
    holding = ctypes.PyDLL(None).syscall
    for function in (releasing, holding):
        function.argtypes = _ARGUMENT_TYPES
        function.restype = ctypes.c_long
    return releasing, holding


@functools.cache
def _call_number() -> int:
    return _CALL_NUMBERS.get(platform.machine(), -1) if sys.platform == "linux" else -1


@functools.cache
def is_available() -> bool:
    """Whether this system has the call and permits it."""
    if _call_number() < 0:
        return False
    word = ctypes.c_uint32(0)
    # Nobody waits, so 0 are woken; a negative number is an error, such as that of a sandbox.
    return wake(ctypes.addressof(word)) == 0


def wait(address: int, expected_value: int, seconds: float) -> None:
    """Wait until somebody wakes those who wait for a word; not if it has changed already.

    Args:
        address: Of 4 bytes of mapped memory, divisible by 4.
        expected_value: The word's value when the caller last looked.
        seconds: How long at most. It may also end early, for example at a signal.
    """
    whole_seconds = int(seconds)
    time_limit = _TimeSpec(whole_seconds, int((seconds - whole_seconds) * 1e9))
    releasing, _ = _functions()
    releasing(
        _call_number(),
        address,
        _FUTEX_WAIT,
        expected_value,
        ctypes.addressof(time_limit),
        None,
        0,
    )


def wake(address: int) -> int:
    """Wake all who wait for a word, in whatever process.

    Args:
        address: Of the word in this process.

    Returns:
        How many were woken; negative if the system has refused the call.
    """
    _, holding = _functions()  # it returns at once: giving up Python's lock would take longer
    return int(holding(_call_number(), address, _FUTEX_WAKE, _ALL_WAITERS, None, None, 0))
