"""What trains: a process's ``Place``, what is prepared together, number formats and strategies.

The methods of a `Precision` have the meaning of float32, and those of a `Strategy` the one that
they have with one process and nothing sharded; implementations write only what differs. No strategy
knows a device or a precision by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn
    from typing_extensions import Self

    from nbaccel.config import Fp8Config, RunConfig
    from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs
    from nbaccel.plan.launch_plan import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One process of a training run.

    Attributes:
        rank: Its number among all processes, from 0.
        local_rank: Its number on its node, from 0.
        world_size: Processes in total.
        local_world_size: Processes on its node.
        device: What it computes on.
        device_row: The row of that device, where torch's name for it is another.
        backend: Process group backend, as torch names it; empty where there is no group.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device
    device_row: str = ""
    backend: str = ""

    @property
    def device_name(self) -> str:
        """The capability row of what it computes on."""
        return self.device_row or self.device.type

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is process 0 of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the process of the highest rank."""
        return self.rank == self.world_size - 1

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        return self.world_size == 1


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


Source = Literal["argument", "config", "environment", "default"]
"""Where a setting comes from, the strongest first: a call's arguments win over a configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """Everything that may request a strategy.

    Attributes:
        run: The configuration; None where none was given.
        arguments: Plugins that an `Accelerator` was given, by the argument's name.
        handlers: Its ``kwargs_handlers``.
        has_environment: Whether environment variables count: they do in a process that trains, and
            not where a launch is planned, whose workers get variables of their own.
    """

    run: RunConfig | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    handlers: tuple[Any, ...] = ()
    has_environment: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A strategy's answer that it was requested.

    Attributes:
        strategy: Its name.
        source: Where the request comes from.
        what: The request, as messages write it: ``zero_stage=2``, ``fsdp_plugin``.
        reason: Why it is taken, for the training plan.
        settings: Makes its settings; called where training begins, and not for a launch's plan.
        headline: Its part of the launch plan's first line.
        choices: Its lines of the launch plan's table.
    """

    strategy: str
    source: Source
    what: str
    reason: str
    settings: Callable[[], Any]
    headline: str = ""
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """The settings given in a call, a configuration or the environment.

    Attributes:
        mixed_precision: The precision by name.
        precision_source: Its source: an argument, the environment, a `RunConfig`, or a default.
        accumulation_steps: Batches for one optimizer step.
        accumulation_source: Its source.
        strategy: The requested strategy; None goes by the number of processes.
        fp8: Which library computes in 8 bits, and how; None where it was not given.
        device: The row of the requested device; empty takes what there is.
        split_batches: Whether a loader's batch is cut up, or every process gets whole ones.
    """

    mixed_precision: str = "no"
    precision_source: Source = "default"
    accumulation_steps: int = 1
    accumulation_source: Source = "default"
    strategy: Wanted | None = None
    fp8: Fp8Config | None = None
    device: str = ""
    split_batches: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidBySettings:
    """What a strategy's settings say of training beside sharding.

    Attributes:
        mixed_precision: The precision by name; None where they leave it open.
        accumulation_steps: Batches for one optimizer step; None where they leave it open.
        writes_shards: Whether every process writes its own part of a checkpoint.
        reason: Why the strategy is taken, where only the settings can tell.
        speaker: What says it, as messages call it.
        remedy: How a contradiction with it can be resolved other than by leaving it out.
    """

    mixed_precision: str | None = None
    accumulation_steps: int | None = None
    writes_shards: bool = False
    reason: str = ""
    speaker: str = "what the strategy was told"
    remedy: str = ""


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


class Strategy:
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

    def wrap(self, bundle: Bundle) -> Bundle:
        """Make models ready to train, and let the optimizers hold the parameters that result.

        Args:
            bundle: Models that are on their device, with their optimizers.

        Returns:
            The same, ready to train.
        """
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside what :meth:`wrap` returned; any other module as it is."""
        return model

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

    def release(self, models: Iterable[nn.Module] | None = None) -> None:
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


Piece = tuple[int, "torch.Tensor"]
"""Number of the first element in the flattened whole, and the values, of shape ``[n]``."""


@dataclass(frozen=True)
class Remembered:
    """What a module was.

    Attributes:
        tensors: Format and attributes of each parameter and buffer, by name.
    """

    tensors: dict[str, tuple[torch.dtype, frozenset[str]]]


def remember(module: nn.Module) -> Remembered:
    """The state of a module that no library has taken over.

    Args:
        module: The module.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    return Remembered({name: (t.dtype, frozenset(vars(t))) for name, t in named})


class ShardReader:
    """Reads one library's shards: a module with these functions, or an object of a subclass.

    DTensors say themselves which elements a process has. A library that puts placeholders in the
    place of parameters (ZeRO-3), or trains copies of higher precision beside them (ZeRO-1 and 2,
    MS-AMP's O3), has a reader in its capability row, so that trained weights are copied back from
    wherever they are. The defaults are those of a library without engines and placeholders.
    """

    def is_cut(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of the library's. The other functions get such tensors only."""
        raise NotImplementedError

    def whole_shape(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Shape of the whole, where a placeholder has another."""
        return None

    def local_pieces(self, tensor: torch.Tensor, held: object = None) -> list[Piece]:
        """The elements that this process has to copy back; none where it has none."""
        raise NotImplementedError

    def hold(self, tensor: torch.Tensor) -> object:
        """What must be kept so that the pieces can be read when the engine is gone; or None."""
        return None

    def assign(self, tensor: torch.Tensor, whole: torch.Tensor) -> None:
        """Put the values of the whole in this process's pieces."""
        raise NotImplementedError

    def inner_module(self, module: nn.Module) -> nn.Module | None:
        """The user's module, if this is an engine around it."""
        return None

    def plain_state(self, module: nn.Module) -> dict[str, Any] | None:
        """The attributes of a module without the library's; None if it put none there."""
        return None

    def check_whole(self, module_or_state: Any, what: str) -> None:
        """Refuse a module or state dict in which placeholders stand for weights.

        Args:
            module_or_state: The module, or the state dict of one.
            what: What was asked for, to begin the message with.

        Raises:
            ConfigError: Some do.
        """

    def remember(self, module: nn.Module) -> Remembered:
        """The state of a module before the library took it over, if it did."""
        return remember(module)

    def take_back(self, module: nn.Module, remembered: Remembered) -> bool:
        """Make a module that the library took apart in this one process what it was.

        Returns:
            Whether it had been taken apart.
        """
        raise NotImplementedError

    def building_whole(self) -> AbstractContextManager[None]:
        """A block in which the library does not cut models while they are built."""
        return nullcontext()

    def leave(self) -> None:
        """Remove what the library keeps on disk for this process, which ends."""

    def forget_groups(self) -> None:
        """Torch's process groups are gone: forget those that the library made from them."""

    def tear_down(self, before: Any) -> None:
        """End the library's part of this process: engines, groups, variables.

        Args:
            before: What the ``observe`` of the capability row saw.
        """


# ----------------------------------------------------------------------------- stand-ins
# A training loop has an optimizer and a schedule; where DeepSpeed's file says which they are, the
# loop is written with these and `prepare` puts the real ones in their place. Names and arguments
# are Accelerate's.


class _Unsaid(float):
    """A default, whose type tells it from the same number given by a caller."""


class _UnsaidSteps(int):
    """The same of a whole number."""


_LR = _Unsaid(0.001)
_WEIGHT_DECAY = _Unsaid(0)
_WARMUP = _UnsaidSteps(0)


def _given(arguments: dict[str, Any]) -> frozenset[str]:
    defaults = (_Unsaid, _UnsaidSteps)
    return frozenset(name for name, value in arguments.items() if not isinstance(value, defaults))


class DummyOptim:
    """Stands for the optimizer of a DeepSpeed configuration.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate, where the file has ``"auto"``.
        weight_decay: Weight decay, where the file has ``"auto"``.
        **kwargs: Further arguments (``betas``, ``eps``), where the file has ``"auto"``.

    Attributes:
        params: Parameters, or parameter groups, as a list.
        lr: As given.
        weight_decay: As given.
        kwargs: As given.
        given: What was given of these, by name. A default was not chosen by the user, so it
            contradicts no file; it fills in ``"auto"`` all the same.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = _LR,
        weight_decay: float = _WEIGHT_DECAY,
        **kwargs: Any,
    ) -> None:
        # A list, because a generator could be read only once.
        self.params = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        self.given = _given({"lr": lr, "weight_decay": weight_decay, **kwargs})


class DummyScheduler:
    """Stands for the schedule of a DeepSpeed configuration.

    Args:
        optimizer: The optimizer, or what stands for it.
        total_num_steps: Calls of ``step`` in a loop of one process; divided by the number of
            processes, as a loop of several makes fewer.
        warmup_num_steps: Steps of warm-up.
        lr_scheduler_callable: Makes the schedule from the optimizer, in place of the file's.
        **kwargs: Kept.

    Attributes:
        optimizer: As given.
        total_num_steps: As given.
        warmup_num_steps: As given.
        lr_scheduler_callable: As given.
        kwargs: As given.
        given: ``warmup_num_steps``, where it was given.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = _WARMUP,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
        self.given = _given({"warmup_num_steps": warmup_num_steps})
