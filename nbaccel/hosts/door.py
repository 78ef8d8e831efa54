"""Where agents connect: one listening socket, and the handshake with whoever comes.

Anything may connect to a port. A caller that does not prove in time that it knows the token is
disconnected, and keeps no one else waiting.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from nbaccel.hosts.event_loop import EventLoop
from nbaccel.hosts.secure_link import ANSWER_BYTES, HandshakeFailed, SecureLink, Side

__all__ = ["Door"]

_HANDSHAKE_S = 5.0
_MAX_CALLERS = 256


class Door:
    """Lets agents in."""

    def __init__(
        self,
        events: EventLoop,
        listener: socket.socket,
        token: str,
        on_admitted: Callable[[SecureLink], None],
    ) -> None:
        self._events = events
        self._listener = listener
        self._token = token
        self._on_admitted = on_admitted
        self._callers: list[_Caller] = []
        self._is_open = True
        listener.setblocking(False)
        events.on_readable(listener.fileno(), self._accept)

    def due_in(self) -> float | None:
        """Seconds until a caller has been silent for too long; None if there is none."""
        if not self._callers:
            return None
        return max(0.0, min(caller.until for caller in self._callers) - time.monotonic())

    def close_silent(self) -> None:
        """Hang up on callers that have been silent for too long."""
        for caller in list(self._callers):
            if time.monotonic() >= caller.until:
                self._dismiss(caller)

    def close(self) -> None:
        """Let nobody else in."""
        if not self._is_open:
            return
        self._is_open = False
        self._events.forget(self._listener.fileno())
        self._listener.close()
        for caller in list(self._callers):
            self._dismiss(caller)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has hung up already
            return
        if len(self._callers) >= _MAX_CALLERS:
            connection.close()
            return
        try:
            caller = _Caller(connection, self._token)
        except OSError:  # it has connected and reset at once
            connection.close()
            return
        self._callers.append(caller)
        self._events.on_readable(connection.fileno(), lambda: self._receive(caller))

    def _receive(self, caller: _Caller) -> None:
        try:
            link = caller.receive()
        except (OSError, HandshakeFailed):
            self._dismiss(caller)
            return
        if link is not None:
            self._callers.remove(caller)
            self._events.forget(caller.connection.fileno())
            self._on_admitted(link)

    def _dismiss(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._events.forget(caller.connection.fileno())
        caller.connection.close()


class _Caller:
    """Someone who has connected and has proved nothing yet."""

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection = connection
        self.until = time.monotonic() + _HANDSHAKE_S
        self._side = Side(token)
        self._answer = b""
        connection.setblocking(False)
        # A fresh connection has room for so few bytes.
        connection.send(self._side.nonce)

    def receive(self) -> SecureLink | None:
        """Take in what has come; the connection once it is authentic."""
        received = self.connection.recv(ANSWER_BYTES - len(self._answer))
        if not received:
            raise HandshakeFailed
        self._answer += received
        if len(self._answer) < ANSWER_BYTES:
            return None
        proof, key = self._side.relay_answer(self._answer)
        self.connection.send(proof)
        return SecureLink(self.connection, key, is_relay=True)
