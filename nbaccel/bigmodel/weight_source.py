"""What a map of weights may offer beside the weights: to bring them near before they are read.

It is a contract only; a plain dictionary of tensors, which lacks it, is a map of weights, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["PrefetchingWeights", "prefetch_weights", "release_weights"]


@runtime_checkable
class PrefetchingWeights(Protocol):
    """A map of weights that reads ahead."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Begin to bring weights near; return at once.

        Args:
            names: Their names; some of them may be near already.
        """

    def release(self, names: Sequence[str]) -> None:
        """Take note that weights are not used for now: their memory may be used for others.

        Args:
            names: Their names; also of weights that were asked for and then not needed.
        """


def prefetch_weights(weights_map: Any, names: Sequence[str]) -> None:
    """Pass a wish on to a map of weights that reads ahead; others do nothing.

    Args:
        weights_map: Any map.
        names: See :meth:`PrefetchingWeights.prefetch`.
    """
    if names and isinstance(weights_map, PrefetchingWeights):
        weights_map.prefetch(names)


def release_weights(weights_map: Any, names: Sequence[str]) -> None:
    """The same of :meth:`PrefetchingWeights.release`.

    Args:
        weights_map: Any map.
        names: The weights that are not used for now.
    """
    if names and isinstance(weights_map, PrefetchingWeights):
        weights_map.release(names)
