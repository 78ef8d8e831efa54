"""Messages between the notebook and the workers of a pool, over `workers.messaging`'s channels.

    notebook ──► WorkerAssignment once, then one Task at a time: RunCell, Job, Pull, …
             ◄── Returned, Failed, … and Idle, which ends the task
    notebook ──► ASK_WHEREABOUTS, BREAK  by a second channel (see `workers.messaging`)

A channel is a nameless pair of sockets inherited by fork: no other process can connect to it.
Messages of every cell have no slots: frozen dataclasses with slots take twice as long to pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nbaccel.calls.pool_planning import CellSource
from nbaccel.workers import messaging

PACKAGE_CHANGES = "nbaccel_package_changes"
"""The name by which changes of packages travel; see `changed_packages.LiveChanges`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWanted:
    """This rank is about to join the default process group and will wait for all others.

    As a task: join that group, unless it has happened already.
    """

    generation: int = 0
    ordinal: int = 0
    """How many default groups this rank has been in since the generation began."""
    backend: str | None = None
    timeout_s: float | None = None


# ---- notebook → worker: tasks


@dataclass(frozen=True, kw_only=True)
class RunCell:
    """Run the code of a cell in the worker's namespace. Idle has the value to show."""

    source: CellSource
    directory: str | None = None
    """The notebook's working directory, if it has changed since the last cell."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Environment variables that the notebook has changed since; None for one that is gone."""
    settings: bytes
    """Settings of loggers and libraries; see `transfer.library_settings`."""


@dataclass(frozen=True, kw_only=True)
class BindNames:
    """Bind names that the notebook has. Descriptors: those of `update`, a `NamespaceUpdate`."""

    update: Any

    def file_hints(self) -> messaging.FileHints:
        """What it means for memory files."""
        return messaging.FileHints(
            arenas=tuple(key for key, _ in self.update.arenas),
            reads_arenas=self.update.reads_arenas,
            forgets=self.update.forget_arenas,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Send the values of names. Answered by Returned."""

    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WriteWeights:
    """Write changed weights into staging files. Descriptors: these files. Answered by Staged."""

    arenas: tuple[str, ...]
    """Keys of the arenas that the staging files belong to, in their order."""

    def file_hints(self) -> messaging.FileHints:
        """What it means for memory files."""
        return messaging.FileHints(staging=self.arenas)


@dataclass(frozen=True, slots=True)
class WeightsReceived:
    """The notebook has the weights: share again what is equal to them. Not waited for."""

    def file_hints(self) -> messaging.FileHints:
        """What it means for memory files."""
        return messaging.FileHints(reads_arenas=True, ends_staging=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGroups:
    """Drop every process group: they are out of step. New ones get another name in the store."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Find completions. Idle has them."""

    code: str
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """Describe an object. Idle has the description."""

    name: str
    detail: int


# ---- worker → notebook


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
