"""``Precision``: in which number format the forward and backward pass compute.

Every method here does nothing, which is float32; a precision writes only what differs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nbaccel.abc.bundle import Bundle
    from nbaccel.config.handlers import AutocastKwargs

__all__ = ["Precision"]


class Precision:
    """One number format.

    Attributes:
        name: As in its capability row.
        scaler: What scales the loss and watches for infinite gradients; None where nothing must.
        dtype: What layers compute in; None leaves it to the parameters.
    """

    name: ClassVar[str] = "no"
    scaler: torch.amp.GradScaler | None = None
    dtype: torch.dtype | None = None

    def convert(self, bundle: Bundle) -> Bundle:
        """Replace layers or optimizers by those of this format, before any wrapping."""
        return bundle

    def wrap_forward(self, model: nn.Module) -> None:
        """Let the model's forward compute in this format and return float32; undone by `unwrap`."""

    def unwrap_forward(self, model: nn.Module) -> None:
        """Give the model its own forward back."""

    def autocast(self, settings: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context in which operators compute in this format."""
        return nullcontext()
