"""``Precision``: in which number format the forward and backward pass compute.

Every method here does nothing, which is float32; a precision writes only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from typing_extensions import Self

    from nbaccel.config import Fp8Config
    from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs
    from nbaccel.plan.contracts.bundle import Bundle
    from nbaccel.plan.launch_plan import Choice

__all__ = ["Precision", "PrecisionSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSettings:
    """All that was said of a number format.

    Attributes:
        device: What the model computes on.
        autocast: Arguments of ``torch.autocast``.
        scaler: Arguments of ``torch.amp.GradScaler``.
        fp8: Library and recipe of FP8; None where nothing was said. Its recipe is never ``auto``
            where the library has any.
        emulates_fp8: Whether the device has no products of 8 bits, so that they are emulated.
        world_size: Processes in total.
        is_main: Whether this is process 0, which speaks for all.
        accumulation_steps: Batches for one optimizer step.
        is_sharded: Whether each process holds a part of each weight, as with `fully_shard`.
        handlers: What was given as ``kwargs_handlers``, for a library's own objects.
    """

    device: torch.device
    autocast: AutocastKwargs
    scaler: GradScalerKwargs
    fp8: Fp8Config | None = None
    emulates_fp8: bool = False
    world_size: int = 1
    is_main: bool = True
    accumulation_steps: int = 1
    is_sharded: bool = False
    handlers: tuple[Any, ...] = ()


class Precision:
    """One number format.

    Attributes:
        name: As in its capability row.
        scaler: What scales the loss and watches for infinite gradients; None where nothing must.
        dtype: What layers compute in; None leaves it to the parameters.
        converts_layers: Whether :meth:`convert` replaces layers, which is done even where a
            strategy's engine casts the model itself.
        choices: What was decided while preparing, each with its reason.
    """

    name: ClassVar[str] = "no"
    converts_layers: ClassVar[bool] = False
    scaler: torch.amp.GradScaler | None = None
    dtype: torch.dtype | None = None
    choices: tuple[Choice, ...] = ()

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
        """Give the model its own forward back, and its own layers."""

    def autocast(self, settings: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A context in which operators compute in this format."""
        return nullcontext()

    def own_gradients(self, model: nn.Module) -> list[str]:
        """Names of the parameters whose gradients this format averages over processes itself.

        Args:
            model: A converted model.
        """
        return []

    def average_gradients(self, model: nn.Module, is_synced: Callable[[], bool]) -> None:
        """Average the gradients of :meth:`own_gradients` after each backward pass; a collective.

        Args:
            model: A converted model; the parameters get the values of process 0.
            is_synced: Whether the backward pass at hand ends a group of accumulated ones.
        """

    def full_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict with all digits that are kept beside the model; a collective.

        Args:
            model: A converted model.
            state: Its state dict.
        """
        return state

    def state_dict(self, models: Iterable[nn.Module]) -> dict[str, Any]:
        """What a checkpoint needs beside weights and optimizers; empty where that is nothing."""
        return {}

    def load_state_dict(self, models: Iterable[nn.Module], state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""
