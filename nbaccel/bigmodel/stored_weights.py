"""Tensors that view a checkpoint's files: mapped when asked for, read ahead, and let go again.

The system reads a mapped file's pages when they are used, keeps them once for all processes, and
takes them back where memory is short. So a weight on the "disk" tier is never copied: it is
mapped for the time of a forward pass.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from nbaccel.base import mapped_files
from nbaccel.base.errors import CheckpointDamaged
from nbaccel.bigmodel.checkpoint_files import CheckpointTensor
from nbaccel.transfer import arena
from nbaccel.transfer.arena import Arena

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
            try:
                num_bytes = self._bytes_in(stored.path)
            except OSError as error:
                problems[stored.path] = (
                    f"{stored.path} cannot be mapped ({error.strerror or error})"
                )
                continue
            if num_bytes < stored.first_byte + stored.num_bytes:
                problems[stored.path] = f"{stored.path} has become shorter, and lacks {stored.name}"
        if problems:
            raise CheckpointDamaged(
                *(
                    f"{problem}: another program may be writing it. Nothing has been changed. "
                    "Load it when it is complete."
                    for problem in problems.values()
                )
            )

    def _bytes_in(self, path: Path) -> int:
        return self._arena_of(path).nbytes if _HAS_MEMORY_FILES else path.stat().st_size

    def view(self, stored: CheckpointTensor) -> torch.Tensor:
        """A tensor over the file's bytes, of the file's dtype.

        What is written to it stays in this process. Where the file cannot be viewed (its bytes
        are not aligned, or the system has no such mappings), the tensor is a copy or is mapped by
        torch.
        """
        if stored.opened is not None:
            return self._own_view(stored.name, stored.opened)
        if not stored.num_bytes:
            return torch.empty(stored.shape, dtype=stored.dtype)
        raw_bytes = self._raw_bytes(stored)
        if not stored.is_mappable:
            raw_bytes = raw_bytes.clone()
        return raw_bytes.view(stored.dtype).view(stored.shape)

    def _own_view(self, name: str, opened: torch.Tensor) -> torch.Tensor:
        """A tensor of a file of torch, with memory that no other name's view has."""
        address = opened.untyped_storage().data_ptr()
        is_owner = not address or self._owners.setdefault(address, name) == name
        return opened if is_owner and opened.is_contiguous() else opened.contiguous().clone()

    def _raw_bytes(self, stored: CheckpointTensor) -> torch.Tensor:
        """The bytes of a tensor, of shape ``[num_bytes]`` and dtype uint8."""
        if not _HAS_MEMORY_FILES:
            end_byte = stored.first_byte + stored.num_bytes
            whole_file = torch.from_file(str(stored.path), False, end_byte, dtype=torch.uint8)
            return whole_file[stored.first_byte :]
        # A storage of its own for each tensor, as launches share storages.
        storage = arena.storage_at(self._arena_of(stored.path), stored.first_byte, stored.num_bytes)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def _arena_of(self, path: Path) -> Arena:
        if path not in self._arenas:
            self._arenas[path] = Arena.of_file(path)
        return self._arenas[path]

    def bring_in(
        self, stored: CheckpointTensor, when_read: Callable[[int], object] | None = None
    ) -> None:
        """Read a tensor's bytes into memory now."""
        count_bytes = when_read or _count_nothing
        mapped = self._span_of(stored)
        if mapped is None:
            count_bytes(stored.num_bytes)
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
            count_bytes(portion_end - portion_start)

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


def _count_nothing(num_bytes: int) -> None:
    """A progress bar that is none."""


class StoredWeights(Mapping[str, torch.Tensor]):
    """Weights by name, of which some stay in a checkpoint's files until they are asked for."""

    def __init__(
        self,
        files: WeightFiles,
        stored: Mapping[str, CheckpointTensor],
        held: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._files = files
        self._stored = dict(stored)
        self._held = dict(held or {})
        self._reads: dict[str, Future[None]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._held:
            return self._held[name]
        read = self._reads.pop(name, None)
        if read is not None:
            # Touching the pages meanwhile would read them a second time, in small pieces.
            read.result()
        return self._files.view(self._stored[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._held
        yield from (name for name in self._stored if name not in self._held)

    def __len__(self) -> int:
        return len(self._held.keys() | self._stored.keys())

    def holding(self, held: Mapping[str, torch.Tensor]) -> StoredWeights:
        """The same with further weights, which are in memory."""
        return StoredWeights(self._files, self._stored, {**self._held, **held})

    def prefetch(self, names: Sequence[str]) -> None:
        """See :class:`~nbaccel.bigmodel.weight_source.PrefetchingWeights`."""
        new_names = [name for name in names if name in self._stored and name not in self._reads]
        if not new_names:
            return
        # A thread for each call, which ends when it has read: one that stayed would be in the way
        # of a fork. Reading waits for the disk without the interpreter's lock.
        reader = ThreadPoolExecutor(1, thread_name_prefix="nbaccel-read-ahead")
        self._reads |= {
            name: reader.submit(self._files.bring_in, self._stored[name]) for name in new_names
        }
        reader.shutdown(wait=False)

    def release(self, names: Sequence[str]) -> None:
        """See :class:`~nbaccel.bigmodel.weight_source.PrefetchingWeights`."""
        for name in names:
            if name in self._stored:
                read = self._reads.pop(name, None)
                if read is None or read.cancel() or read.done():
                    self._files.release(self._stored[name])
