"""Process groups in a live worker: joined when first needed, cut when stuck, begun anew after that.

`dist.all_reduce(x)` in a cell needs no set-up: the first use of the default group joins it, and the
notebook asks the workers that are idle to join as well.

A rank whose peers have failed waits in C++ for ever and handles no signals. Its second thread then
shuts down the sockets that belong to its groups, and the wait ends with an error; NCCL has `abort`
for that. Groups that were cut, or whose ranks have begun different numbers of collectives, are of
no more use: all ranks leave them, and the next use makes new ones, which DDP models take up in
their next forward (`reattach_models`), as other code holds references to them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.trees import map_leaves, tensor_digest
from nbaccel.config.handlers import InitProcessGroupKwargs
from nbaccel.plan.topology import Topology
from nbaccel.train import call_check, distributed
from nbaccel.transfer import sharded_tensors
from nbaccel.workers import fork_safety, rendezvous
from nbaccel.workers.messaging import GroupWanted

# Raised for a group that is looked up by name, or held in C++, where no frame has it as a value.
_LEFT_GROUP_TYPES = (RuntimeError, ValueError, AssertionError)
_LEFT_GROUP = (
    "DeepSpeed backend not set",  # DeepSpeed 0.19
    "resolve the process group",  # torch 2.13: functional collectives, so FSDP2
    "Invalid process group",  # torch 2.13: distributed_c10d
)
_SOCKET_CLOSING_S = 1.0  # gloo takes less than a millisecond to close what was shut down


class ProcessGroups:
    """The process groups of one worker."""

    def __init__(self, place: Topology, ask_for_group: Callable[[GroupWanted], None]) -> None:
        self._place = place
        self._ask_for_group = ask_for_group
        self._generation = 0
        self._made = 0
        self._sockets: set[int] = set()  # inodes of those that belong to groups
        self._before: set[int] | None = None  # only while a group is being made
        # Kept, so that their ids are not reused: errors and DDP models are compared with them.
        self._left: list[Any] = []
        self._left_defaults: list[Any] = []

    def watch(self) -> None:
        """Take part in how torch makes and finds groups. Once per worker."""
        rendezvous.join_store(self._place, self._next_name)
        reattach_models(lambda group: any(group is left for left in self._left_defaults))
        torch_private.create_in_default_group(self.join)
        torch_private.watch_new_groups(self._noting_sockets())
        c10d = dist.distributed_c10d
        torch_init_process_group = c10d.init_process_group
        torch_destroy_process_group = c10d.destroy_process_group

        # Parameters have torch's names: user code passes them by keyword.
        def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():
                self._check_same(backend)
                return
            timeout = kwargs.get("timeout") or timedelta(seconds=distributed.timeout_s(None))
            self._ask_for_group(
                GroupWanted(
                    generation=self._generation,
                    ordinal=self._made,
                    backend=backend,
                    timeout_s=timeout.total_seconds(),
                )
            )
            torch_init_process_group(backend, *args, **kwargs)

        def destroy_process_group(group: Any = None) -> None:
            torch_destroy_process_group(group)
            call_check.forget_left_group()
            if not dist.is_initialized():
                self._close_sockets()
                sharded_tensors.forget_process_groups()

        # In both: torch.distributed has bound the functions to names of its own.
        for module in (c10d, dist):
            module.init_process_group = init_process_group  # type: ignore[attr-defined]
            module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]

    def _next_name(self) -> str:
        """Where the ranks of the next default group meet in the store."""
        self._made += 1
        return f"generation_{self._generation}/group_{self._made}"

    def join_others(self, wanted: GroupWanted) -> None:
        """Join the group that another rank is waiting in; not if this rank has been in it."""
        if (self._generation, self._made) == (wanted.generation, wanted.ordinal):
            self.join(wanted.backend, wanted.timeout_s)

    def join(self, backend: str | None = None, timeout_s: float | None = None) -> None:
        """Join the default group, if this worker is in none yet."""
        if dist.is_initialized():
            return
        timeout = timedelta(seconds=timeout_s or distributed.timeout_s(None))
        if self._place.world_size > 1:
            settings = InitProcessGroupKwargs(backend=backend, timeout=timeout)
            distributed.init_process(settings=settings)
        # `init_process` makes no group for one process, but a collective in a cell needs one.
        else:
            dist.init_process_group(backend or "gloo", timeout=timeout)

    def sequence(self) -> tuple[tuple[str, int], ...]:
        """How many collectives each group has begun: equal on all ranks that are in step."""
        # Calls that processes compare before a collective are none of torch's.
        counts = [("calls of nbaccel", call_check.calls_begun())]
        for group, name in torch_private.process_group_names().items():
            # Raised by a backend that does not count its collectives.
            with contextlib.suppress(RuntimeError):
                counts.append((name, torch_private.collectives_begun(group)))
        return tuple(sorted(counts))

    def cut(self) -> None:
        """Let a collective that will never complete fail. For the second thread."""
        for group in torch_private.process_groups():
            for backend in torch_private.device_backends(group):
                # gloo's own `abort` does not reach a wait that has begun (torch 2.13).
                if backend.name() != "gloo" and hasattr(backend, "abort"):
                    backend.abort()
        # A copy: this is the second thread, and the main one may add sockets meanwhile.
        sockets = set(self._sockets)
        # A rank may also hang while a group is being made; its sockets are not recorded yet.
        if self._before is not None:
            sockets |= set(_own_sockets()) - self._before
        for inode, fd in _own_sockets().items():
            if inode in sockets:
                _shut_connection(fd, spared_port=self._place.master_port)

    def close(self, generation: int) -> None:
        """Drop every group; the next one is made in this generation."""
        self._generation = generation
        self._made = 0
        if dist.is_initialized():
            self._left += torch_private.process_groups()
            self._left_defaults.append(dist.group.WORLD)
            # Broken groups may raise when they are destroyed; they are dropped all the same.
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()
            sharded_tensors.forget_process_groups()
        self._close_sockets()

    def are_behind(self, error: BaseException) -> bool:
        """Whether an error comes from the use of a group that was left."""
        if not self._left or not isinstance(error, _LEFT_GROUP_TYPES):
            return False
        for frame, _ in traceback.walk_tb(error.__traceback__):
            values = tuple(frame.f_locals.values())
            if any(value is left for value in values for left in self._left):
                return True
        return any(text in str(error) for text in _LEFT_GROUP)

    def _close_sockets(self) -> None:
        """Close what gloo leaves open: `keep_process_groups` keeps its objects, not their ports.

        Connections are shut down, and gloo's own threads close them. One that finds the null device
        where its peer has just hung up would end this process; see `docs/pages/upstream.md`. The
        null device takes the numbers of the rest, so that these threads touch nothing else.
        """
        shut = {
            inode
            for inode, fd in _own_sockets().items()
            if inode in self._sockets and _shut_connection(fd, spared_port=self._place.master_port)
        }
        deadline = time.monotonic() + _SOCKET_CLOSING_S
        while shut & _own_sockets().keys() and time.monotonic() < deadline:
            # There is nothing to wait on: gloo's threads close the descriptors without notice.
            time.sleep(0.001)
        null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for inode, fd in _own_sockets().items():
            if inode in self._sockets:
                # Listening sockets are left; the docstring says why their numbers stay taken.
                os.dup2(null_fd, fd, inheritable=False)
        os.close(null_fd)
        self._sockets.clear()

    def _check_same(self, backend: str | None) -> None:
        joined = str(dist.get_backend_config())
        if backend is not None and backend not in joined:
            raise ConfigError(
                f"init_process_group({backend!r}): this worker is in a process group over {joined} "
                "already, and there can be no second default group. Leave the call out, call "
                "dist.destroy_process_group() on all ranks first, or use dist.new_group."
            )

    @contextlib.contextmanager
    def _noting_sockets(self) -> Iterator[None]:
        """What is connected while a group is made belongs to it."""
        before = set(_own_sockets())
        outer = self._before
        self._before = before if self._before is None else self._before
        try:
            yield
        finally:
            self._before = outer
            self._sockets |= set(_own_sockets()) - before


def _own_sockets() -> dict[int, int]:
    """Inode → descriptor of every socket of this process."""
    return {
        int(target[8:-1]): fd
        for fd, target in fork_safety.open_descriptors()
        if target.startswith("socket:[")
    }


def _shut_connection(fd: int, *, spared_port: int) -> bool:
    """Shut a TCP connection down, unless this process serves the store over it."""
    # It may have been closed meanwhile. A duplicate: closing the socket object closes its own.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as duplicate:
        is_internet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
        is_listening = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not is_internet or is_listening or duplicate.getsockname()[1] == spared_port:
            return False
        # Either side may have shut it already.
        with contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)
        return True
    return False


def reattach_models(was_left: Callable[[Any], bool]) -> None:
    """Let DDP models find the new group in their forward. Once per worker."""
    ddp_forward = DistributedDataParallel.forward

    @functools.wraps(ddp_forward)
    def attached(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        # One that sends nothing (evaluation without buffers) may run on one rank alone.
        if was_left(self.process_group) and (torch.is_grad_enabled() or self.modules_buffers):
            _attach_to_new_group(self)
        return ddp_forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]

    DistributedDataParallel.forward = attached  # type: ignore[method-assign]


def _attach_to_new_group(model: DistributedDataParallel) -> None:
    """Give a DDP model a new reducer in the default group; a collective."""
    hooks = tuple(torch_private.communication_hooks(model))
    left_out = ("process_group", "reducer", "logger")
    state = {name: value for name, value in vars(model).items() if name not in left_out}
    dist.get_rank()  # joins the default group, if this rank is in none
    # Dropped before the new one is made, because its hooks on the parameters go with it.
    vars(model).pop("reducer", None)
    vars(model).pop("logger", None)
    # Unpickling is DDP's own way to make both anew, in the default group.
    model.__setstate__(state)  # type: ignore[no-untyped-call]
    # Registering a hook appends it again.
    torch_private.communication_hooks(model).clear()
    for hook, hook_state in hooks:
        model.register_comm_hook(hook_state, hook)
    _send_weights(model)
    for parameter in model.parameters():
        # Gradients of a step that other ranks have not reached must not be added to the next ones.
        parameter.grad = None
    were_equal = _even_out(model.module)
    if dist.get_rank() == 0:
        kept = "their state" if were_equal else "rank 0's state, as ranks were at different steps"
        sys.stderr.write(
            "nbaccel: the DDP model goes on in new process groups, with rank 0's weights; "
            f"optimizers keep {kept}. The step that was cut short is left out.\n"
        )


@torch.no_grad()
def _send_weights(model: DistributedDataParallel) -> None:
    """Give all ranks the weights and buffers of rank 0; a collective."""
    for name, tensor in (*model.module.named_parameters(), *model.module.named_buffers()):
        if name not in model.parameters_to_ignore:
            # gloo refuses tensors that are not contiguous.
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, 0, group=model.process_group)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)


def _even_out(module: nn.Module) -> bool:
    """Let all ranks have rank 0's optimizer states; returns whether they had."""
    optimizers = _optimizers_of(module)
    facts: list[Any] = [None] * dist.get_world_size()
    # Facts instead of states, which are as large as the model or larger.
    dist.all_gather_object(facts, [map_leaves(_comparable, o.state_dict()) for o in optimizers])
    if all(fact == facts[0] for fact in facts):
        return True
    if len({len(fact) for fact in facts}) > 1:
        raise RuntimeError(
            f"The ranks have {', '.join(str(len(fact)) for fact in facts)} optimizers for this "
            "model: their states cannot be compared. Make the optimizer again on all ranks."
        )
    states: list[Any] = [[optimizer.state_dict() for optimizer in optimizers]]
    dist.broadcast_object_list(states, src=0)
    for optimizer, state in zip(optimizers, states[0], strict=True):
        optimizer.load_state_dict(state)
    return False


def _optimizers_of(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Those that train this module, in an order that is the same on all ranks."""
    positions = {id(parameter): position for position, parameter in enumerate(module.parameters())}
    found = []
    # A DDP model does not know its optimizers, and torch keeps no list of them.
    for candidate in gc.get_objects():
        kind = type(candidate)
        # isinstance would ask objects for __class__, which proxies answer with code of their own.
        # By name, as importing it is slow: of that one each rank has a part of the state.
        is_in_parts = any(base.__name__ == "ZeroRedundancyOptimizer" for base in kind.__mro__)
        if not issubclass(kind, torch.optim.Optimizer) or is_in_parts:
            continue
        # An optimizer whose constructor has failed has no groups.
        groups = getattr(candidate, "param_groups", ())
        trained = [positions.get(id(one), -1) for group in groups for one in group["params"]]
        if any(position >= 0 for position in trained):
            found.append((trained, kind.__qualname__, candidate))
    return [optimizer for *_, optimizer in sorted(found, key=lambda entry: entry[:2])]


def _comparable(value: Any) -> Any:
    """What is equal where two optimizers would step alike, of a value in their states."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), tensor_digest(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
