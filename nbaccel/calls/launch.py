"""One launch, from a plan to results.

    find modules ─► arena ─► pack (or fork) ─► start ─► supervise ─► weights back ─► results

Whatever happens, everything opened here is closed here, and the notebook's process is left as it
was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from nbaccel.base.errors import LaunchTimeout, StartupFailed, WorkerFailed
from nbaccel.base.log import write_notice
from nbaccel.base.units import first_few, format_bytes
from nbaccel.calls.changed_packages import tell_of_edits
from nbaccel.calls.group import Group
from nbaccel.calls.launch_hosts import LaunchHosts
from nbaccel.calls.outcome import CallOutcome, conclude_call
from nbaccel.calls.packing import PackedCall, fork_if_sooner, pack_call
from nbaccel.config.capabilities import device_row
from nbaccel.output.cell_place import WaitingLine
from nbaccel.output.panel.following import DashboardUpdater
from nbaccel.plan import Choice, Plan
from nbaccel.plan.launch_plan import copies_in_turn
from nbaccel.transfer.memfd import closing_files
from nbaccel.workers import requirements, template

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
        packed_call, plan = pack_call(plan, function, args)
        plan = _tell_host_memory(plan, packed_call)
        clean_up.enter_context(closing_files(*packed_call.files()))
        if template.uses_template(plan) and not packed_call.is_inherited:
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
    config = launch_hosts.config
    num_restarts = {
        # The variables that torchrun sets, which training scripts read.
        "TORCHELASTIC_RESTART_COUNT": str(attempt_number),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.rdzv_id,
    }
    with contextlib.ExitStack() as clean_up:
        weight_receiver = clean_up.enter_context(packed_call.staged(share_back=config.share_back))
        # Entered last, so that the workers end before their files are closed.
        group = Group.started(
            clean_up,
            launch_hosts,
            waiting_line,
            forked_call=packed_call.call if packed_call.is_inherited else None,
            variables=num_restarts,
        )
        ranks = [member.rank for member in group.members]
        call_result = group.run_tasks(
            dict.fromkeys(ranks, packed_call.task(weight_receiver)),
            timeout_s=config.timeout,
            place=waiting_line.place,
            make_show=lambda: DashboardUpdater(
                ranks, plan=group.plan, place=waiting_line.place, waiting_line=waiting_line
            ),
        )
        was_stopped, closing_lines = _closing_words(packed_call, group.plan)
        return conclude_call(
            group.plan,
            call_result,
            weight_receiver,
            was_stopped=f"all {len(ranks)} workers have been stopped{was_stopped}",
            closing_lines=closing_lines,
        )


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
