"""An authenticated TCP connection between the relay and one agent: frames in both directions.

    frame: [ kind, bytes, file, offset | authentication code | body ]

Both sides prove that they know the launch's token before anything is unpickled. From then on every
frame carries a code over its number, header and body, made with a key of this connection, so that
none can be forged, changed, repeated or left out. The bodies of weights, which are numbers and are
never unpickled, are left out of it, because that would halve their speed. Nothing is encrypted.

What is urgent overtakes what is long: output, signals and ends of workers go before the rest, which
is sent piece by piece, in order.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ANSWER_BYTES",
    "CHUNK_BYTES",
    "NONCE_BYTES",
    "FileBytes",
    "HandshakeFailed",
    "SecureLink",
    "Side",
]

CHUNK_BYTES = 1 << 20
"""Bytes of a file that travel in one frame."""
NONCE_BYTES = 32
_CODE_BYTES = 16
ANSWER_BYTES = NONCE_BYTES + 32
"""What an agent answers to a nonce: a nonce of its own, and its proof."""
_HEADER = struct.Struct(">BIQQ")
_NUMBER = struct.Struct(">Q")
_RECORD = 1
_PLAIN_BYTES = 2
_WEIGHT_BYTES = 3
_MAX_BODY_BYTES = CHUNK_BYTES + (1 << 16)
_READ_ROUNDS = 8  # frames that are taken in before other descriptors get their turn
# A silent peer is given up after that time; a machine that swaps may be silent for a while.
SILENCE_S = 10
_PROBE_IDLE_S = 3
_PROBE_EVERY_S = 2
_PROBES = 3


class HandshakeFailed(Exception):
    """The other side does not know the token."""


@dataclass(frozen=True, kw_only=True)
class FileBytes:
    """A piece of a file.

    Attributes:
        file: The file's number.
        offset: Its first byte.
        content: The bytes; of an incoming piece, valid until the next frame is taken in.
        is_weights: Whether they are weights, which are never unpickled.
    """

    file: int
    offset: int
    content: memoryview
    is_weights: bool


class Side:
    """One side of the handshake: the relay or an agent."""

    def __init__(self, token: str) -> None:
        self._token = bytes.fromhex(token)
        self.nonce = secrets.token_bytes(NONCE_BYTES)

    def agent_answer(self, relay_nonce: bytes) -> bytes:
        """An agent's answer to the relay's nonce."""
        return self.nonce + self._proof(b"agent", relay_nonce, self.nonce)

    def relay_answer(self, agent_answer: bytes) -> tuple[bytes, bytes]:
        """The relay's proof, and the connection's key."""
        agent_nonce = agent_answer[:NONCE_BYTES]
        agent_proof = agent_answer[NONCE_BYTES:]
        if not hmac.compare_digest(agent_proof, self._proof(b"agent", self.nonce, agent_nonce)):
            raise HandshakeFailed
        return (
            self._proof(b"relay", self.nonce, agent_nonce),
            self._proof(b"key", self.nonce, agent_nonce),
        )

    def agent_key(self, relay_nonce: bytes, relay_proof: bytes) -> bytes:
        """The connection's key, once the relay has proved itself to the agent."""
        if not hmac.compare_digest(relay_proof, self._proof(b"relay", relay_nonce, self.nonce)):
            raise HandshakeFailed
        return self._proof(b"key", relay_nonce, self.nonce)

    def _proof(self, role: bytes, relay_nonce: bytes, agent_nonce: bytes) -> bytes:
        return hmac.digest(self._token, role + relay_nonce + agent_nonce, "sha256")


class SecureLink:
    """An authenticated connection."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_relay: bool) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        _notice_loss(connection)
        role, other_role = (b"relay", b"agent") if is_relay else (b"agent", b"relay")
        self._own_key = hmac.digest(key, role, "sha256")
        self._other_key = hmac.digest(key, other_role, "sha256")
        self._num_sent = self._num_received = 0
        self._urgent: deque[Any] = deque()
        self._ordered: deque[Iterator[Any]] = deque()
        self._current: Iterator[Any] | None = None
        self._unsent: deque[memoryview] = deque()
        self._header = bytearray(_HEADER.size + _CODE_BYTES)
        self._body = bytearray(_MAX_BODY_BYTES)
        self._num_read = 0

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def addresses(self) -> tuple[str, str]:
        """This side's address, and the other's."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    # ---- sending

    def send(self, record: Any) -> None:
        """Send a short record as soon as possible."""
        self._urgent.append(record)

    def send_in_order(self, frames: Iterator[Any]) -> None:
        """Send records and `FileBytes`, one after the other, behind those given before."""
        self._ordered.append(frames)

    @property
    def wants_to_write(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent or self._urgent or self._current or self._ordered)

    def write(self) -> None:
        """Send what can be sent without waiting."""
        while self._unsent or self._fill():
            try:
                num_written = self._socket.sendmsg(list(self._unsent)[:8])
            except BlockingIOError:
                return
            while num_written:
                first_part = self._unsent[0]
                if num_written < len(first_part):
                    self._unsent[0] = first_part[num_written:]
                    break
                num_written -= len(first_part)
                self._unsent.popleft()

    def _fill(self) -> bool:
        """Take up the next frame, if there is one."""
        if self._urgent:
            self._pack(self._urgent.popleft())
            return True
        while self._current or self._ordered:
            if self._current is None:
                self._current = self._ordered.popleft()
            frame = next(self._current, None)
            if frame is not None:
                self._pack(frame)
                return True
            self._current = None
        return False

    def _pack(self, frame: Any) -> None:
        if isinstance(frame, FileBytes):
            kind = _WEIGHT_BYTES if frame.is_weights else _PLAIN_BYTES
            header = _HEADER.pack(kind, len(frame.content), frame.file, frame.offset)
            body = frame.content
        else:
            body = memoryview(pickle.dumps(frame, protocol=5))
            header = _HEADER.pack(_RECORD, len(body), 0, 0)
            if len(body) > _MAX_BODY_BYTES:
                raise ValueError(f"a record of {len(body)} bytes; {_MAX_BODY_BYTES} is the most")
        code = _code(self._own_key, self._num_sent, header, body)
        self._num_sent += 1
        self._unsent.append(memoryview(header + code))
        if body.nbytes:
            self._unsent.append(body)

    # ---- receiving

    def read(self) -> Iterator[Any]:
        """Records and `FileBytes` that have come in; a few at a time."""
        for _ in range(_READ_ROUNDS):
            frame = self._read_frame()
            if frame is None:
                return
            yield frame

    def _read_frame(self) -> Any:
        """The next frame; None if it has not come in as a whole."""
        head_bytes = len(self._header)
        if self._num_read < head_bytes and not self._read_into(self._header, 0, head_bytes):
            return None
        kind, num_bytes, file, offset = _HEADER.unpack_from(self._header)
        if num_bytes > _MAX_BODY_BYTES:
            raise ConnectionError(f"a frame of {num_bytes} bytes came, which nobody sends")
        if not self._read_into(self._body, head_bytes, num_bytes):
            return None
        self._num_read = 0
        body = memoryview(self._body)[:num_bytes]
        header = bytes(self._header[: _HEADER.size])
        code = bytes(self._header[_HEADER.size :])
        if not hmac.compare_digest(code, _code(self._other_key, self._num_received, header, body)):
            raise ConnectionError("a frame was changed on its way, or is not the other side's")
        self._num_received += 1
        if kind == _RECORD:
            return pickle.loads(body)
        return FileBytes(file=file, offset=offset, content=body, is_weights=kind == _WEIGHT_BYTES)

    def _read_into(self, target: bytearray, bytes_before: int, num_bytes: int) -> bool:
        """Go on filling a part of a frame; returns whether it is full."""
        while (first_byte := self._num_read - bytes_before) < num_bytes:
            try:
                num_read = self._socket.recv_into(memoryview(target)[first_byte:num_bytes])
            except BlockingIOError:
                return False
            if not num_read:
                raise EOFError("the other side closed the connection")
            self._num_read += num_read
        return True


def _code(key: bytes, number: int, header: bytes, body: memoryview) -> bytes:
    """The authentication code of one frame."""
    frame_hash = hashlib.blake2b(_NUMBER.pack(number) + header, key=key, digest_size=_CODE_BYTES)
    if header[0] != _WEIGHT_BYTES:
        frame_hash.update(body)
    return frame_hash.digest()


def _notice_loss(connection: socket.socket) -> None:
    """Let the system tell within seconds that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
