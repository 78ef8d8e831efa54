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
from collections.abc import Callable
from typing import Any

from nbaccel.errors import LaunchTimeout, StartupFailed, WorkerFailed
from nbaccel.launch import loggers, required, store, wire, worker
from nbaccel.launch.console import Console
from nbaccel.launch.dashboard.following import Following
from nbaccel.launch.edited import tell_of_edits
from nbaccel.launch.fork import ForkStarter
from nbaccel.launch.hiring import Surroundings, dismiss, hire, libraries_memory, posts, topologies
from nbaccel.launch.member import Member
from nbaccel.launch.outcome import Outcome, conclude
from nbaccel.launch.packing import Packed, pack
from nbaccel.launch.sharing import arena
from nbaccel.launch.sharing.find import find_modules
from nbaccel.launch.sharing.homecoming import Homecoming
from nbaccel.launch.starter import Starter
from nbaccel.launch.supervisor import Supervisor
from nbaccel.launch.system import uninterrupted
from nbaccel.launch.template import TemplateStarter, dispose
from nbaccel.plan import Plan

_CALLER = 8
"""Frames from a warning up to the cell: this file's four, the façade's three, the cell."""

_ONE_AT_A_TIME = threading.Lock()  # the template answers one launch at a time


def launch(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    """Run `function(*args)` in the workers of a plan.

    Raises:
        PlatformUnsupported: This machine lacks something that several workers need.
        ModelNotShareable, NotSendable, UnsafeFork, PortTaken: Before any process is started.
        WorkerFailed: If a worker raised or died; of the worker's exception type too.
        KeyboardInterrupt: If the notebook was interrupted; all workers have ended.
    """
    plan = required.prepared(plan)
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        if plan.start_method != "fork":
            tell_of_edits()
        sharing = arena.share(find_modules(args))
        packed, plan = pack(plan, function, args, sharing)
        if packed.fd is not None:
            stack.callback(os.close, packed.fd)
        return _attempts(plan, packed)


def _attempts(plan: Plan, packed: Packed) -> Outcome:
    """Launch, and launch anew after a failure as often as allowed."""
    allowed = plan.config.max_restarts
    for attempt in range(allowed):
        try:
            return _attempt(plan, packed, attempt)
        except (LaunchTimeout, StartupFailed):
            raise  # the same would happen again, after the same wait
        except WorkerFailed as error:
            first = str(error).partition("\n")[0]
            sys.stderr.write(f"nbaccel: {first}. Restart {attempt + 1} of {allowed}.\n")
    return _attempt(plan, packed, allowed)


def _attempt(plan: Plan, packed: Packed, attempt: int) -> Outcome:
    with contextlib.ExitStack() as stack:
        with uninterrupted():  # until somebody is there to close the staging files
            homecoming = Homecoming(packed.sharing, packed.arenas if plan.config.share_back else {})
            stack.callback(homecoming.close, dispose)
        listener = None
        if plan.config.node_rank == 0:
            listener = store.listen(plan.master_addr, plan.port)
            stack.callback(listener.close)
        watch = _start(stack, plan, packed, homecoming, listener, attempt)
        watch.run()
        stopped = f"all {plan.num_processes} workers have been stopped; the model is as it was"
        return conclude(plan, watch, homecoming, stopped=stopped, stacklevel=_CALLER)


# ------------------------------------------------------------------------- starting


def _start(
    stack: contextlib.ExitStack,
    plan: Plan,
    packed: Packed,
    homecoming: Homecoming,
    listener: socket.socket | None,
    attempt: int,
) -> Supervisor:
    places = topologies(plan, listener)
    stack.enter_context(libraries_memory(places))
    starter = _starter(packed)
    stack.callback(starter.close)
    members: list[Member] = []
    stack.callback(dismiss, starter, members)
    for place in places:
        hire(starter, place.rank, members)
    surroundings = Surroundings.here(
        {
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(plan.config.max_restarts),
        }
    )
    for (post, post_fds), member in zip(
        posts(plan, places, surroundings, listener), members, strict=True
    ):
        job, fds = job_of(plan, packed, homecoming, post)
        with wire.unless_gone():  # it has died already: its sentinel tells, to the supervisor
            member.channel.send(job, [*fds, *post_fds])
    if listener is not None:
        listener.close()
    console = Console([p.rank for p in places], template=plan.config.log_line_prefix_template)
    return Supervisor(
        starter,
        members,
        console=console,
        timeout_s=plan.config.timeout,
        following=Following([p.rank for p in places], device=plan.device),
    )


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


def job_of(
    plan: Plan, packed: Packed, homecoming: Homecoming, post: wire.Post | None
) -> tuple[wire.Job, list[int]]:
    """The call as a worker gets it, with the descriptors that belong to it.

    Args:
        plan: What was planned.
        packed: The call.
        homecoming: Where trained weights go.
        post: The worker's post; None for one that has it already.
    """
    staging = homecoming.staging
    fds = [found.fd for found in packed.arenas.values()]
    fds += [staging[key] for key in packed.arenas if key in staging]
    job = wire.Job(
        post=post,
        arenas=tuple((key, found.nbytes) for key, found in packed.arenas.items()),
        parcel=packed.parcel,
        sources=packed.sources,
        random_states=post.random_states if post else worker.random_states(),
        logging=loggers.as_configured(),
        mixed_precision=plan.config.mixed_precision,
        share_back=plan.config.share_back,
    )
    return job, fds if packed.fd is None else [*fds, packed.fd]
