"""``PartialState``, ``AcceleratorState``: this process among the others, without a training loop.

Unlike Accelerate's, they share no hidden state: the process group and the environment are the
state, and every object reads the same from them. Only the newest `Accelerator` is remembered, so
that ``AcceleratorState()`` without arguments can mean its state.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbaccel.base import env
from nbaccel.base.errors import ConfigError
from nbaccel.config.capabilities import device_row
from nbaccel.config.handlers import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
)
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import Place
from nbaccel.train import distributed
from nbaccel.train.collectives import Collectives
from nbaccel.train.gradient import GradientState

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "is_initialized",
    "remember_accelerator",
]

_DecoratedFunction = TypeVar("_DecoratedFunction", bound=Callable[..., Any])


def shows(path: str, *, is_settable: bool = False) -> Any:
    """A property that shows what is inside of its object, and may set it there."""
    owner, _, name = path.rpartition(".")

    def set_inside(self: Any, value: Any) -> None:
        setattr(operator.attrgetter(owner)(self), name, value)

    return property(operator.attrgetter(path), set_inside if is_settable else None)


class ProcessInfo:
    """This process among the others: its numbers, and who runs what."""

    def __init__(self, collectives: Collectives) -> None:
        self._found_collectives = collectives

    def _check_process(self) -> None:
        """Refuse that ranks use what the notebook has made, by a process alone."""
        number = distributed.world_size() if self._found_collectives.place.is_alone else 1
        if number > 1:
            raise ConfigError(
                f"This {type(self).__name__} was made in one process and is used by {number}: each "
                "would take itself for the only one. Make it in the function or cell that all run."
            )

    @property
    def _collectives(self) -> Collectives:
        self._check_process()
        return self._found_collectives

    _place: Place = shows("_collectives.place")

    device: torch.device = shows("_place.device")
    """What this process computes on."""
    num_processes: int = shows("_place.world_size")
    """Processes in total."""
    process_index: int = shows("_place.rank")
    """Number of this process among all, from 0."""
    local_process_index: int = shows("_place.local_rank")
    """Number of this process on its node, from 0."""
    is_main_process: bool = shows("_place.is_main")
    """Whether this is process 0."""
    is_local_main_process: bool = shows("_place.is_local_main")
    """Whether this is process 0 of its node."""
    is_last_process: bool = shows("_place.is_last")
    """Whether this is the process of the highest number."""

    @property
    def use_distributed(self) -> bool:
        """Whether there are other processes."""
        return not self._place.is_alone

    def wait_for_everyone(self) -> None:
        """Wait until every process is here.

        Raises:
            CollectiveTimeout: A process did not call; the message names it and its last call.
        """
        self._collectives.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let process 0 run the block before all others do."""
        return self._run_first(self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let process 0 of every node run the block before the others of its node do."""
        return self._run_first(self.is_local_main_process, "local_main_process_first")

    @contextlib.contextmanager
    def _run_first(self, is_first: bool, barrier_name: str) -> Iterator[None]:
        if not is_first:
            self._collectives.barrier(barrier_name)
        try:
            yield
        finally:
            # Also after an exception: the others must not wait for one that has failed.
            if is_first:
                self._collectives.barrier(barrier_name)

    def on_main_process(self, function: _DecoratedFunction | None = None) -> Any:
        """Let only process 0 run a function; elsewhere the call returns None."""
        return _run_only_here(function, self.is_main_process)

    def on_local_main_process(self, function: _DecoratedFunction | None = None) -> Any:
        """Let only process 0 of each node run a function; elsewhere the call returns None."""
        return _run_only_here(function, self.is_local_main_process)

    def on_last_process(self, function: _DecoratedFunction) -> _DecoratedFunction:
        """Let only the last process run a function; elsewhere the call returns None."""
        own_function: _DecoratedFunction = _run_only_here(function, self.is_last_process)
        return own_function

    def on_process(
        self, function: _DecoratedFunction | None = None, process_index: int | None = None
    ) -> Any:
        """Let only one process of a number run a function; elsewhere the call returns None.

        Raises:
            ConfigError: There is no process of that number. One that is alone runs everything.
        """
        is_named = self._is_named(process_index, self.process_index, self.num_processes)
        return _run_only_here(function, is_named)

    def on_local_process(
        self, function: _DecoratedFunction | None = None, local_process_index: int | None = None
    ) -> Any:
        """Let only one process of each node run a function; elsewhere the call returns None.

        Raises:
            ConfigError: There is no process of that number. One that is alone runs everything.
        """
        place = self._place
        is_named = self._is_named(
            local_process_index, place.local_rank, place.local_world_size, "local_process_index"
        )
        return _run_only_here(function, is_named)

    def _is_named(
        self, number: int | None, own_number: int, count: int, name: str = "process_index"
    ) -> bool:
        # One process runs everything, so that code written for several runs on one.
        if self._place.is_alone:
            return True
        if number is None or not 0 <= number < count:
            raise ConfigError(
                f"{name}={number!r} names no process: there are {count}. The function would run "
                f"nowhere. Give a number from 0 to {count - 1}."
            )
        return number == own_number

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node, whatever the number of processes."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give every process its part of some inputs.

        Args:
            inputs: A list, tuple, tensor, or dict of such (of equal lengths), or a dataset with
                `select`; anything else is given to every process whole.
            apply_padding: Repeat the last item until all parts, to be gathered, are equally long.

        Yields:
            A contiguous part; the first processes have one item more where it does not work out.

        Raises:
            ConfigError: The values of a dict have different lengths.
        """
        yield inputs if self._place.is_alone else self._own_part(inputs, apply_padding)

    def _own_part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            length_by_key = {key: len(values) for key, values in inputs.items()}
            if len(set(length_by_key.values())) > 1:
                raise ConfigError(
                    f"split_between_processes got values of different lengths: {length_by_key}. "
                    "Make them equally long: items that belong together go to one process."
                )
            return {key: self._own_part(it, apply_padding) for key, it in inputs.items()}
        is_sequence = isinstance(inputs, (list, tuple, torch.Tensor))
        # Tensors have a `select`, too, which means something else.
        is_dataset = not is_sequence and hasattr(inputs, "select") and hasattr(inputs, "__len__")
        if not is_sequence and not is_dataset:
            return inputs
        items_each, num_longer = divmod(len(inputs), self.num_processes)
        rank = self.process_index
        first_item = rank * items_each + min(rank, num_longer)
        end_item = first_item + items_each + (rank < num_longer)
        # To the longest part.
        num_missing = int(apply_padding and 0 < num_longer <= rank)
        if is_dataset:
            # `select` takes indices, so the last item is repeated by its index.
            return inputs.select([*range(first_item, end_item), *[len(inputs) - 1] * num_missing])
        own_part: Any = inputs[first_item:end_item]
        if isinstance(own_part, torch.Tensor):
            # As in Accelerate: only padded tensors, which will be gathered, go to the device.
            padded_part = torch.cat([own_part, *[inputs[-1:]] * num_missing])
            return padded_part.to(self.device) if apply_padding else own_part
        return own_part + type(inputs)(inputs[-1:]) if num_missing else own_part


def _run_only_here(function: Callable[..., Any] | None, runs_here: bool) -> Any:
    """The function, or one that does nothing; without a function, what decorates one so."""
    if function is None:
        return functools.partial(_run_only_here, runs_here=runs_here)
    if runs_here:
        return function

    @functools.wraps(function)
    def skip_call(*args: Any, **kwargs: Any) -> None:
        return None

    return skip_call


# Accelerators of this process, newest last; weak: they hold models. A fork has made none yet.
_LIVE_ACCELERATORS: list[weakref.ref[Any]] = []
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_LIVE_ACCELERATORS.clear)


def remember_accelerator(new_accelerator: Any) -> None:
    """Let ``AcceleratorState()`` mean this one's, as long as it lives and is the newest."""
    _LIVE_ACCELERATORS[:] = [one for one in _LIVE_ACCELERATORS if one() is not None]
    _LIVE_ACCELERATORS.append(weakref.ref(new_accelerator))


def _newest_accelerator() -> Any:
    # The newest may be gone while an older one still trains.
    there = (reference() for reference in reversed(_LIVE_ACCELERATORS))
    return next((accelerator for accelerator in there if accelerator is not None), None)


def is_initialized() -> bool:
    """Whether there is an `Accelerator` whose state ``AcceleratorState()`` is."""
    return _newest_accelerator() is not None


def distributed_type(place: Place) -> DistributedType:
    """How processes train together where each holds the whole model."""
    # XLA's devices have this type in a single process, too.
    if default_type := device_row(place.device_name).distributed_type:
        return DistributedType(default_type)
    if place.is_alone:
        return DistributedType.NO
    host = device_row(place.device_name).in_host_memory
    return DistributedType.MULTI_CPU if host else DistributedType.MULTI_GPU


class PartialState(ProcessInfo):
    """This process among the others.

    Args:
        cpu: Compute on the CPU even if there is a GPU.
        **kwargs: Arguments of ``torch.distributed.init_process_group``, where there are other
            processes and no group yet: ``backend``, ``init_method``, ``timeout``.

    Raises:
        ConfigError: The environment contradicts itself.
    """

    _debug: bool | None = None

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        settings = InitProcessGroupKwargs(**kwargs)
        place = distributed.init_process(cpu=cpu, settings=settings)
        super().__init__(Collectives(place, distributed.timeout_s(settings)))

    @staticmethod
    def _reset_state() -> None:
        """Accelerate's name for forgetting what a process is, which is kept nowhere here."""

    @property
    def debug(self) -> bool:
        """Whether ``ACCELERATE_DEBUG_MODE`` is set. It lets all collectives be compared."""
        return bool(env.flag("ACCELERATE_DEBUG_MODE")) if self._debug is None else self._debug

    @debug.setter
    def debug(self, value: bool) -> None:
        self._debug = value

    @property
    def distributed_type(self) -> DistributedType:
        """How processes train together, as far as is known without a model."""
        return distributed_type(self._place)

    @property
    def backend(self) -> str | None:
        """Process group backend as torch names it; None where there is no group."""
        return self._place.backend or None

    initialized = True
    """Whether the facts are known; they always are."""

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook's launcher forked this process."""
        return bool(env.flag("FORK_LAUNCHED"))

    @property
    def default_device(self) -> torch.device:
        """What a process without a number of its own would compute on."""
        return distributed.find_device()

    def set_device(self) -> None:
        """Make this process's device torch's current one."""
        registry.device(self._place.device_name).make_current(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave a process group; the default one, if there is one, where none is given."""
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}"
            f"{'  Backend: ' + self.backend if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """What an `Accelerator` says of its process: ``accelerator.state``.

    Without arguments it says what the newest `Accelerator` says, or what is known without one.

    Args:
        collectives: What the processes do together, and where this one stands.
        distributed_type: How they train.
        mixed_precision: In which format.
        fsdp_plugin: How torch shards models, if it does.
        deepspeed_plugins: How DeepSpeed shards them, if it does.
        dynamo_plugin: How they are compiled, if they are.
        said: What a program has set, by attribute; the accelerator's own.
    """

    def __init__(
        self,
        collectives: Collectives | None = None,
        *,
        distributed_type: DistributedType = DistributedType.NO,
        mixed_precision: str = "no",
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        deepspeed_plugins: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        said: dict[str, DistributedType] | None = None,
    ) -> None:
        if collectives is None:
            if (newest := _newest_accelerator()) is not None:
                self.__dict__.update(vars(newest.state))
                return
            super().__init__()
            distributed_type = super().distributed_type
            mixed_precision = env.read("ACCELERATE_MIXED_PRECISION") or mixed_precision
        else:
            # Past PartialState's constructor, which would find the place anew.
            ProcessInfo.__init__(self, collectives)
        self._said = {} if said is None else said
        self._distributed_type = distributed_type
        self.mixed_precision = mixed_precision
        self.fsdp_plugin = fsdp_plugin
        self.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin()
        self._deepspeed_plugins = deepspeed_plugins

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget which accelerators there are, until one is made anew; they train on."""
        del reset_partial_state  # nothing of PartialState is kept
        _LIVE_ACCELERATORS.clear()

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by ``fully_shard``."""
        return self.distributed_type is DistributedType.FSDP

    parallelism_config = None
    """None: this version does not mix parallelisms."""
    device_mesh = None
    """None: as `parallelism_config`."""

    @property
    def deepspeed_plugins(self) -> dict[str, Any]:
        """DeepSpeed's plugins by name; empty where something else trains."""
        return {} if self._deepspeed_plugins is None else dict(self._deepspeed_plugins.by_name)

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin that the next `prepare` uses; None where DeepSpeed is not used."""
        return None if self._deepspeed_plugins is None else self._deepspeed_plugins.active

    def get_deepspeed_plugin(self, name: str) -> Any:
        """A plugin by its name.

        Raises:
            ConfigError: There is none of that name.
        """
        return self._require_plugins().get(name)

    def select_deepspeed_plugin(self, name: str) -> None:
        """Let the next `prepare` use another plugin.

        Raises:
            ConfigError: There is none of that name.
        """
        self._require_plugins().select(name)

    def _require_plugins(self) -> Any:
        if self._deepspeed_plugins is None:
            raise ConfigError(
                f"There are no DeepSpeed plugins in a run of type {self.distributed_type.value}: "
                "none can be named. Give Accelerator(deepspeed_plugins={...})."
            )
        return self._deepspeed_plugins

    @property
    def distributed_type(self) -> DistributedType:
        """How processes train together; what is set is said from then on, and changes no run."""
        return self._said.get("distributed_type", self._distributed_type)

    @distributed_type.setter
    def distributed_type(self, value: DistributedType) -> None:
        self._said["distributed_type"] = DistributedType(value)

    def __repr__(self) -> str:
        text = f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"
        plugin = self.deepspeed_plugin
        return text if plugin is None else f"{text}ds_config: {plugin.deepspeed_config}\n"
