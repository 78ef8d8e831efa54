"""Reads weights out of files, piece by piece, through one buffer.

Files are read, not mapped: pages of a mapped file count as the process's memory until the system
wants them back, and of a model all pages would be touched.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from nbaccel.deepspeed.weights.stored import Record, StoredTensor, Weight
from nbaccel.errors import CheckpointDamaged, CheckpointFailed

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CHUNK_BYTES", "Reader", "check_records"]

CHUNK_BYTES = 4 * 2**20
_MOST_OPEN = 256  # a checkpoint has a file per rank, and a process may open 1024 as a rule
_NUMPY = {
    "complex64": "<c8",
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
}


def check_records(weights: Iterable[Weight]) -> None:
    """Compare what will be read with its checksums: each record is read through once.

    Args:
        weights: Whose pieces will be read.

    Raises:
        CheckpointDamaged: Bytes are not what was saved; it names all files and records.
    """
    records = {piece.record for weight in weights for piece in weight.pieces if piece.record}
    ordered = sorted(records, key=lambda record: (record.path, record.start))
    damaged = [
        f"{record.path} has flipped bits: the checksum of its record {record.name} "
        f"({record.num_bytes:,} bytes) is wrong. Weights would be converted that nobody trained. "
        "Copy it again, or convert another checkpoint (tag=...)."
        for record in ordered
        if record.crc is not None and _crc(record) != record.crc
    ]
    if damaged:
        raise CheckpointDamaged(*damaged)


def _crc(record: Record) -> int:
    found, left, buffer = 0, record.num_bytes, memoryview(bytearray(CHUNK_BYTES))
    with record.path.open("rb", buffering=0) as file:
        file.seek(record.start)
        while left and (count := file.readinto(buffer[:left])):
            found = zlib.crc32(buffer[:count], found)
            left -= count
    return found


class Reader:
    """Reads weights; keeps files open until it is closed, by its ``with`` block."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffer = bytearray(CHUNK_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; a file that is read from again is opened again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def chunks(self, weight: Weight) -> Iterator[memoryview]:
        """The bytes of a weight, in order.

        Args:
            weight: Which.

        Yields:
            At most a few MiB each, of the weight's type; each is valid until the next is asked for.

        Raises:
            CheckpointFailed: A file ends before its numbers do.
        """
        for piece in weight.pieces:
            if not piece.is_contiguous:
                yield self._scattered(piece, weight.dtype)
                continue
            step = CHUNK_BYTES // piece.itemsize
            for begin in range(0, piece.numel, step):
                part = piece.part(begin, min(step, piece.numel - begin))
                data = self._read(part, memoryview(self._buffer)[: part.numel * part.itemsize])
                yield _converted(data, piece.dtype, weight.dtype)

    def _scattered(self, piece: StoredTensor, dtype: str) -> memoryview:
        """A tensor whose elements have gaps or another order; only buffers of modules are so."""
        whole = piece.span
        data = self._read(whole, memoryview(bytearray(whole.numel * whole.itemsize)))
        elements = np.frombuffer(data, dtype=f"V{piece.itemsize}")
        strides = [step * piece.itemsize for step in piece.stride]
        ordered = np.lib.stride_tricks.as_strided(elements, piece.shape, strides)
        return _converted(memoryview(ordered.tobytes()), piece.dtype, dtype)

    def _read(self, part: StoredTensor, into: memoryview) -> memoryview:
        file = self._files.get(part.path)
        if file is None:
            if len(self._files) >= _MOST_OPEN:
                self.close()
            file = self._files[part.path] = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < len(into):
            got = os.preadv(file, [into[done:]], part.first_byte + done)
            if not got:
                raise CheckpointFailed(
                    f"{part.path} ends at byte {os.fstat(file).st_size:,}, and numbers should be "
                    f"read up to byte {part.first_byte + len(into):,}: it is torn. Copy it again, "
                    "or convert another checkpoint (tag=...)."
                )
            done += got
        return into


def _converted(data: memoryview, source: str, target: str) -> memoryview:
    if source == target:
        return data
    numbers: np.ndarray[Any, Any] = np.frombuffer(data, dtype=_NUMPY[source])
    if source == "bfloat16":  # the upper half of an fp32
        numbers = numbers.astype("<u4") << 16
    else:
        numbers = numbers.astype(_NUMPY[target])
    return numbers.data.cast("B")
