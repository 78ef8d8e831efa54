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
from nbaccel.launch import preflight, worker
from nbaccel.launch.sharing import arena, blame, home, parcel
from nbaccel.launch.sharing.find import outermost, reached
from nbaccel.plan import Plan

_COPY_LIMIT_BYTES = 256 * 2**20
"""A pickle longer than this costs seconds per launch; a fork would cost nothing."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A call made ready to travel, or to be inherited."""

    call: worker.Call
    sharing: arena.Sharing
    """The modules that come home: those in the arguments, and those that the function reaches."""
    arenas: dict[str, arena.Arena]
    parcel: parcel.Parcel | None
    fd: int | None
    """The parcel's memory file, which the owner of this record closes."""
    sources: dict[str, list[str]]


def pack(
    plan: Plan, function: Callable[..., Any], args: tuple[Any, ...], sharing: arena.Sharing
) -> tuple[Packed, Plan]:
    """Make the call ready for the plan's start method, or for `fork` where `auto` must take it."""
    if plan.start_method == "fork":
        judge_fork()
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


def pack_for_the_living(
    function: Callable[..., Any], args: tuple[Any, ...], sharing: arena.Sharing
) -> Packed:
    """Make the call ready for workers that exist already: whatever it needs has to travel.

    Raises:
        NotSendable: If something cannot be pickled.
    """
    try:
        return _pickle(function, args, sharing, None)
    except Exception as error:  # pickling runs user code: anything may come out of it
        culprit = blame.find(function, args)
        raise NotSendable(
            f"{culprit} cannot be sent to the workers: {type(error).__name__}: {error}.\n"
            "They are processes of their own. Create it inside the function instead, or pass what "
            "it is made from.",
            path=culprit,
        ) from error


def _pickle(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sharing: arena.Sharing,
    limit_bytes: int | None,
) -> Packed:
    call, sender, prepared = _prepare(function, args, sharing, limit_bytes)
    strays = outermost(sender.modules, (m.module for m in sharing.modules))
    if strays:
        prepared.drop()  # it views the memory that is about to be left
        sharing = sharing.joined(_share_reached(_named(strays, function, args)))
        call, sender, prepared = _prepare(function, args, sharing, limit_bytes)
    packed, fd = prepared.write()
    return Packed(
        call=call,
        sharing=sharing,
        arenas=dict(sender.arenas),
        parcel=packed,
        fd=fd,
        sources=sender.sources,
    )


def _prepare(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sharing: arena.Sharing,
    limit_bytes: int | None,
) -> tuple[worker.Call, parcel.Sender, parcel.Prepared]:
    sender = parcel.Sender.create(sharing.stand_ins)
    for found in sharing.arenas():
        sender.key(found)
    call = _call(function, args, sharing, sender.keys)
    return call, sender, parcel.prepare(call, sender, limit_bytes=limit_bytes)


def _named(
    modules: Sequence[nn.Module], function: Callable[..., Any], args: tuple[Any, ...]
) -> list[tuple[str, nn.Module]]:
    """Modules that were found in a pickle, with the paths that a user would write."""
    paths = {id(module): path for path, module in reached(function, args)}
    taken: dict[str, nn.Module] = {}
    for module in modules:
        path = paths.get(id(module), type(module).__name__)
        while path in taken:  # a report must not mix two up
            path += "'"
        taken[path] = module
    return list(taken.items())


def _share_reached(modules: Sequence[tuple[str, nn.Module]]) -> arena.Sharing:
    """Share what can be shared; of the rest it is told that its weights stay in the workers."""
    sharing = arena.Sharing()
    for path, module in modules:
        try:
            sharing = sharing.joined(arena.share([(path, module)]))
        except ModelNotShareable as error:
            why = str(error).partition("\n")[2].strip()
            sys.stderr.write(
                f"nbaccel: each worker gets a copy of {path}, and its weights will not come back, "
                f"because it cannot be shared: {why}\n"
            )
    return sharing


def _inherit(function: Callable[..., Any], args: tuple[Any, ...], sharing: arena.Sharing) -> Packed:
    found = [module for _, module in reached(function, args)]
    strays = outermost(found, (m.module for m in sharing.modules))
    sharing = sharing.joined(_share_reached(_named(strays, function, args)))
    arenas = {f"arena{i}": found for i, found in enumerate(sharing.arenas())}
    keys = {id(found): key for key, found in arenas.items()}
    call = _call(function, args, sharing, keys)
    return Packed(call=call, sharing=sharing, arenas=arenas, parcel=None, fd=None, sources={})


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sharing: arena.Sharing,
    keys: dict[int, str],
) -> worker.Call:
    modules = zip(home.manifests(sharing, keys), (m.module for m in sharing.modules), strict=True)
    return worker.Call(function=function, args=args, modules=tuple(modules))


def judge_fork() -> None:
    """Say what speaks against a fork of this process.

    Raises:
        UnsafeFork: If its children would hang or crash.
    """
    found = preflight.hazards()
    fatal = [hazard for hazard in found if hazard.is_fatal]
    if fatal:
        raise UnsafeFork(
            "start_method='fork' cannot work in this notebook as it is now:\n"
            + "\n".join(f"  {hazard}" for hazard in fatal)
            + "\nUse start_method='template' (the default): its workers are forked from a clean "
            "process, so no restart of the notebook is needed."
        )
    for hazard in found:
        sys.stderr.write(f"nbaccel: {hazard}. start_method='template' is safe from that.\n")


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
