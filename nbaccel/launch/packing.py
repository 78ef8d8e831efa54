"""Making a call ready to travel: pickled for the template's workers, or left for a fork to take.

Which of the two it is, is decided here where the plan says `auto`: the template, unless something
cannot be pickled or would cost too much to copy, and nothing speaks against a fork.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nbaccel.errors import ModelNotShareable, NotSendable, UnsafeFork
from nbaccel.plan import Plan
from nbaccel.transfer import arena, pickling, weight_sync
from nbaccel.transfer.find_modules import outermost_modules, reached_modules
from nbaccel.workers import fork_safety, worker

_COPY_LIMIT_BYTES = 256 * 2**20
"""A pickle longer than this costs seconds per launch; a fork would cost nothing."""


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A call made ready to travel, or to be inherited."""

    call: worker.WorkerCall
    sharing: arena.Sharing
    """The modules that come home: those in the arguments, and those that the function reaches."""
    arenas: dict[str, arena.Arena]
    parcel: pickling.PackedObject | None
    fd: int | None
    """The parcel's memory file, which the owner of this record closes."""
    sources: dict[str, list[str]]


def pack_call(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...], module_sharing: arena.Sharing
) -> tuple[PackedCall, Plan]:
    """Make the call ready for the plan's start method, or for `fork` where `auto` must take it."""
    if plan.start_method == "fork":
        judge_fork()
        return _inherited_call(function, args, module_sharing), plan
    asked_method = plan.config.start_method == "template"
    try:
        return _pickle_call(
            function, args, module_sharing, None if asked_method else _COPY_LIMIT_BYTES
        ), plan
    except pickling.TooCostly:
        fork_reason = (
            f"a copy of its data for each worker would take over {_COPY_LIMIT_BYTES >> 20} MiB"
        )
        found_modules = fork_safety.hazards()
        if found_modules:
            return _pickle_call(function, args, module_sharing, None), plan
    except Exception as pickling_error:  # pickling runs user code: anything may come out of it
        culprit_path = pickling.find_culprit(function, args)
        fork_reason = (
            f"{culprit_path} cannot be pickled ({type(pickling_error).__name__}: {pickling_error})"
        )
        found_modules = fork_safety.hazards()
        if asked_method or found_modules:
            raise NotSendable(
                _cannot_send(culprit_path, pickling_error, found_modules), path=culprit_path
            ) from pickling_error
    changed_sources = plan.with_start_method(
        "fork", f"{fork_reason}, and nothing speaks against a fork"
    )
    sys.stderr.write(f"nbaccel: workers are forked from the notebook, because {fork_reason}.\n")
    return _inherited_call(function, args, module_sharing), changed_sources


def pack_for_the_living(
    function: Callable[..., Any], args: tuple[Any, ...], module_sharing: arena.Sharing
) -> PackedCall:
    """Make the call ready for workers that exist already: whatever it needs has to travel.

    Raises:
        NotSendable: If something cannot be pickled.
    """
    try:
        return _pickle_call(function, args, module_sharing, None)
    except Exception as pickling_error:  # pickling runs user code: anything may come out of it
        culprit_path = pickling.find_culprit(function, args)
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
    worker_call, pickle_sender, prepared_object = _prepare_sharing(
        function, args, module_sharing, limit_bytes
    )
    stray_modules = outermost_modules(
        pickle_sender.modules, (shared_module.module for shared_module in module_sharing.modules)
    )
    if stray_modules:
        prepared_object.drop()  # it views the memory that is about to be left
        module_sharing = module_sharing.joined(
            _share_reached(_named_modules(stray_modules, function, args))
        )
        worker_call, pickle_sender, prepared_object = _prepare_sharing(
            function, args, module_sharing, limit_bytes
        )
    packed_object, parcel_fd = prepared_object.write()
    return PackedCall(
        call=worker_call,
        sharing=module_sharing,
        arenas=dict(pickle_sender.arenas),
        parcel=packed_object,
        fd=parcel_fd,
        sources=pickle_sender.sources,
    )


def _prepare_sharing(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    module_sharing: arena.Sharing,
    limit_bytes: int | None,
) -> tuple[worker.WorkerCall, pickling.Sender, pickling.PreparedObject]:
    pickle_sender = pickling.Sender.create(module_sharing.stand_ins)
    for found_modules in module_sharing.arenas():
        pickle_sender.key(found_modules)
    worker_call = _worker_call(function, args, module_sharing, pickle_sender.keys)
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
        id(reached_module): module_path
        for module_path, reached_module in reached_modules(function, args)
    }
    taken_paths: dict[str, nn.Module] = {}
    for reached_module in call_modules:
        module_path = module_paths.get(id(reached_module), type(reached_module).__name__)
        while module_path in taken_paths:  # a report must not mix two up
            module_path += "'"
        taken_paths[module_path] = reached_module
    return list(taken_paths.items())


def _share_reached(call_modules: Sequence[tuple[str, nn.Module]]) -> arena.Sharing:
    """Share what can be shared; of the rest it is told that its weights stay in the workers."""
    module_sharing = arena.Sharing()
    for module_path, reached_module in call_modules:
        try:
            module_sharing = module_sharing.joined(
                arena.share_modules([(module_path, reached_module)])
            )
        except ModelNotShareable as pickling_error:
            fork_reason = str(pickling_error).partition("\n")[2].strip()
            sys.stderr.write(
                f"nbaccel: each worker gets a copy of {module_path}, and its weights will not "
                "come back, "
                f"because it cannot be shared: {fork_reason}\n"
            )
    return module_sharing


def _inherited_call(
    function: Callable[..., Any], args: tuple[Any, ...], module_sharing: arena.Sharing
) -> PackedCall:
    found_modules = [reached_module for _, reached_module in reached_modules(function, args)]
    stray_modules = outermost_modules(
        found_modules, (shared_module.module for shared_module in module_sharing.modules)
    )
    module_sharing = module_sharing.joined(
        _share_reached(_named_modules(stray_modules, function, args))
    )
    call_arenas = {
        f"arena{position}": found_modules
        for position, found_modules in enumerate(module_sharing.arenas())
    }
    arena_keys = {id(found_modules): arena_key for arena_key, found_modules in call_arenas.items()}
    worker_call = _worker_call(function, args, module_sharing, arena_keys)
    return PackedCall(
        call=worker_call,
        sharing=module_sharing,
        arenas=call_arenas,
        parcel=None,
        fd=None,
        sources={},
    )


def _worker_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    module_sharing: arena.Sharing,
    arena_keys: dict[int, str],
) -> worker.WorkerCall:
    call_modules = zip(
        weight_sync.module_manifests(module_sharing, arena_keys),
        (shared_module.module for shared_module in module_sharing.modules),
        strict=True,
    )
    return worker.WorkerCall(function=function, args=args, modules=tuple(call_modules))


def judge_fork() -> None:
    """Say what speaks against a fork of this process.

    Raises:
        UnsafeFork: If its children would hang or crash.
    """
    found_modules = fork_safety.hazards()
    fatal_hazards = [fork_hazard for fork_hazard in found_modules if fork_hazard.is_fatal]
    if fatal_hazards:
        raise UnsafeFork(
            "start_method='fork' cannot work in this notebook as it is now:\n"
            + "\n".join(f"  {fork_hazard}" for fork_hazard in fatal_hazards)
            + "\nUse start_method='template' (the default): its workers are forked from a clean "
            "process, so no restart of the notebook is needed."
        )
    for fork_hazard in found_modules:
        sys.stderr.write(f"nbaccel: {fork_hazard}. start_method='template' is safe from that.\n")


def _cannot_send(
    culprit_path: str, pickling_error: Exception, found_modules: Sequence[fork_safety.Hazard]
) -> str:
    no_fork = (
        "A fork, which pickles nothing, is no way out here:\n"
        + "\n".join(f"  {fork_hazard}" for fork_hazard in found_modules)
        if found_modules
        else "Or use start_method='fork' (or 'auto'), which pickles nothing."
    )
    return (
        f"{culprit_path} cannot be sent to the workers: {type(pickling_error).__name__}: "
        f"{pickling_error}.\n"
        f"Create it inside the function instead, or pass what it is made from.\n{no_fork}"
    )
