"""The control flow of several processes: which of them runs what, and waits for which."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch

from nbaccel.base.errors import ConfigError
from nbaccel.plan.contracts.training import Place
from nbaccel.train.collectives import Collectives

_DecoratedFunction = TypeVar("_DecoratedFunction", bound=Callable[..., Any])


class ProcessInfo:
    """This process among the others: its numbers, and who runs what.

    Args:
        place: Where this process stands.
        collectives: Collectives of all processes.
    """

    def __init__(self, place: Place, collectives: Collectives) -> None:
        self._place = place
        self._collectives = collectives

    # --------------------------------------------------------------------- numbers

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return self._place.device

    @property
    def num_processes(self) -> int:
        """Processes in total."""
        return self._place.world_size

    @property
    def process_index(self) -> int:
        """Number of this process among all, from 0."""
        return self._place.rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its node, from 0."""
        return self._place.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._place.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its node."""
        return self._place.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process of the highest number."""
        return self._place.is_last

    @property
    def use_distributed(self) -> bool:
        """Whether there are other processes."""
        return not self._place.is_alone

    # --------------------------------------------------------------------- waiting

    def wait_for_everyone(self) -> None:
        """Wait until every process is here.

        Raises:
            CollectiveTimeout: A process did not call; the message names it and its last call.
        """
        self._collectives.barrier()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let process 0 run the block before all others do."""
        with self._run_first(self.is_main_process, "main_process_first"):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let process 0 of every node run the block before the others of its node do."""
        with self._run_first(self.is_local_main_process, "local_main_process_first"):
            yield

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

    # --------------------------------------------------------------------- who runs what

    def on_main_process(self, function: _DecoratedFunction | None = None) -> Any:
        """Let only process 0 run a function; elsewhere the call returns None.

        Args:
            function: The function; without it, a decorator is returned.
        """
        if function is None:
            return self.on_main_process
        return _run_only_here(function, self.is_main_process)

    def on_local_main_process(self, function: _DecoratedFunction | None = None) -> Any:
        """Let only process 0 of each node run a function; elsewhere the call returns None.

        Args:
            function: The function; without it, a decorator is returned.
        """
        if function is None:
            return self.on_local_main_process
        return _run_only_here(function, self.is_local_main_process)

    def on_last_process(self, function: _DecoratedFunction) -> _DecoratedFunction:
        """Let only the last process run a function; elsewhere the call returns None."""
        return _run_only_here(function, self.is_last_process)

    def on_process(
        self, function: _DecoratedFunction | None = None, process_index: int | None = None
    ) -> Any:
        """Let only one process run a function; elsewhere the call returns None.

        Args:
            function: The function; without it, a decorator is returned.
            process_index: Number of the process among all.

        Raises:
            ConfigError: There is no process of that number. One that is alone runs everything.
        """
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        # One process runs everything, so that code written for several runs on one.
        if self._place.is_alone:
            return function
        rank = _check_process_number(process_index, self.num_processes, "process_index")
        return _run_only_here(function, self.process_index == rank)

    def on_local_process(
        self, function: _DecoratedFunction | None = None, local_process_index: int | None = None
    ) -> Any:
        """Let only one process of each node run a function; elsewhere the call returns None.

        Args:
            function: The function; without it, a decorator is returned.
            local_process_index: Number of the process on its node.

        Raises:
            ConfigError: There is no process of that number. One that is alone runs everything.
        """
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        if self._place.is_alone:
            return function
        rank = _check_process_number(
            local_process_index, self._place.local_world_size, "local_process_index"
        )
        return _run_only_here(function, self.local_process_index == rank)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node, whatever the number of processes."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    # --------------------------------------------------------------------- sharing work out

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give every process its part of some inputs.

        Args:
            inputs: A list, tuple, tensor, or dict of such (of equal lengths), or a dataset with
                `select`; anything else is given to every process whole.
            apply_padding: Repeat the last item until all parts are equally long, so that results
                can be gathered.

        Yields:
            A contiguous part; the first processes have one item more where it does not work out.

        Raises:
            ConfigError: The values of a dict have different lengths.
        """
        yield inputs if self._place.is_alone else self._own_part(inputs, apply_padding)

    def _own_part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            length_by_key = {
                input_key: len(input_values) for input_key, input_values in inputs.items()
            }
            if len(set(length_by_key.values())) > 1:
                raise ConfigError(
                    f"split_between_processes got values of different lengths: {length_by_key}. "
                    "Items that belong together would go to different processes. Make them "
                    "equally long."
                )
            return {
                input_key: self._own_part(input_values, apply_padding)
                for input_key, input_values in inputs.items()
            }
        is_sequence = isinstance(inputs, (list, tuple, torch.Tensor))
        # Tensors have a `select`, too, which means something else.
        is_dataset = not is_sequence and hasattr(inputs, "select") and hasattr(inputs, "__len__")
        if not is_sequence and not is_dataset:
            return inputs
        first_item, end_item, num_missing = self._own_span(len(inputs), apply_padding)
        if is_dataset:
            # `select` takes indices, so the last item is repeated by its index.
            return inputs.select([*range(first_item, end_item), *[len(inputs) - 1] * num_missing])
        own_part: Any = inputs[first_item:end_item]
        if isinstance(own_part, torch.Tensor):
            # As in Accelerate, only padded tensors are moved to the device, since they will be
            # gathered.
            padded_part = torch.cat([own_part, *[inputs[-1:]] * num_missing])
            return padded_part.to(self.device) if apply_padding else own_part
        return (
            own_part + type(inputs)(itertools.repeat(inputs[-1], num_missing))
            if num_missing
            else own_part
        )

    def _own_span(self, length: int, apply_padding: bool) -> tuple[int, int, int]:
        """First and one-past-last item of this process, and how many are missing to the longest."""
        items_each, num_longer = divmod(length, self.num_processes)
        rank = self.process_index
        first_item = rank * items_each + min(rank, num_longer)
        end_item = first_item + items_each + (rank < num_longer)
        most_items = items_each + (num_longer > 0)
        return (
            first_item,
            end_item,
            most_items - (end_item - first_item) if apply_padding and length else 0,
        )


def _run_only_here(function: _DecoratedFunction, runs_here: bool) -> _DecoratedFunction:
    if runs_here:
        return function

    @functools.wraps(function)
    def skip_call(*args: Any, **kwargs: Any) -> None:
        return None

    return cast("_DecoratedFunction", skip_call)


def _check_process_number(process_number: int | None, num_processes: int, name: str) -> int:
    if process_number is None or not 0 <= process_number < num_processes:
        raise ConfigError(
            f"{name}={process_number!r} names no process: there are {num_processes}. The "
            f"function would run nowhere. Give a number from 0 to {num_processes - 1}."
        )
    return process_number
