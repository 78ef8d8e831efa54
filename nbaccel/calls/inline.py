"""One worker, in the notebook's own process: results look the same, and a debugger works.

The function trains the notebook's model itself, so nothing has to be copied back; and if it raises,
the exception is the original one, with frames for `%debug`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nbaccel.base import accelerate_library, env, ports
from nbaccel.calls.inline_board import observing_here
from nbaccel.config.capabilities import STRATEGIES, StrategyRow
from nbaccel.config.variables import run_variables
from nbaccel.output.panel.facts import RunBoard
from nbaccel.plan import Plan, registry
from nbaccel.plan.contracts.shards import Remembered, ShardReader, remember
from nbaccel.plan.topology import Topology

if TYPE_CHECKING:
    from torch import nn


def run_observed(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[list[Any], RunBoard]:
    """Call the function here with the environment of a worker, and tidy up after it."""
    __tracebackhide__ = True  # so that what the function raises shows the user's frames
    with observing_here(plan) as board:
        values = _call_here(plan, function, args)
    return values, board


def _call_here(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    __tracebackhide__ = True
    address = ports.loopback(plan.config.master_addr)
    with _reserved_port(address, plan.port) as store_port, _tidy_process():
        topology = Topology(master_addr=address, master_port=store_port)
        variables: dict[str, str | None] = dict(
            topology.variables(mixed_precision=plan.config.mixed_precision, device=plan.device)
            | run_variables(plan.config)
        )
        # Without this variable rank 0 serves the rendezvous store, which no launcher does here.
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": None, "FORK_LAUNCHED": None}
        with env.applied(variables), _own_libraries(args), _own_layers(args):
            return [function(*args)]


@contextlib.contextmanager
def _own_layers(args: tuple[Any, ...]) -> Iterator[None]:
    """Give modules their own layers back that the call has replaced to compute in 8 bits."""
    modules = _modules_in(args)
    classes_before = [_layer_classes(module) for module in modules]
    try:
        yield
    finally:
        for module, classes in zip(modules, classes_before, strict=True):
            # A module that the notebook itself has prepared stays as it is.
            if _layer_classes(module) != classes:
                for restore_layers in registry.layer_restorers():
                    restore_layers(module)


def _layer_classes(module: nn.Module) -> list[type]:
    return [type(submodule) for submodule in module.modules()]


@contextlib.contextmanager
def _reserved_port(host_name: str, store_port: int | None) -> Iterator[int]:
    """A port that is bound but not listened on: reserved, and the store can still listen there."""
    address_family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
    with socket.socket(address_family, socket.SOCK_STREAM) as probe:
        # Lets the store bind the same port while this socket holds it without listening.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host_name, store_port or 0))
        yield int(probe.getsockname()[1])


@contextlib.contextmanager
def _own_libraries(args: tuple[Any, ...]) -> Iterator[None]:
    """Tear down libraries that shard models after the call, unless they were in use before it.

    Nothing is imported for a function that does not use it: torch alone takes a second.
    """
    # The process group is the notebook's own: what was set up in it belongs to the notebook too.
    if _has_group():
        yield
        return
    modules = _modules_in(args)
    state_before = [
        (
            row,
            registry.load_object(row.observe)(),
            [_remember_state(row, module) for module in modules],
        )
        for row in STRATEGIES
        if row.shards
    ]
    try:
        yield
    finally:
        for row, process, remembered_states in state_before:
            if row.library in sys.modules:
                reader: ShardReader = registry.load_object(row.shards)
                for module, remembered in zip(modules, remembered_states, strict=True):
                    reader.take_back(module, remembered)
                reader.tear_down(process)


def _modules_in(args: tuple[Any, ...]) -> list[nn.Module]:
    if "torch" not in sys.modules:
        return []
    from nbaccel.transfer.object_walk import find_modules

    return [module for _, module in find_modules(args)]


def _remember_state(row: StrategyRow, module: nn.Module) -> Remembered:
    """A module's state before the call; an engine that wraps it knows the original state."""
    if row.library not in sys.modules:
        return remember(module)
    reader: ShardReader = registry.load_object(row.shards)
    return reader.remember(module)


@contextlib.contextmanager
def _tidy_process() -> Iterator[None]:
    """Remove what the function set up and left: a process group, Accelerate's shared state."""
    group_before = _has_group()
    state_before = accelerate_library.is_set_up()
    try:
        yield
    finally:
        if _has_group() and not group_before:
            sys.modules["torch.distributed"].destroy_process_group()
        if not state_before:
            accelerate_library.forget()


def _has_group() -> bool:
    torch_distributed = sys.modules.get("torch.distributed")
    return bool(
        torch_distributed
        and torch_distributed.is_available()
        and torch_distributed.is_initialized()
    )
