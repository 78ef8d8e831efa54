"""``Bundle``: what is prepared together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Bundle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """Models and optimizers during preparation.

    They are kept together because FSDP2, FP8 and ZeRO replace parameters: the optimizer must follow
    its model. A step takes a bundle and returns a bundle of the same lengths and order.

    Attributes:
        models: Models that are to be trained.
        optimizers: Torch optimizers, built over the parameters of these models, or stand-ins.
        schedulers: Learning-rate schedulers of these optimizers, or stand-ins.
        loaders: Data loaders, shared out already; also those prepared before.
    """

    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[Any, ...] = ()
    schedulers: tuple[Any, ...] = ()
    loaders: tuple[Any, ...] = ()
