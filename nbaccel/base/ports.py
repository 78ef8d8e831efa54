"""The port where processes meet: bound once, never chosen first and bound later."""

from __future__ import annotations

import errno
import os
import re
import socket
from importlib.metadata import version
from typing import Any

import psutil

from nbaccel.base.errors import PortTaken
from nbaccel.base.processes import describe_process

LOOPBACK_ADDRESSES = ("127.0.0.1", "::1")
"""Addresses that lead to this machine alone: version 4, version 6."""

_LISTEN_BACKLOG = 4096  # connections that may wait for the store: all workers of all nodes


def loopback(host_address: str) -> str:
    """The address to use for one: version 6's where this machine has no other."""
    if host_address != LOOPBACK_ADDRESSES[0]:
        return host_address
    for loopback_address, family in zip(
        LOOPBACK_ADDRESSES, (socket.AF_INET, socket.AF_INET6), strict=True
    ):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe_socket:
                probe_socket.bind((loopback_address, 0))
        # This machine has no such address, or no such family.
        except OSError:
            continue
        return loopback_address
    return host_address


def listen(
    host: str,
    port: int | None,
    *,
    setting: str = "use_port",
    waiting_processes: str = "the workers",
) -> socket.socket:
    """A listening socket for the store.

    It listens from the first moment: a process that connects before the store serves it waits, and
    no other process can take the port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without it a port is unusable for minutes after a store on it has closed (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port or 0))
        listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTaken(
            f"{setting}={port} is taken by {_describe_holder(port or 0)}, so {waiting_processes} "
            f"could not find each other there. Leave {setting} out: a free port is found and "
            "reserved.",
            port=port,
        ) from error
    return listener


def _describe_holder(port: int) -> str:
    try:
        listeners = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.laddr
            and connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
        ]
    except psutil.AccessDenied:
        listeners = []
    process_id = next((connection.pid for connection in listeners if connection.pid), None)
    if process_id is None:
        return "another process"
    if process_id == os.getpid():
        return f"this very process ({process_id})"
    return describe_process(process_id)


def store_options(listener: int) -> dict[str, Any]:
    """What makes torch's `TCPStore` serve on a socket that is bound already."""
    torch_release = tuple(int(part) for part in re.findall(r"\d+", version("torch"))[:2])
    # Before 2.9 its libuv server may refuse one, as that of 2.6 does; the older server takes it.
    options = {"use_libuv": False} if torch_release < (2, 9) else {}
    return {"master_listen_fd": listener, **options}
