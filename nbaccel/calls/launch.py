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
from pathlib import Path
from typing import Any

from nbaccel.base.errors import LaunchTimeout, StartupFailed, WorkerFailed
from nbaccel.base.log import write_notice
from nbaccel.base.units import first_few, format_bytes
from nbaccel.calls import launched_functions
from nbaccel.calls.changed_packages import tell_of_edits
from nbaccel.calls.group import Group, LaunchHosts
from nbaccel.calls.outcome import CallOutcome, conclude_call
from nbaccel.calls.packing import PackedCall, fork_if_sooner, pack_call
from nbaccel.config.capabilities import device_row
from nbaccel.output.cell_place import WaitingLine
from nbaccel.output.panel.following import DashboardUpdater
from nbaccel.plan import Choice, Plan
from nbaccel.plan.launch_plan import copies_in_turn
from nbaccel.transfer.memfd import closing_files
from nbaccel.workers import starters, template

_ONE_AT_A_TIME = threading.Lock()  # the template serves one launch at a time


def launch_plan(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> CallOutcome:
    """Run `function(*args)` in the workers of a plan."""
    plan = starters.check_requirements(plan)
    folder = launched_functions.resume_folder(plan, function)
    with _one_at_a_time(), contextlib.ExitStack() as clean_up:
        waiting_line = WaitingLine(plan.num_processes)
        clean_up.callback(waiting_line.close)
        # A fork has the notebook's modules and imports none anew.
        has_edits = plan.start_method != "fork" and tell_of_edits()
        if template.uses_template(plan) and not has_edits:
            plan = fork_if_sooner(plan)
        packed, plan = pack_call(plan, function, args)
        plan = _tell_host_memory(plan, packed)
        clean_up.enter_context(closing_files(*packed.files()))
        if template.uses_template(plan) and not packed.is_inherited:
            launch_template = template.template_for(plan.device)
            launch_template.wait(waiting_line.say, packed.mentions)
            plan = launch_template.told_in(plan)
        hosts = LaunchHosts(plan)
        clean_up.callback(hosts.close)
        outcome = _run_attempts(hosts, packed, waiting_line, folder)
        if folder is not None or outcome.stopped is not None:
            launched_functions.note_end(folder, outcome.stopped, has_ended=outcome.has_ended)
        return outcome


def _tell_host_memory(plan: Plan, packed: PackedCall) -> Plan:
    """The plan with the host memory that its models take at most, where copies are staged."""
    model_bytes = sum(found.nbytes for found in packed.arenas.values())
    if not model_bytes or not device_row(plan.device).stages_copies:
        return plan
    free_bytes = plan.inventory.host_available_bytes
    if copies_in_turn(plan.num_processes, model_bytes, free_bytes):
        peak_bytes = 2 * model_bytes
        who_copies = (
            "one worker after another copies it to its chip, which takes as much again at most"
        )
    else:
        peak_bytes = (1 + plan.num_processes) * model_bytes
        who_copies = (
            f"all {plan.num_processes} copy it to their chips at once, each with as much again at "
            "most"
        )
    peak = format_bytes(peak_bytes)
    free = format_bytes(free_bytes)
    reason = (
        f"one copy of {format_bytes(model_bytes)} for all workers; {who_copies}; {free} were free"
    )
    choices = (*plan.choices, Choice("host_memory", f"up to {peak}", reason))
    plan = dataclasses.replace(plan, choices=choices)
    if peak_bytes - model_bytes <= free_bytes:
        return plan
    warning = (
        f"the models take up to {peak} of host memory, and {free} are free: a worker may be killed "
        "(SIGSEGV, SIGKILL). Close what holds memory, or use a machine with more."
    )
    write_notice(f"nbaccel: {warning}\n")
    return dataclasses.replace(plan, warnings=(*plan.warnings, warning))


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
    hosts: LaunchHosts, packed: PackedCall, waiting_line: WaitingLine, folder: Path | None
) -> CallOutcome:
    """Launch, and launch anew after a failure as often as allowed."""
    max_restarts = hosts.plan.config.max_restarts
    attempt = 0
    while True:
        try:
            return _run_attempt(hosts, packed, attempt, waiting_line, folder)
        except (LaunchTimeout, StartupFailed):
            # The same would happen again, after the same wait.
            raise
        except WorkerFailed as error:
            if attempt == max_restarts:
                # The last attempt: its error is the user's.
                raise
            attempt += 1
            first_line = str(error).partition("\n")[0]
            write_notice(
                f"nbaccel: {first_line}. Restart {attempt} of {max_restarts}"
                f"{hosts.what_is_left()}.\n"
            )


def _run_attempt(
    hosts: LaunchHosts,
    packed: PackedCall,
    attempt: int,
    waiting_line: WaitingLine,
    folder: Path | None,
) -> CallOutcome:
    config = hosts.plan.config
    variables = {
        # The variables that torchrun sets, which training scripts read.
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.rdzv_id,
        **launched_functions.variables_of(folder),
    }
    with contextlib.ExitStack() as clean_up:
        receiver = clean_up.enter_context(packed.staged(share_back=config.share_back))
        # Entered last, so that the workers end before their files are closed.
        group = Group.started(
            clean_up,
            hosts,
            waiting_line,
            forked_call=packed.call if packed.is_inherited else None,
            variables=variables,
        )
        ranks = [member.rank for member in group.members]
        result = group.run_tasks(
            dict.fromkeys(ranks, packed.task(receiver)),
            timeout_s=config.timeout,
            place=waiting_line.place,
            make_show=lambda: DashboardUpdater(
                ranks,
                plan=group.plan,
                place=waiting_line.place,
                waiting_line=waiting_line,
                title=launched_functions.call_title(packed.call.function, packed.call.args),
            ),
        )
        was_stopped, closing_lines = _closing_words(packed, group.plan)
        return conclude_call(
            group.plan,
            result,
            receiver,
            was_stopped=f"all {len(ranks)} workers have been stopped{was_stopped}",
            closing_lines=closing_lines,
        )


def _closing_words(packed: PackedCall, plan: Plan) -> tuple[str, str]:
    """What a Stop and a failure say at their end: of the notebook's models, and of other nodes."""
    config = plan.config
    was_stopped = ""
    lines = []
    if packed.arenas:
        was_stopped = "; the model is as it was"
        lines.append("The notebook's model is as it was before the launch.")
    if config.num_nodes > 1:
        per_node = plan.num_processes
        others = [
            f"node {node} (ranks {node * per_node} to {(node + 1) * per_node - 1})"
            for node in range(config.num_nodes)
            if node != config.node_rank
        ]
        lines.append(
            f"This is node {config.node_rank} of {config.num_nodes}. Nothing but a broken "
            "connection or a timeout tells of another one that is lost: look at "
            f"{first_few(others, 3)}."
        )
    return was_stopped, " ".join(lines)
