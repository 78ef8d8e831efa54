"""Messages between the notebook and the workers of a pool, over `workers.messaging`'s channels.

    notebook ──► WorkerAssignment once, then one Task at a time, whose body is a Job or a PoolTask
             ◄── Returned, Failed, … and Idle, which ends the task
    notebook ──► ASK_WHEREABOUTS, BREAK  by a second channel (see `workers.messaging`)

A channel is a nameless pair of sockets inherited by fork: no other process can connect to it.
Messages of every cell have no slots: frozen dataclasses with slots take twice as long to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbaccel.workers.messaging import FileHints

PACKAGE_CHANGES = "nbaccel_package_changes"
"""The name by which changes of packages travel; see `changed_packages.LiveChanges`."""


@dataclass(frozen=True)
class PoolTask:
    """A method of `pool_worker.CellWorker`, by its name, and what it is given."""

    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    hints: FileHints = field(default_factory=FileHints)

    def file_hints(self) -> FileHints:
        """What it means for memory files."""
        return self.hints


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWanted:
    """This rank is about to join the default process group and will wait for all others."""

    generation: int = 0
    ordinal: int = 0
    """How many default groups this rank has been in since the generation began."""
    backend: str | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What could stand in the code from `start` to `end`."""

    matches: tuple[str, ...]
    start: int
    end: int
    types: tuple[str, ...]
    """Of each match: `function`, `instance`, …; empty where IPython cannot tell."""


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A task is done: the worker waits for the next one."""

    number: int = 0
    """The number of the task."""
    shown: Any = None
    """What the task gives the user to see: a mime bundle, completions; None for nothing."""
    bound: tuple[str, ...] = ()
    """Names that the task bound or deleted."""
    dirty: tuple[str, ...] = ()
    """Keys of those of the notebook's modules whose weights may have changed."""
    sequence: tuple[tuple[str, int], ...] = ()
    """How many collectives each process group has begun."""
    in_groups: bool = False
    """Whether this worker is in a process group."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """This rank has written its part of the changed weights. Descriptors: those of `whole`."""

    report: Any
    """`WeightReport`"""
    whole: tuple[str, ...]
    """Keys of the arenas that files of this rank's own hold completely, in their order."""
