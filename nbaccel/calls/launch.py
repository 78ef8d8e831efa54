"""One launch, from a plan to results; and what a call in live workers has in common with it.

    find modules ─► arena ─► pack (or fork) ─► start ─► supervise ─► weights back ─► results

Whatever happens, everything opened here is closed here, and the notebook's process is left as it
was found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.base import errors, frames
from nbaccel.base.log import write_notice
from nbaccel.base.processes import uninterrupted
from nbaccel.base.units import count_noun, first_few, format_bytes
from nbaccel.calls import launched_functions, outcome
from nbaccel.calls.changed_packages import sendable_changes, tell_of_edits
from nbaccel.calls.group import Group, open_hosts
from nbaccel.calls.supervisor import CallResult
from nbaccel.config.call_arguments import call_title
from nbaccel.config.capabilities import ENGINES, device_row
from nbaccel.hosts.host_session import HostSession
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.publish import WaitingLine
from nbaccel.plan import Choice, Plan, registry
from nbaccel.plan.launch_plan import copies_in_turn
from nbaccel.plan.topology import FOLDER_VARIABLE
from nbaccel.transfer import arena, object_walk, pickling
from nbaccel.transfer.library_settings import library_settings, logging_only, seeded_states
from nbaccel.transfer.memfd import PackedObject, closing_files
from nbaccel.transfer.weight_sync import WeightReceiver, WeightReport
from nbaccel.workers import fork_safety, messaging, template, worker
from nbaccel.workers.worker_processes import WorkerHandle, check_requirements, dispose

_ONE_AT_A_TIME = threading.Lock()  # the template serves one launch at a time
_COPY_LIMIT_BYTES = 256 * 2**20  # a longer pickle costs seconds per launch; a fork, nothing
_SEARCH_LIMIT_BYTES = 8 * 2**20  # a longer pickle is not searched for names


def launch_plan(plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]) -> CallOutcome:
    """Run `function(*args)` in the workers of a plan."""
    plan = check_requirements(plan)
    folder = launched_functions.resume_folder(plan, function) if plan.config.resume else None
    with contextlib.ExitStack() as clean_up:
        # Tried first, so that the user learns why the second launch does not begin.
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            write_notice(
                "nbaccel: another thread of this notebook has begun a launch; this one waits.\n"
            )
            _ONE_AT_A_TIME.acquire()
        clean_up.callback(_ONE_AT_A_TIME.release)
        waiting_line = WaitingLine(plan.num_processes)
        clean_up.callback(waiting_line.close)
        # A fork has the notebook's modules and imports none anew.
        has_edits = plan.start_method != "fork" and tell_of_edits()
        if template.uses_template(plan) and not has_edits:
            plan = fork_if_sooner(plan)
        packed, plan = pack_call(plan, function, args)
        plan = _tell_host_memory(plan, packed)
        clean_up.enter_context(closing_files(*packed.payload_fds))
        if template.uses_template(plan):
            launch_template = template.template_for(plan.device)
            launch_template.wait(waiting_line.say, packed.mentions)
            plan = launch_template.told_in(plan)
        done = _run_attempts(plan, packed, waiting_line, folder)
        if folder is not None or done.stopped is not None:
            launched_functions.note_end(folder, done.stopped, has_ended=done.has_ended)
        return done


def _tell_host_memory(plan: Plan, packed: PackedCall) -> Plan:
    """The plan with the host memory that its models take at most, where copies are staged."""
    model_bytes = sum(found.nbytes for found in packed.arenas.values())
    if not model_bytes or not device_row(plan.device).stages_copies:
        return plan
    free_bytes = plan.inventory.host_available_bytes
    num_copies = 1
    who_copies = "one worker after another copies it to its chip"
    if not copies_in_turn(plan.num_processes, model_bytes, free_bytes):
        num_copies = plan.num_processes
        who_copies = f"all {num_copies} copy it to their chips at once"
    peak = format_bytes((1 + num_copies) * model_bytes)
    free = format_bytes(free_bytes)
    reason = (
        f"one copy of {format_bytes(model_bytes)} for all workers; {who_copies}, which takes as "
        f"much again for each at most; {free} were free"
    )
    choices = (*plan.choices, Choice("host_memory", f"up to {peak}", reason))
    plan = dataclasses.replace(plan, choices=choices)
    if num_copies * model_bytes <= free_bytes:
        return plan
    warning = (
        f"the models take up to {peak} of host memory, and {free} are free: a worker may be killed "
        "(SIGSEGV, SIGKILL). Close what holds memory, or use a machine with more."
    )
    write_notice(f"nbaccel: {warning}\n")
    return dataclasses.replace(plan, warnings=(*plan.warnings, warning))


def _run_attempts(
    plan: Plan, packed: PackedCall, waiting_line: WaitingLine, folder: Path | None
) -> CallOutcome:
    """Launch, and launch anew after a failure as often as allowed, on the hosts that are left."""
    max_restarts = plan.config.max_restarts
    attempt = 0
    all_lost: list[str] = []
    with contextlib.ExitStack() as clean_up:
        session = open_hosts(clean_up, plan)
        while True:
            try:
                return _run_attempt(plan, session, packed, attempt, waiting_line, folder)
            except (errors.LaunchTimeout, errors.StartupFailed):
                # The same would happen again, after the same wait.
                raise
            except errors.WorkerFailed as error:
                if attempt == max_restarts:
                    # The last attempt: its error is the user's.
                    raise
                attempt += 1
                reason = str(error).partition("\n")[0]
                lost = session.lost_hosts if session is not None else ()
                without = f", without {', '.join(lost)}" if lost else ""
                write_notice(f"nbaccel: {reason}. Restart {attempt} of {max_restarts}{without}.\n")
            if lost:
                all_lost += lost
                clean_up.close()
                session = open_hosts(clean_up, plan, all_lost)


def _run_attempt(
    plan: Plan,
    session: HostSession | None,
    packed: PackedCall,
    attempt: int,
    waiting_line: WaitingLine,
    folder: Path | None,
) -> CallOutcome:
    config = plan.config
    variables = {
        # The variables that torchrun sets, which training scripts read.
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "TORCHELASTIC_RUN_ID": config.rdzv_id,
        **({FOLDER_VARIABLE: str(folder)} if folder is not None else {}),
    }
    with contextlib.ExitStack() as clean_up:
        receiver = clean_up.enter_context(packed.staged(share_back=config.share_back))
        # Entered last, so that the workers end before their files are closed.
        group = Group.started(
            clean_up, plan, session, waiting_line, forked_call=packed.call, variables=variables
        )
        ranks = [member.rank for member in group.members]
        result = group.run_tasks(
            dict.fromkeys(ranks, packed.task(receiver)),
            timeout_s=config.timeout,
            place=waiting_line.place,
            waiting_line=waiting_line,
            title=call_title(packed.call.function, packed.call.args),
        )
        was_stopped = f"all {len(ranks)} workers have been stopped"
        if packed.arenas:
            was_stopped += "; the model is as it was"
        endings = (was_stopped, _closing_lines(packed, group.plan))
        return conclude_call(group.plan, result, receiver, endings)


def _closing_lines(packed: PackedCall, plan: Plan) -> str:
    """What a failure says at its end: of the notebook's models, and of other nodes."""
    config = plan.config
    lines = []
    if packed.arenas:
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
    return " ".join(lines)


# ---- what is sent


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A call that is ready to be sent, or to be inherited."""

    call: worker.WorkerCall
    sharing: arena.Sharing  # the modules of the arguments, and those that the function reaches
    arenas: dict[str, arena.Arena]
    job: messaging.Job
    payload_fds: tuple[int, ...] = ()  # the payload's memory file, which the owner closes; or none

    def staged(
        self, *, share_back: bool
    ) -> contextlib.AbstractContextManager[WeightReceiver | None]:
        """Files for the trained weights, as long as the block lasts; None without modules."""
        if not self.sharing.modules:
            return contextlib.nullcontext()
        return staged(self.sharing, self.arenas if share_back else {})

    def task(self, receiver: WeightReceiver | None) -> tuple[messaging.Job, list[int]]:
        """What each rank is given, with its descriptors in the order of `messaging.Job`."""
        fds = [call_arena.fd for call_arena in self.arenas.values()]
        staging_fds = receiver.staging.values() if receiver is not None else ()
        return self.job, [*fds, *staging_fds, *self.payload_fds]

    def mentions(self, package: str) -> bool:
        """Whether the call may use a package: the pickle, which has code, too, has its name."""
        if self.job.payload is None:
            return False
        first_byte, end_byte = self.job.payload.pickle
        if end_byte - first_byte > _SEARCH_LIMIT_BYTES:
            return True
        with mmap.mmap(self.payload_fds[0], 0, access=mmap.ACCESS_READ) as payload_bytes:
            return payload_bytes.find(package.encode(), first_byte, end_byte) >= 0


@contextlib.contextmanager
def staged(sharing: arena.Sharing, arenas: Mapping[str, arena.Arena]) -> Iterator[WeightReceiver]:
    """Staging files for these arenas, as long as the block lasts."""
    with contextlib.ExitStack() as clean_up:
        # An interrupt before the callback is registered would leak the files.
        with uninterrupted():
            receiver = WeightReceiver(sharing, arenas)
            # By the template process: freeing gigabytes would delay the notebook.
            clean_up.callback(receiver.close, dispose)
        yield receiver


def fork_if_sooner(plan: Plan) -> Plan:
    """The plan, with a fork of the notebook where that is asked for, safe, and sooner ready."""
    if (
        plan.config.start_method != "auto"
        or plan.engine != ENGINES[0].name
        or registry.device(plan.device).own_process
        # A script has no cells that a first launch would keep waiting.
        or frames.running_shell() is None
        or threading.current_thread() is not threading.main_thread()
        or template.template_for(plan.device).is_ready()
        # Workers have none, and it is said.
        or torch.get_default_device().type != "cpu"
        or fork_safety.hazards()
        or fork_safety.has_native_threads()
    ):
        return plan
    return plan.with_start_method(
        "fork", "the template is not ready yet, and preflight found nothing against a fork"
    )


def _share_modules_of(args: tuple[Any, ...]) -> arena.Sharing:
    """Share what a call hands over; without a model there is nothing to lock or to walk."""
    modules = object_walk.find_modules(args) if args else ()
    return arena.share_modules(modules) if modules else arena.Sharing()


def pack_call(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[PackedCall, Plan]:
    """Make the call ready for the plan's start method, or for `fork` where `auto` must take it."""
    sharing = _share_modules_of(args)
    if plan.start_method == "fork":
        fork_safety.judge_fork()
        return _inherited_call(function, args, sharing), plan
    # A requested template takes any amount of data; on `auto` a fork may be better.
    is_asked = plan.config.start_method == "template"
    limit_bytes = None if is_asked else _COPY_LIMIT_BYTES
    try:
        return _pickled_call(function, args, sharing, limit_bytes), plan
    except pickling.TooCostly:
        reason = f"a copy of its data for each worker would take over {_COPY_LIMIT_BYTES >> 20} MiB"
        # A slow start is better than workers that may hang.
        if fork_safety.hazards():
            return _pickled_call(function, args, sharing, None), plan
    except Exception as error:  # pickling runs user code: it may raise anything
        culprit = object_walk.find_culprit(function, args)
        reason = f"{culprit} cannot be pickled ({type(error).__name__}: {error})"
        hazards = fork_safety.hazards()
        if is_asked or hazards:
            remedy = "Or use start_method='fork' (or 'auto'), which pickles nothing."
            if hazards:
                lines = "\n".join(f"  {hazard}" for hazard in hazards)
                remedy = f"A fork, which pickles nothing, is no way out here:\n{lines}"
            raise _not_sendable(culprit, error, remedy) from error
    write_notice(f"nbaccel: workers are forked from the notebook, because {reason}.\n")
    plan = plan.with_start_method("fork", f"{reason}, and preflight found nothing against a fork")
    return _inherited_call(function, args, sharing), plan


def pack_for_running_workers(function: Callable[..., Any], args: tuple[Any, ...]) -> PackedCall:
    """Make the call ready for workers that exist already: whatever it needs has to travel."""
    sharing = _share_modules_of(args)
    try:
        packed = _pickled_call(function, args, sharing, None, looks_anew=False)
        for used in packed.arenas.values():
            # Live workers keep it, and follow what is written to it.
            used.leave_file()
    except Exception as error:  # pickling runs user code: it may raise anything
        culprit = object_walk.find_culprit(function, args)
        raise _not_sendable(culprit, error, "They are processes of their own.") from error
    return packed


def _pickled_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sharing: arena.Sharing,
    limit_bytes: int | None,
    *,
    looks_anew: bool = True,
) -> PackedCall:
    changes = sendable_changes(looks_anew=looks_anew)
    is_again = False
    while True:
        sender = pickling.Sender(sharing.stand_ins, shares=True)
        for shared in sharing.arenas.values():
            # Named before pickling: an arena counts even if the pickle does not refer to it.
            sender.key(shared)
        call = worker.WorkerCall(
            function=function, args=args, modules=sharing.modules, changes=changes
        )
        prepared = pickling.prepare(call, sender, limit_bytes=limit_bytes)
        # Modules that only the pickle has shown, such as one in a global of the function.
        strays = _strays(sender.modules, sharing)
        if is_again or not strays:
            break
        is_again = True
        # It views memory that the modules are about to leave.
        prepared.drop()
        sharing = _with_strays(sharing, strays, function, args)
    payload, fd = prepared.write()
    # After pickling, which finds tensors in further arenas.
    for used in sender.arenas.values():
        used.sync()
    return _packed(call, sharing, dict(sender.arenas), payload, (fd,), sender.sources)


def _inherited_call(
    function: Callable[..., Any], args: tuple[Any, ...], sharing: arena.Sharing
) -> PackedCall:
    # Nothing is pickled here, so the modules have to be searched for.
    modules = [module for _, module in object_walk.reached_modules(function, args)]
    if strays := _strays(modules, sharing):
        sharing = _with_strays(sharing, strays, function, args)
    arenas = sharing.arenas
    for shared in arenas.values():
        shared.sync()
    call = worker.WorkerCall(function=function, args=args, modules=sharing.modules, arenas=arenas)
    return _packed(call, sharing, arenas)


def _packed(
    call: worker.WorkerCall,
    sharing: arena.Sharing,
    arenas: dict[str, arena.Arena],
    payload: PackedObject | None = None,
    payload_fds: tuple[int, ...] = (),
    sources: Mapping[str, list[str]] | None = None,
) -> PackedCall:
    job = messaging.Job(
        arenas=tuple((key, found.nbytes) for key, found in arenas.items()),
        payload=payload,
        sources=dict(sources or {}),
        random_states=seeded_states(),
        settings=logging_only() if payload is None else library_settings(),
    )
    return PackedCall(call=call, sharing=sharing, arenas=arenas, job=job, payload_fds=payload_fds)


def _strays(modules: Sequence[nn.Module], sharing: arena.Sharing) -> Sequence[nn.Module]:
    """Those of these modules that are not shared yet."""
    return modules and object_walk.outermost_modules(
        modules, (shared.module for shared in sharing.modules)
    )


def _with_strays(
    sharing: arena.Sharing,
    strays: Sequence[nn.Module],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> arena.Sharing:
    """Share what can be shared; print a message for modules whose weights stay in the workers."""
    paths = {id(module): path for path, module in object_walk.reached_modules(function, args)}
    taken: set[str] = set()
    for module in strays:
        # As a user would write it.
        path = paths.get(id(module), type(module).__name__)
        # Reports name modules by path, and must not confuse two of them.
        while path in taken:
            path += "'"
        taken.add(path)
        try:
            sharing = arena.Sharing.joined([sharing, arena.share_modules([(path, module)])])
        except errors.ModelNotShareable as error:
            reason = str(error).partition("\n")[2].strip()
            write_notice(
                f"nbaccel: each worker gets a copy of {path}, and its weights will not "
                f"come back, because it cannot be shared: {reason}\n"
            )
    return sharing


def _not_sendable(path: str, error: Exception, more: str) -> errors.NotSendable:
    return errors.NotSendable(
        f"{path} cannot be sent to the workers: {type(error).__name__}: {error}.\n"
        f"Create it inside the function instead, or pass what it is made from.\n{more}",
        path=path,
    )


# ---- what comes back


class UnsendableResult:
    """Stands in the results for a value that could not leave its worker, and says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<not sent: {self.reason}>"


def _open_result(member: WorkerHandle, message: messaging.Returned) -> Any:
    if message.payload is None:
        return UnsendableResult(message.unsendable or "")
    try:
        return pickling.unpack(message.payload, member.handed_fds[0], {})
    except Exception as error:  # a missing class, or the user's __setstate__: any
        return UnsendableResult(f"rank {member.rank}'s result cannot be opened here: {error!r}")


@dataclass(frozen=True, kw_only=True)
class CallOutcome:
    """What a launch hands to the notebook that succeeded, or was stopped where a step had ended."""

    values: list[Any]
    plan: Plan
    state_dicts: dict[str, dict[str, Any]]  # of modules that could not be copied in place
    observed: RunBoard | None = None  # what was seen of it
    stopped: errors.LaunchInterrupted | None = None  # what a Stop that keeps the weights raises
    has_ended: bool = True  # whether the functions came to their ends


def conclude_call(
    plan: Plan, result: CallResult, receiver: WeightReceiver | None, endings: tuple[str, str]
) -> CallOutcome:
    """Copy the weights back and open the results, or raise what went wrong.

    A Stop says the first of the endings, and a failure the second one.
    """
    was_stopped, closing_lines = endings
    # Where a step had ended, all have handed over the weights of that one.
    is_of_one_step = all(m.returned is not None and not m.is_stopped for m in result.members)
    if result.interrupted and not is_of_one_step:
        lines = [was_stopped, *outcome.where_ranks_were(result)]
        raise outcome.with_report(errors.LaunchInterrupted("\n".join(lines)), result.observed)
    if not result.is_complete:
        raise outcome.call_error(result, plan, closing_lines=closing_lines)
    returned = [(member, member.returned) for member in result.members if member.returned]
    reports = [message.weight_report for _, message in returned if message.weight_report]
    lines = list(weights_lines(reports, "In the results: results.state_dicts[{!r}].").values())
    if receiver is not None:
        # It compares with the notebook's old values, which `apply` overwrites.
        lines += receiver.differing(reports).values()
        # A model with half of the new weights would be useless.
        with uninterrupted():
            receiver.apply(reports)
    values = [_open_result(member, message) for member, message in returned]
    lost = [value.reason for value in values if isinstance(value, UnsendableResult)]
    if lost:
        others = f", and so did {count_noun(len(lost) - 1, 'more rank')}" if len(lost) > 1 else ""
        lines.insert(
            0,
            f"{lost[0]}{others}. The results say so in its place. Return what can be pickled: "
            "numbers, tensors, accelerator.get_state_dict(model).",
        )
    level = frames.caller_level() if lines else 0
    for line in lines:
        warnings.warn(line, stacklevel=level)
    state_dicts = {path: state for report in reports for path, state in report.state_dicts.items()}
    stopped = None
    if result.interrupted:
        ranks = result.observed.ranks.values() if result.observed is not None else ()
        steps = max((facts.told.steps or 0 for facts in ranks), default=0)
        modules = receiver.modules if receiver is not None else []
        words = outcome.kept_words(None if result.has_ended else steps, modules)
        stopped = outcome.with_report(errors.LaunchInterrupted(words), result.observed)
    return CallOutcome(
        values=values,
        plan=plan,
        state_dicts=state_dicts,
        observed=result.observed,
        stopped=stopped,
        has_ended=result.has_ended,
    )


def weights_lines(reports: Sequence[WeightReport], remedy: str) -> dict[str, str]:
    """What is told of modules whose weights are not in the notebook as trained, by path."""
    lines = {}
    for report in reports:
        for path, reason in report.stranded.items():
            words = f"do not fit the notebook's module ({reason}), so it is as it was"
            lines[path] = f"The trained weights of {path} {words}. {remedy.format(path)}"
        for path, change in report.changes.items():
            words = f"were copied into the notebook's module, but not as they were: {change}"
            lines[path] = f"The trained weights of {path} {words}. {remedy.format(path)}"
    return lines
