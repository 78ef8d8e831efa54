"""A model's way to a worker and home again, within one process: the worker's side is a private map.

notebook's module ─ share ─► arena ─ payload ─► worker's module ─ write ─► staging ─► home
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from nbaccel.transfer import arena, pickling
from nbaccel.transfer.object_walk import find_modules
from nbaccel.transfer.received_modules import ReceivedModules
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.transfer.weight_writer import WeightReport


class Worker:
    """One rank's copy of the arguments, and its way home."""

    def __init__(self, trip: Trip, rank: int) -> None:
        self.received = ReceivedModules(rank=rank, staging_files=trip.weight_receiver.staging)
        for key, found in trip.arenas.items():
            self.received.open_arena(key, found.nbytes, found.fd)
        self.mappings = self.received.mappings
        self.args, modules = pickling.unpack(trip.payload, trip.fd, self.mappings)
        for shared in modules:
            self.received.add(shared.path, shared)


class Trip:
    """One launch of a function of these arguments, without processes."""

    def __init__(self, *args: Any) -> None:
        self.sharing = arena.share_modules(find_modules(args))
        sender = pickling.Sender(self.sharing.stand_ins)
        for found in self.sharing.arenas.values():
            sender.key(found)
        self.payload, self.fd = pickling.pack((args, self.sharing.modules), sender)
        self.arenas = dict(sender.arenas)
        self.weight_receiver = WeightReceiver(self.sharing, self.arenas)

    def worker(self, rank: int = 0) -> Worker:
        return Worker(self, rank)

    def come_home(self, *workers: Worker) -> WeightReport:
        """All ranks have returned; the first worker's report is given back."""
        reports = [worker.received.write_all() for worker in workers]
        self.weight_receiver.apply(reports)
        return reports[0]

    def close(self) -> None:
        self.weight_receiver.close(close_all)
        with contextlib.suppress(OSError):
            os.close(self.fd)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def replace_tensor(module: nn.Module, name: str, tensor: Any) -> None:
    """Set a parameter or buffer by its dotted name."""
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, tensor)
