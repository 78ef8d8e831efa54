"""Collectives over tensors in the host's memory, by processes that share memory.

The bytes of all tensors, one after the other, go along with the comparison of calls; what has no
room there goes along with further ones.

    bytes of a process     [ tensor 0 |pad| tensor 1 … ]
    rounds                 [ 0           ][ 1         ][ 2 … ]       one announced call each
    a sum of many bytes    after each round one more, with this process's part of the round's sum

Each process makes the result by itself, in order of rank: the same operations on the same values,
so results are equal to the bit. Tensors of a GPU are not taken, because reading them waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nbaccel.base.errors import InternalError
from nbaccel.train.shared_page import ALIGNMENT, aligned
from nbaccel.train.trees import leaves, map_tensors

__all__ = ["COPIED_TYPES", "NUMBER_TYPES", "HostTensors"]

# What gloo adds and compares, too; the rest is left to the group, which says what it cannot do.
NUMBER_TYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )
)
COPIED_TYPES = NUMBER_TYPES | frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "int16", "uint16", "uint32", "uint64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
)
_TENSOR_CLASSES = frozenset((torch.Tensor, torch.nn.Parameter))

_Exchange = Callable[[Any, Sequence[memoryview] | None], list[memoryview] | None]


class _Segment(NamedTuple):
    """Bytes of one tensor in one round."""

    tensor: int
    """Its number."""
    first: int
    """The first byte in the tensor."""
    place: int
    """The first byte in the round."""
    size: int


class HostTensors:
    """The tensors of a tree, for one collective.

    Args:
        tree: Tensors in containers, of equal shapes and dtypes on all processes.
        exchange: Announces a call with this detail and these bytes; returns the bytes of all
            processes by rank, or None if not all have given some.
        round_bytes: How many bytes can go along with one call; 0 for none.
        dtypes: Those that can be taken.
    """

    def __init__(
        self, tree: Any, exchange: _Exchange, round_bytes: int, dtypes: frozenset[torch.dtype]
    ) -> None:
        self._tree = tree
        self._exchange = exchange
        self._round_bytes = round_bytes // ALIGNMENT * ALIGNMENT
        self._tensors: list[torch.Tensor] = list(leaves(tree))
        has_some = bool(self._tensors) and self._round_bytes > 0
        self._is_taken = has_some and all(
            # Subclasses may hold their values elsewhere.
            type(tensor) in _TENSOR_CLASSES
            and tensor.dtype in dtypes
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and tensor.numel() > 0
            for tensor in self._tensors
        )
        self._sent: list[memoryview] = []
        self._first_data: list[memoryview] = []

    def begin(self, detail: Any, *, is_sent: bool = True) -> bool:
        """Announce the call, with the first bytes.

        Args:
            detail: What is to be the same on all processes; JSON.
            is_sent: Whether this process's values matter.

        Returns:
            Whether all processes take part. If not, the call has been compared all the same.
        """
        if not self._is_taken:
            self._exchange(detail, None)
            return False
        if is_sent:
            self._sent = [
                # A conjugated view has the bytes of what it is a view of.
                _bytes_of(tensor.detach().resolve_conj().resolve_neg().contiguous())
                for tensor in self._tensors
            ]
        data = self._exchange(detail, self._sent_in(self._segments(0)))
        self._first_data = data or []
        return data is not None

    def gathered(self) -> Any:
        """The tree with the tensors of all processes, joined along the first dimension."""
        world_size = len(self._first_data)
        joined = [
            tensor.new_empty((world_size * (tensor.shape or (1,))[0], *tensor.shape[1:]))
            for tensor in self._tensors
        ]
        targets = [_bytes_of(tensor) for tensor in joined]
        for segments, data in self._rounds():
            for segment in segments:
                num_bytes = self._tensors[segment.tensor].nbytes
                for rank, sent in enumerate(data):
                    first = rank * num_bytes + segment.first
                    targets[segment.tensor][first : first + segment.size] = sent[
                        segment.place : segment.place + segment.size
                    ]
        return self._as_tree(joined)

    def received(self, from_process: int) -> Any:
        """The tree with one process's tensors."""
        received = [_new_tensor(tensor.shape, tensor.dtype) for tensor in self._tensors]
        targets = [_bytes_of(tensor) for tensor in received]
        for segments, data in self._rounds():
            _copy_segments(data[from_process], segments, targets)
        return self._as_tree(received)

    def combined(self, rank: int, *, is_maximum: bool) -> Any:
        """The tree with sums, or maxima, over all processes.

        Args:
            rank: This process's number.
            is_maximum: Whether to take the maximum instead of the sum.
        """
        combined = [_new_tensor(tensor.shape, tensor.dtype) for tensor in self._tensors]
        targets = [_bytes_of(tensor) for tensor in combined]
        for segments, data in self._rounds():
            if self._num_rounds == 1:
                whole = self._combine_part(segments, data, is_maximum)
                _copy_segments(whole, segments, targets)
                continue
            # Each process adds up one part of a long round, and all get it from there.
            parts = self._parts(segments, len(data))
            own_part = self._combine_part(parts[rank], data, is_maximum)
            for part, sent in zip(parts, self._exchange_again([own_part]), strict=True):
                _copy_segments(sent, part, targets, base=part[0].place if part else 0)
        return self._as_tree(combined)

    def _combine_part(
        self, part: Sequence[_Segment], data: Sequence[memoryview], is_maximum: bool
    ) -> memoryview:
        """The bytes of a part of a round, combined."""
        if not part:
            return memoryview(b"")
        base = part[0].place
        num_bytes = part[-1].place + part[-1].size - base
        combined_bytes = _new_tensor((num_bytes,), torch.uint8)
        for segment in part:
            dtype = self._tensors[segment.tensor].dtype
            count = segment.size // dtype.itemsize
            place = segment.place
            values = [
                torch.frombuffer(sent, dtype=dtype, count=count, offset=place) for sent in data
            ]
            target = combined_bytes[place - base : place - base + segment.size].view(dtype)
            operation = torch.maximum if is_maximum else torch.add
            operation(values[0], values[1], out=target)
            for further in values[2:]:
                operation(target, further, out=target)
        return _bytes_of(combined_bytes)

    # --------------------------------------------------------------------- rounds

    @property
    def _num_rounds(self) -> int:
        num_bytes = sum(aligned(tensor.nbytes) for tensor in self._tensors)
        return -(-num_bytes // self._round_bytes)

    def _rounds(self) -> Iterator[tuple[list[_Segment], list[memoryview]]]:
        """Of each round what is in it, and the bytes of all processes."""
        yield self._segments(0), self._first_data
        for number in range(1, self._num_rounds):
            segments = self._segments(number)
            yield segments, self._exchange_again(self._sent_in(segments))

    def _exchange_again(self, sent: Sequence[memoryview]) -> list[memoryview]:
        data = self._exchange("continued", sent)
        if data is None:
            raise InternalError(
                f"{len(self._tensors)} tensors in {self._num_rounds} rounds: a process gave data "
                "in the first round and none in a later one, so the result cannot be completed."
            )
        return data

    def _segments(self, round_number: int) -> list[_Segment]:
        round_first = round_number * self._round_bytes
        round_end = round_first + self._round_bytes
        segments = []
        tensor_first = 0
        for number, tensor in enumerate(self._tensors):
            first = max(tensor_first, round_first)
            end = min(tensor_first + tensor.nbytes, round_end)
            if first < end:
                segments.append(
                    _Segment(number, first - tensor_first, first - round_first, end - first)
                )
            tensor_first += aligned(tensor.nbytes)
        return segments

    def _sent_in(self, segments: Sequence[_Segment]) -> list[memoryview]:
        return [
            self._sent[segment.tensor][segment.first : segment.first + segment.size]
            for segment in (segments if self._sent else ())
        ]

    @staticmethod
    def _parts(segments: Sequence[_Segment], count: int) -> list[list[_Segment]]:
        """A round's segments in so many parts of about equal size."""
        round_end = segments[-1].place + segments[-1].size
        part_bytes = aligned(-(-round_end // count))
        parts: list[list[_Segment]] = []
        for part_first in range(0, part_bytes * count, part_bytes):
            part = []
            for segment in segments:
                first = max(segment.place, part_first)
                end = min(segment.place + segment.size, part_first + part_bytes)
                if first < end:
                    shift = first - segment.place
                    part.append(_Segment(segment.tensor, segment.first + shift, first, end - first))
            parts.append(part)
        return parts

    def _as_tree(self, tensors: Sequence[torch.Tensor]) -> Any:
        remaining = iter(tensors)
        # `map_tensors` visits tensors in the order in which `leaves` lists them.
        return map_tensors(lambda _: next(remaining), self._tree)


def _new_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # The device is named, because the user may have set another default.
    return torch.empty(shape, dtype=dtype, device="cpu")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which it keeps using."""
    # Not `view`: a tensor of one element counts as contiguous whatever its stride is.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _copy_segments(
    sent: memoryview, segments: Sequence[_Segment], targets: Sequence[memoryview], base: int = 0
) -> None:
    """Copy what one process has sent to the tensors it belongs to.

    Args:
        sent: The bytes.
        segments: What they are.
        targets: The bytes of all tensors.
        base: The first byte of `sent`, in the round.
    """
    for tensor, first, place, size in segments:
        targets[tensor][first : first + size] = sent[place - base : place - base + size]
