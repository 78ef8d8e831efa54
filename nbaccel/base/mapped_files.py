"""Files that this process has mapped copy-on-write: which bytes it sees, and pages given back.

They are in `LIVING_MAPPINGS`. Strategies that cut tensors into shards drop pages they have read.
"""

from __future__ import annotations

import mmap
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakSet

from nbaccel.base import env

_BOOT_NUMBER = Path("/proc/sys/kernel/random/boot_id")  # drawn anew by each start of a system
_PAGE_BYTES = mmap.PAGESIZE

# Private ones of `transfer.memfd`; weak, so that a mapping ends with its last tensor.
LIVING_MAPPINGS: WeakSet[Any] = WeakSet()


def find_mapping(address: int, num_bytes: int) -> Any:
    """The private mapping that holds these bytes, if any."""
    # A copy, because another thread may add one while the loop runs.
    return next((one for one in tuple(LIVING_MAPPINGS) if one.contains(address, num_bytes)), None)


def drop_pages(address: int, num_bytes: int, *, keep_written: bool = False) -> None:
    """Give back the pages that lie wholly within these bytes, if they are in a private mapping."""
    mapping = find_mapping(address, num_bytes)
    if mapping is None:
        return
    first_byte = -(-(address - mapping.address) // _PAGE_BYTES) * _PAGE_BYTES
    end_byte = (address - mapping.address + num_bytes) // _PAGE_BYTES * _PAGE_BYTES
    if first_byte >= end_byte:
        return
    written_ranges = mapping.written(first_byte, end_byte) if keep_written else []
    for written_start, written_end in [*written_ranges, (end_byte, end_byte)]:
        if first_byte < written_start:
            mapping.give_back(first_byte, written_start)
        first_byte = written_end


def same_bytes(spans: Iterable[tuple[int, int] | None]) -> tuple[object, ...] | None:
    """What tells that another process sees the same bytes of the same files."""
    is_written: dict[int, bool] = {}
    # What no two nodes of a run share: the numbers of devices and inodes may well be equal.
    places: list[object] = [(platform.node(), env.read_file(_BOOT_NUMBER))]
    for span in spans:
        if span is None:
            return None
        address, num_bytes = span
        mapping = find_mapping(address, num_bytes)
        if mapping is None:
            return None
        if is_written.setdefault(id(mapping), bool(mapping.written())):
            return None
        places.append((*mapping.identity, address - mapping.address, num_bytes))
    return tuple(places)
