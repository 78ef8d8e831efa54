"""Process groups in a live worker: joined when first needed, cut when stuck, begun anew after that.

DDP models go on in the new groups after the old ones were left.

[Note: joined on request] `dist.all_reduce(x)` in a cell needs no set-up: the first use of the
default group joins it, and the notebook asks the workers that are idle to join as well. (Those that
run the same cell come by themselves.) `init_process_group()` in a cell that is run twice finds the
group there and leaves it.

[Note: cutting] A rank whose peers have failed waits in C++ for ever, deaf to signals. Its second
thread then shuts down the sockets that belong to its groups, and the wait ends with an error. NCCL
has `abort` for that. Groups that were cut, or whose ranks have begun different numbers of
collectives, are of no more use: all ranks leave them, and the next use makes new ones under a new
prefix in the store. DDP models take these up in their next forward (`reattach`).

    forward of a DDP model whose group was left
      ─► the default group, joined by all ranks     the wrapper gets a new reducer in it
      ─► weights and buffers of rank 0              as DDP's own constructor hands them out
      ─► are the optimizers' states equal?          if not, rank 0's: a rank may be a step ahead

What the constructor would do, without losing what hangs on the wrapper: the optimizer, its state,
and whoever else holds one of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel import torch_private
from nbaccel.config.handlers import InitProcessGroupKwargs
from nbaccel.errors import ConfigError
from nbaccel.pool.messages import GroupWanted
from nbaccel.topology import Topology
from nbaccel.train import distributed
from nbaccel.train.in_sync import tensor_fingerprint
from nbaccel.transfer import sharded_tensors
from nbaccel.workers import rendezvous

__all__ = ["ProcessGroups", "reattach_models"]


_SOCKET_CLOSING_S = 1.0  # gloo takes less than a millisecond to close what was shut down
_RequestGroup = Callable[[GroupWanted], None]


class ProcessGroups:
    """The process groups of one worker.

    Args:
        place: The worker's place.
        group_wanted: Tells the notebook that this rank is about to wait for all others.
    """

    def __init__(self, place: Topology, group_wanted: _RequestGroup) -> None:
        self._place = place
        self._wanted = group_wanted
        self._generation = 0
        self._made = 0
        self._sockets: set[int] = set()  # inodes of those that belong to groups
        self._before: set[int] | None = None  # while a group is being made
        self._left: list[Any] = []
        self._left_defaults: list[Any] = []
        self.left_for = ""
        """Why the groups before these were left, if so."""

    def watch(self) -> None:
        """Take part in how torch makes and finds groups. Once per worker."""
        rendezvous.meet_here(self._place, self._next_name)
        reattach_models(
            lambda process_group: any(
                process_group is left_group for left_group in self._left_defaults
            )
        )
        torch_private.create_in_default_group(self.join)
        torch_private.watch_new_groups(self._noting_sockets)
        c10d = dist.distributed_c10d
        torch_init_process_group, torch_destroy_process_group = (
            c10d.init_process_group,
            c10d.destroy_process_group,
        )

        # Parameters have torch's names: user code passes them by keyword.
        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():
                self._check_same(backend)
                return
            group_timeout = kwargs.get("timeout") or timedelta(seconds=distributed.timeout_s(None))
            self._wanted(
                GroupWanted(
                    generation=self._generation,
                    ordinal=self._made,
                    backend=backend,
                    timeout_s=group_timeout.total_seconds(),
                )
            )
            torch_init_process_group(backend, *args, **kwargs)

        def destroy_process_group(group: Any = None) -> None:
            torch_destroy_process_group(group)
            if not dist.is_initialized():
                self._close_sockets()
                sharded_tensors.forget_process_groups()

        for patched_module in (c10d, dist):
            patched_module.init_process_group = init_process_group  # type: ignore[attr-defined]
            patched_module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]

    def _next_name(self) -> str:
        """Where the ranks of the next default group meet in the store."""
        self._made += 1
        return f"generation_{self._generation}/group_{self._made}"

    def join_others(self, group_wanted: GroupWanted) -> None:
        """Join the group that another rank is waiting in; not if this rank has been in it."""
        if (self._generation, self._made) == (group_wanted.generation, group_wanted.ordinal):
            self.join(group_wanted.backend, group_wanted.timeout_s)

    def join(self, group_backend: str | None = None, timeout_s: float | None = None) -> None:
        """Join the default group, if this worker is in none yet."""
        if not dist.is_initialized():
            timeout_seconds = timeout_s or distributed.timeout_s(None)
            group_timeout = timedelta(seconds=timeout_seconds)
            group_settings = InitProcessGroupKwargs(backend=group_backend, timeout=group_timeout)
            if self._place.world_size > 1:
                distributed.arrive(settings=group_settings)
            else:  # alone, `arrive` sees no need for a group; a collective in a cell does
                dist.init_process_group(group_backend or "gloo", timeout=group_timeout)

    def sequence(self) -> tuple[tuple[str, int], ...]:
        """How many collectives each group has begun: equal on all ranks that are in step."""
        found_values = []
        for process_group, entry_name in torch_private.process_group_names().items():
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                found_values.append((entry_name, torch_private.collectives_begun(process_group)))
        return tuple(sorted(found_values))

    def cut(self) -> None:
        """Let a collective that will never complete fail. For the second thread."""
        for process_group in torch_private.process_groups():
            for group_backend in torch_private.device_backends(process_group):
                # gloo's own `abort` does not reach a wait that has begun (torch 2.13).
                if group_backend.name() != "gloo" and hasattr(group_backend, "abort"):
                    group_backend.abort()
        own_sockets = set(self._sockets)
        if self._before is not None:
            own_sockets |= set(_own_sockets()) - self._before
        for socket_inode, socket_fd in _own_sockets().items():
            if socket_inode in own_sockets:
                _shut_connection(socket_fd, spared_port=self._place.master_port)

    def leave(self, generation: int, leave_reason: str) -> None:
        """Drop every group; the next one is made in this generation.

        Args:
            generation: The same number on all ranks.
            leave_reason: Why, for whoever meets an object that holds one of them.
        """
        self._generation = generation
        self._made = 0
        if dist.is_initialized():
            self.left_for = leave_reason
            self._left += torch_private.process_groups()
            self._left_defaults.append(dist.group.WORLD)
            with contextlib.suppress(RuntimeError, ValueError):  # they are broken: that is why
                dist.destroy_process_group()
            sharded_tensors.forget_process_groups()
        self._close_sockets()

    def are_behind(self, traceback_entry: TracebackType | None) -> bool:
        """Whether an error comes of the use of a group that was left."""
        while traceback_entry is not None:
            frame_values = tuple(traceback_entry.tb_frame.f_locals.values())
            if any(
                frame_value is left_group
                for frame_value in frame_values
                for left_group in self._left
            ):
                return True
            traceback_entry = traceback_entry.tb_next
        return False

    def _close_sockets(self) -> None:
        """Close what gloo leaves open: `keep_groups_alive` keeps its objects, not their ports.

        Connections are shut down, and gloo's own threads close them. One that finds the null device
        where its peer has just hung up would end this process; see `docs/pages/upstream.md`. The
        numbers of the rest stay taken, by the null device, so that these threads touch nothing
        else.
        """
        shut_inodes = {
            socket_inode
            for socket_inode, socket_fd in _own_sockets().items()
            if socket_inode in self._sockets
            and _shut_connection(socket_fd, spared_port=self._place.master_port)
        }
        closing_deadline = time.monotonic() + _SOCKET_CLOSING_S
        while shut_inodes & _own_sockets().keys() and time.monotonic() < closing_deadline:
            time.sleep(0.001)
        null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for socket_inode, socket_fd in _own_sockets().items():
            if socket_inode in self._sockets:
                os.dup2(null_fd, socket_fd, inheritable=False)
        os.close(null_fd)
        self._sockets.clear()

    def _check_same(self, group_backend: str | None) -> None:
        joined_backends = str(dist.get_backend_config())
        if group_backend is not None and group_backend not in joined_backends:
            raise ConfigError(
                f"init_process_group({group_backend!r}): this worker is in a process group over "
                f"{joined_backends} already, and a second default group cannot be had. Leave the "
                f"call out, call dist.destroy_process_group() on all ranks first, or use "
                f"dist.new_group for another backend."
            )

    @contextlib.contextmanager
    def _noting_sockets(self) -> Iterator[None]:
        """What is connected while a group is made belongs to it."""
        inodes_before = set(_own_sockets())
        outer_inodes, self._before = (
            self._before,
            inodes_before if self._before is None else self._before,
        )
        try:
            yield
        finally:
            self._before = outer_inodes
            self._sockets |= set(_own_sockets()) - inodes_before


def _own_sockets() -> dict[int, int]:
    """Inode → descriptor of every socket of this process."""
    found_values = {}
    for entry_name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            link_target = os.readlink(f"/proc/self/fd/{entry_name}")
            if link_target.startswith("socket:["):
                found_values[int(link_target[8:-1])] = int(entry_name)
    return found_values


def _shut_connection(socket_fd: int, *, spared_port: int) -> bool:
    """Shut a TCP connection down, unless this process serves the store over it.

    Returns:
        Whether it is, or was, such a connection.
    """
    with contextlib.suppress(OSError):  # closed meanwhile
        duplicate_socket = socket.socket(fileno=os.dup(socket_fd))
        with duplicate_socket:
            is_internet = duplicate_socket.family in (socket.AF_INET, socket.AF_INET6)
            is_listening = duplicate_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not is_internet or is_listening or duplicate_socket.getsockname()[1] == spared_port:
                return False
            with contextlib.suppress(OSError):  # shut already, by either side
                duplicate_socket.shutdown(socket.SHUT_RDWR)
            return True
    return False


def reattach_models(was_left: Callable[[Any], bool]) -> None:
    """Let DDP models find the new group in their forward. Once per worker.

    Args:
        was_left: Whether a process group was a default group that all ranks have left.
    """
    ddp_forward = DistributedDataParallel.forward

    @functools.wraps(ddp_forward)
    def attached(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        # Where nothing is to be sent, one rank may well run it alone.
        if was_left(self.process_group) and (torch.is_grad_enabled() or self.modules_buffers):
            _attach_to_new_group(self)
        return ddp_forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    DistributedDataParallel.forward = attached  # type: ignore[method-assign]


def _attach_to_new_group(ddp_model: DistributedDataParallel) -> None:
    """A collective."""
    communication_hooks = tuple(torch_private.communication_hooks(ddp_model))
    ddp_state = {
        attribute_name: attribute_value
        for attribute_name, attribute_value in vars(ddp_model).items()
        if attribute_name not in ("process_group", "reducer", "logger")
    }
    dist.get_rank()  # joins the default group, if this rank is in none
    vars(ddp_model).pop("reducer", None)  # its hooks on the parameters go with it
    vars(ddp_model).pop("logger", None)
    # It makes them anew, in the default group.
    ddp_model.__setstate__(ddp_state)  # type: ignore[no-untyped-call]
    torch_private.communication_hooks(ddp_model).clear()  # registering appends each again
    for hook, hook_state in communication_hooks:
        ddp_model.register_comm_hook(hook_state, hook)
    _send_weights(ddp_model)
    unfinished_parameters = [
        trained_parameter
        for trained_parameter in ddp_model.parameters()
        if trained_parameter.grad is not None
    ]
    for model_parameter in unfinished_parameters:  # of a step that some ranks have not come to
        model_parameter.grad = None
    states_were_equal = _even_out(ddp_model.module)
    if dist.get_rank() == 0:
        sys.stderr.write(_reattached_message(states_were_equal))


@torch.no_grad()
def _send_weights(ddp_model: DistributedDataParallel) -> None:
    """Give all ranks the weights and buffers of rank 0; a collective."""
    for entry_name, tensor in (
        *ddp_model.module.named_parameters(),
        *ddp_model.module.named_buffers(),
    ):
        if entry_name not in ddp_model.parameters_to_ignore:
            dense = tensor.detach().contiguous()  # gloo refuses others
            dist.broadcast(dense, 0, group=ddp_model.process_group)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)


def _reattached_message(states_were_equal: bool) -> str:
    state_words = (
        "their state"
        if states_were_equal
        else "rank 0's state, since ranks were at different steps"
    )
    return (
        f"nbaccel: the DDP model goes on in new process groups, with rank 0's weights; "
        f"optimizers keep {state_words}. The step that was cut short is left out.\n"
    )


def _even_out(trained_module: nn.Module) -> bool:
    """Let all ranks have rank 0's optimizer states, where they differ.

    Returns:
        Whether they were equal.
    """
    own_optimizers = [*_optimizers_of(trained_module)]
    rank_facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        rank_facts, [_optimizer_facts(optimizer) for optimizer in own_optimizers]
    )
    if all(rank_fact == rank_facts[0] for rank_fact in rank_facts):
        return True
    if len({len(rank_fact) for rank_fact in rank_facts}) > 1:
        raise RuntimeError(
            f"The ranks have {', '.join(str(len(rank_fact)) for rank_fact in rank_facts)} "
            f"optimizers for this model, so their states cannot be compared. Run the cell again "
            f"that makes the optimizer, on all ranks."
        )
    state_words: list[Any] = [[optimizer.state_dict() for optimizer in own_optimizers]]
    dist.broadcast_object_list(state_words, src=0)
    for optimizer, ddp_state in zip(own_optimizers, state_words[0], strict=True):
        optimizer.load_state_dict(ddp_state)
    return False


def _optimizers_of(patched_module: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Those that train this module, in an order that is the same on all ranks."""
    parameter_positions = {
        id(model_parameter): position
        for position, model_parameter in enumerate(patched_module.parameters())
    }
    found_values = []
    for heap_object in gc.get_objects():
        if issubclass(type(heap_object), torch.optim.Optimizer) and not _is_in_parts(
            type(heap_object)
        ):
            parameter_groups = getattr(
                heap_object, "param_groups", ()
            )  # one whose constructor has failed has none
            own_sockets = [
                parameter_positions.get(id(trained_parameter), -1)
                for process_group in parameter_groups
                for trained_parameter in process_group["params"]
            ]
            if any(place >= 0 for place in own_sockets):
                found_values.append((own_sockets, type(heap_object).__qualname__, heap_object))
    yield from (
        heap_object
        for *_, heap_object in sorted(found_values, key=lambda sort_entry: sort_entry[:2])
    )


def _is_in_parts(optimizer_class: type) -> bool:
    """Whether each rank has a part of such an optimizer's state; importing it takes long."""
    return any(
        base_class.__name__ == "ZeroRedundancyOptimizer" for base_class in optimizer_class.__mro__
    )


def _optimizer_facts(optimizer: torch.optim.Optimizer) -> Any:
    """What is equal where two optimizers would step alike."""
    return _comparable(optimizer.state_dict())


def _comparable(frame_value: Any) -> Any:
    if isinstance(frame_value, torch.Tensor):
        return str(frame_value.dtype), tuple(frame_value.shape), tensor_fingerprint(frame_value)
    if isinstance(frame_value, dict):
        return {
            state_key: _comparable(inner_value) for state_key, inner_value in frame_value.items()
        }
    if isinstance(frame_value, (list, tuple)):
        return [_comparable(inner_value) for inner_value in frame_value]
    return (
        frame_value
        if isinstance(frame_value, (bool, int, float, str, type(None)))
        else type(frame_value).__name__
    )
