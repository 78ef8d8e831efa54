"""Preparing a call for workers: pickled for those of the template, or inherited by a fork.

Where `auto` is asked for, this module decides: the template, unless a fork is safe and the template
is not ready, or something cannot be pickled or would cost too much to copy.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbaccel.base import frames
from nbaccel.base.errors import ModelNotShareable, NotSendable, UnsafeFork
from nbaccel.base.log import write_notice
from nbaccel.base.processes import uninterrupted
from nbaccel.calls.changed_packages import sendable_changes
from nbaccel.config.capabilities import ENGINES
from nbaccel.plan import Plan, registry
from nbaccel.transfer import arena, pickling
from nbaccel.transfer.library_settings import library_settings, logging_only, seeded_states
from nbaccel.transfer.object_walk import (
    find_culprit,
    find_modules,
    outermost_modules,
    reached_modules,
)
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.workers import fork_safety, messaging, template, worker
from nbaccel.workers.starters import dispose

_COPY_LIMIT_BYTES = 256 * 2**20
"""A pickle longer than this costs seconds per launch; a fork would cost nothing."""

_SEARCH_LIMIT_BYTES = 8 * 2**20
"""A longer pickle is not searched for names."""


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A call that is ready to be sent, or to be inherited."""

    call: worker.WorkerCall
    sharing: arena.Sharing
    """The modules that are copied back: those in the arguments and those the function reaches."""
    arenas: dict[str, arena.Arena]
    job: messaging.Job
    fd: int | None = None
    """The payload's memory file."""

    def files(self) -> list[int]:
        """Descriptors that the owner of this record closes."""
        return [] if self.fd is None else [self.fd]

    @property
    def is_inherited(self) -> bool:
        """Whether workers have it because they are forked from the notebook."""
        return self.job.payload is None

    def staged(self, *, share_back: bool) -> contextlib.AbstractContextManager[WeightReceiver]:
        """Files for the trained weights, as long as the block lasts."""
        return staged([self.sharing], self.arenas if share_back else {})

    def task(self, receiver: WeightReceiver) -> tuple[messaging.Job, list[int]]:
        """What each rank is given, with its descriptors in the order of `messaging.Job`."""
        staging_fds = receiver.staging
        fds = [call_arena.fd for call_arena in self.arenas.values()]
        fds += [staging_fds[key] for key in self.arenas if key in staging_fds]
        return self.job, [*fds, *self.files()]

    def mentions(self, package: str) -> bool:
        """Whether the call may use a package: its name is in the pickle.

        Functions of the notebook travel with their code, so names that they import are there, too.
        """
        if self.job.payload is None or self.fd is None:
            return False
        first_byte, end_byte = self.job.payload.pickle
        if end_byte - first_byte > _SEARCH_LIMIT_BYTES:
            return True
        with mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ) as payload_bytes:
            return payload_bytes.find(package.encode(), first_byte, end_byte) >= 0


@contextlib.contextmanager
def staged(
    sharings: Iterable[arena.Sharing], arenas: Mapping[str, arena.Arena]
) -> Iterator[WeightReceiver]:
    """Staging files for these arenas, as long as the block lasts."""
    sharing = arena.Sharing.joined(sharings)
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
        or registry.known_device(plan.device).own_process
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


def pack_call(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[PackedCall, Plan]:
    """Make the call ready for the plan's start method, or for `fork` where `auto` must take it."""
    sharing = arena.share_modules(find_modules(args))
    if plan.start_method == "fork":
        judge_fork()
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
        culprit = find_culprit(function, args)
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
    sharing = arena.share_modules(find_modules(args))
    try:
        packed = _pickled_call(function, args, sharing, None)
        for used in packed.arenas.values():
            # Live workers keep it, and follow what is written to it.
            used.leave_file()
    except Exception as error:  # pickling runs user code: it may raise anything
        culprit = find_culprit(function, args)
        raise _not_sendable(culprit, error, "They are processes of their own.") from error
    return packed


def _pickled_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sharing: arena.Sharing,
    limit_bytes: int | None,
) -> PackedCall:
    changes = sendable_changes()

    def prepare(
        sharing: arena.Sharing,
    ) -> tuple[worker.WorkerCall, pickling.Sender, pickling.PreparedObject]:
        sender = pickling.Sender(sharing.stand_ins)
        for shared in sharing.arenas.values():
            # Named before pickling: an arena counts even if the pickle does not refer to it.
            sender.key(shared)
        call = worker.WorkerCall(
            function=function, args=args, modules=sharing.modules, changes=changes
        )
        return call, sender, pickling.prepare(call, sender, limit_bytes=limit_bytes)

    call, sender, prepared = prepare(sharing)
    # Modules that only the pickle has shown, such as one in a global of the function.
    if strays := _strays(sender.modules, sharing):
        # It views memory that the modules are about to leave.
        prepared.drop()
        sharing = _with_strays(sharing, strays, function, args)
        call, sender, prepared = prepare(sharing)
    payload, fd = prepared.write()
    # After pickling, which finds tensors in further arenas.
    for used in sender.arenas.values():
        used.sync()
    return PackedCall(
        call=call,
        sharing=sharing,
        arenas=dict(sender.arenas),
        job=messaging.Job(
            arenas=_sizes(sender.arenas),
            payload=payload,
            sources=sender.sources,
            random_states=seeded_states(),
            settings=library_settings(),
        ),
        fd=fd,
    )


def _inherited_call(
    function: Callable[..., Any], args: tuple[Any, ...], sharing: arena.Sharing
) -> PackedCall:
    # Nothing is pickled here, so the modules have to be searched for.
    modules = [module for _, module in reached_modules(function, args)]
    sharing = _with_strays(sharing, _strays(modules, sharing), function, args)
    arenas = sharing.arenas
    for shared in arenas.values():
        shared.sync()
    return PackedCall(
        call=worker.WorkerCall(
            function=function, args=args, modules=sharing.modules, arenas=arenas
        ),
        sharing=sharing,
        arenas=arenas,
        job=messaging.Job(
            arenas=_sizes(arenas),
            payload=None,
            random_states=seeded_states(),
            settings=logging_only(),
        ),
    )


def _sizes(arenas: Mapping[str, arena.Arena]) -> tuple[tuple[str, int], ...]:
    return tuple((key, found.nbytes) for key, found in arenas.items())


def _strays(modules: Sequence[nn.Module], sharing: arena.Sharing) -> Sequence[nn.Module]:
    """Those of these modules that are not shared yet."""
    return outermost_modules(modules, (shared.module for shared in sharing.modules))


def _with_strays(
    sharing: arena.Sharing,
    strays: Sequence[nn.Module],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> arena.Sharing:
    """Share what can be shared; print a message for modules whose weights stay in the workers."""
    paths = {id(module): path for path, module in reached_modules(function, args)}
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
        except ModelNotShareable as error:
            reason = str(error).partition("\n")[2].strip()
            write_notice(
                f"nbaccel: each worker gets a copy of {path}, and its weights will not "
                f"come back, because it cannot be shared: {reason}\n"
            )
    return sharing


def judge_fork() -> None:
    """Report what makes a fork of this process unsafe."""
    hazards = fork_safety.hazards()
    fatal = [hazard for hazard in hazards if hazard.is_fatal]
    if fatal:
        raise UnsafeFork(
            "start_method='fork' cannot work in this notebook as it is now:\n"
            + "\n".join(f"  {hazard}" for hazard in fatal)
            + "\nUse start_method='template' (the default): its workers are forked from a clean "
            "process, so no restart of the notebook is needed."
        )
    for hazard in hazards:
        write_notice(f"nbaccel: {hazard}. start_method='template' is safe from that.\n")


def _not_sendable(path: str, error: Exception, more: str) -> NotSendable:
    return NotSendable(
        f"{path} cannot be sent to the workers: {type(error).__name__}: {error}.\n"
        f"Create it inside the function instead, or pass what it is made from.\n{more}",
        path=path,
    )
