"""Preparing a call for workers: pickled for those of the template, or inherited by a fork.

Where `auto` is asked for, this module decides: the template, unless a fork is safe and the template
is not ready, or something cannot be pickled or would cost too much to copy.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbaccel.base import frames
from nbaccel.base.errors import ModelNotShareable, NotSendable, UnsafeFork
from nbaccel.base.log import write_notice
from nbaccel.base.process_death import uninterrupted
from nbaccel.calls.changed_packages import sendable_changes
from nbaccel.config.capabilities import ENGINES
from nbaccel.plan import Plan, registry
from nbaccel.transfer import arena, pickling
from nbaccel.transfer.library_settings import library_settings
from nbaccel.transfer.object_walk import (
    find_culprit,
    find_modules,
    outermost_modules,
    reached_modules,
)
from nbaccel.transfer.package_changes import LateChange, PackageChange
from nbaccel.transfer.weight_receiver import WeightReceiver
from nbaccel.workers import fork_safety, messaging, template, worker, worker_output
from nbaccel.workers.template_starter import dispose

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

    @contextlib.contextmanager
    def staged(self, *, share_back: bool) -> Iterator[WeightReceiver]:
        """Files for the trained weights, as long as the block lasts."""
        with contextlib.ExitStack() as clean_up:
            # An interrupt before the callback is registered would leak the files.
            with uninterrupted():
                weight_receiver = WeightReceiver(self.sharing, self.arenas if share_back else {})
                # By the template process: freeing gigabytes would delay the notebook.
                clean_up.callback(weight_receiver.close, dispose)
            yield weight_receiver

    def task(self, weight_receiver: WeightReceiver) -> tuple[messaging.Job, list[int]]:
        """What each rank is given, with its descriptors in the order of `messaging.Job`."""
        staging_fds = weight_receiver.staging
        file_descriptors = [call_arena.fd for call_arena in self.arenas.values()]
        file_descriptors += [staging_fds[key] for key in self.arenas if key in staging_fds]
        return self.job, [*file_descriptors, *self.files()]

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
    module_sharing = arena.share_modules(find_modules(args))
    if plan.start_method == "fork":
        judge_fork()
        return _inherited_call(function, args, module_sharing), plan
    is_template_asked = plan.config.start_method == "template"
    try:
        return _pickle_call(
            # A requested template takes any amount of data; on `auto` a fork may be better.
            function,
            args,
            module_sharing,
            None if is_template_asked else _COPY_LIMIT_BYTES,
        ), plan
    except pickling.TooCostly:
        fork_reason = (
            f"a copy of its data for each worker would take over {_COPY_LIMIT_BYTES >> 20} MiB"
        )
        fork_hazards = fork_safety.hazards()
        # A slow start is better than workers that may hang.
        if fork_hazards:
            return _pickle_call(function, args, module_sharing, None), plan
    except Exception as pickling_error:  # pickling runs user code: it may raise anything
        culprit_path = find_culprit(function, args)
        fork_reason = (
            f"{culprit_path} cannot be pickled ({type(pickling_error).__name__}: {pickling_error})"
        )
        fork_hazards = fork_safety.hazards()
        if is_template_asked or fork_hazards:
            raise NotSendable(
                _cannot_send(culprit_path, pickling_error, fork_hazards), path=culprit_path
            ) from pickling_error
    fork_plan = plan.with_start_method(
        "fork", f"{fork_reason}, and preflight found nothing against a fork"
    )
    write_notice(f"nbaccel: workers are forked from the notebook, because {fork_reason}.\n")
    return _inherited_call(function, args, module_sharing), fork_plan


def pack_for_running_workers(function: Callable[..., Any], args: tuple[Any, ...]) -> PackedCall:
    """Make the call ready for workers that exist already: whatever it needs has to travel."""
    module_sharing = arena.share_modules(find_modules(args))
    try:
        packed_call = _pickle_call(function, args, module_sharing, None)
        for used_arena in packed_call.arenas.values():
            # Live workers keep it, and follow what is written to it.
            used_arena.leave_file()
        return packed_call
    except Exception as pickling_error:  # pickling runs user code: it may raise anything
        culprit_path = find_culprit(function, args)
        raise NotSendable(
            f"{culprit_path} cannot be sent to the workers: {type(pickling_error).__name__}: "
            f"{pickling_error}.\n"
            "They are processes of their own. Create it inside the function instead, or pass what "
            "it is made from.",
            path=culprit_path,
        ) from pickling_error


def _pickle_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    module_sharing: arena.Sharing,
    limit_bytes: int | None,
) -> PackedCall:
    package_changes = sendable_changes()
    worker_call, pickle_sender, prepared_object = _prepare_sharing(
        function, args, package_changes, module_sharing, limit_bytes
    )
    stray_modules = outermost_modules(
        pickle_sender.modules, (shared_module.module for shared_module in module_sharing.modules)
    )
    # Modules that only the pickle has shown, such as one in a global of the function.
    if stray_modules:
        # It views memory that the modules are about to leave.
        prepared_object.drop()
        module_sharing = module_sharing.joined(
            _share_reached(_named_modules(stray_modules, function, args))
        )
        worker_call, pickle_sender, prepared_object = _prepare_sharing(
            function, args, package_changes, module_sharing, limit_bytes
        )
    packed_object, payload_fd = prepared_object.write()
    # After pickling, which finds tensors in further arenas.
    for used_arena in pickle_sender.arenas.values():
        used_arena.sync()
    return PackedCall(
        call=worker_call,
        sharing=module_sharing,
        arenas=dict(pickle_sender.arenas),
        job=messaging.Job(
            arenas=_arena_sizes(pickle_sender.arenas),
            payload=packed_object,
            sources=pickle_sender.sources,
            random_states=worker.seeded_states(),
            logging=worker_output.as_configured(),
            settings=library_settings(),
        ),
        fd=payload_fd,
    )


def _arena_sizes(call_arenas: Mapping[str, arena.Arena]) -> tuple[tuple[str, int], ...]:
    return tuple((key, call_arena.nbytes) for key, call_arena in call_arenas.items())


def _prepare_sharing(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    package_changes: tuple[PackageChange | LateChange, ...],
    module_sharing: arena.Sharing,
    limit_bytes: int | None,
) -> tuple[worker.WorkerCall, pickling.Sender, pickling.PreparedObject]:
    pickle_sender = pickling.Sender(module_sharing.stand_ins)
    for shared_arena in module_sharing.arenas.values():
        # Named before pickling: an arena counts even if the pickle does not refer to it.
        pickle_sender.key(shared_arena)
    worker_call = worker.WorkerCall(
        function=function, args=args, modules=module_sharing.modules, changes=package_changes
    )
    return (
        worker_call,
        pickle_sender,
        pickling.prepare(worker_call, pickle_sender, limit_bytes=limit_bytes),
    )


def _named_modules(
    call_modules: Sequence[nn.Module], function: Callable[..., Any], args: tuple[Any, ...]
) -> list[tuple[str, nn.Module]]:
    """Modules that were found in a pickle, with the paths that a user would write."""
    module_paths = {
        id(module): module_path for module_path, module in reached_modules(function, args)
    }
    taken_paths: dict[str, nn.Module] = {}
    for module in call_modules:
        module_path = module_paths.get(id(module), type(module).__name__)
        # Reports name modules by path, and must not confuse two of them.
        while module_path in taken_paths:
            module_path += "'"
        taken_paths[module_path] = module
    return list(taken_paths.items())


def _share_reached(call_modules: Sequence[tuple[str, nn.Module]]) -> arena.Sharing:
    """Share what can be shared; print a message for modules whose weights stay in the workers."""
    module_sharing = arena.Sharing()
    for path, module in call_modules:
        try:
            module_sharing = module_sharing.joined(arena.share_modules([(path, module)]))
        except ModelNotShareable as sharing_error:
            reason = str(sharing_error).partition("\n")[2].strip()
            write_notice(
                f"nbaccel: each worker gets a copy of {path}, and its weights will not "
                f"come back, because it cannot be shared: {reason}\n"
            )
    return module_sharing


def _inherited_call(
    function: Callable[..., Any], args: tuple[Any, ...], module_sharing: arena.Sharing
) -> PackedCall:
    # Nothing is pickled here, so the modules have to be searched for.
    modules = [module for _, module in reached_modules(function, args)]
    stray_modules = outermost_modules(
        modules, (shared_module.module for shared_module in module_sharing.modules)
    )
    module_sharing = module_sharing.joined(
        _share_reached(_named_modules(stray_modules, function, args))
    )
    call_arenas = module_sharing.arenas
    for used_arena in call_arenas.values():
        used_arena.sync()
    worker_call = worker.WorkerCall(
        function=function, args=args, modules=module_sharing.modules, arenas=call_arenas
    )
    return PackedCall(
        call=worker_call,
        sharing=module_sharing,
        arenas=call_arenas,
        job=messaging.Job(
            arenas=_arena_sizes(call_arenas),
            payload=None,
            random_states=worker.seeded_states(),
            logging=worker_output.as_configured(),
        ),
    )


def judge_fork() -> None:
    """Report what makes a fork of this process unsafe."""
    hazards = fork_safety.hazards()
    fatal_hazards = [fork_hazard for fork_hazard in hazards if fork_hazard.is_fatal]
    if fatal_hazards:
        raise UnsafeFork(
            "start_method='fork' cannot work in this notebook as it is now:\n"
            + "\n".join(f"  {fork_hazard}" for fork_hazard in fatal_hazards)
            + "\nUse start_method='template' (the default): its workers are forked from a clean "
            "process, so no restart of the notebook is needed."
        )
    for fork_hazard in hazards:
        write_notice(f"nbaccel: {fork_hazard}. start_method='template' is safe from that.\n")


def _cannot_send(path: str, error: Exception, found_hazards: Sequence[fork_safety.Hazard]) -> str:
    no_fork = (
        "A fork, which pickles nothing, is no way out here:\n"
        + "\n".join(f"  {fork_hazard}" for fork_hazard in found_hazards)
        if found_hazards
        else "Or use start_method='fork' (or 'auto'), which pickles nothing."
    )
    return (
        f"{path} cannot be sent to the workers: {type(error).__name__}: "
        f"{error}.\n"
        f"Create it inside the function instead, or pass what it is made from.\n{no_fork}"
    )
