"""What a checkpoint's files hold, from their headers alone, and tensors that view them.

A checkpoint is a safetensors file, a file of `torch.save`, a folder with one of them, or a folder
(or an index) of several. Nothing in it is run: pickles are opened with ``weights_only=True``, and
an index may name files of its own folder only.

A weight on the "disk" tier is never copied: it is mapped for the time of a forward pass.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nbaccel.base import mapped_files
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.units import first_few
from nbaccel.base.weight_files import SAFE_DTYPE_NAMES
from nbaccel.train.checkpoint.files import read_torch_file, why_unreadable
from nbaccel.transfer import arena
from nbaccel.transfer.arena import Arena

SAFE_FILE = "model.safetensors"
TORCH_FILE = "pytorch_model.bin"
INDEX_SUFFIX = ".index.json"
_SAFE_SUFFIX = ".safetensors"
_HEADER_LENGTH_BYTES = 8
_POINTER_START = b"version https://git-lfs"
_ARCHIVE_START = b"PK\x03\x04"
_REMEDY = "Nothing has been changed. Copy or save the checkpoint again."


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint."""

    name: str  # as in the state dict
    path: Path  # the file
    dtype: torch.dtype  # its format there
    shape: tuple[int, ...]  # its shape
    # Where it begins in a safetensors file, whose elements are not packed otherwise.
    first_byte: int = 0
    opened: torch.Tensor | None = None  # the tensor, of a file of torch
    # Whether bytes stay in the file until used: torch before 1.6 wrote files to be read whole.
    is_mapped: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of it in the file."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


def read_checkpoint(checkpoint: str | Path) -> dict[str, CheckpointTensor]:
    """Read the headers of a checkpoint: its tensors by name."""
    source = Path(checkpoint)
    file_paths, weight_map = _locate_files(source)
    tensors_by_file: dict[str, dict[str, CheckpointTensor]] = {}
    problems: list[str] = []
    for path in file_paths:
        try:
            _refuse_pointer(path)
            read = _read_safetensors if path.suffix == _SAFE_SUFFIX else _read_torch
            tensors_by_file[path.name] = {stored.name: stored for stored in read(path)}
        except CheckpointDamaged as damage:
            problems += damage.mistakes
    if problems:
        raise CheckpointDamaged(*problems)
    if weight_map is None:
        return tensors_by_file[file_paths[0].name]
    absent = [
        f"{name} in {file_name}"
        for name, file_name in weight_map.items()
        if name not in tensors_by_file[file_name]
    ]
    if absent:
        raise CheckpointDamaged(
            f"The index of {source} promises {len(absent)} tensors that are not in the files it "
            f"names: {first_few(absent, 3)}. {_REMEDY}"
        )
    # Files may hold more than the index names, and a name twice; the index says which one counts.
    return {name: tensors_by_file[file_name][name] for name, file_name in weight_map.items()}


def _locate_files(source: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files, and by which name of a file each tensor is listed where there is an index."""
    if _is_readable_file(source):
        return _indexed_files(source) if source.suffix == ".json" else ([source], None)
    if not os.path.isdir(source):  # noqa: PTH112 - as below
        raise ConfigError(
            f"checkpoint={str(source)!r} is no file and no folder: there are no weights to load. "
            "Give a .safetensors or .bin file, an *.index.json, or the folder that holds them. "
            "(A name on a model hub must be downloaded first: "
            "huggingface_hub.snapshot_download gives the folder.)"
        )
    for file_name in (TORCH_FILE, SAFE_FILE):
        if _is_readable_file(source / file_name):
            return [source / file_name], None
    index_paths = sorted(source.glob(f"*{INDEX_SUFFIX}"))
    if len(index_paths) == 1:
        return _indexed_files(index_paths[0])
    if index_paths:
        index_names = ", ".join(path.name for path in index_paths)
        raise ConfigError(
            f"{source} holds {len(index_paths)} indexes ({index_names}): each describes other "
            "weights. Give the path of one of them."
        )
    names = sorted(path.name for path in source.iterdir())
    raise ConfigError(
        f"{source} holds no {SAFE_FILE}, no {TORCH_FILE} and no *{INDEX_SUFFIX}: there are no "
        f"weights to load. It has {first_few(names, 5) or 'no files'}. Give the file itself."
    )


def _is_readable_file(path: Path) -> bool:
    # Not by its method, for which an impossible name (too long, a folder not ours) is an OSError.
    return os.path.isfile(path)  # noqa: PTH113


def _indexed_files(index_path: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
    # A deeply nested text is a RecursionError.
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{index_path} cannot be read as JSON ({error}): it says in which files the weights "
            f"are. {_REMEDY}"
        ) from error
    weight_map: Any = index.get("weight_map", index) if isinstance(index, dict) else None
    is_map = isinstance(weight_map, dict) and bool(weight_map)
    if not is_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointDamaged(
            f"{index_path} is no index: it must map names of tensors to names of files, under "
            f'"weight_map". {_REMEDY}'
        )
    file_names = sorted(set(weight_map.values()))
    # A crafted index could otherwise make this process open files anywhere.
    outside = [name for name in file_names if Path(name).name != name or name in ("", ".", "..")]
    if outside:
        raise CheckpointDamaged(
            f"{index_path} names files outside of its folder ({first_few(outside, 3)}): a "
            f"checkpoint's files are in one folder. {_REMEDY}"
        )
    missing = [name for name in file_names if not _is_readable_file(index_path.parent / name)]
    if missing:
        raise CheckpointDamaged(
            f"{index_path.parent} lacks {len(missing)} of the {len(file_names)} files that "
            f"{index_path.name} names: {first_few(missing, 3)}. {_REMEDY}"
        )
    return [index_path.parent / name for name in file_names], weight_map


def _refuse_pointer(path: Path) -> None:
    """Say what a file of Git LFS is, which a clone without it leaves where weights should be."""
    try:
        with path.open("rb") as file:
            first_bytes = file.read(len(_POINTER_START))
    except OSError as error:
        raise CheckpointDamaged(
            f"{path} cannot be opened ({error.strerror or error}): there is nothing to load from "
            f"it. {_REMEDY}"
        ) from error
    if first_bytes == _POINTER_START:
        raise CheckpointDamaged(
            f"{path} is a pointer of Git LFS, and the weights themselves were not downloaded. "
            "Nothing has been changed. Run `git lfs pull` in its folder, or download it again."
        )


def _read_safetensors(path: Path) -> list[CheckpointTensor]:
    try:
        # The library compares the header with itself and with the file's size.
        with safe_open(path, "numpy") as weights:
            file_format = (weights.metadata() or {}).get("format", "pt")
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            header: dict[str, Any] = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointDamaged(
            f"{path} is truncated, or no safetensors file ({error}). {_REMEDY}"
        ) from error
    if file_format not in ("pt", "np", "numpy", "mlx"):
        raise CheckpointDamaged(
            f"{path} was saved in the format {file_format!r}, whose layers lay weights out in "
            "another way than torch's. Convert it: from_pretrained(from_tf=True, from_flax=True)."
        )
    header.pop("__metadata__", None)
    start = _HEADER_LENGTH_BYTES + header_bytes  # from which offsets count
    tensors = []
    for name, entry in header.items():
        dtype = getattr(torch, SAFE_DTYPE_NAMES.get(entry["dtype"], ""), None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointDamaged(
                f"{path} holds {name} as {entry['dtype']}, a format that torch "
                f"{torch.__version__} does not have. Save it in another one, or update torch."
            )
        first_byte = start + int(entry["data_offsets"][0])
        shape = tuple(entry["shape"])
        tensors.append(
            CheckpointTensor(name=name, path=path, dtype=dtype, shape=shape, first_byte=first_byte)
        )
    return tensors


def _read_torch(path: Path) -> list[CheckpointTensor]:
    try:
        # What torch wrote before version 1.6 is no archive, and cannot be mapped.
        is_mapped = _is_plain_archive(path)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise CheckpointDamaged(why_unreadable(path, error)) from error
    with warnings.catch_warnings():
        # Of checking them or not, by the version: torch 2.11 and 2.15. They are refused below.
        warnings.filterwarnings("ignore", "(?i).*sparse.* invariant", UserWarning)
        state = read_torch_file(path, mmap=is_mapped)
    if not isinstance(state, Mapping):
        raise CheckpointDamaged(
            f"{path} holds a {type(state).__name__}, no state dict: it is unclear which tensor is "
            "which. Save model.state_dict()."
        )
    nested = [str(name) for name, value in state.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointDamaged(
            f"{path} holds mappings inside of its state dict ({first_few(nested, 3)}): it is a "
            "checkpoint of a training, not of one model's weights. Save model.state_dict() alone."
        )
    tensors = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
    problems = [
        f"{path} holds {name} as {form}. Save a dense tensor with values, or leave it out."
        for name, value in tensors.items()
        if (form := _unusable_form(value))
    ]
    if problems:
        raise CheckpointDamaged(*problems)
    return [
        CheckpointTensor(
            name=str(name),
            path=path,
            dtype=value.dtype,
            shape=tuple(value.shape),
            opened=value.detach(),
            is_mapped=is_mapped,
        )
        for name, value in tensors.items()
    ]


def _unusable_form(tensor: torch.Tensor) -> str:
    """Why a tensor's values cannot be copied into a parameter; empty if they can."""
    if tensor.is_meta:
        return "a tensor on meta, which has no values"
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} and {tensor.dtype}, not one block of numbers"
    return ""


def _is_plain_archive(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(len(_ARCHIVE_START)) != _ARCHIVE_START:
            return False
    num_bytes = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            is_stored = record.compress_type == zipfile.ZIP_STORED
            if not is_stored or record.header_offset + record.file_size > num_bytes:
                raise ValueError(f"its record {record.filename} is compressed or incomplete")
    return True


_HAS_MEMORY_FILES = hasattr(os, "memfd_create")  # Linux
_MADV_POPULATE_READ = 22  # <asm-generic/mman-common.h>, Linux 5.14; the mmap module lacks it
_PORTION_BYTES = 64 << 20  # read at a time, so that a bar moves and an interrupt gets through


class WeightFiles:
    """Files of a checkpoint, each mapped once, when the first of its tensors is asked for."""

    def __init__(self) -> None:
        self._arenas: dict[Path, Arena] = {}
        # Whose view has which memory of a file of torch, in which names may share theirs.
        self._owners: dict[int, str] = {}

    def map_files(self, tensors: Iterable[CheckpointTensor]) -> None:
        """Map the files of these tensors now, so that later nothing can be missing."""
        problems = {}
        for stored in tensors:
            if stored.opened is not None or not stored.num_bytes or stored.path in problems:
                continue
            path = stored.path
            try:
                is_mapped = _HAS_MEMORY_FILES
                num_bytes = self._arena_of(path).nbytes if is_mapped else path.stat().st_size
                if num_bytes < stored.first_byte + stored.num_bytes:
                    problems[path] = f"{path} has become shorter, and lacks {stored.name}"
            except OSError as error:
                problems[path] = f"{path} cannot be mapped ({error.strerror or error})"
        why = "another program may be writing it. Nothing has been changed. Load it when complete."
        if problems:
            raise CheckpointDamaged(*(f"{problem}: {why}" for problem in problems.values()))

    def view(self, stored: CheckpointTensor) -> torch.Tensor:
        """A tensor over the file's bytes; what is written to it stays in this process.

        A copy where the bytes are not aligned, mapped by torch where the system cannot otherwise.
        """
        if stored.opened is not None:
            # Memory that no other name's view has.
            address = stored.opened.untyped_storage().data_ptr()
            is_owner = not address or self._owners.setdefault(address, stored.name) == stored.name
            is_usable = is_owner and stored.opened.is_contiguous()
            return stored.opened if is_usable else stored.opened.contiguous().clone()
        if not stored.num_bytes:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if _HAS_MEMORY_FILES:
            # A storage of its own for each tensor, as launches share storages.
            own_arena = self._arena_of(stored.path)
            storage = arena.storage_at(own_arena, stored.first_byte, stored.num_bytes)
            raw_bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        else:
            end_byte = stored.first_byte + stored.num_bytes
            whole_file = torch.from_file(str(stored.path), False, end_byte, dtype=torch.uint8)
            raw_bytes = whole_file[stored.first_byte :]
        if stored.first_byte % stored.dtype.itemsize:  # at an address that its dtype does not allow
            raw_bytes = raw_bytes.clone()
        return raw_bytes.view(stored.dtype).view(stored.shape)

    def _arena_of(self, path: Path) -> Arena:
        if path not in self._arenas:
            self._arenas[path] = Arena.of_file(path)
        return self._arenas[path]

    def bring_in(self, stored: CheckpointTensor, count: Callable[[int], object] = int) -> None:
        """Read a tensor's bytes into memory now, and tell (by default nobody) how many."""
        mapped = self._span_of(stored)
        if mapped is None:
            count(stored.num_bytes)
            return
        file_arena, first_byte, end_byte = mapped
        for portion_start in range(first_byte, end_byte, _PORTION_BYTES):
            portion_end = min(portion_start + _PORTION_BYTES, end_byte)
            try:
                file_arena.advise(portion_start, portion_end, _MADV_POPULATE_READ)
            except OSError as error:
                # An older Linux: then the bytes are read when they are used.
                if error.errno != errno.EINVAL:
                    raise
            count(portion_end - portion_start)

    def release(self, stored: CheckpointTensor) -> None:
        """Let go of the memory of a tensor that is not used for now; the file's bytes stay."""
        mapped = self._span_of(stored)
        if mapped is not None:
            file_arena, first_byte, end_byte = mapped
            mapped_files.drop_pages(file_arena.address + first_byte, end_byte - first_byte)

    def _span_of(self, stored: CheckpointTensor) -> tuple[Arena, int, int] | None:
        file_arena = self._arenas.get(stored.path)
        if file_arena is None or stored.opened is not None or not stored.num_bytes:
            return None
        return file_arena, stored.first_byte, stored.first_byte + stored.num_bytes


class StoredWeights(Mapping[str, torch.Tensor]):
    """Weights by name, of which some stay in a checkpoint's files until they are asked for."""

    def __init__(
        self,
        files: WeightFiles,
        stored: Mapping[str, CheckpointTensor],
        held: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._files = files
        self.stored = dict(stored)
        self._held = dict(held or {})
        self._reads: dict[str, Future[None]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._held:
            return self._held[name]
        read = self._reads.pop(name, None)
        if read is not None:
            # Touching the pages meanwhile would read them a second time, in small pieces.
            read.result()
        return self._files.view(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._held
        yield from (name for name in self.stored if name not in self._held)

    def __len__(self) -> int:
        return len(self._held.keys() | self.stored.keys())

    def holding(self, held: Mapping[str, torch.Tensor]) -> StoredWeights:
        """The same with further weights, which are in memory."""
        return StoredWeights(self._files, self.stored, {**self._held, **held})

    def prefetch(self, names: Sequence[str]) -> None:
        """See :func:`~nbaccel.bigmodel.prefetching.tell_weights`."""
        new_names = [name for name in names if name in self.stored and name not in self._reads]
        if not new_names:
            return
        # A thread for each call, which ends when it has read: one that stayed would be in the way
        # of a fork. Reading waits for the disk without the interpreter's lock.
        reader = ThreadPoolExecutor(1, thread_name_prefix="nbaccel-read-ahead")
        self._reads |= {
            name: reader.submit(self._files.bring_in, self.stored[name]) for name in new_names
        }
        reader.shutdown(wait=False)

    def release(self, names: Sequence[str]) -> None:
        """See :func:`~nbaccel.bigmodel.prefetching.tell_weights`."""
        for name in names:
            if name in self.stored:
                read = self._reads.pop(name, None)
                if read is None or read.cancel() or read.done():
                    self._files.release(self.stored[name])
