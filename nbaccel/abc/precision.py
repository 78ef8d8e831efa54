"""``Precision``: in which number format the forward and backward pass compute.

Every method here does nothing, which is float32; a precision writes only what differs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from typing_extensions import Self

    from nbaccel.abc.bundle import Bundle
    from nbaccel.config import Fp8Config
    from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs

__all__ = ["Precision", "PrecisionSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSettings:
    """All that was said of a number format.

    Attributes:
        device: What the model computes on.
        autocast: Arguments of ``torch.autocast``.
        scaler: Arguments of ``torch.amp.GradScaler``.
        fp8: Library and recipe of FP8; None where nothing was said.
    """

    device: torch.device
    autocast: AutocastKwargs
    scaler: GradScalerKwargs
    fp8: Fp8Config | None = None


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

    @classmethod
    def build(cls, settings: PrecisionSettings) -> Self:
        """One for a process's models.

        Args:
            settings: What was said of it; a format takes what it needs.
        """
        return cls()

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
