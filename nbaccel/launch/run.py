"""One launch, from a plan to results.

    find modules ─► arena ─► pack (or fork) ─► start ─► supervise ─► weights home ─► results

Whatever happens, everything opened here is closed here, and the notebook's process is left as it
was found.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel import env
from nbaccel.errors import (
    LaunchInterrupted,
    LaunchTimeout,
    PlatformUnsupported,
    StartupFailed,
    WorkerFailed,
)
from nbaccel.launch import store, verdict, wire, worker
from nbaccel.launch.console import Console
from nbaccel.launch.ending import kill_all
from nbaccel.launch.fork import ForkStarter
from nbaccel.launch.member import Member, connect
from nbaccel.launch.packing import Packed, pack
from nbaccel.launch.sharing import arena, home, memory
from nbaccel.launch.sharing.find import find_modules
from nbaccel.launch.starter import Starter
from nbaccel.launch.supervisor import Supervisor
from nbaccel.launch.system import uninterrupted
from nbaccel.launch.template import TemplateStarter, dispose
from nbaccel.plan import Plan
from nbaccel.topology import Topology
from nbaccel.units import counted

_CALLER = 7
"""Frames from a warning up to the cell: this file's four, the façade's two, the cell."""

_ONE_AT_A_TIME = threading.Lock()  # the template answers one launch at a time


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launch that succeeded hands to the notebook."""

    values: list[Any]
    plan: Plan
    state_dicts: dict[str, dict[str, Any]]
    """Weights of modules whose structure changed, so that they could not come home in place."""


def launch(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    """Run `function(*args)` in the workers of a plan.

    Raises:
        ModelNotShareable, NotSendable, UnsafeFork, PortTaken: Before any process is started.
        WorkerFailed: If a worker raised or died; of the worker's exception type too.
        KeyboardInterrupt: If the notebook was interrupted; all workers have ended.
    """
    if not sys.platform.startswith("linux"):
        raise PlatformUnsupported(
            f"Several workers need Linux (memfd, pidfd): this is {sys.platform}. "
            "Use num_processes=1, which runs in the notebook itself."
        )
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        sharing = arena.share(find_modules(args))
        packed, plan = pack(plan, function, args, sharing)
        if packed.fd is not None:
            stack.callback(os.close, packed.fd)
        return _attempts(plan, packed, sharing)


def _attempts(plan: Plan, packed: Packed, sharing: arena.Sharing) -> Outcome:
    """Launch, and launch anew after a failure as often as allowed."""
    allowed = plan.config.max_restarts
    for attempt in range(allowed):
        try:
            return _attempt(plan, packed, sharing, attempt)
        except (LaunchTimeout, StartupFailed):
            raise  # the same would happen again, after the same wait
        except WorkerFailed as error:
            first = str(error).partition("\n")[0]
            sys.stderr.write(f"nbaccel: {first}. Restart {attempt + 1} of {allowed}.\n")
    return _attempt(plan, packed, sharing, allowed)


def _attempt(plan: Plan, packed: Packed, sharing: arena.Sharing, attempt: int) -> Outcome:
    with contextlib.ExitStack() as stack:
        homecoming = home.Homecoming(sharing, packed.arenas if plan.config.share_back else {})
        stack.callback(homecoming.close, dispose)
        listener = None
        if plan.config.node_rank == 0:
            listener = store.listen(plan.master_addr, plan.port)
            stack.callback(listener.close)
        watch = _start(stack, plan, packed, homecoming, listener, attempt)
        watch.run()
        return _conclude(plan, watch, homecoming)


def _conclude(plan: Plan, watch: Supervisor, homecoming: home.Homecoming) -> Outcome:
    if watch.interrupted:
        raise LaunchInterrupted(
            f"all {plan.num_processes} workers have been stopped; the model is as it was"
        )
    failed = verdict.error(watch, world_size=plan.world_size, timeout_s=plan.config.timeout)
    if failed is not None:
        raise failed
    reports = [m.returned.home for m in watch.members if m.returned and m.returned.home]
    with uninterrupted():  # half of a model is worse than either
        homecoming.apply(reports)
    values, lost = verdict.results(watch.members)
    state_dicts = {k: v for report in reports for k, v in report.state_dicts.items()}
    if lost:
        more = f", and so did {counted(len(lost) - 1, 'more rank')}" if len(lost) > 1 else ""
        warnings.warn(f"{lost[0]}{more}. The results say so in its place.", stacklevel=_CALLER)
    for report in reports:
        for path, why in report.stranded.items():
            warnings.warn(
                f"The trained weights of {path} do not fit the notebook's module ({why}), so it is "
                f"as it was. They are in the results: results.state_dicts[{path!r}].",
                stacklevel=_CALLER,
            )
    return Outcome(values=values, plan=plan, state_dicts=state_dicts)


# ------------------------------------------------------------------------- starting


def _start(
    stack: contextlib.ExitStack,
    plan: Plan,
    packed: Packed,
    homecoming: home.Homecoming,
    listener: socket.socket | None,
    attempt: int,
) -> Supervisor:
    config = plan.config
    starter = _starter(packed)
    stack.callback(starter.close)
    members: list[Member] = []
    stack.callback(_end, starter, members)
    topologies = Topology.of_node(
        num_processes=plan.num_processes,
        master_port=listener.getsockname()[1] if listener else plan.port or 0,
        master_addr=plan.master_addr,
        node_rank=config.node_rank,
        num_nodes=config.num_nodes,
    )
    common = _common_facts(plan, attempt)
    for topology in topologies:
        _hire(starter, topology.rank, members)
    for topology, member in zip(topologies, members, strict=True):
        job, fds = _job(plan, packed, homecoming, topology, common, listener)
        member.channel.send(job, fds)
    if listener is not None:
        listener.close()
    console = Console([t.rank for t in topologies], template=config.log_line_prefix_template)
    return Supervisor(starter, members, console=console, timeout_s=config.timeout)


def _starter(packed: Packed) -> Starter:
    if packed.parcel is not None:
        return TemplateStarter()
    return ForkStarter(
        worker.Inheritance(
            call=packed.call,
            arenas=packed.arenas,
            arena_fds={key: found.fd for key, found in packed.arenas.items()},
        )
    )


def _hire(starter: Starter, rank: int, members: list[Member]) -> Member:
    """Start one worker and note it at once, so that it is ended whatever comes next."""
    channel, pipes, ends = connect()
    forks_us = isinstance(starter, ForkStarter)
    with memory.closing(*ends.all()):
        if isinstance(starter, ForkStarter):
            starter.ours += [channel.fileno(), *pipes]
        pid = starter.start(ends)
    member = Member(rank=rank, channel=channel, pipes=pipes, pid=pid, tells_its_stack=forks_us)
    members.append(member)
    return member


def _end(starter: Starter, members: Sequence[Member]) -> None:
    """Kill what is left of the workers, and close all connections."""
    kill_all(starter, [m for m in members if not m.has_ended])
    for member in members:
        member.close()


@dataclass(frozen=True)
class _Common:
    """What all jobs of a launch share: looked up once."""

    environment: dict[str, str]
    working_directory: str
    import_path: tuple[str, ...]
    random_states: bytes


def _common_facts(plan: Plan, attempt: int) -> _Common:
    restarts = {
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.config.max_restarts),
    }
    return _Common(
        env.snapshot() | restarts,
        os.getcwd(),
        tuple(os.path.abspath(entry) for entry in sys.path),
        worker.random_states(),
    )


def _job(
    plan: Plan,
    packed: Packed,
    homecoming: home.Homecoming,
    topology: Topology,
    common: _Common,
    listener: socket.socket | None,
) -> tuple[wire.Job, list[int]]:
    config = plan.config
    own = topology.variables(
        mixed_precision=config.mixed_precision, device=plan.device, environ=common.environment
    )
    # Accelerate, and OpenMP libraries loaded later, go by this variable unless the user set it.
    defaults = {"OMP_NUM_THREADS": str(plan.threads_per_process)}
    staging = homecoming.staging
    fds = [found.fd for found in packed.arenas.values()]
    fds += [staging[key] for key in packed.arenas if key in staging]
    serves_store = topology.rank == 0 and listener is not None
    fds += [listener.fileno()] if serves_store and listener is not None else []
    job = wire.Job(
        serves_store=serves_store,
        topology=topology.to_json(),
        config=config.to_json(),
        device=plan.device,
        mixed_precision=config.mixed_precision,
        threads=plan.threads_per_process,
        environment=defaults | common.environment | own,
        working_directory=common.working_directory,
        import_path=common.import_path,
        arenas=tuple((key, found.nbytes) for key, found in packed.arenas.items()),
        parcel=packed.parcel,
        sources=packed.sources,
        random_states=common.random_states,
        share_back=config.share_back,
    )
    return job, fds if packed.fd is None else [*fds, packed.fd]
