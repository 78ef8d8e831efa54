"""Records sent from the notebook to workers before a cell runs.

descriptors of an update: [ arena | arena | … | payload ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from nbaccel.transfer.arena import Manifest
from nbaccel.transfer.memfd import PackedObject
from nbaccel.transfer.module_registry import ModuleChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The content of a payload."""

    names: dict[str, Any]
    modules: tuple[tuple[str, Manifest, nn.Module], ...] = ()
    """Modules that come whole, each with the key by which both sides name it from now on."""
    changes: tuple[ModuleChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceUpdate:
    """What ranks that all lack the same get; travels on the channel, beside the descriptors."""

    arenas: tuple[tuple[str, int], ...]
    """Key and size of each arena that comes along."""
    payload: PackedObject
    sources: Mapping[str, list[str]]
    """Source lines of the cells that the functions in it come from."""
    forget: tuple[str, ...] = ()
    """Modules whose original is gone: their weights have no destination any more."""
    forget_arenas: tuple[str, ...] = ()
    reads_arenas: bool = True
    """Whether workers will read what the notebook has written to arenas that they have."""
