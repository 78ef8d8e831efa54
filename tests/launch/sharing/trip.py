"""A model's way to a worker and home again, within one process: the worker's side is a private map.

notebook's module ─ share ─► arena ─ parcel ─► worker's module ─ write ─► staging ─► home
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from nbaccel.launch.sharing import arena, home, memory, parcel
from nbaccel.launch.sharing.find import find_modules
from nbaccel.launch.sharing.homecoming import Homecoming


class Worker:
    """One rank's copy of the arguments, and its way home."""

    def __init__(self, trip: Trip, rank: int) -> None:
        self.mappings = {
            key: memory.Mapping(found.fd, found.nbytes, private=True)
            for key, found in trip.arenas.items()
        }
        call = parcel.unpack(trip.parcel, trip.fd, self.mappings)
        self.args, modules = call
        self.homebound = home.Homebound(
            rank=rank, modules=modules, mappings=self.mappings, staging=trip.homecoming.staging
        )


class Trip:
    """One launch of a function of these arguments, without processes."""

    def __init__(self, *args: Any) -> None:
        self.sharing = arena.share(find_modules(args))
        sender = parcel.Sender.create(self.sharing.stand_ins)
        for found in self.sharing.arenas():
            sender.key(found)
        manifests = home.manifests(self.sharing, sender.keys)
        modules = tuple(zip(manifests, (m.module for m in self.sharing.modules), strict=True))
        self.parcel, self.fd = parcel.pack((args, modules), sender)
        self.arenas = dict(sender.arenas)
        self.homecoming = Homecoming(self.sharing, self.arenas)

    def worker(self, rank: int = 0) -> Worker:
        return Worker(self, rank)

    def come_home(self, *workers: Worker) -> home.HomeReport:
        """All ranks have returned; the first worker's report is given back."""
        reports = [worker.homebound.write() for worker in workers]
        self.homecoming.apply(reports)
        return reports[0]

    def close(self) -> None:
        self.homecoming.close(close_all)
        with contextlib.suppress(OSError):
            os.close(self.fd)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def replace_tensor(module: nn.Module, name: str, tensor: Any) -> None:
    """Set a parameter or buffer by its dotted name."""
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, tensor)
