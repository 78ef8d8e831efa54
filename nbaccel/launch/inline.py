"""One worker, in the notebook's own process: results look the same, and a debugger works.

The function trains the notebook's model itself, so there is nothing to bring home; and if it
raises, the exception is the real one, with frames for `%debug` to walk.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from nbaccel import env
from nbaccel.config.variables import run_variables
from nbaccel.plan import Plan
from nbaccel.topology import Topology


def run(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Call the function here with the environment of a worker, and tidy up after it."""
    __tracebackhide__ = True  # so that what the function raises shows the user's frames
    with _reserved_port(plan.config.master_addr, plan.port) as port, _tidy():
        topology = Topology(master_addr=plan.config.master_addr, master_port=port)
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
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port or 0))
        yield int(sock.getsockname()[1])


def _own_libraries(args: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """What shards models is taken down after the call, unless it was up before it."""
    if _has_group():
        return contextlib.nullcontext()
    from nbaccel.launch.sharing.find import find_modules
    from nbaccel.launch.sharing.shards import given_back

    return given_back(module for _, module in find_modules(args))


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Take down what the function set up and left: a process group, Accelerate's shared state."""
    group_before, state_before = _has_group(), _accelerate_state()
    try:
        yield
    finally:
        if _has_group() and not group_before:
            sys.modules["torch.distributed"].destroy_process_group()
        state = _accelerate_state()
        if state is not None and not state_before:
            sys.modules["accelerate.state"].AcceleratorState._reset_state(True)
            sys.modules["accelerate.state"].GradientState._reset_state()


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _accelerate_state() -> dict[str, Any] | None:
    """Accelerate's process-wide state, if it has been set up."""
    module = sys.modules.get("accelerate.state")
    return module.PartialState._shared_state or None if module is not None else None
