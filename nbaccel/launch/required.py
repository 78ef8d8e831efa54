"""What several workers need of the operating system, looked at before anything is started."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import sys
from pathlib import Path

from nbaccel import ports
from nbaccel.errors import PlatformUnsupported
from nbaccel.plan import Plan

__all__ = ["prepared"]

_CONNECT_S = 2.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_DESCRIPTORS = 8
"""For memory files, the rendezvous store and the template process."""
_DESCRIPTORS_OF_A_WORKER = 5
"""Its channel, three pipes, and its process."""


def prepared(plan: Plan, *, live: bool = False) -> Plan:
    """The plan as it can be carried out here.

    Args:
        plan: What was planned.
        live: Whether the workers stay, which takes a little more.

    Returns:
        The same plan; with IPv6's loopback address where this machine has no other.

    Raises:
        PlatformUnsupported: Something is missing that several workers cannot do without.
    """
    lack = _missing(live=live) or _too_few_descriptors(plan.num_processes)
    if lack:
        raise PlatformUnsupported(
            f"Several workers need {lack}. Use num_processes=1, which runs in the notebook itself."
        )
    if plan.config.num_nodes > 1:
        return plan
    address = ports.loopback(plan.master_addr)
    if address in ports.LOOPBACK:
        _try_to_connect(address)
    return plan if address == plan.master_addr else dataclasses.replace(plan, master_addr=address)


def _missing(*, live: bool) -> str:
    """What is missing, as the end of a sentence; empty if nothing is."""
    if not sys.platform.startswith("linux"):
        return f"Linux (memfd_create, pidfd_open): this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "memory files (os.memfd_create), which this Python has not"
    try:
        os.close(os.memfd_create("nbaccel-trial", os.MFD_CLOEXEC))
    except OSError as error:
        if error.errno in _NO_DESCRIPTORS:
            return f"free file descriptors: {error.strerror}. Close files, or raise `ulimit -n`"
        return (
            f"memory files (memfd_create), which this system refuses: {error.strerror}. A sandbox "
            "may forbid them"
        )
    if not Path("/proc/self").exists():
        return "/proc, which is not mounted here (mount -t proc proc /proc)"
    return _no_pidfd() if live else ""


def _too_few_descriptors(workers: int) -> str:
    """The same for descriptors, of which each worker costs some."""
    wanted = _DESCRIPTORS + workers * _DESCRIPTORS_OF_A_WORKER
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(wanted):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in _NO_DESCRIPTORS:
            raise
        return (
            f"{wanted} free file descriptors: {error.strerror}. Raise `ulimit -n`, or close files"
        )
    return ""


def _no_pidfd() -> str:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"pidfd_open (Linux 5.3 and later; some sandboxes forbid it): {error}"
    return ""


def _try_to_connect(address: str) -> None:
    """See whether a process can reach another one on this machine.

    Raises:
        PlatformUnsupported: The loopback interface is down. Workers would wait for half an hour.
    """
    try:
        with ports.listen(address, None) as sock:
            socket.create_connection(sock.getsockname()[:2], timeout=_CONNECT_S).close()
    except OSError as error:
        raise PlatformUnsupported(
            f"Several workers meet at {address}, and nothing can be reached there: "
            f"{error.strerror or error}. The loopback interface is down, or a firewall closes it: "
            "ip link set lo up. Or use num_processes=1, which needs no network."
        ) from error
