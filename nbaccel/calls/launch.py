"""One launch, from a plan to results.

    find modules ─► arena ─► pack (or fork) ─► start ─► supervise ─► weights back ─► results

Whatever happens, everything opened here is closed here, and the notebook's process is left as it
was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from nbaccel.base.errors import LaunchTimeout, StartupFailed, WorkerFailed
from nbaccel.base.log import write_notice
from nbaccel.base.process_death import uninterrupted
from nbaccel.base.units import first_few, format_bytes
from nbaccel.calls.edited_sources import tell_of_edits
from nbaccel.calls.launch_hosts import LaunchHosts
from nbaccel.calls.launch_supervisor import LaunchSupervisor
from nbaccel.calls.outcome import CallOutcome, conclude_call
from nbaccel.calls.packing import PackedCall, fork_if_sooner, pack_call
from nbaccel.config.capabilities import device_row
from nbaccel.output.console import Console
from nbaccel.output.dashboard.following import DashboardUpdater
from nbaccel.output.rank_logs import RankLogs, hidden_streams, logs_of_run
from nbaccel.output.waiting_line import WaitingLine
from nbaccel.plan import Choice, Plan
from nbaccel.plan.launch_plan import copies_in_turn
from nbaccel.transfer import arena
from nbaccel.transfer.find_modules import find_modules
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.workers import (
    messaging,
    requirements,
    template,
    worker,
    worker_output,
)
from nbaccel.workers.fork import ForkStarter
from nbaccel.workers.start_method import Starter
from nbaccel.workers.template_starter import TemplateStarter, dispose
from nbaccel.workers.worker_group import MeetingPlace, WorkerGroup

_ONE_AT_A_TIME = threading.Lock()  # the template serves one launch at a time


def launch_plan(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> CallOutcome:
    """Run `function(*args)` in the workers of a plan."""
    plan = requirements.check_requirements(plan)
    with _one_at_a_time(), contextlib.ExitStack() as clean_up:
        waiting_line = WaitingLine(plan.num_processes)
        clean_up.callback(waiting_line.close)
        # A fork has the notebook's modules and imports none anew.
        has_edits = plan.start_method != "fork" and tell_of_edits()
        if template.uses_template(plan):
            is_outdated = template.template_for(plan.device).drop_outdated()
            if not has_edits and not is_outdated:
                plan = fork_if_sooner(plan)
        module_sharing = arena.share_modules(find_modules(args))
        packed_call, plan = pack_call(plan, function, args, module_sharing)
        plan = _tell_host_memory(plan, packed_call)
        if packed_call.fd is not None:
            clean_up.callback(os.close, packed_call.fd)
        if template.uses_template(plan) and packed_call.payload is not None:
            launch_template = template.template_for(plan.device)
            launch_template.wait(waiting_line.say, packed_call.mentions)
            plan = launch_template.told_in(plan)
        launch_hosts = LaunchHosts(plan)
        clean_up.callback(launch_hosts.close)
        return _run_attempts(launch_hosts, packed_call, waiting_line)


def _tell_host_memory(plan: Plan, packed_call: PackedCall) -> Plan:
    """The plan with the host memory that its models take at most, where copies are staged."""
    model_bytes = sum(call_arena.nbytes for call_arena in packed_call.arenas.values())
    if not model_bytes or not device_row(plan.device).stages_copies:
        return plan
    num_workers = plan.num_processes
    free_bytes = plan.inventory.host_available_bytes
    in_turn = copies_in_turn(num_workers, model_bytes, free_bytes)
    peak_bytes = model_bytes * (2 if in_turn else 1 + num_workers)
    each_text = (
        "one worker after another copies it to its chip, which takes as much again at most"
        if in_turn
        else f"all {num_workers} copy it to their chips at once, each with as much again at most"
    )
    reason = (
        f"one copy of {format_bytes(model_bytes)} for all workers; {each_text}; "
        f"{format_bytes(free_bytes)} were free"
    )
    choice = Choice("host_memory", f"up to {format_bytes(peak_bytes)}", reason)
    warning = (
        f"the models take up to {format_bytes(peak_bytes)} of host memory, and "
        f"{format_bytes(free_bytes)} are free: a worker may be killed (SIGSEGV, SIGKILL). Close "
        "what holds memory, or use a machine with more."
    )
    is_short = peak_bytes - model_bytes > free_bytes
    if is_short:
        write_notice(f"nbaccel: {warning}\n")
    warnings = (*plan.warnings, warning) if is_short else plan.warnings
    return dataclasses.replace(plan, choices=(*plan.choices, choice), warnings=warnings)


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    # Tried first, so that the user learns why the second launch does not begin.
    if not _ONE_AT_A_TIME.acquire(blocking=False):
        write_notice(
            "nbaccel: another thread of this notebook has begun a launch; this one waits until "
            "that is over.\n"
        )
        _ONE_AT_A_TIME.acquire()
    try:
        yield
    finally:
        _ONE_AT_A_TIME.release()


def _run_attempts(
    launch_hosts: LaunchHosts, packed_call: PackedCall, waiting_line: WaitingLine
) -> CallOutcome:
    """Launch, and launch anew after a failure as often as allowed."""
    allowed_restarts = launch_hosts.config.max_restarts
    attempt_number = 0
    while True:
        try:
            call_outcome = _run_attempt(launch_hosts, packed_call, attempt_number, waiting_line)
        except (LaunchTimeout, StartupFailed):
            # The same would happen again, after the same wait.
            raise
        except WorkerFailed as error:
            if attempt_number == allowed_restarts:
                # The last attempt: its error is the user's.
                raise
            attempt_number += 1
            first_attempt = str(error).partition("\n")[0]
            write_notice(
                f"nbaccel: {first_attempt}. Restart {attempt_number} of {allowed_restarts}"
                f"{launch_hosts.what_is_left()}.\n"
            )
        else:
            return call_outcome


def _run_attempt(
    launch_hosts: LaunchHosts,
    packed_call: PackedCall,
    attempt_number: int,
    waiting_line: WaitingLine,
) -> CallOutcome:
    with contextlib.ExitStack() as clean_up:
        plan = launch_hosts.prepare()
        # An interrupt before the callback is registered would leak the staging files.
        with uninterrupted():
            weight_receiver = WeightReceiver(
                packed_call.sharing, packed_call.arenas if plan.config.share_back else {}
            )
            clean_up.callback(weight_receiver.close, dispose)
        clean_up.callback(launch_hosts.close_store)
        meeting_place = launch_hosts.meeting_place()
        plan = dataclasses.replace(plan, world_size=plan.num_processes * meeting_place.num_nodes)
        first_rank = plan.num_processes * meeting_place.node_rank
        rank_logs = clean_up.enter_context(logs_of_run(plan, first_rank=first_rank))
        was_stopped, closing_lines = _closing_words(packed_call, plan)
        worker_starter = launch_hosts.starter() or _choose_starter(plan, packed_call, waiting_line)
        worker_group = WorkerGroup(plan, worker_starter)
        # Registered last, so that it runs first: the workers end before their files are closed.
        clean_up.callback(worker_group.end)
        _start_workers(worker_group, packed_call, weight_receiver, meeting_place, attempt_number)
        # Rank 0 has a copy. With this one open, connections to a dead rank 0 would not be refused.
        launch_hosts.close_store()
        launch_supervisor = _make_supervisor(worker_group, rank_logs, waiting_line)
        call_result = launch_supervisor.run()
        return conclude_call(
            plan,
            call_result,
            weight_receiver,
            was_stopped=f"all {plan.num_processes} workers have been stopped{was_stopped}",
            closing_lines=closing_lines,
        )


# ------------------------------------------------------------------------- starting


def _start_workers(
    worker_group: WorkerGroup,
    packed_call: PackedCall,
    weight_receiver: WeightReceiver,
    meeting_place: MeetingPlace,
    attempt_number: int,
) -> None:
    run_config = worker_group.plan.config
    num_restarts = {
        # The variables that torchrun sets, which training scripts read.
        "TORCHELASTIC_RESTART_COUNT": str(attempt_number),
        "TORCHELASTIC_MAX_RESTARTS": str(run_config.max_restarts),
        "TORCHELASTIC_RUN_ID": run_config.rdzv_id,
        "GROUP_WORLD_SIZE": str(meeting_place.num_nodes),
    }
    assigned_workers = worker_group.start(meeting_place, num_restarts)
    worker_group.prepare_files([used_arena.fd for used_arena in packed_call.arenas.values()])
    for worker_assignment in assigned_workers:
        worker_job, file_descriptors = job_of(
            worker_group.plan,
            packed_call,
            weight_receiver,
            worker_assignment.assignment,
        )
        worker_assignment.send(worker_job, [*file_descriptors, *worker_assignment.fds])


def _closing_words(packed_call: PackedCall, plan: Plan) -> tuple[str, str]:
    """What a Stop and a failure say at their end: of the notebook's models, and of other nodes."""
    lines = []
    if packed_call.arenas:
        lines.append("The notebook's model is as it was before the launch.")
    if plan.config.num_nodes > 1:
        lines.append(_words_of_other_nodes(plan))
    return "; the model is as it was" if packed_call.arenas else "", " ".join(lines)


def _words_of_other_nodes(plan: Plan) -> str:
    config = plan.config
    others = [
        f"node {node} (ranks {node * plan.num_processes} to {(node + 1) * plan.num_processes - 1})"
        for node in range(config.num_nodes)
        if node != config.node_rank
    ]
    return (
        f"This is node {config.node_rank} of {config.num_nodes}. Nothing but a broken connection "
        f"or a timeout tells of another one that is lost: look at {first_few(others, 3)}."
    )


def _make_supervisor(
    worker_group: WorkerGroup,
    rank_logs: RankLogs | None,
    waiting_line: WaitingLine,
) -> LaunchSupervisor:
    run_config = worker_group.plan.config
    worker_ranks = [member.rank for member in worker_group.members]
    return LaunchSupervisor(
        worker_group,
        console=Console(
            worker_ranks,
            prefix_template=run_config.log_line_prefix_template,
            hidden=hidden_streams(run_config.shown_output, worker_ranks),
            rank_logs=rank_logs,
            place=waiting_line.place,
        ),
        timeout_s=run_config.timeout,
        show=DashboardUpdater(
            worker_ranks,
            plan=worker_group.plan,
            place=waiting_line.place,
            waiting_line=waiting_line,
        ),
    )


def _choose_starter(plan: Plan, packed_call: PackedCall, waiting_line: WaitingLine) -> Starter:
    if packed_call.payload is not None:
        return TemplateStarter(plan.device, threads=plan.threads_per_process, say=waiting_line.say)
    return ForkStarter(
        worker.InheritedObjects(call=packed_call.call, arenas=packed_call.arenas),
        is_asked=plan.config.start_method == "fork",
    )


def job_of(
    plan: Plan,
    packed_call: PackedCall,
    weight_receiver: WeightReceiver,
    worker_assignment: messaging.WorkerAssignment | None,
) -> tuple[messaging.Job, list[int]]:
    """The call as a worker gets it, with the descriptors that belong to it."""
    staging_fds = weight_receiver.staging
    # In the order of `messaging.Job`: arenas, staging files, payload.
    file_descriptors = [call_arena.fd for call_arena in packed_call.arenas.values()]
    file_descriptors += [
        staging_fds[arena_key] for arena_key in packed_call.arenas if arena_key in staging_fds
    ]
    worker_job = messaging.Job(
        assignment=worker_assignment,
        arenas=tuple(
            (arena_key, call_arena.nbytes) for arena_key, call_arena in packed_call.arenas.items()
        ),
        payload=packed_call.payload,
        sources=packed_call.sources,
        random_states=worker_assignment.random_states
        if worker_assignment
        else worker.seeded_states(),
        logging=worker_output.as_configured(),
        settings=packed_call.settings,
        mixed_precision=plan.config.mixed_precision,
        share_back=plan.config.share_back,
    )
    return worker_job, file_descriptors if packed_call.fd is None else [
        *file_descriptors,
        packed_call.fd,
    ]
