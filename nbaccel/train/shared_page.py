"""Memory in which the processes of one host leave their entries for each other.

    block of process 0   header: word, state, process id, start time, token
                         entry of even calls      call number, lengths, checksum; text, text, data
                         entry of odd calls
    block of process 1   …
    block for entries that came from other hosts

Each block has one writer. To announce call `n` it writes the entry, then the word, and wakes those
who wait for the word; the others read. No call is made to another process.

[Note: two entries] A process announces call `n + 1` when it has left call `n`, for which it has
read the entries of all others. So when all have announced `n + 1`, nobody reads an entry of call
`n` any more, and only then does one leave `n + 1` and write the entry of `n + 2` over it. Data in
an entry may be read until the reader announces its next call.

[Note: order of writes] Python has no memory barriers. x86 shows writes to other processors in the
order in which they were made; other architectures need not. So an entry has a checksum of its call
number, lengths and texts, and where the order is not certain, of its data: an entry that is seen in
part does not fit, and counts as not there yet. A reader's next entry cannot come before its reads,
because it is written only if their checksum was right.
"""

from __future__ import annotations

import os
import platform
import struct
import time
import zlib
from collections.abc import Callable, Sequence

from nbaccel.base import process_names
from nbaccel.train import futex
from nbaccel.train.announced_calls import Entry
from nbaccel.transfer import memfd

__all__ = ["ALIGNMENT", "DATA_BYTES", "TOKEN_BYTES", "SharedPage", "aligned", "page_bytes"]

DATA_BYTES = 1 << 20
"""Room for an entry's data. Only what was used takes memory."""
_TEXT_BYTES = 1 << 16
_ENTRY_BYTES = _TEXT_BYTES + DATA_BYTES

_HEADER_BYTES = memfd.PAGE_BYTES
_BLOCK_BYTES = _HEADER_BYTES + 2 * _ENTRY_BYTES
ALIGNMENT = 64
"""Of data in an entry, in bytes: that of torch's own tensors."""
TOKEN_BYTES = 16

_WORD_BITS = 0xFFFFFFFF
_WHO = struct.Struct("<qq")  # process id, start time
_WHO_AT = 8
_STATE_AT = 4
_TOKEN_AT = 32
_HAS_LEFT = 1

# Call number, bytes of both texts, where the data begins, its bytes (-1: none), checksum.
_ENTRY = struct.Struct("<qIIIiI")
_CALL_NUMBER = struct.Struct("<q")
_FIRST_TEXT_AT = _ENTRY.size

# Before a process goes to sleep. No more, because on a busy machine one that yields comes last, and
# one that is woken up comes first.
_YIELDS = 3
_IS_ORDERED = platform.machine() in ("x86_64", "AMD64")  # see [Note: order of writes]
_LOOK_AROUND_S = 0.05  # how often a process that sleeps wakes up to do something else
_MOST_POLL_S = 0.02  # between two looks, where a process cannot be woken
# Of the time already waited: a short wait ends with little delay, a long one uses little CPU.
_POLL_SHARE = 0.1


def page_bytes(num_processes: int) -> int:
    """How large the memory of so many processes is, in bytes."""
    return (num_processes + 1) * _BLOCK_BYTES


class SharedPage:
    """The memory, as one of its processes sees it.

    Args:
        file_descriptor: Of the memory file, which may be closed afterwards.
        num_processes: How many share it.
    """

    def __init__(self, file_descriptor: int, num_processes: int) -> None:
        mapping = memfd.Mapping(file_descriptor, page_bytes(num_processes), is_private=False)
        self._address = mapping.address
        self._memory = mapping.view(0, mapping.nbytes)  # keeps the mapping
        self._words = [
            self._memory[start : start + 4].cast("I")
            for start in range(0, mapping.nbytes, _BLOCK_BYTES)
        ]
        self._can_sleep = futex.is_available()
        self.common_position = num_processes
        """The block for what came from elsewhere."""

    # --------------------------------------------------------------------- who is here

    def sign(self, position: int, token: bytes) -> None:
        """Write into a block whose it is.

        Args:
            position: The block's number.
            token: `TOKEN_BYTES` that nobody can know who does not see this memory.
        """
        start = position * _BLOCK_BYTES
        process_id = os.getpid()
        start_ticks = process_names.start_ticks(process_id) or 0
        _WHO.pack_into(self._memory, start + _WHO_AT, process_id, start_ticks)
        self._memory[start + _TOKEN_AT : start + _TOKEN_AT + TOKEN_BYTES] = token

    def token(self, position: int) -> bytes:
        """What the writer of a block has signed with."""
        start = position * _BLOCK_BYTES + _TOKEN_AT
        return bytes(self._memory[start : start + TOKEN_BYTES])

    def close(self, position: int) -> None:
        """Say that a block's writer will announce nothing more, and wake those who wait for it."""
        # A forked child has the same memory, and must not speak for its parent.
        if self._writer(position)[0] == os.getpid():
            self._memory[position * _BLOCK_BYTES + _STATE_AT] = _HAS_LEFT
            self._wake(position)

    def has_left(self, position: int) -> bool:
        """Whether the writer of a block has left, or its process has ended."""
        if self._memory[position * _BLOCK_BYTES + _STATE_AT] == _HAS_LEFT:
            return True
        process_id, start_ticks = self._writer(position)
        # Another process may have got the same number since.
        return bool(start_ticks) and process_names.start_ticks(process_id) != start_ticks

    def _writer(self, position: int) -> tuple[int, int]:
        process_id, start_ticks = _WHO.unpack_from(self._memory, position * _BLOCK_BYTES + _WHO_AT)
        return process_id, start_ticks

    # --------------------------------------------------------------------- entries

    @staticmethod
    def has_room(entry: Entry) -> bool:
        """Whether an entry's texts are short enough."""
        return _data_start(entry) <= _TEXT_BYTES

    def write(self, position: int, entry: Entry, data: Sequence[memoryview] | None = None) -> None:
        """Announce a call.

        Args:
            position: The block of this process.
            entry: The entry, for which there is room.
            data: Bytes to add, each piece at an aligned place, up to `DATA_BYTES`.
        """
        texts = entry.call_text + entry.place_text
        start = position * _BLOCK_BYTES + _HEADER_BYTES + entry.call_number % 2 * _ENTRY_BYTES
        slot = self._memory[start : start + _ENTRY_BYTES]
        slot[_FIRST_TEXT_AT : _FIRST_TEXT_AT + len(texts)] = texts
        data_start = data_end = _data_start(entry)
        for piece in data or ():
            slot[data_end : data_end + piece.nbytes] = piece
            data_end += aligned(piece.nbytes)
        facts = (
            entry.call_number,
            len(entry.call_text),
            len(entry.place_text),
            data_start,
            -1 if data is None else data_end - data_start,
        )
        checksum = _checksum(facts, texts, slot[data_start:data_end])
        _ENTRY.pack_into(slot, 0, *facts, checksum)
        # Last: whoever sees the word finds the entry.
        self._words[position][0] = entry.call_number + 1 & _WORD_BITS
        self._wake(position)

    def read(self, position: int, parity: int) -> Entry | None:
        """The last entry of a block's even or odd calls; None if there is none that is complete."""
        start = position * _BLOCK_BYTES + _HEADER_BYTES + parity * _ENTRY_BYTES
        *facts, checksum = _ENTRY.unpack_from(self._memory, start)
        number, call_bytes, place_bytes, data_start, data_bytes = facts
        texts_end = _FIRST_TEXT_AT + call_bytes + place_bytes
        if not texts_end <= data_start + max(data_bytes, 0) <= _ENTRY_BYTES:
            return None  # half written
        texts = bytes(self._memory[start + _FIRST_TEXT_AT : start + texts_end])
        data = self._memory[start + data_start : start + data_start + max(data_bytes, 0)]
        if checksum != _checksum(facts, texts, data):
            return None
        return Entry(
            number, texts[:call_bytes], texts[call_bytes:], None if data_bytes < 0 else data
        )

    def read_call(self, position: int, call_number: int) -> Entry | None:
        """A block's entry of this call; None if it has not come."""
        start = position * _BLOCK_BYTES + _HEADER_BYTES + call_number % 2 * _ENTRY_BYTES
        # Looked at first, because it is asked again and again.
        if _CALL_NUMBER.unpack_from(self._memory, start)[0] != call_number:
            return None
        entry = self.read(position, call_number % 2)
        return entry if entry is not None and entry.call_number == call_number else None

    # --------------------------------------------------------------------- waiting

    def await_call(
        self, position: int, call_number: int, while_waiting: Callable[[], None]
    ) -> Entry:
        """Wait for an entry.

        Args:
            position: The block.
            call_number: The call.
            while_waiting: Called from time to time; it may raise to end the wait.

        Returns:
            The entry.
        """
        entry = self.read_call(position, call_number)
        if entry is not None:
            return entry
        for _ in range(_YIELDS):
            # With more processes than processors, the one that is waited for may need this one.
            os.sched_yield()
            if (entry := self.read_call(position, call_number)) is not None:
                return entry
        start_time = time.monotonic()
        looked_at = start_time
        while True:
            # Read before the entry: a change in between ends the sleep at once.
            word = self._words[position][0]
            if (entry := self.read_call(position, call_number)) is not None:
                return entry
            now = time.monotonic()
            if now - looked_at >= _LOOK_AROUND_S:
                looked_at = now
                while_waiting()
            self._sleep(position, word, now - start_time)

    def _sleep(self, position: int, word: int, waited_s: float) -> None:
        """Sleep until a word has changed, or for a moment."""
        if self._can_sleep:
            futex.wait(self._address + position * _BLOCK_BYTES, word, _LOOK_AROUND_S)
        else:
            time.sleep(min(_MOST_POLL_S, waited_s * _POLL_SHARE))

    def _wake(self, position: int) -> None:
        if self._can_sleep:
            futex.wake(self._address + position * _BLOCK_BYTES)


def aligned(num_bytes: int) -> int:
    """The number of bytes that a piece of data takes in an entry."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _data_start(entry: Entry) -> int:
    return aligned(_FIRST_TEXT_AT + len(entry.call_text) + len(entry.place_text))


def _checksum(facts: Sequence[int], texts: bytes, data: memoryview) -> int:
    # Of a new file's zeros it must not be zero.
    checksum = zlib.crc32(texts, zlib.crc32(struct.pack("<5q", *facts), 1))
    return checksum if _IS_ORDERED else zlib.crc32(data, checksum)
