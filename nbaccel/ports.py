"""The port where processes meet: bound once, never chosen first and bound later."""

from __future__ import annotations

import errno
import os
import re
import socket
from importlib.metadata import version
from typing import Any

import psutil

from nbaccel.errors import PortTaken

__all__ = ["LOOPBACK", "listen", "loopback", "store_options"]

LOOPBACK = ("127.0.0.1", "::1")
"""Addresses that lead to this machine alone: version 4, version 6."""

_BACKLOG = 4096


def loopback(host: str) -> str:
    """The address to use for one: version 6's where this machine has no other.

    Args:
        host: Any address; one that is not 127.0.0.1 is given back as it is.
    """
    if host != LOOPBACK[0]:
        return host
    for address, family in zip(LOOPBACK, (socket.AF_INET, socket.AF_INET6), strict=True):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind((address, 0))
        except OSError:  # there is no such address here, or no such family
            continue
        return address
    return host


def listen(
    host: str, port: int | None, *, setting: str = "use_port", who: str = "the workers"
) -> socket.socket:
    """A listening socket for the store.

    It listens from the first moment: whoever connects before the store serves it waits in line,
    and nobody else can take the port.

    Args:
        host: Address to bind; loopback unless several machines take part.
        port: The port asked for; None for any free one.
        setting: The argument by which it was asked for.
        who: Those who were to meet there.

    Raises:
        PortTaken: If the port asked for is in use.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just used is not in use
        sock.bind((host, port or 0))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(
            f"{setting}={port} is taken by {_holder(port or 0)}, so {who} could not find each "
            f"other there. Leave {setting} out: a free port is found and reserved.",
            port=port,
        ) from error
    return sock


def _holder(port: int) -> str:
    try:
        found = [
            c
            for c in psutil.net_connections("tcp")
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN
        ]
    except psutil.AccessDenied:
        found = []
    pid = next((c.pid for c in found if c.pid), None)
    if pid is None:
        return "another process"
    if pid == os.getpid():
        return f"this very process ({pid})"
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:80]})"
    except psutil.Error:
        return f"process {pid}"


def store_options(listener: int) -> dict[str, Any]:
    """What makes torch's `TCPStore` serve on a socket that is bound already.

    Args:
        listener: The socket's descriptor.

    Returns:
        Keyword arguments.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", version("torch"))[:2])
    # Before 2.9 its libuv server may refuse one, as that of 2.6 does; the older server takes it.
    older = {"use_libuv": False} if release < (2, 9) else {}
    return {"master_listen_fd": listener, **older}
