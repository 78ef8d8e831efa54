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
    """One process of a training run."""

    rank: int = 0  # its number among all processes, from 0
    local_rank: int = 0  # its number on its node, from 0
    world_size: int = 1  # processes in total
    local_world_size: int = 1  # processes on its node
    device: torch.device  # what it computes on
    device_row: str = ""  # the row of that device, where torch's name for it is another
    backend: str = ""  # process group backend, as torch names it; empty where there is no group

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

    FSDP2, FP8 and ZeRO replace parameters: the optimizer must follow its model. A step takes a
    bundle and returns a bundle of the same lengths and order.
    """

    models: tuple[nn.Module, ...] = ()  # models that are to be trained
    optimizers: tuple[Any, ...] = ()  # torch's, over the parameters of these models, or stand-ins
    schedulers: tuple[Any, ...] = ()  # learning-rate schedulers of these optimizers, or stand-ins
    loaders: tuple[Any, ...] = ()  # data loaders, shared out already; also those prepared before


Source = Literal["argument", "config", "environment", "default"]
"""Where a setting comes from, the strongest first: a call's arguments win over a configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """Everything that may request a strategy."""

    run: RunConfig | None = None  # the configuration; None where none was given
    arguments: Mapping[str, Any] = field(default_factory=dict)  # plugins by the argument's name
    handlers: tuple[Any, ...] = ()  # its ``kwargs_handlers``
    # Whether environment variables count, as where training begins, and not in a launch's plan.
    has_environment: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A strategy's answer that it was requested."""

    strategy: str  # its name
    source: Source  # where the request comes from
    what: str  # the request, as messages write it: ``zero_stage=2``, ``fsdp_plugin``
    reason: str  # why it is taken, for the training plan
    settings: Callable[[], Any]  # makes its settings; called where training begins
    headline: str = ""  # its part of the launch plan's first line
    choices: tuple[Choice, ...] = ()  # its lines of the launch plan's table


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """The settings given in a call, a configuration or the environment."""

    mixed_precision: str = "no"  # the precision by name
    precision_source: Source = "default"  # its source
    accumulation_steps: int = 1  # batches for one optimizer step
    accumulation_source: Source = "default"  # its source
    strategy: Wanted | None = None  # the requested strategy; None goes by the number of processes
    fp8: Fp8Config | None = None  # None where it was not given
    device: str = ""  # the row of the requested device; empty takes what there is
    split_batches: bool = False  # whether a loader's batch is cut up


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidBySettings:
    """What a strategy's settings say of training beside sharding."""

    mixed_precision: str | None = None  # the precision by name; None where they leave it open
    accumulation_steps: int | None = None  # batches for a step; None where they leave it open
    writes_shards: bool = False  # whether every process writes its own part of a checkpoint
    reason: str = ""  # why the strategy is taken, where only the settings can tell
    speaker: str = "what the strategy was told"  # what says it, as messages call it
    remedy: str = ""  # how a contradiction with it can be resolved other than by leaving it out


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSettings:
    """All that was said of a number format."""

    device: torch.device  # what the model computes on
    autocast: AutocastKwargs  # arguments of ``torch.autocast``
    scaler: GradScalerKwargs  # arguments of ``torch.amp.GradScaler``
    # None where nothing was said. Its recipe is never ``auto`` where the library has any.
    fp8: Fp8Config | None = None
    emulates_fp8: bool = False  # whether the device has no products of 8 bits
    world_size: int = 1  # processes in total
    is_main: bool = True  # whether this is process 0, which speaks for all
    accumulation_steps: int = 1  # batches for one optimizer step
    is_sharded: bool = False  # whether each process holds a part of each weight
    handlers: tuple[Any, ...] = ()  # ``kwargs_handlers``, for a library's own objects


class Precision:
    """One number format."""

    name: ClassVar[str] = "no"  # as in its capability row
    # Whether :meth:`convert` replaces layers, also where a strategy's engine casts the model.
    converts_layers: ClassVar[bool] = False
    scaler: torch.amp.GradScaler | None = None  # scales the loss; None where nothing must
    dtype: torch.dtype | None = None  # what layers compute in; None leaves it to the parameters
    choices: tuple[Choice, ...] = ()  # what was decided while preparing, each with its reason

    @classmethod
    def build(cls, settings: PrecisionSettings) -> Self:
        """One for a process's models; a format takes what it needs of the settings."""
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
        """Names of a converted model's parameters whose gradients this format averages itself."""
        return []

    def average_gradients(self, model: nn.Module, is_synced: Callable[[], bool]) -> None:
        """Average the gradients of :meth:`own_gradients` after each backward pass; a collective.

        The parameters get the values of process 0. `is_synced` says whether the backward pass at
        hand ends a group of accumulated ones.
        """

    def state_dict(self, models: Iterable[nn.Module]) -> dict[str, Any]:
        """What a checkpoint needs beside weights and optimizers; empty where that is nothing."""
        return {}

    def load_state_dict(self, models: Iterable[nn.Module], state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""


class Strategy:
    """One way to train in this process, together with the others of the run."""

    name: ClassVar[str]  # as in its capability row
    owns_precision: ClassVar[bool] = False  # whether its engine casts models and scales the loss
    shards_parameters: ClassVar[bool] = False  # whether torch's FSDP cuts weights up
    choices: tuple[Choice, ...] = ()  # what was decided while preparing, each with its reason
    # Is given the models where they were built; may be a collective. None: `wrap` is early enough.
    before_placement: Callable[[Iterable[nn.Module]], None] | None = None

    def __init__(self, place: Place) -> None:
        self.place = place

    @classmethod
    def build(
        cls, place: Place, settings: Any, *, precision: Precision, asked: TrainingRequest
    ) -> Self:
        """One for this process; `settings` as the row names them, `asked`: what else was asked."""
        return cls(place)

    @classmethod
    def said_by(cls, settings: Any) -> SaidBySettings:
        """What the settings say of training beside sharding."""
        return SaidBySettings()

    def wrap(self, bundle: Bundle) -> Bundle:
        """Make models, which are on their device, ready to train; optimizers hold the result."""
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside what :meth:`wrap` returned; any other module as it is."""
        return model

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        """Compute gradients of a scaled loss; `sync`: it ends a group of accumulated batches."""
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
        """A context in which processes may run out of batches at other times; None: it cannot."""
        return nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a norm over the whole model; returns the norm before, on all."""
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def release(self, models: Iterable[nn.Module] | None = None) -> None:
        """Release what :meth:`wrap` made for these models; None for all."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The whole state dict of the unwrapped model, on process 0; collective where it is cut."""
        return self.unwrap(model).state_dict()

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> None:
        """Load what :meth:`model_state` gave, by a collective of process 0's if cut."""
        self.unwrap(model).load_state_dict(state, **options)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What ``Optimizer.state_dict`` gives on process 0; a collective where it is cut."""
        return optimizer.state_dict()

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load what :meth:`optimizer_state` gave; that of process 0 counts where it is sharded."""
        optimizer.load_state_dict(dict(state))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShards:
    """A folder of which every process writes and reads its own part, and what it is of."""

    model: nn.Module  # as :meth:`Strategy.wrap` returned it
    optimizer: torch.optim.Optimizer | None  # its state is there, too; None for weights alone
    folder: Path
    left_out: Collection[str] = ()  # names of frozen parameters that are not written
    # The ranks that write into each folder, where each host has its own.
    ranks_by_folder: Sequence[Sequence[int]] = ()
    ranks_there: Collection[int] = ()  # ranks whose shards are there, if it is one host's folder


@runtime_checkable
class ShardedCheckpoints(Protocol):
    """A strategy whose processes can each write and read their own part of a checkpoint."""

    shard_kind: ClassVar[str]  # what kind of shards they are, see `train.checkpoint.files`

    @property
    def keeps_own_disks(self) -> bool:
        """Whether the user's settings say that each host writes to a disk of its own."""

    def shard_folder(self, number: int) -> str:
        """What the folder of a model in shards is called, by the model's number from 0."""

    def save_sharded(self, shards: ModelShards) -> None:
        """Write weights, and the optimizer's state if one is given; a collective.

        All processes see the folder, or each host has its own: then `ranks_by_folder` has the ranks
        that write into each, which has to suffice for them.
        """

    def check_sharded(self, shards: ModelShards) -> None:
        """Refuse a folder that :meth:`load_sharded` could not read into these; no collective.

        What was left out stays as it is in the model. Raises `CheckpointDamaged` where files are
        missing or not what was saved, `ConfigError` where they are of another model or number of
        processes.
        """

    def load_sharded(self, shards: ModelShards) -> None:
        """Read what :meth:`save_sharded` wrote, with any number of processes; a collective."""


Piece = tuple[int, "torch.Tensor"]  # first element in the flattened whole; values ``[n]``


@dataclass(frozen=True)
class Remembered:
    """What a module was."""

    # Format and attributes of each parameter and buffer, by name.
    tensors: dict[str, tuple[torch.dtype, frozenset[str]]]


def remember(module: nn.Module) -> Remembered:
    """The state of a module that no library has taken over."""
    named = (*module.named_parameters(), *module.named_buffers())
    return Remembered({name: (t.dtype, frozenset(vars(t))) for name, t in named})


class ShardReader:
    """Reads one library's shards: a module with these functions, or an object of a subclass.

    DTensors say themselves which elements a process has; a library with placeholders (ZeRO-3), or
    with copies of higher precision (ZeRO-1 and 2), has a reader in its capability row.
    The defaults are those of a library without engines and placeholders.
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
        """Refuse, with `ConfigError`, a module or state with placeholders; `what` was asked for."""

    def remember(self, module: nn.Module) -> Remembered:
        """The state of a module before the library took it over, if it did."""
        return remember(module)

    def take_back(self, module: nn.Module, remembered: Remembered) -> bool:
        """Make a module that the library took apart what it was; False where it was not."""
        raise NotImplementedError

    def building_whole(self) -> AbstractContextManager[None]:
        """A block in which the library does not cut models while they are built."""
        return nullcontext()

    def leave(self) -> None:
        """Remove what the library keeps on disk for this process, which ends."""

    def forget_groups(self) -> None:
        """Torch's process groups are gone: forget those that the library made from them."""

    def tear_down(self, before: Any) -> None:
        """End the library's part of this process; `before` is what the row's ``observe`` saw."""


# Where DeepSpeed's file has optimizer and schedule: `prepare` puts the real ones in their place.


class _Unsaid(float):
    """A default, whose type tells it from the same number given by a caller."""


class _UnsaidSteps(int):
    """The same of a whole number."""


_LR = _Unsaid(0.001)
_WEIGHT_DECAY = _Unsaid(0)
_WARMUP = _UnsaidSteps(0)


def _given(arguments: dict[str, Any]) -> frozenset[str]:
    """What was given, by name: a default contradicts no file, and fills in ``"auto"`` as well."""
    defaults = (_Unsaid, _UnsaidSteps)
    return frozenset(name for name, value in arguments.items() if not isinstance(value, defaults))


class DummyOptim:
    """Stands for the optimizer of a DeepSpeed configuration.

    Args:
        params: Parameters, or parameter groups; kept as a list.
        lr: Learning rate, where the file has ``"auto"``.
        weight_decay: Weight decay, where the file has ``"auto"``.
        **kwargs: Further arguments (``betas``, ``eps``), where the file has ``"auto"``.
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
        self.given = _given({"lr": lr, "weight_decay": weight_decay, **kwargs})
        # Plain numbers: DeepSpeed writes them into checkpoints, which are read without classes.
        self.lr = lr if "lr" in self.given else float(lr)
        self.weight_decay = weight_decay if "weight_decay" in self.given else float(weight_decay)
        self.kwargs = kwargs


class DummyScheduler:
    """Stands for the schedule of a DeepSpeed configuration.

    Args:
        optimizer: The optimizer, or what stands for it.
        total_num_steps: Calls of ``step`` in a loop of one process; a loop of several makes fewer.
        warmup_num_steps: Steps of warm-up.
        lr_scheduler_callable: Makes the schedule from the optimizer, in place of the file's.
        **kwargs: Kept.
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
        self.given = _given({"warmup_num_steps": warmup_num_steps})
        self.warmup_num_steps = warmup_num_steps if self.given else int(warmup_num_steps)
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
