"""Folders that engines swap to: one for each engine, and none left behind.

DeepSpeed empties its folder when an engine is made, also where another engine of the process has
its states in it, and leaves the files there when the process ends.
"""

from __future__ import annotations

import atexit
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbaccel.deepspeed.config import ZERO
from nbaccel.leftovers import Leftover, tell

__all__ = ["Claim", "claim", "folders_in_use", "leave"]

_SECTIONS = ("offload_optimizer", "offload_param")


class Claim:
    """An engine's use of folders on the fast disk.

    Args:
        folders: What the engine is told to swap to.
        rank: This process, which has a folder of its own in each.
    """

    def __init__(self, folders: frozenset[Path], rank: int) -> None:
        self.folders = folders
        self._rank = rank
        self._pid = os.getpid()

    def release(self) -> None:
        """Remove this process's files; a second time does nothing."""
        if self not in _CLAIMS:
            return
        _CLAIMS.remove(self)
        if os.getpid() != self._pid:
            return  # a forked child's copy; the files are its parent's
        for left in self.leftovers():
            left.remove()
            tell(left, is_there=False)

    def leftovers(self) -> list[Leftover]:
        """What is to be removed when the engine, or this process, has ended."""
        return [
            Leftover(
                folder.absolute(),
                f"zero_stage_3/*/rank{self._rank}",
                whole=folder.name.startswith(_PREFIX),
            )
            for folder in sorted(self.folders)
        ]


_PREFIX = "engine_"
_CLAIMS: list[Claim] = []
"""Of this process: engines of several Accelerators must not meet in one folder."""


def claim(settings: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], Claim]:
    """Give an engine folders that no other engine of this process has.

    Args:
        settings: A DeepSpeed configuration without ``"auto"``.
        rank: This process among all.

    Returns:
        The configuration with these folders, and the claim; it is released when the engine ends.
    """
    found = copy.deepcopy(dict(settings))
    used = folders_in_use()
    mine = set()
    for name in _SECTIONS:
        section = found.get(ZERO, {}).get(name) or {}
        if section.get("device") == "nvme":
            base, number = Path(section["nvme_path"]), 0
            folder = base
            while folder in used:
                number += 1
                folder = base / f"{_PREFIX}{number}"
            section["nvme_path"] = str(folder)
            mine.add(folder)
    made = Claim(frozenset(mine), rank)
    if mine:
        _CLAIMS.append(made)
        for left in made.leftovers():
            tell(left, is_there=True)
    return found, made


def folders_in_use() -> set[Path]:
    """Those in which engines of this process have files."""
    return {folder for other in _CLAIMS for folder in other.folders}


def leave() -> None:
    """Release all: this process ends."""
    for held in tuple(_CLAIMS):
        held.release()


# Now, so that it is done after all that is registered later: an environment's end takes its engines
# down first. A worker leaves without it, and is told to.
atexit.register(leave)
