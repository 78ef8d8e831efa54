"""One worker, in the notebook's own process: results look the same, and a debugger works.

The function trains the notebook's model itself, so there is nothing to bring home; and if it
raises, the exception is the real one, with frames for `%debug` to walk.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nbaccel import _accelerate, _catalog, env, ports
from nbaccel.abc.shards import Remembered, ShardReader, remember
from nbaccel.capabilities import STRATEGIES, StrategyRow
from nbaccel.config.variables import run_variables
from nbaccel.plan import Plan
from nbaccel.topology import Topology

if TYPE_CHECKING:
    from torch import nn


def run(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Call the function here with the environment of a worker, and tidy up after it."""
    __tracebackhide__ = True  # so that what the function raises shows the user's frames
    address = ports.loopback(plan.config.master_addr)
    with _reserved_port(address, plan.port) as port, _tidy():
        topology = Topology(master_addr=address, master_port=port)
        variables: dict[str, str | None] = dict(
            topology.variables(mixed_precision=plan.config.mixed_precision, device=plan.device)
            | run_variables(plan.config)
        )
        # Nobody serves a store here: rank 0 has to.
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": None, "FORK_LAUNCHED": None}
        with env.applied(variables), _own_libraries(args):
            return [function(*args)]


@contextlib.contextmanager
def _reserved_port(host: str, port: int | None) -> Iterator[int]:
    """A port that is bound but not listened on: ours, and the store can still listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port or 0))
        yield int(sock.getsockname()[1])


@contextlib.contextmanager
def _own_libraries(args: tuple[Any, ...]) -> Iterator[None]:
    """What shards models is taken down after the call, modules whole, unless it was up before it.

    Nothing is imported for a function that has no use for it: torch alone is a second.
    """
    if _has_group():
        yield
        return
    modules = _modules(args)
    before = [
        (row, _catalog.load(row.observe)(), [_remember(row, module) for module in modules])
        for row in STRATEGIES
        if row.shards
    ]
    try:
        yield
    finally:
        for row, process, remembered in before:
            if row.library in sys.modules:
                reader: ShardReader = _catalog.load(row.shards)
                for module, was in zip(modules, remembered, strict=True):
                    reader.take_back(module, was)
                reader.tear_down(process)


def _modules(args: tuple[Any, ...]) -> list[nn.Module]:
    if "torch" not in sys.modules:
        return []
    from nbaccel.launch.sharing.find import find_modules

    return [module for _, module in find_modules(args)]


def _remember(row: StrategyRow, module: nn.Module) -> Remembered:
    """What a module is; a library that has been imported may have it, and knows what it was."""
    if row.library not in sys.modules:
        return remember(module)
    reader: ShardReader = _catalog.load(row.shards)
    return reader.remember(module)


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Take down what the function set up and left: a process group, Accelerate's shared state."""
    group_before, state_before = _has_group(), _accelerate.is_set_up()
    try:
        yield
    finally:
        if _has_group() and not group_before:
            sys.modules["torch.distributed"].destroy_process_group()
        if not state_before:
            _accelerate.forget()


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
