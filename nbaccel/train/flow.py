"""Who does what, and who waits for whom: the control flow of several processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch

from nbaccel.abc.place import Place
from nbaccel.errors import ConfigError
from nbaccel.train.collectives import Collectives

__all__ = ["Processes"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Processes:
    """This process among the others: its numbers, and who runs what.

    Args:
        place: Where this process stands.
        collectives: What they do together.
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
            CollectiveTimeout: Somebody did not come; it says who, and where it was last.
        """
        self._collectives.barrier()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let process 0 run the block before all others do."""
        with self._first(self.is_main_process, "main_process_first"):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let process 0 of every node run the block before the others of its node do."""
        with self._first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextlib.contextmanager
    def _first(self, is_first: bool, what: str) -> Iterator[None]:
        if not is_first:
            self._collectives.barrier(what)
        try:
            yield
        finally:
            # Also after an exception: the others must not wait for one that has failed.
            if is_first:
                self._collectives.barrier(what)

    # --------------------------------------------------------------------- who runs what

    def on_main_process(self, function: _Function | None = None) -> Any:
        """Let only process 0 run a function; elsewhere the call returns None.

        Args:
            function: The function; without it, a decorator is returned.
        """
        if function is None:
            return self.on_main_process
        return _only(function, self.is_main_process)

    def on_local_main_process(self, function: _Function | None = None) -> Any:
        """Let only process 0 of each node run a function; elsewhere the call returns None.

        Args:
            function: The function; without it, a decorator is returned.
        """
        if function is None:
            return self.on_local_main_process
        return _only(function, self.is_local_main_process)

    def on_last_process(self, function: _Function) -> _Function:
        """Let only the last process run a function; elsewhere the call returns None."""
        return _only(function, self.is_last_process)

    def on_process(
        self, function: _Function | None = None, process_index: int | None = None
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
        if self._place.is_alone:
            return function
        chosen = _existing(process_index, self.num_processes, "process_index")
        return _only(function, self.process_index == chosen)

    def on_local_process(
        self, function: _Function | None = None, local_process_index: int | None = None
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
        chosen = _existing(local_process_index, self._place.local_world_size, "local_process_index")
        return _only(function, self.local_process_index == chosen)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per node, whatever the number of processes."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  (that is what it is for)

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
        yield inputs if self._place.is_alone else self._part(inputs, apply_padding)

    def _part(self, inputs: Any, apply_padding: bool) -> Any:
        if isinstance(inputs, Mapping):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigError(
                    f"split_between_processes got values of different lengths: {lengths}. Items "
                    "that belong together would go to different processes. Make them equally long."
                )
            return {key: self._part(value, apply_padding) for key, value in inputs.items()}
        is_sequence = isinstance(inputs, (list, tuple, torch.Tensor))
        # Tensors have a `select`, too, which means something else.
        is_dataset = not is_sequence and hasattr(inputs, "select") and hasattr(inputs, "__len__")
        if not is_sequence and not is_dataset:
            return inputs
        start, stop, missing = self._span(len(inputs), apply_padding)
        if is_dataset:
            return inputs.select([*range(start, stop), *[len(inputs) - 1] * missing])
        part: Any = inputs[start:stop]
        if isinstance(part, torch.Tensor):
            padded = torch.cat([part, *[inputs[-1:]] * missing])
            return padded.to(self.device) if apply_padding else part
        return part + type(inputs)(itertools.repeat(inputs[-1], missing)) if missing else part

    def _span(self, length: int, apply_padding: bool) -> tuple[int, int, int]:
        """First and one-past-last item of this process, and how many are missing to the longest."""
        each, more = divmod(length, self.num_processes)
        rank = self.process_index
        start = rank * each + min(rank, more)
        stop = start + each + (rank < more)
        longest = each + (more > 0)
        return start, stop, longest - (stop - start) if apply_padding and length else 0


def _only(function: _Function, runs_here: bool) -> _Function:
    if runs_here:
        return function

    @functools.wraps(function)
    def elsewhere(*args: Any, **kwargs: Any) -> None:
        return None

    return cast("_Function", elsewhere)


def _existing(index: int | None, count: int, name: str) -> int:
    if index is None or not 0 <= index < count:
        raise ConfigError(
            f"{name}={index!r} names no process: there are {count}. The function would run "
            f"nowhere. Give a number from 0 to {count - 1}."
        )
    return index
