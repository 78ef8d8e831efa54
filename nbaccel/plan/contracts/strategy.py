"""``Strategy``: how several processes train one model.

The methods here have the meaning they have with one process and nothing sharded; a strategy writes
only what differs. None of them knows a device or a precision by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn
    from typing_extensions import Self

    from nbaccel.plan.contracts.bundle import Bundle
    from nbaccel.plan.contracts.place import Place
    from nbaccel.plan.contracts.precision import Precision
    from nbaccel.plan.launch_plan import Choice
    from nbaccel.plan.training_plan import TrainingRequest

from nbaccel.plan.contracts.asking import SaidBySettings

__all__ = ["ShardedCheckpoints", "Strategy"]


class Strategy(ABC):
    """One way to train in this process, together with the others of the run.

    Args:
        place: This process among the others.

    Attributes:
        name: As in its capability row.
        place: This process among the others.
        shards_parameters: Whether `torch.distributed.fsdp` cuts weights up and gathers them.
        owns_precision: Whether models are cast, and the loss scaled, by the strategy's own engine.
        place_batch: Lays out one tensor of a batch, of shape ``[rows, ...]``, that has been put on
            the device; None leaves it as it is.
        before_placement: Is given the models while they are where they were built, most often in
            host memory, and may be a collective; None where :meth:`wrap` is early enough.
        choices: What was decided while preparing, each with its reason.
    """

    name: ClassVar[str]
    owns_precision: ClassVar[bool] = False
    shards_parameters: ClassVar[bool] = False
    choices: tuple[Choice, ...] = ()
    place_batch: Callable[[torch.Tensor], None] | None = None
    before_placement: Callable[[Iterable[nn.Module]], None] | None = None

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    def build(
        cls, place: Place, settings: Any, *, precision: Precision, asked: TrainingRequest
    ) -> Self:
        """One for this process.

        Args:
            place: This process among the others.
            settings: An object of the class that the capability row names; None where it has none.
            precision: What layers compute in.
            asked: What else the `Accelerator` was asked.
        """
        return cls(place)

    @classmethod
    def said_by(cls, settings: Any) -> SaidBySettings:
        """What the settings say of training beside sharding."""
        return SaidBySettings()

    @abstractmethod
    def wrap(self, bundle: Bundle) -> Bundle:
        """Make models ready to train, and let the optimizers hold the parameters that result.

        Args:
            bundle: Models that are on their device, with their optimizers.

        Returns:
            The same, ready to train.
        """

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside what :meth:`wrap` returned; any other module as it is."""

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        """Compute gradients.

        Args:
            loss: A 0-d tensor, scaled already for accumulation and for the precision.
            sync: Whether the batch at hand ends a group of accumulated ones.
            **options: Of ``Tensor.backward``.
        """
        loss.backward(**options)  # type: ignore[no-untyped-call]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which backward passes of the model leave gradients on their process."""
        return nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """A context in which a backward pass reduces gradients although its forward did not ask."""
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

    def release(self, models: Iterable[nn.Module] | None = None) -> None:  # noqa: B027 - nothing is kept
        """Release what :meth:`wrap` made for these models; None for all."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The whole state dict of the unwrapped model; a collective where it is sharded.

        Returns:
            Tensors by name on process 0; elsewhere it may be empty.
        """
        return self.unwrap(model).state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> None:
        """Load what :meth:`model_state` gave; a collective where the model is sharded.

        Args:
            model: The model, as :meth:`wrap` returned it.
            state: The state; where the model is sharded, that of process 0 counts.
            **options: Of ``Module.load_state_dict``.
        """
        self.unwrap(model).load_state_dict(state, **options)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state dict of a model's optimizer; a collective where it is sharded.

        Returns:
            What ``Optimizer.state_dict`` gives where nothing is sharded, so that another strategy
            or another number of processes can load it. On process 0; elsewhere it may be empty.
        """
        return optimizer.state_dict()

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load what :meth:`optimizer_state` gave; that of process 0 counts where it is sharded."""
        optimizer.load_state_dict(dict(state))


@runtime_checkable
class ShardedCheckpoints(Protocol):
    """A strategy whose processes can each write and read their own part of a checkpoint.

    Attributes:
        shard_kind: What kind of shards they are, see `train.checkpoint.layout`.
    """

    shard_kind: ClassVar[str]

    @property
    def keeps_own_disks(self) -> bool:
        """Whether the user's settings say that each host writes to a disk of its own."""

    def shard_folder(self, number: int) -> str:
        """What the folder of a model in shards is called.

        Args:
            number: Of the model, from 0.
        """

    def save_sharded(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        folder: str | Path,
        *,
        left_out: Collection[str] = (),
        ranks_by_folder: Sequence[Sequence[int]] = (),
    ) -> None:
        """Write weights, and the optimizer's state if one is given; a collective.

        Args:
            model: The model, as :meth:`Strategy.wrap` returned it.
            optimizer: The torch optimizer of its parameters.
            folder: A folder that all processes see, or each host one of its own.
            left_out: Names of frozen parameters of the user's own module that are not written.
            ranks_by_folder: Where hosts have folders of their own, the ranks that write into one,
                for each; each has to suffice for them. Empty where all see one folder.
        """

    def check_sharded(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        folder: str | Path,
        *,
        left_out: Collection[str] = (),
        ranks_there: Collection[int] = (),
    ) -> None:
        """Refuse a folder that :meth:`load_sharded` could not read into these; no collective.

        Nothing is changed. Sizes and checksums of whole files have been looked at before.
        What was left out need not be there: it stays as it is in the model. `ranks_there` are the
        ranks whose shards are there, if it is one host's folder; this process is one of them.

        Raises:
            CheckpointDamaged: Files are missing, or not what was saved.
            ConfigError: They are of another model, or another number of processes.
        """

    def load_sharded(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        folder: str | Path,
        *,
        left_out: Collection[str] = (),
    ) -> None:
        """Read what :meth:`save_sharded` wrote, with any number of processes; a collective."""
