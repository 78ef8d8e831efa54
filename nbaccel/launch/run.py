"""One launch, from a plan to results.

    find modules ─► arena ─► pack (or fork) ─► start ─► supervise ─► weights home ─► results

Whatever happens, everything opened here is closed here, and the notebook's process is left as it
was found.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel import env
from nbaccel.errors import LaunchInterrupted, NotSendable, PlatformUnsupported, UnsafeFork
from nbaccel.launch import preflight, store, verdict, wire, worker
from nbaccel.launch.console import Console
from nbaccel.launch.ending import kill_all
from nbaccel.launch.fork import ForkStarter
from nbaccel.launch.member import Member, connect
from nbaccel.launch.sharing import arena, blame, home, memory, parcel
from nbaccel.launch.sharing.find import find_modules
from nbaccel.launch.starter import Starter
from nbaccel.launch.supervisor import Supervisor
from nbaccel.launch.template import TemplateStarter
from nbaccel.plan import Plan
from nbaccel.topology import Topology
from nbaccel.units import counted

_COPY_LIMIT_BYTES = 256 * 2**20
"""A pickle longer than this costs seconds per launch; a fork would cost nothing."""

_CALLER = 5
"""Frames from a warning up to the cell: `_conclude`, `launch`, the façade's two, the cell."""

_ONE_AT_A_TIME = threading.Lock()  # the template answers one launch at a time


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launch that succeeded hands to the notebook."""

    values: list[Any]
    plan: Plan
    state_dicts: dict[str, dict[str, Any]]
    """Weights of modules whose structure changed, so that they could not come home in place."""


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """A call made ready to travel, or to be inherited."""

    call: worker.Call
    arenas: dict[str, arena.Arena]
    parcel: parcel.Parcel | None
    fd: int | None
    sources: dict[str, list[str]]


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
        packed, plan = _pack(plan, function, args, sharing)
        if packed.fd is not None:
            stack.callback(os.close, packed.fd)
        homecoming = home.Homecoming(sharing, packed.arenas if plan.config.share_back else {})
        stack.callback(homecoming.close)
        listener = store.listen(plan.config.master_addr, plan.port)
        stack.callback(listener.close)
        watch = _start(stack, plan, packed, homecoming, listener)
        watch.run()
        return _conclude(plan, watch, homecoming)


def _conclude(plan: Plan, watch: Supervisor, homecoming: home.Homecoming) -> Outcome:
    if watch.interrupted:
        raise LaunchInterrupted("all workers have been stopped; the model is as it was")
    failed = verdict.error(watch, world_size=plan.world_size, timeout_s=plan.config.timeout)
    if failed is not None:
        raise failed
    reports = [m.returned.home for m in watch.members if m.returned and m.returned.home]
    homecoming.apply(reports)
    values, lost = verdict.results(watch.members)
    state_dicts = {k: v for report in reports for k, v in report.state_dicts.items()}
    if lost:
        more = f" (as from {counted(len(lost) - 1, 'more rank')})" if len(lost) > 1 else ""
        warnings.warn(f"{lost[0]}{more}. The results say so in its place.", stacklevel=_CALLER)
    for report in reports:
        for path, why in report.stranded.items():
            warnings.warn(
                f"The trained weights of {path} do not fit the notebook's module ({why}), so it is "
                f"as it was. They are in the results: results.state_dicts[{path!r}].",
                stacklevel=_CALLER,
            )
    return Outcome(values=values, plan=plan, state_dicts=state_dicts)


# ------------------------------------------------------------------------- packing


def _pack(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...], sharing: arena.Sharing
) -> tuple[_Packed, Plan]:
    """Make the call ready for the plan's start method, or for `fork` where `auto` must take it."""
    if plan.start_method == "fork":
        _refuse_unsafe_fork()
        return _inherit(function, args, sharing), plan
    asked = plan.config.start_method == "template"
    try:
        return _pickle(function, args, sharing, None if asked else _COPY_LIMIT_BYTES), plan
    except parcel.TooCostly:
        why = f"a copy of its data for each worker would take over {_COPY_LIMIT_BYTES >> 20} MiB"
        found = preflight.hazards()
        if found:
            return _pickle(function, args, sharing, None), plan
    except Exception as error:  # pickling runs user code: anything may come out of it
        culprit = blame.find(function, args)
        why = f"{culprit} cannot be pickled ({type(error).__name__}: {error})"
        found = preflight.hazards()
        if asked or found:
            raise NotSendable(_cannot_send(culprit, error, found), path=culprit) from error
    changed = plan.with_start_method("fork", f"{why}, and nothing speaks against a fork")
    sys.stderr.write(f"nbaccel: workers are forked from the notebook, because {why}.\n")
    return _inherit(function, args, sharing), changed


def _pickle(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sharing: arena.Sharing,
    limit_bytes: int | None,
) -> _Packed:
    sender = parcel.Sender.create(sharing.stand_ins)
    for found in sharing.arenas():
        sender.key(found)
    call = _call(function, args, sharing, sender.keys)
    packed, fd = parcel.pack(call, sender, limit_bytes=limit_bytes)
    return _Packed(
        call=call, arenas=dict(sender.arenas), parcel=packed, fd=fd, sources=sender.sources
    )


def _inherit(
    function: Callable[..., Any], args: tuple[Any, ...], sharing: arena.Sharing
) -> _Packed:
    arenas = {f"arena{i}": found for i, found in enumerate(sharing.arenas())}
    keys = {id(found): key for key, found in arenas.items()}
    call = _call(function, args, sharing, keys)
    return _Packed(call=call, arenas=arenas, parcel=None, fd=None, sources={})


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sharing: arena.Sharing,
    keys: dict[int, str],
) -> worker.Call:
    modules = zip(home.manifests(sharing, keys), (m.module for m in sharing.modules), strict=True)
    return worker.Call(function=function, args=args, modules=tuple(modules))


def _refuse_unsafe_fork() -> None:
    fatal = [hazard for hazard in preflight.hazards() if hazard.is_fatal]
    if fatal:
        raise UnsafeFork(
            "start_method='fork' cannot work in this notebook as it is now:\n"
            + "\n".join(f"  {hazard}" for hazard in fatal)
            + "\nUse start_method='template' (the default): its workers are forked from a clean "
            "process, so no restart of the notebook is needed."
        )


def _cannot_send(culprit: str, error: Exception, found: Sequence[preflight.Hazard]) -> str:
    no_fork = (
        "A fork, which pickles nothing, is no way out here:\n"
        + "\n".join(f"  {hazard}" for hazard in found)
        if found
        else "Or use start_method='fork' (or 'auto'), which pickles nothing."
    )
    return (
        f"{culprit} cannot be sent to the workers: {type(error).__name__}: {error}.\n"
        f"Create it inside the function instead, or pass what it is made from.\n{no_fork}"
    )


# ------------------------------------------------------------------------- starting


def _start(
    stack: contextlib.ExitStack,
    plan: Plan,
    packed: _Packed,
    homecoming: home.Homecoming,
    listener: Any,
) -> Supervisor:
    config = plan.config
    starter = _starter(packed)
    stack.callback(starter.close)
    members: list[Member] = []
    stack.callback(_end, starter, members)
    port = listener.getsockname()[1]
    topologies = Topology.of_node(
        num_processes=plan.num_processes,
        master_port=port,
        master_addr=config.master_addr,
        node_rank=config.node_rank,
        num_nodes=config.num_nodes,
    )
    common = _common_facts()
    for topology in topologies:
        _hire(starter, topology.rank, members)
    for topology, member in zip(topologies, members, strict=True):
        job, fds = _job(plan, packed, homecoming, topology, common, listener)
        member.channel.send(job, fds)
    listener.close()
    console = Console([t.rank for t in topologies], template=config.log_line_prefix_template)
    return Supervisor(starter, members, console=console, timeout_s=config.timeout)


def _starter(packed: _Packed) -> Starter:
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
    with memory.closing(*ends.all()):
        if isinstance(starter, ForkStarter):
            starter.ours += [channel.fileno(), *pipes]
        pid = starter.start(ends)
    member = Member(rank=rank, channel=channel, pipes=pipes, pid=pid)
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


def _common_facts() -> _Common:
    return _Common(
        env.snapshot(),
        os.getcwd(),
        tuple(os.path.abspath(entry) for entry in sys.path),
        worker.random_states(),
    )


def _job(
    plan: Plan,
    packed: _Packed,
    homecoming: home.Homecoming,
    topology: Topology,
    common: _Common,
    listener: Any,
) -> tuple[wire.Job, list[int]]:
    config = plan.config
    variables = topology.variables(
        mixed_precision=config.mixed_precision, device=plan.device, environ=common.environment
    )
    staging = homecoming.staging
    fds = [found.fd for found in packed.arenas.values()]
    fds += [staging[key] for key in packed.arenas if key in staging]
    serves_store = topology.rank == 0
    fds += [listener.fileno()] if serves_store else []
    job = wire.Job(
        serves_store=serves_store,
        topology=topology.to_json(),
        config=config.to_json(),
        device=plan.device,
        mixed_precision=config.mixed_precision,
        threads=plan.threads_per_process,
        environment=common.environment | variables,
        working_directory=common.working_directory,
        import_path=common.import_path,
        arenas=tuple((key, found.nbytes) for key, found in packed.arenas.items()),
        parcel=packed.parcel,
        sources=packed.sources,
        random_states=common.random_states,
        share_back=config.share_back,
    )
    return job, fds if packed.fd is None else [*fds, packed.fd]
