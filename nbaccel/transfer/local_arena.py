"""An arena as one worker has it: mapped privately, or shown by a file that the worker trains in.

[Note: training in place] Rank 0 would pay twice: once for the private page that its first optimizer
step writes, once for copying that page to the staging file at the end. So just before its first
step it copies the arena to a file, maps that file where its model lies, and trains right there: no
private pages, and nothing to copy at the end. This is done only where most of the arena is about to
be trained; otherwise the kernel's table of private pages tells what was written.

In a launch it is the staging file. A live worker cannot know when the next cell will train, so it
makes a file of its own, which travels to the notebook with the report.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nbaccel.transfer import memfd
from nbaccel.transfer.arena import PLAIN

# Share of an arena's bytes that is about to be trained. Training in place copies the whole arena
# once, otherwise the trained part is copied twice: half is where both cost the same.
_IN_PLACE_SHARE = 0.5


@dataclass(eq=False)
class LocalArena:
    """A worker's own descriptor of an arena, and its mapping."""

    fd: int
    mapping: memfd.Mapping
    training_file: int | None = None
    """Descriptor of the file that the mapping shows instead, where this rank trains in one."""
    is_in_staging: bool = False
    """Whether that is the notebook's staging file: nothing needs to be copied there."""
    is_handed_over: bool = False
    """Whether every byte of a file of this rank's own was in the last report."""

    @classmethod
    def open(cls, fd: int, num_bytes: int) -> LocalArena:
        """Map an arena; the descriptor stays the caller's."""
        own_fd = os.dup(fd)
        try:
            mapping = memfd.Mapping(own_fd, num_bytes, is_private=True)
        except BaseException:  # an interrupt must not leak the descriptor either
            os.close(own_fd)
            raise
        # It goes with the mapping, which is with the last tensor that lives in it.
        closing = weakref.finalize(mapping, os.close, own_fd)
        closing.atexit = False  # a process that ends closes it anyway
        return cls(own_fd, mapping)

    @property
    def own_file(self) -> int | None:
        """The file of this rank's own that it trains in."""
        return None if self.is_in_staging else self.training_file

    def written(self) -> list[memfd.ByteRange]:
        """What this rank has written to it."""
        if self.training_file is not None:
            return [(0, self.mapping.nbytes)]
        return self.mapping.written()

    def changed(self, written: list[memfd.ByteRange]) -> list[memfd.ByteRange]:
        """What of the written bytes differs from the notebook's: not each value is another one."""
        if self.training_file is not None:
            return written
        return list(memfd.ranges_without(written, self.equal_runs(written)))

    def equal_runs(self, spans: list[memfd.ByteRange]) -> Iterator[memfd.ByteRange]:
        """What of these bytes is here as it is in the notebook."""
        # A mapping of its own, because this worker's shows its own pages. Private, because the file
        # may be a checkpoint that is open for reading only.
        arena = memfd.Mapping(self.fd, self.mapping.nbytes, is_private=True)
        return memfd.equal_runs(self.mapping.bytes(), arena.bytes(), spans)

    # ------------------------------------------------------------------- training in a file

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer steps so much of it that training in a file is worth it."""
        spans = [
            _span_in(self.mapping, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        # Merged first: tied parameters and views of one storage would count twice.
        merged = memfd.merge_ranges(span for span in spans if span)
        return memfd.total_bytes(merged) >= _IN_PLACE_SHARE * self.mapping.nbytes

    def train_in_file(self, staging_file: int | None) -> None:
        """Let the mapping show and write a file from now on: this one, or one of its own."""
        fd = staging_file
        if fd is None:
            fd = memfd.create_file("staging", self.mapping.nbytes)
        try:
            memfd.write_at(fd, self.mapping.view(0, self.mapping.nbytes), 0)
            # In this order: the mapping must never show a file that has not been filled.
            self.mapping.replace(fd, is_private=False)
        except BaseException:  # an interrupt must not leak the descriptor either
            if staging_file is None:
                os.close(fd)
            raise
        self.training_file = fd
        self.is_in_staging = staging_file is not None

    def leave_file(self) -> None:
        """Map the arena again, privately; what it does not say is kept as private pages."""
        whole = [(0, self.mapping.nbytes)]
        # The mapping keeps its address when replaced, so these show the arena afterwards.
        own_bytes = self.mapping.bytes()
        kept = []
        if not self.is_handed_over:
            kept = [
                # Copied, because replacing the mapping takes these pages away.
                (start, end, own_bytes[start:end].copy())
                for start, end in memfd.ranges_without(whole, self.equal_runs(whole))
            ]
        self.mapping.replace(self.fd, is_private=True)
        for start, end, values in kept:
            own_bytes[start:end] = values
        self.close_file()

    def close_file(self) -> None:
        """Close the descriptor of the file of its own that this rank trains in."""
        if self.own_file is not None:
            os.close(self.own_file)
            self.training_file = None

    # ------------------------------------------------------------------- from the notebook

    def show_again(self, start: int, end: int) -> None:
        """Let exactly these bytes show the notebook's values again."""
        page_bytes = memfd.PAGE_BYTES
        pages_start = -(-start // page_bytes) * page_bytes
        pages_end = end
        if end != self.mapping.nbytes:
            pages_end = end // page_bytes * page_bytes
        copied = [(start, end)]
        # A file of this rank's own has no notebook pages beneath: all values are copied in.
        if self.training_file is None and pages_start < pages_end:
            self.mapping.give_back(pages_start, pages_end)
            # Pages at the edges also hold other modules' tensors: giving them back would undo
            # training.
            copied = [(start, pages_start), (pages_end, end)]
        for low, high in copied:
            if low < high:
                memfd.read_at(self.fd, self.mapping.view(low, high), low)


def _span_in(mapping: memfd.Mapping, tensor: torch.Tensor) -> memfd.ByteRange | None:
    if tensor.device.type != "cpu" or type(tensor) not in PLAIN:
        return None
    storage = tensor.untyped_storage()
    if not mapping.contains(storage.data_ptr(), storage.nbytes()):
        return None
    start = storage.data_ptr() - mapping.address
    return (start, start + storage.nbytes())
