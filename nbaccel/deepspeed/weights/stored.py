"""Numbers that lie in a file: where, of which type, in which shape. Nothing of them is in memory.

Offline, weights are read without torch and without DeepSpeed: what a conversion needs beside the
bytes themselves is a table of types.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from nbaccel.errors import ConfigError

__all__ = [
    "DTYPES",
    "SAFETENSORS_CODES",
    "Record",
    "StoredTensor",
    "Strip",
    "Weight",
    "misplaced",
    "num_elements",
]

DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
"""torch's name of a type → (its code in safetensors, bytes per element)."""

SAFETENSORS_CODES = {code: name for name, (code, _) in DTYPES.items()}

# A buffer may repeat its elements (`expand`); a file of a few bytes must not make gigabytes.
_REPEATED, _REPEATED_BYTES = 16, 64 * 2**20
_FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})


def num_elements(shape: Sequence[int]) -> int:
    """How many elements a tensor of a shape has; one for ``()``."""
    return math.prod(shape)


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes in an archive.

    Attributes:
        path: The archive.
        name: What it is called there.
        start: Its first byte in the file.
        num_bytes: How many it has.
        crc: Their CRC-32; None where the archive was saved without.
    """

    path: Path
    name: str
    start: int
    num_bytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, within the record that holds its storage.

    Attributes:
        path: The file.
        start: Byte at which its storage begins.
        dtype: torch's name, without ``torch.``.
        offset: Element of the storage that is its first.
        shape: Its shape.
        stride: Elements of the storage between neighbours, by dimension.
        ds_id: What DeepSpeed's swapper calls it; empty for most.
        record: The record that it lies in; None where it has a file to itself.
    """

    path: Path
    start: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ds_id: str = ""
    record: Record | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return num_elements(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def first_byte(self) -> int:
        """Where its first element is in the file."""
        return self.start + self.offset * self.itemsize

    @property
    def extent(self) -> int:
        """Elements of the storage from its first to its last; its number if it has no gaps."""
        if not self.numel:
            return 0
        return 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )

    @property
    def span(self) -> StoredTensor:
        """All elements of the storage from its first to its last, as one dimension."""
        return replace(self, shape=(self.extent,), stride=(1,))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other, in their order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return not self.numel
            expected *= size
        return True

    def part(self, begin: int, numel: int) -> StoredTensor:
        """Some of its elements, as a tensor of one dimension.

        Raises:
            ValueError: It has gaps, or another order: its elements are not where they would be.
        """
        if not self.is_contiguous:
            raise ValueError(f"a tensor of shape {self.shape} has the strides {self.stride}")
        return replace(self, offset=self.offset + begin, shape=(numel,), stride=(1,))


def misplaced(tensor: StoredTensor, num_bytes: int) -> str:
    """Why a tensor cannot lie in a record of some size; empty if it can.

    Args:
        tensor: What a pickle says of it, which may be anything.
        num_bytes: The record's size.
    """
    numbers = (tensor.offset, *tensor.shape, *tensor.stride)
    if len(tensor.shape) != len(tensor.stride) or not all(type(n) is int for n in numbers):
        return f"has the shape {tensor.shape} and the strides {tensor.stride}, which fit no tensor"
    if min(numbers) < 0:
        return (
            f"has a negative number in its offset, shape or strides "
            f"({tensor.offset}, {tensor.shape}, {tensor.stride})"
        )
    there = num_bytes // tensor.itemsize
    most = max(_REPEATED_BYTES, _REPEATED * num_bytes) // tensor.itemsize  # of stride 0
    if tensor.numel and (tensor.offset + tensor.extent > there or tensor.numel > most):
        return (
            f"of shape {tensor.shape}, strides {tensor.stride} and offset {tensor.offset} needs "
            f"more than the {there:,} elements that its record holds"
        )
    return ""


class Strip:
    """Tensors of one dimension, seen as one: they may lie in many files.

    Args:
        tensors: In order.
    """

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self._tensors = tuple(tensors)
        self._bounds = (0, *accumulate(tensor.numel for tensor in self._tensors))

    @property
    def numel(self) -> int:
        """Elements of all."""
        return self._bounds[-1]

    def part(self, begin: int, numel: int) -> tuple[StoredTensor, ...]:
        """Where some consecutive elements lie.

        Args:
            begin: The first.
            numel: How many.

        Returns:
            One tensor for each that they touch; fewer elements where it ends before.
        """
        end, found = begin + numel, []
        number = bisect_right(self._bounds, begin) - 1
        while begin < min(end, self.numel):
            tensor, low, high = self._tensors[number], *self._bounds[number : number + 2]
            last = min(end, high)
            if begin < last:
                found.append(tensor.part(begin - low, last - begin))
            begin, number = last, number + 1
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be: what it is called, what it looks like, of what it is put together.

    Attributes:
        name: As in the model's state dict.
        shape: Its shape.
        dtype: Type of its elements when it has been read: torch's name.
        pieces: Its elements in their order; empty where they are not in files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of it when it has been read."""
        return num_elements(self.shape) * DTYPES[self.dtype][1]

    @classmethod
    def whole(cls, name: str, tensor: StoredTensor) -> Weight:
        """A tensor as it is in its file; fp32 if it is of floating point.

        Args:
            name: What it is called.
            tensor: Where it is.

        Returns:
            The weight.
        """
        dtype = "float32" if tensor.dtype in _FLOATING else tensor.dtype
        return cls(name, tensor.shape, dtype, (tensor,))

    @classmethod
    def flat(cls, name: str, shape: tuple[int, ...], pieces: tuple[StoredTensor, ...]) -> Weight:
        """A parameter whose elements are put together from pieces, as fp32.

        Args:
            name: What it is called.
            shape: Its shape.
            pieces: Its elements.

        Returns:
            The weight.

        Raises:
            ConfigError: They are more or fewer than the shape holds.
        """
        found = sum(piece.numel for piece in pieces)
        if found != num_elements(shape):
            raise ConfigError(
                f"{name} has shape {list(shape)}, which is {num_elements(shape):,} elements, and "
                f"the checkpoint has {found:,} of it: its files are not of one save, or not "
                "complete. Convert another checkpoint (tag=...)."
            )
        return cls(name, shape, "float32", pieces)
