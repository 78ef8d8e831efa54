"""Files of ``torch.save``, read by torch: plain data, and tensors that stay in the file until used.

The file is mapped. Pages that were read count as this process's memory until they are given back:
that is done piece by piece, so a few MiB are in memory whatever the file's size. Of classes that
torch does not take for plain data, such as DeepSpeed's, there is a stand-in: no code of a file is
run, and DeepSpeed is not imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.units import first_few
from nbaccel.base.weight_files import OLD_TORCH_FORMAT

if TYPE_CHECKING:
    from typing_extensions import Self


_CHUNK_ELEMENTS = 2**20
# A buffer may repeat its elements (`expand`); a file of a few bytes must not make gigabytes.
_REPEATED = 16
_REPEATED_BYTES = 64 * 2**20
_MADV_DONTNEED = 4  # of Linux's <sys/mman.h>


class Unknown:
    """An object of a class that is not looked up; it keeps its constructor's arguments."""

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Self:
        """Without a constructor's work: pickles make objects by this alone."""
        unknown = super().__new__(cls)
        unknown.args = args
        return unknown

    def __setstate__(self, state: Any) -> None:
        """Ignored, since state is not needed."""


class StateFile(NamedTuple):
    """A file that is mapped, with what was saved."""

    path: Path
    states: Any
    mappings: frozenset[range]
    """Addresses at which it is mapped; none where the system does not tell."""


def is_readable(path: Path) -> bool:
    """Whether a file is not of torch's format of before 2020, which cannot be mapped."""
    with path.open("rb") as file:
        return file.read(len(OLD_TORCH_FORMAT)) != OLD_TORCH_FORMAT


def read_states(path: Path) -> StateFile:
    """Read what ``torch.save`` wrote, but not the numbers of its tensors."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([_stand_in(name) for name in names]):
            states = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a damaged pickle is a program that may raise anything
        raise _unreadable(path, error) from error
    return StateFile(path, states, _mappings_of(path))


def _stand_in(full_name: str) -> type[Unknown]:
    """A class that torch takes for the one of this name."""
    module, _, name = full_name.rpartition(".")
    return type(name, (Unknown,), {"__module__": module})


def map_numbers(path: Path, num_elements: int) -> FileTensor:
    """A file that holds nothing but fp32 numbers."""
    tensor = torch.from_file(str(path), shared=False, size=num_elements, dtype=torch.float32)
    return FileTensor(StateFile(path, tensor, _mappings_of(path)), tensor)


def _mappings_of(path: Path) -> frozenset[range]:
    maps = Path("/proc/self/maps")  # of Linux alone
    lines = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    return frozenset(
        range(*(int(address, 16) for address in line.split(maxsplit=1)[0].split("-")))
        for line in lines.splitlines()
        if line.endswith(f" {path.resolve()}")
    )


def _unreadable(path: Path, error: Exception) -> ConfigError:
    if not is_readable(path):
        return ConfigError(
            f"{path} is in torch's format of before 2020, whose tensors cannot be read one "
            'by one (DeepSpeed writes it where the configuration has "checkpoint_serialization": '
            "false). Write it anew, with torch.save(torch.load(path, weights_only=False), path), "
            "for every .pt file of the folder; then convert. (That runs whatever code is in the "
            "file: only do it with your own.)"
        )
    # torch's text has several paragraphs, and recommends to read the file without any check.
    reason = next(iter(str(error).splitlines()), "")
    if isinstance(error, pickle.UnpicklingError):
        reason = reason.partition("you can do so")[0].partition("Please")[0]
    return CheckpointDamaged(
        f"{path} cannot be read, at a size of {path.stat().st_size:,} bytes "
        f"({type(error).__name__}: {reason}): it is torn, or no checkpoint. A process was killed "
        "while it wrote it, the disk was full, or a copy is not complete. Copy it again, or "
        "convert an earlier checkpoint (tag=...)."
    )


class FileTensor(NamedTuple):
    """A tensor, and the file that it lies in."""

    file: StateFile
    tensor: torch.Tensor

    @classmethod
    def of(cls, file: StateFile, value: Any) -> FileTensor:
        """A tensor of a file; ValueError for what has no numbers, or repeats them too often."""
        tensor: torch.Tensor = value.detach()
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or value.is_quantized:
            raise ValueError(f"a tensor is {tensor.layout} on {tensor.device}")
        stored_bytes = tensor.untyped_storage().nbytes()
        if tensor.nbytes > max(_REPEATED_BYTES, _REPEATED * stored_bytes):
            raise ValueError(f"a tensor of {stored_bytes} bytes has the shape {list(tensor.shape)}")
        return cls(file, tensor)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    def chunks(self) -> Iterator[torch.Tensor]:
        """Its elements in their order, a few MiB at a time; each is gone with the next."""
        for chunk in torch.split(self.tensor.reshape(-1), _CHUNK_ELEMENTS):
            yield chunk
            self._give_back(chunk)

    def _give_back(self, chunk: torch.Tensor) -> None:
        address = chunk.data_ptr()
        # Nothing else: memory that belongs to no file would be filled with zeros.
        if any(address in mapping for mapping in self.file.mappings):
            first = address - address % mmap.PAGESIZE
            size = ctypes.c_size_t(address + chunk.nbytes - first)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, ctypes.c_int(_MADV_DONTNEED))


def pieces_between(tensors: Iterable[FileTensor], begin: int, end: int) -> tuple[FileTensor, ...]:
    """Some elements of tensors that are laid end to end: as many as there are."""
    pieces = []
    for tensor in tensors:
        first = max(begin, 0)
        count = min(end, tensor.numel) - first
        if count > 0:
            part = tensor.tensor.view(-1).narrow(0, first, count)
            pieces.append(FileTensor(tensor.file, part))
        begin -= tensor.numel
        end -= tensor.numel
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be written: its name, its shape, and the pieces that it is put together from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Type of its elements when it has been read."""
    pieces: tuple[FileTensor, ...] = ()
    """Its elements in their order; empty where they are not in files."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def whole(cls, name: str, file: StateFile, value: torch.Tensor) -> Weight:
        """A tensor as it is, with floating-point numbers as fp32."""
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return cls(name, tuple(value.shape), dtype, (FileTensor.of(file, value),))

    def chunks(self) -> Iterator[torch.Tensor]:
        """Its elements in their order, a few MiB at a time."""
        for piece in self.pieces:
            for chunk in piece.chunks():
                yield chunk.to(self.dtype)


@contextlib.contextmanager
def checked_bits(weights: Iterable[Weight]) -> Iterator[None]:
    """A block that reads weights; it ends with an error where their bits are not those saved.

    Meanwhile they are compared with the checksums that `torch.save` wrote beside them: in threads,
    since checksums cover whole records, of which the block may read the parts in any order.
    """
    checksums_of = functools.cache(_checksums_in)
    # By address: a record may have several weights.
    records = {
        piece.tensor.untyped_storage().data_ptr(): (weight.name, piece)
        for weight in weights
        for piece in weight.pieces
        if checksums_of(piece.file.path)
    }
    # zlib lets other threads run. Few, because each has a piece in memory.
    threads = ThreadPoolExecutor(max_workers=4)
    try:
        sums = threads.map(_sum_of_record, (piece for _, piece in records.values()))
        yield
        for (name, piece), record in zip(records.values(), sums, strict=True):
            if record not in checksums_of(piece.file.path):
                raise CheckpointDamaged(
                    f"{piece.file.path} has flipped bits: the checksum of the record with {name} "
                    f"({record[0]:,} bytes) is wrong. Weights would be converted that are not "
                    "those that were trained. Copy it again, or convert another checkpoint "
                    "(tag=...)."
                )
    finally:
        threads.shutdown(cancel_futures=True)


def _sum_of_record(piece: FileTensor) -> tuple[int, int]:
    """Size and CRC-32 of the record that a tensor lies in."""
    storage = piece.tensor.untyped_storage()
    stored = FileTensor(piece.file, torch.empty(0, dtype=torch.uint8).set_(storage))
    crc = 0
    for chunk in stored.chunks():
        crc = zlib.crc32(chunk.numpy().data, crc)
    return storage.nbytes(), crc


def _checksums_in(path: Path) -> set[tuple[int, int]]:
    """Size and CRC-32 of each record; none where it was saved without, as torch can."""
    if not zipfile.is_zipfile(path):
        return set()
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    has_checksums = any(record.CRC for record in records)
    return {(record.file_size, record.CRC) for record in records if has_checksums}


# ------------------------------------------------------------------------------ placeholders
# A partitioned parameter of ZeRO-3 is a tensor of shape ``(0,)`` while no layer uses it.
# ``model.state_dict()`` and ``torch.save`` take it as it is.


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 keeps this parameter's numbers elsewhere at the moment."""
    whole_shape = getattr(parameter, "ds_shape", None)
    return whole_shape is not None and tuple(parameter.shape) != tuple(whole_shape)


def placeholders(module_or_state: nn.Module | Mapping[str, Any]) -> list[str]:
    """Names of the parameters that are placeholders of ZeRO-3.

    Parameters of a module have DeepSpeed's attributes; a state dict has only shapes, unless it was
    taken with `keep_vars`.
    """
    if isinstance(module_or_state, nn.Module):
        # With duplicates: a tied parameter is named twice in the state dict, too.
        named = module_or_state.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if is_placeholder(parameter)]
    return [
        name
        for name, value in module_or_state.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and (is_placeholder(value) or tuple(value.shape) == (0,))
    ]


def check_whole(module_or_state: nn.Module | Mapping[str, Any], thing: str) -> None:
    """Refuse weights that are placeholders of ZeRO-3, before they are saved or loaded."""
    names = placeholders(module_or_state)
    if names:
        raise ConfigError(
            f"{thing}: {len(names)} of the weights are ZeRO-3 placeholders "
            f"({first_few(names, 3)}), tensors of shape (0,) in the place of parameters that are "
            "spread over the ranks. A file of them is worthless. To save whole weights call "
            "nbaccel.fp32_state_dict(engine) or nbaccel.save_16bit_weights(engine, folder) on "
            "every rank, or use accelerator.save_model(model, folder). From a checkpoint of "
            "engine.save_checkpoint, nbaccel.zero_to_fp32(...) makes them."
        )
