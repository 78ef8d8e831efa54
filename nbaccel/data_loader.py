"""Data loaders that are shared out, under the names by which Accelerate's users import them."""

from __future__ import annotations

from nbaccel.train.dispatch import DispatchLoader as DataLoaderDispatcher
from nbaccel.train.loader import PreparedLoader as DataLoaderShard
from nbaccel.train.loading import skip_first_batches
from nbaccel.train.sampling import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "skip_first_batches",
]
