"""Process groups in a live worker: joined when first needed, cut when stuck, begun anew after that.

DDP models go on in the new groups after the old ones were left.

[Note: joined on request] `dist.all_reduce(x)` in a cell needs no set-up: the first use of the
default group joins it, and the notebook asks the workers that are idle to join as well. (Those that
run the same cell come by themselves.) `init_process_group()` in a cell that is run twice finds the
group there and leaves it.

[Note: cutting] A rank whose peers have failed waits in C++ for ever and handles no signals. Its
second thread then shuts down the sockets that belong to its groups, and the wait ends with an
error. NCCL has `abort` for that. Groups that were cut, or whose ranks have begun different numbers
of collectives, are of no more use: all ranks leave them, and the next use makes new ones under a
new prefix in the store. DDP models take these up in their next forward (`reattach_models`).

    forward of a DDP model whose group was left
      ─► the default group, joined by all ranks     the wrapper gets a new reducer in it
      ─► weights and buffers of rank 0              as DDP's constructor sends them
      ─► are the optimizers' states equal?          if not, rank 0's: a rank may be a step ahead

What the constructor would do, without a new wrapper: the optimizer, its state and other code hold
references to the old one.
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

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.calls.pool_messages import GroupWanted
from nbaccel.config.handlers import InitProcessGroupKwargs
from nbaccel.plan.topology import Topology
from nbaccel.train import call_check, distributed
from nbaccel.train.in_sync import tensor_fingerprint
from nbaccel.transfer import sharded_tensors
from nbaccel.workers import fork_safety, rendezvous

__all__ = ["ProcessGroups", "reattach_models"]


_SOCKET_CLOSING_S = 1.0  # gloo takes less than a millisecond to close what was shut down
_RequestGroup = Callable[[GroupWanted], None]


class ProcessGroups:
    """The process groups of one worker."""

    def __init__(self, place: Topology, group_wanted: _RequestGroup) -> None:
        self._place = place
        self._wanted = group_wanted
        self._generation = 0
        self._made = 0
        self._sockets: set[int] = set()  # inodes of those that belong to groups
        self._before: set[int] | None = None  # only while a group is being made
        self._left: list[Any] = []
        self._left_defaults: list[Any] = []
        self.left_for = ""
        """Why the groups before these were left, if so."""

    def watch(self) -> None:
        """Take part in how torch makes and finds groups. Once per worker."""
        rendezvous.join_store(self._place, self._next_name)
        reattach_models(
            lambda process_group: any(
                process_group is left_group for left_group in self._left_defaults
            )
        )
        torch_private.create_in_default_group(self.join)
        torch_private.watch_new_groups(self._noting_sockets)
        c10d = dist.distributed_c10d
        torch_init_process_group = c10d.init_process_group
        torch_destroy_process_group = c10d.destroy_process_group

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
            call_check.forget_left_groups()
            if not dist.is_initialized():
                self._close_sockets()
                sharded_tensors.forget_process_groups()

        # In both: torch.distributed has bound the functions to names of its own.
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
            settings = InitProcessGroupKwargs(backend=group_backend, timeout=group_timeout)
            if self._place.world_size > 1:
                distributed.init_process(settings=settings)
            # `init_process` makes no group for one process, but a collective in a cell needs one.
            else:
                dist.init_process_group(group_backend or "gloo", timeout=group_timeout)

    def sequence(self) -> tuple[tuple[str, int], ...]:
        """How many collectives each group has begun: equal on all ranks that are in step."""
        # Calls that processes compare before a collective are none of torch's.
        group_counts = [("calls of nbaccel", call_check.calls_begun())]
        for process_group, name in torch_private.process_group_names().items():
            # Raised by a backend that does not count its collectives.
            with contextlib.suppress(RuntimeError):
                group_counts.append((name, torch_private.collectives_begun(process_group)))
        return tuple(sorted(group_counts))

    def cut(self) -> None:
        """Let a collective that will never complete fail. For the second thread."""
        for process_group in torch_private.process_groups():
            for backend in torch_private.device_backends(process_group):
                # gloo's own `abort` does not reach a wait that has begun (torch 2.13).
                if backend.name() != "gloo" and hasattr(backend, "abort"):
                    backend.abort()
        # A copy: this is the second thread, and the main one may add sockets meanwhile.
        sockets = set(self._sockets)
        # A rank may also hang while a group is being made; its sockets are not recorded yet.
        if self._before is not None:
            sockets |= set(_own_sockets()) - self._before
        for socket_inode, fd in _own_sockets().items():
            if socket_inode in sockets:
                _shut_connection(fd, spared_port=self._place.master_port)

    def close(self, generation: int, leave_reason: str) -> None:
        """Drop every group; the next one is made in this generation."""
        self._generation = generation
        self._made = 0
        if dist.is_initialized():
            self.left_for = leave_reason
            # Kept, so that their ids are not reused: errors and DDP models are compared with them.
            self._left += torch_private.process_groups()
            self._left_defaults.append(dist.group.WORLD)
            # Broken groups may raise when they are destroyed; they are dropped all the same.
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()
            sharded_tensors.forget_process_groups()
        self._close_sockets()

    def are_behind(self, traceback_entry: TracebackType | None) -> bool:
        """Whether an error comes from the use of a group that was left."""
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
            # There is nothing to wait on: gloo's threads close the descriptors without notice.
            time.sleep(0.001)
        null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for socket_inode, socket_fd in _own_sockets().items():
            if socket_inode in self._sockets:
                # Listening sockets are left; the docstring says why their numbers stay taken.
                os.dup2(null_fd, socket_fd, inheritable=False)
        os.close(null_fd)
        self._sockets.clear()

    def _check_same(self, group_backend: str | None) -> None:
        joined_backends = str(dist.get_backend_config())
        if group_backend is not None and group_backend not in joined_backends:
            raise ConfigError(
                f"init_process_group({group_backend!r}): this worker is in a process group over "
                f"{joined_backends} already, and there can be no second default group. Leave "
                "the call out, call dist.destroy_process_group() on all ranks first, or use "
                "dist.new_group for another backend."
            )

    @contextlib.contextmanager
    def _noting_sockets(self) -> Iterator[None]:
        """What is connected while a group is made belongs to it."""
        inodes_before = set(_own_sockets())
        outer_inodes = self._before
        self._before = inodes_before if self._before is None else self._before
        try:
            yield
        finally:
            self._before = outer_inodes
            self._sockets |= set(_own_sockets()) - inodes_before


def _own_sockets() -> dict[int, int]:
    """Inode → descriptor of every socket of this process."""
    return {
        int(target[8:-1]): file_descriptor
        for file_descriptor, target in fork_safety.open_descriptors()
        if target.startswith("socket:[")
    }


def _shut_connection(fd: int, *, spared_port: int) -> bool:
    """Shut a TCP connection down, unless this process serves the store over it."""
    # The descriptor may have been closed meanwhile. A duplicate, because closing the socket object
    # would close gloo's descriptor.
    with contextlib.suppress(OSError):
        duplicate_socket = socket.socket(fileno=os.dup(fd))
        with duplicate_socket:
            is_internet = duplicate_socket.family in (socket.AF_INET, socket.AF_INET6)
            is_listening = duplicate_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if not is_internet or is_listening or duplicate_socket.getsockname()[1] == spared_port:
                return False
            # Either side may have shut it already.
            with contextlib.suppress(OSError):
                duplicate_socket.shutdown(socket.SHUT_RDWR)
            return True
    return False


def reattach_models(was_left: Callable[[Any], bool]) -> None:
    """Let DDP models find the new group in their forward. Once per worker."""
    ddp_forward = DistributedDataParallel.forward

    @functools.wraps(ddp_forward)
    def attached(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        # A forward that sends nothing (evaluation without buffers) may run on one rank alone, where
        # reattaching would wait for the others.
        if was_left(self.process_group) and (torch.is_grad_enabled() or self.modules_buffers):
            _attach_to_new_group(self)
        return ddp_forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    DistributedDataParallel.forward = attached  # type: ignore[method-assign]


def _attach_to_new_group(ddp_model: DistributedDataParallel) -> None:
    """Give a DDP model a new reducer in the default group; a collective."""
    communication_hooks = tuple(torch_private.communication_hooks(ddp_model))
    ddp_state = {
        attribute_name: attribute_value
        for attribute_name, attribute_value in vars(ddp_model).items()
        if attribute_name not in ("process_group", "reducer", "logger")
    }
    dist.get_rank()  # joins the default group, if this rank is in none
    # Dropped before the new one is made, because its hooks on the parameters go with it.
    vars(ddp_model).pop("reducer", None)
    vars(ddp_model).pop("logger", None)
    # Unpickling is DDP's own way to make both anew, in the default group.
    ddp_model.__setstate__(ddp_state)  # type: ignore[no-untyped-call]
    # Registering a hook appends it again.
    torch_private.communication_hooks(ddp_model).clear()
    for hook, hook_state in communication_hooks:
        ddp_model.register_comm_hook(hook_state, hook)
    _send_weights(ddp_model)
    unfinished_parameters = [
        trained_parameter
        for trained_parameter in ddp_model.parameters()
        if trained_parameter.grad is not None
    ]
    # Gradients of a step that other ranks have not reached must not be added to the next ones.
    for model_parameter in unfinished_parameters:
        model_parameter.grad = None
    states_were_equal = _even_out(ddp_model.module)
    if dist.get_rank() == 0:
        sys.stderr.write(_reattached_message(states_were_equal))


@torch.no_grad()
def _send_weights(ddp_model: DistributedDataParallel) -> None:
    """Give all ranks the weights and buffers of rank 0; a collective."""
    for name, tensor in (
        *ddp_model.module.named_parameters(),
        *ddp_model.module.named_buffers(),
    ):
        if name not in ddp_model.parameters_to_ignore:
            # gloo refuses tensors that are not contiguous.
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, 0, group=ddp_model.process_group)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)


def _reattached_message(states_were_equal: bool) -> str:
    words = (
        "their state"
        if states_were_equal
        else "rank 0's state, since ranks were at different steps"
    )
    return (
        "nbaccel: the DDP model goes on in new process groups, with rank 0's weights; "
        f"optimizers keep {words}. The step that was cut short is left out.\n"
    )


def _even_out(trained_module: nn.Module) -> bool:
    """Let all ranks have rank 0's optimizer states, where they differ."""
    optimizers = [*_optimizers_of(trained_module)]
    rank_facts: list[Any] = [None] * dist.get_world_size()
    # Facts instead of states, which are as large as the model or larger.
    dist.all_gather_object(rank_facts, [_optimizer_facts(optimizer) for optimizer in optimizers])
    if all(rank_fact == rank_facts[0] for rank_fact in rank_facts):
        return True
    if len({len(rank_fact) for rank_fact in rank_facts}) > 1:
        raise RuntimeError(
            f"The ranks have {', '.join(str(len(rank_fact)) for rank_fact in rank_facts)} "
            f"optimizers for this model, so their states cannot be compared. Run the cell again "
            "that makes the optimizer, on all ranks."
        )
    state_dicts: list[Any] = [[optimizer.state_dict() for optimizer in optimizers]]
    dist.broadcast_object_list(state_dicts, src=0)
    for optimizer, optimizer_state in zip(optimizers, state_dicts[0], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return False


def _optimizers_of(trained_module: nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Those that train this module, in an order that is the same on all ranks."""
    parameter_positions = {
        id(model_parameter): position
        for position, model_parameter in enumerate(trained_module.parameters())
    }
    optimizers = []
    # A DDP model does not know its optimizers, and torch keeps no list of them.
    for heap_object in gc.get_objects():
        # isinstance would ask objects for __class__, which proxies answer with code of their own.
        if issubclass(type(heap_object), torch.optim.Optimizer) and not _is_in_parts(
            type(heap_object)
        ):
            # An optimizer whose constructor has failed has no groups.
            parameter_groups = getattr(heap_object, "param_groups", ())
            trained_positions = [
                parameter_positions.get(id(trained_parameter), -1)
                for parameter_group in parameter_groups
                for trained_parameter in parameter_group["params"]
            ]
            if any(trained_position >= 0 for trained_position in trained_positions):
                optimizers.append((trained_positions, type(heap_object).__qualname__, heap_object))
    yield from (
        heap_object for *_, heap_object in sorted(optimizers, key=lambda sort_entry: sort_entry[:2])
    )


def _is_in_parts(optimizer_class: type) -> bool:
    """Whether each rank has a part of such an optimizer's state; by name: importing it is slow."""
    return any(
        base_class.__name__ == "ZeroRedundancyOptimizer" for base_class in optimizer_class.__mro__
    )


def _optimizer_facts(optimizer: torch.optim.Optimizer) -> Any:
    """What is equal where two optimizers would step alike."""
    return _comparable(optimizer.state_dict())


def _comparable(state_value: Any) -> Any:
    if isinstance(state_value, torch.Tensor):
        return str(state_value.dtype), tuple(state_value.shape), tensor_fingerprint(state_value)
    if isinstance(state_value, dict):
        return {key: _comparable(inner_value) for key, inner_value in state_value.items()}
    if isinstance(state_value, (list, tuple)):
        return [_comparable(inner_value) for inner_value in state_value]
    return (
        state_value
        if isinstance(state_value, (bool, int, float, str, type(None)))
        else type(state_value).__name__
    )
