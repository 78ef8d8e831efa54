"""Records sent from the notebook to workers before a cell runs.

descriptors of an update: [ arena | arena | … | payload of part 0 | payload of part 1 | … ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from nbaccel.transfer.memfd import PackedObject
from nbaccel.transfer.weight_sync import Manifest

__all__ = ["Load", "NamespaceUpdate", "Update", "UpdatePart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the notebook changed in a module that a worker has: only the differences."""

    key: str
    requires_grad: Mapping[str, bool] = field(default_factory=dict)
    """By dotted name of the parameter."""
    training: Mapping[str, bool] = field(default_factory=dict)
    """By path of the submodule."""
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """New values of plain attributes, by path of the submodule."""
    removed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Plain attributes that are gone, by path of the submodule."""
    adopt: bool = False
    """The notebook wrote to the weights: drop what this worker has written to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The content of a payload."""

    names: dict[str, Any]
    modules: tuple[tuple[str, Manifest, nn.Module], ...] = ()
    """Modules that come whole, each with the key by which both sides name it from now on."""
    updates: tuple[Update, ...] = ()
    classes: tuple[type, ...] = ()
    """Classes of cells that changed since: unpickling one brings the worker's up to date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePart:
    """What a group of ranks that all lack the same gets."""

    ranks: tuple[int, ...]
    payload: PackedObject
    sources: Mapping[str, list[str]]
    """Source lines of the cells that the functions in it come from."""
    forget: tuple[str, ...] = ()
    """Modules whose original is gone: their weights have no destination any more."""
    forget_arenas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceUpdate:
    """The record that travels on the channel, beside the descriptors."""

    arenas: tuple[tuple[str, int], ...]
    """Key and size of each arena that comes along; one descriptor each, first in the row."""
    parts: tuple[UpdatePart, ...]
    """One descriptor each, behind those of the arenas."""
    reads_arenas: bool = True
    """Whether workers will read what the notebook has written to arenas that they have."""

    def of(self, rank_number: int) -> tuple[UpdatePart, int] | None:
        """A rank's part and the place of its descriptor, if there is something for it."""
        for part_number, update_part in enumerate(self.parts):
            if rank_number in update_part.ranks:
                return update_part, len(self.arenas) + part_number
        return None
