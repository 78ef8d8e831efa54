"""Prepared loaders that are torchdata's too: code asks ``isinstance(loader, StatefulDataLoader)``.

A module of its own, because torchdata is imported only where it is used.
"""

from __future__ import annotations

from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from nbaccel.train.dispatch import DataLoaderDispatcher
from nbaccel.train.loader import DataLoaderShard, PreparedLoader


# Ours comes first, so that its methods win over torchdata's.
class StatefulDataLoaderShard(DataLoaderShard, StatefulDataLoader):  # type: ignore[misc]
    """A prepared loader around torchdata's: everything is the former's."""


class StatefulDataLoaderDispatcher(DataLoaderDispatcher, StatefulDataLoader):  # type: ignore[misc]
    """The same, where process 0 reads for all."""


KINDS: dict[type[PreparedLoader], type[PreparedLoader]] = {
    DataLoaderShard: StatefulDataLoaderShard,
    DataLoaderDispatcher: StatefulDataLoaderDispatcher,
}
