"""What several workers need of the operating system, checked before anything is started."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import sys
from pathlib import Path

from nbaccel.base import ports
from nbaccel.base.errors import PlatformUnsupported, UnsafeMoment
from nbaccel.plan import Plan, registry

_CONNECT_S = 2.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_DESCRIPTORS_OF_NOTEBOOK = 8
"""For memory files, the rendezvous store and the template process."""
_DESCRIPTORS_OF_A_WORKER = 5
"""Its channel, three pipes, and its process."""


def check_requirements(plan: Plan, *, is_live: bool = False) -> Plan:
    """The plan as it can be carried out here."""
    missing = _missing_requirements(is_live=is_live) or _too_few_descriptors(plan.num_processes)
    if missing:
        raise PlatformUnsupported(
            f"Several workers need {missing}. Use num_processes=1, which runs in the notebook "
            "itself."
        )
    if busy_reason := registry.device(plan.device).busy_reason(plan):
        raise UnsafeMoment(busy_reason)
    if plan.config.num_nodes > 1:
        return plan
    address = ports.loopback(plan.master_addr)
    if address in ports.LOOPBACK_ADDRESSES:
        _try_to_connect(address)
    return dataclasses.replace(plan, master_addr=address)


def _missing_requirements(*, is_live: bool) -> str:
    """What is missing, as the end of a sentence; empty if nothing is."""
    if not sys.platform.startswith("linux"):
        return f"Linux (memfd_create, pidfd_open): this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "memory files (os.memfd_create), which this Python does not have"
    try:
        # Tried and not only looked up: a sandbox may refuse the call that the library has.
        os.close(os.memfd_create("nbaccel-trial", os.MFD_CLOEXEC))
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            return f"free file descriptors: {error.strerror}. Close files, or raise `ulimit -n`"
        return (
            f"memory files (memfd_create), which this system refuses: {error.strerror}. A "
            "sandbox may forbid them"
        )
    if not Path("/proc/self").exists():
        return "/proc, which is not mounted here (mount -t proc proc /proc)"
    return _no_pidfd() if is_live else ""


def _too_few_descriptors(num_workers: int) -> str:
    """The same for descriptors, of which each worker costs some."""
    descriptors = _DESCRIPTORS_OF_NOTEBOOK + num_workers * _DESCRIPTORS_OF_A_WORKER
    try:
        with contextlib.ExitStack() as clean_up:
            for _ in range(descriptors):
                # Opened for real: `ulimit -n` says nothing about how many are in use.
                clean_up.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in _NO_DESCRIPTORS:
            raise
        return (
            f"{descriptors} free file descriptors: {error.strerror}. Raise `ulimit -n`, "
            "or close files"
        )
    return ""


def _no_pidfd() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"pidfd_open (Linux 5.3 and later; some sandboxes forbid it): {error}"
    return ""


def _try_to_connect(address: str) -> None:
    """See whether a process can reach another one on this machine."""
    try:
        with ports.listen(address, None) as probe_socket:
            # A real connection: a firewall may let a port be bound and drop what is sent to it.
            socket.create_connection(probe_socket.getsockname()[:2], timeout=_CONNECT_S).close()
    except OSError as error:
        raise PlatformUnsupported(
            f"Several workers meet at {address}, and nothing can be reached there: "
            f"{error.strerror or error}. The loopback interface is down, or a firewall closes "
            "it: ip link set lo up. Or use num_processes=1, which needs no network."
        ) from error
