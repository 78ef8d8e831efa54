"""``Strategy``: how several processes train one model.

The methods here have the meaning they have with one process and nothing sharded; a strategy writes
only what differs. None of them knows a device or a precision by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from nbaccel.abc.bundle import Bundle
    from nbaccel.abc.place import Place

__all__ = ["Sharded", "Strategy"]


class Strategy(ABC):
    """One way to train in this process, together with the others of the run.

    Args:
        place: This process among the others.

    Attributes:
        name: As in its capability row.
        place: This process among the others.
    """

    name: ClassVar[str]

    def __init__(self, place: Place) -> None:
        self.place = place

    @abstractmethod
    def wrap(self, bundle: Bundle) -> Bundle:
        """Make models ready to train, and point the optimizers at what became of the parameters.

        Args:
            bundle: Models that are on their device, with their optimizers.

        Returns:
            The same, ready to train.
        """

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside what :meth:`wrap` returned; any other module as it is."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which backward passes of the model leave gradients on their process."""
        return nullcontext()

    def join(
        self, models: Iterable[nn.Module], **options: Any
    ) -> AbstractContextManager[None] | None:
        """A context in which processes may run out of batches at different times.

        Returns:
            The context, or None where the strategy cannot do it.
        """
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a norm over the whole model, wherever its pieces are.

        Returns:
            The norm before, a 0-d tensor equal on all processes.
        """
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The whole state dict of the unwrapped model; a collective where it is sharded."""
        return self.unwrap(model).state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> None:
        """Load what :meth:`model_state` gave (options of ``Module.load_state_dict``)."""
        self.unwrap(model).load_state_dict(state, **options)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state dict of a model's optimizer; a collective where it is sharded."""
        return optimizer.state_dict()

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load what :meth:`optimizer_state` gave."""
        optimizer.load_state_dict(dict(state))


@runtime_checkable
class Sharded(Protocol):
    """What a strategy can do, too, whose processes each write their part of a checkpoint."""

    @property
    def writes_shards(self) -> bool:
        """Whether checkpoints are to be written in shards."""

    def save_sharded(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path
    ) -> None:
        """Write this process's shards; a collective.

        Args:
            model: What ``wrap`` returned, or the module inside.
            optimizer: None writes the model's weights; an optimizer of the model writes its state
                and no weights.
            folder: An empty folder for this alone, the same on all processes.
        """

    def load_sharded(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path
    ) -> None:
        """Load what :meth:`save_sharded` wrote, maybe on another number of processes."""
