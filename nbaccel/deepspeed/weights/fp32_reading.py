"""Reads weights out of files, piece by piece, through one buffer.

Files are read, not mapped: pages of a mapped file count as the process's memory until the system
reclaims them, and of a model all pages would be touched.

At stage 0 in bf16 or fp16, the model's part has rounded weights; those in fp32 are in the
optimizer's part, laid end to end, group by group, without names. They are matched by rounding: each
parameter takes the next numbers of the group where these round to its values, bit by bit. Every
number of the optimizer must be matched that way.

With an optimizer on NVMe, its state has an empty tensor for each sub-group that was swapped, marked
with the swapper's id, and the fp32 weights are in ``offloaded_tensors/rank<rr>/<id>.tensor.swp``,
whose size is rounded up for the disk. DeepSpeed's script does not look there.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from nbaccel.base.errors import CheckpointDamaged, CheckpointFailed, ConfigError
from nbaccel.deepspeed.weights.torch_archive import (
    ArchiveRecord,
    StoredTensor,
    Strip,
    Weight,
    num_elements,
)

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["CHUNK_BYTES", "Reader", "check_records", "swapped_in", "weights_of_stage_0"]


CHUNK_BYTES = 4 * 2**20
_MOST_OPEN = 256  # a checkpoint has a file per rank, and a process may open 1024 as a rule
_NUMPY_DTYPES = {
    "complex64": "<c8",
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
}


def check_records(stored_weights: Iterable[Weight]) -> None:
    """Compare what will be read with its checksums: each record is read through once."""
    archive_records = {
        stored_piece.record
        for stored_weight in stored_weights
        for stored_piece in stored_weight.pieces
        if stored_piece.record
    }
    # Sorted, since a set has no order: each file is read from its beginning to its end.
    ordered_records = sorted(
        archive_records, key=lambda archive_record: (archive_record.path, archive_record.start)
    )
    texts = [
        f"{archive_record.path} has flipped bits: the checksum of its record {archive_record.name} "
        f"({archive_record.num_bytes:,} bytes) is wrong. Weights would be converted that are not "
        "those that were trained. Copy it again, or convert another checkpoint (tag=...)."
        for archive_record in ordered_records
        if archive_record.crc is not None and _record_crc(archive_record) != archive_record.crc
    ]
    if texts:
        raise CheckpointDamaged(*texts)


def _record_crc(record: ArchiveRecord) -> int:
    # One buffer, reused: a record may be larger than the memory.
    running_crc = 0
    bytes_left = record.num_bytes
    read_buffer = memoryview(bytearray(CHUNK_BYTES))
    with record.path.open("rb", buffering=0) as file:
        file.seek(record.start)
        while bytes_left and (read_bytes := file.readinto(read_buffer[:bytes_left])):
            running_crc = zlib.crc32(read_buffer[:read_bytes], running_crc)
            bytes_left -= read_bytes
    return running_crc


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
        """The bytes of a weight, in order."""
        for piece in weight.pieces:
            if not piece.is_contiguous:
                yield self._scattered(piece, weight.dtype)
                continue
            step_elements = CHUNK_BYTES // piece.itemsize
            for first_element in range(0, piece.numel, step_elements):
                part = piece.part(first_element, min(step_elements, piece.numel - first_element))
                part_bytes = self._read(
                    part,
                    memoryview(self._buffer)[: part.numel * part.itemsize],
                )
                yield _converted_bytes(part_bytes, piece.dtype, weight.dtype)

    def _scattered(self, stored_piece: StoredTensor, dtype: str) -> memoryview:
        """A tensor whose elements have gaps or another order, as only buffers of modules have."""
        # As a whole, since `misplaced` has limited what a repeated one can take.
        whole_span = stored_piece.span
        part_bytes = self._read(
            whole_span, memoryview(bytearray(whole_span.numel * whole_span.itemsize))
        )
        stored_elements = np.frombuffer(part_bytes, dtype=f"V{stored_piece.itemsize}")
        strides = [
            stride_elements * stored_piece.itemsize for stride_elements in stored_piece.stride
        ]
        ordered_elements = np.lib.stride_tricks.as_strided(
            stored_elements, stored_piece.shape, strides
        )
        return _converted_bytes(memoryview(ordered_elements.tobytes()), stored_piece.dtype, dtype)

    def _read(self, part: StoredTensor, target_buffer: memoryview) -> memoryview:
        open_file = self._files.get(part.path)
        if open_file is None:
            if len(self._files) >= _MOST_OPEN:
                self.close()
            open_file = self._files[part.path] = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        done_bytes = 0
        while done_bytes < len(target_buffer):
            # With an offset, so that the descriptor has no position to keep; it may read less than
            # was requested.
            read_bytes = os.preadv(
                open_file, [target_buffer[done_bytes:]], part.first_byte + done_bytes
            )
            if not read_bytes:
                raise CheckpointFailed(
                    f"{part.path} ends at byte {os.fstat(open_file).st_size:,}, and numbers "
                    f"should be read up to byte {part.first_byte + len(target_buffer):,}: "
                    "it is torn. Copy it again, or convert another checkpoint (tag=...)."
                )
            done_bytes += read_bytes
        return target_buffer


def _converted_bytes(part_bytes: memoryview, source_dtype: str, target_dtype: str) -> memoryview:
    if source_dtype == target_dtype:
        return part_bytes
    numbers: np.ndarray[Any, Any] = np.frombuffer(part_bytes, dtype=_NUMPY_DTYPES[source_dtype])
    if source_dtype == "bfloat16":  # the upper half of an fp32
        numbers = numbers.astype("<u4") << 16
    else:
        numbers = numbers.astype(_NUMPY_DTYPES[target_dtype])
    return numbers.data.cast("B")


_ROUNDED_DTYPES = frozenset({"bfloat16", "float16"})


def weights_of_stage_0(
    file_path: Path, model: Mapping[str, Any], *, exclude_frozen_parameters: bool
) -> tuple[dict[str, Weight], dict[str, str]]:
    """The weights of a checkpoint of stage 0."""
    found_weights, tied_names = _stored_weights(model)
    buffer_names = set(model.get("buffer_names") or ())
    trained_weights = [
        stored_weight
        for weight_name, stored_weight in found_weights.items()
        if weight_name not in buffer_names
    ]
    trained_masters = _master_weights(file_path, model, trained_weights)
    if exclude_frozen_parameters:
        if not trained_masters:
            raise ConfigError(
                f"{file_path} was saved without ZeRO and in fp32 (or without an optimizer), and "
                f"does not tell which of its {len(trained_weights)} parameters were frozen. Leave "
                "exclude_frozen_parameters out, and drop them by their names."
            )
        found_weights = {
            weight_name: found_weight
            for weight_name, found_weight in found_weights.items()
            if weight_name in buffer_names or weight_name in trained_masters
        }
    found_weights.update(trained_masters)
    return found_weights, {
        weight_name: tied_target
        for weight_name, tied_target in tied_names.items()
        if tied_target in found_weights
    }


def _stored_weights(model: Mapping[str, Any]) -> tuple[dict[str, Weight], dict[str, str]]:
    """The model's tensors as they are; of those in the same place, the first."""
    weights: dict[str, Weight] = {}
    tied_names: dict[str, str] = {}
    first_names: dict[tuple[int, int, tuple[int, ...]], str] = {}
    for weight_name, value in model["module"].items():
        if not isinstance(value, StoredTensor):
            continue  # a module's extra state is no weight
        first_name = first_names.setdefault((value.start, value.offset, value.shape), weight_name)
        # Empty tensors may be in one place without being tied.
        if first_name == weight_name or not value.numel:
            weights[weight_name] = Weight.whole(weight_name, value)
        else:
            tied_names[weight_name] = first_name
    return weights, tied_names


def _master_weights(
    file_path: Path, model: Mapping[str, Any], trained_weights: Sequence[Weight]
) -> dict[str, Weight]:
    flat_strips = _master_groups(model.get("optimizer"))
    first_elements = [0] * len(flat_strips)
    trained_masters: dict[str, Weight] = {}
    with Reader() as weight_reader:
        for stored_weight in trained_weights:
            (own_tensor,) = stored_weight.pieces
            # In fp32 the model's weights are those that the optimizer trains.
            if own_tensor.dtype not in _ROUNDED_DTYPES or not own_tensor.numel:
                continue
            for strip_number, flat_strip in enumerate(flat_strips):
                stored_pieces = flat_strip.part(first_elements[strip_number], own_tensor.numel)
                if sum(stored_piece.numel for stored_piece in stored_pieces) != own_tensor.numel:
                    continue
                if _rounds_to(weight_reader, stored_pieces, own_tensor):
                    first_elements[strip_number] += own_tensor.numel
                    trained_masters[stored_weight.name] = Weight.flat(
                        stored_weight.name, stored_weight.shape, stored_pieces
                    )
                    break
    # What is left over belongs to a parameter that was not found, so the matches are not certain.
    elements_left = sum(flat_strip.numel for flat_strip in flat_strips) - sum(first_elements)
    if elements_left:
        raise ConfigError(
            f"{file_path} has {elements_left:,} fp32 weights in its optimizer that round to no "
            "parameter of the model: the two did not agree when it was saved, so it is not certain "
            "to which parameters they belong. Load the checkpoint into its engine and use "
            "fp32_state_dict(engine)."
        )
    return trained_masters


def _master_groups(optimizer: Any) -> list[Strip]:
    """The optimizer's fp32 weights, by group; none where it trained the model's tensors."""
    if not isinstance(optimizer, Mapping):
        return []
    flat_groups = optimizer.get("fp32_groups_flat")
    if flat_groups is not None:
        return [Strip([tensor]) for tensor in flat_groups]
    param_groups = optimizer.get("fp32_groups") or ()
    return [
        Strip([tensor.part(0, tensor.numel) for tensor in param_group])
        for param_group in param_groups
    ]


def _rounds_to(
    weight_reader: Reader, stored_pieces: tuple[StoredTensor, ...], own_tensor: StoredTensor
) -> bool:
    """Whether fp32 numbers are, in 16 bit, exactly these; a few MiB of both at a time."""
    master_weight = Weight("", (own_tensor.numel,), "float32", stored_pieces)
    first_element = 0
    for chunk in weight_reader.chunks(master_weight):
        # A copy, because the reader uses its buffer again for the other side.
        float_numbers = np.frombuffer(bytes(chunk), "<f4")
        stored_part = own_tensor.part(first_element, float_numbers.size)
        stored_bytes = b"".join(
            map(
                bytes,
                weight_reader.chunks(
                    Weight("", stored_part.shape, own_tensor.dtype, (stored_part,))
                ),
            )
        )
        if _rounded_to(float_numbers, own_tensor.dtype) != stored_bytes:
            return False
        first_element += float_numbers.size
    return True


def _rounded_to(numbers: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "float16":
        return numbers.astype("<f2").tobytes()
    # numpy has no bfloat16: rounded to the nearest, and of two equally near ones to the even one,
    # as torch does it.
    float_bits = numbers.view("<u4")
    upper_bits: np.ndarray[Any, Any] = (float_bits + 0x7FFF + ((float_bits >> 16) & 1)) >> 16
    return upper_bits.astype("<u2").tobytes()


_ROUNDED_BYTES = 2**20  # far above DeepSpeed's rounding; smaller tensors are never swapped
_WITH_ENGINE = (
    "Load the checkpoint into its engine, in a fresh process, and use fp32_state_dict(engine)."
)


def swapped_in(
    folder: Path,
    rank: int,
    flat_tensors: Sequence[StoredTensor],
    param_groups: Sequence[Mapping[str, tuple[int, ...]]],
    num_ranks: int,
) -> list[StoredTensor]:
    """Put swap files in place of the empty tensors of a rank's state."""
    whole_groups = list(flat_tensors)
    for group_number, (tensor, param_group) in enumerate(
        zip(flat_tensors, param_groups, strict=False)
    ):
        # Each parameter is divided among the ranks, and its last part padded.
        rank_share = sum(-(-num_elements(shape) // num_ranks) for shape in param_group.values())
        if not tensor.numel and rank_share:
            file_path = (
                folder / "offloaded_tensors" / f"rank{rank:02d}" / f"{tensor.ds_id}.tensor.swp"
            )
            _check_file_size(file_path, 4 * rank_share, next(iter(param_group)))
            whole_groups[group_number] = StoredTensor(
                file_path, 0, "float32", 0, (rank_share,), (1,)
            )
    return whole_groups


def _check_file_size(path: Path, byte_count: int, name: str) -> None:
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: it should hold the fp32 weights of {name} and those "
            "after it, which were swapped to NVMe when the checkpoint was saved. Copy the folder "
            f"offloaded_tensors, too, from the machine that saved it. {_WITH_ENGINE}"
        )
    file_size = path.stat().st_size
    if not 0 <= file_size - byte_count < _ROUNDED_BYTES:
        raise ConfigError(
            f"{path} has {file_size:,} bytes, and the weights from {name} on, which it "
            f"should hold, have {byte_count:,}: it is torn, or of another save. {_WITH_ENGINE}"
        )
