"""One end of a worker's channel, of which the other end is on another host.

    process here ── socket pair ── ChannelPort ══ packets ══ ChannelPort ── ── process there

So many packets may be on their way; beyond that a port stops reading, and whoever sends waits as it
would for a process on its own machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from nbaccel.hosts.event_loop import EventLoop
from nbaccel.transfer import memfd
from nbaccel.workers import messaging

__all__ = ["ChannelPort"]

_MAX_UNDERWAY = 64
"""Packets of one channel that the other side has not passed on yet."""

_OnPacket = Callable[[bytes, list[int]], None]


class ChannelPort:
    """Reads packets from a socket, and writes those that come from the other side."""

    def __init__(
        self,
        loop: EventLoop,
        socket_fd: int,
        *,
        on_packet: _OnPacket,
        on_closed: Callable[[], None],
        on_taken: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._channel = messaging.Channel.unwaiting(socket_fd)
        self._on_packet = on_packet
        self._on_closed = on_closed
        self._on_taken = on_taken
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._num_underway = 0
        self._is_open = True
        loop.on_readable(socket_fd, self._read)

    # ---- from the process here

    def _read(self) -> None:
        while self._is_open and self._num_underway < _MAX_UNDERWAY:
            try:
                packet_bytes, file_descriptors = self._channel.receive_packet()
            except BlockingIOError:
                return
            except EOFError:
                self._loop.on_readable(self._channel.fileno(), None)
                self._on_closed()
                return
            self._num_underway += 1
            self._on_packet(packet_bytes, file_descriptors)
        if self._is_open:
            self._loop.on_readable(self._channel.fileno(), None)

    def read_rest(self) -> None:
        """Read what has been sent before the process ended."""
        self._read()

    def taken(self, num_packets: int) -> None:
        """The other side has passed on so many packets."""
        self._num_underway -= num_packets
        if self._is_open:
            self._loop.on_readable(self._channel.fileno(), self._read)

    # ---- to the process here

    def put(self, packet_bytes: bytes, file_descriptors: Sequence[int]) -> None:
        """Write a packet as soon as there is room; its descriptors are closed then."""
        self._outbox.append((packet_bytes, list(file_descriptors)))
        self._write()

    def try_put(self, packet_bytes: bytes, file_descriptors: Sequence[int]) -> bool:
        """Write a packet if there is room at once; then its descriptors are closed."""
        try:
            if self._is_open and not self._channel.send_packet(packet_bytes, file_descriptors):
                return False
        # The process has ended: nobody waits for the packet.
        except OSError:
            self._on_taken(1)
        else:
            self._on_taken(1)
        memfd.close_all(file_descriptors)
        return True

    def _write(self) -> None:
        while self._outbox and self.try_put(*self._outbox[0]):
            self._outbox.popleft()
        if self._is_open:
            self._loop.on_writable(self._channel.fileno(), self._write if self._outbox else None)

    def fileno(self) -> int:
        """The socket."""
        return self._channel.fileno()

    def close(self) -> None:
        """Close this end: the process here reads an end of file."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.forget(self._channel.fileno())
        self._channel.close()
        for _, file_descriptors in self._outbox:
            memfd.close_all(file_descriptors)
        self._outbox.clear()
