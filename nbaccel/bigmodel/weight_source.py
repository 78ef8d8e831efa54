"""What a map of weights may offer beside the weights: to bring them near before they are read.

It is a contract only; a plain dictionary of tensors, which lacks it, is a map of weights, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class PrefetchingWeights(Protocol):
    """A map of weights that reads ahead."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Begin to bring weights near; return at once."""

    def release(self, names: Sequence[str]) -> None:
        """Take note that weights are not used for now: their memory may be used for others."""


def prefetch_weights(weights_map: Any, names: Sequence[str]) -> None:
    """Pass a wish on to a map of weights that reads ahead; others do nothing."""
    # Not by isinstance, which takes long for a protocol, and this runs for every module.
    prefetch = getattr(weights_map, "prefetch", None)
    if names and prefetch is not None:
        prefetch(names)


def release_weights(weights_map: Any, names: Sequence[str]) -> None:
    """The same of :meth:`PrefetchingWeights.release`."""
    release = getattr(weights_map, "release", None)
    if names and release is not None:
        release(names)
