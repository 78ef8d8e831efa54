"""A checkpoint appears whole or not at all, whenever the processes die and whichever fails.

    process 0                       the others
    ---------                       ----------
    clears leftovers away
    makes .ckpt.partial-3f9a   ──►  learn the name
    writes its files                write their files
    waits for the disk              wait for the disk
        ◄── everybody says: written, or what went wrong ──►
    notes sizes and checksums
    ckpt → .ckpt.old  (if there)
    .ckpt.partial-3f9a → ckpt
    .ckpt.old → gone                go on when process 0 is through

Between the two renames there is no ``ckpt``, but ``.ckpt.old`` is whole: :func:`standing` finds it,
and the next save puts it back. A user's own files in ``ckpt`` move over into the new one.

Where nodes do not share a file system, process 0 of each node does on its disk what process 0
does; whether they share one is seen by looking for the partial folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nbaccel.abc.place import Place
from nbaccel.atomic import claimed, clear_leftovers, sync, sync_tree
from nbaccel.errors import (
    CheckpointFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    UserMistake,
)
from nbaccel.train.checkpoint import layout, manifest
from nbaccel.train.collectives import Collectives
from nbaccel.units import format_bytes

__all__ = ["all_fine", "discard", "new_checkpoint", "standing"]

_TOGETHER = (CollectiveMismatch, CollectiveTimeout)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """The names that one save works with.

    Attributes:
        target: The folder to be.
        partial: Where it is built.
        old: Where a folder of that name waits until the new one is in place.
    """

    target: Path
    partial: Path
    old: Path


@contextlib.contextmanager
def new_checkpoint(
    target: Path, place: Place, collectives: Collectives, *, series: bool = False
) -> Iterator[tuple[Path, Path]]:
    """Build a folder together; it takes its name only if every process got through.

    Args:
        target: The folder to be; that of process 0 counts.
        place: This process.
        collectives: All processes; entering and leaving are collectives.
        series: Whether `target` is one of ``checkpoint_0``, ``checkpoint_1``, …: leftovers of all
            of them are cleared away.

    Yields:
        The folder to write into, and the one it will become.

    Raises:
        ConfigError: There can be no folder of that name, or replacing it would do harm.
        CheckpointFailed: On every process, if any failed; what was there before is as it was.
    """
    site = _agree_on_names(target, collectives)
    with contextlib.ExitStack() as held:
        owns = _break_ground(site, place, collectives, series, held)
        try:
            error = None
            try:
                yield site.partial, site.target
                sync_tree(site.partial)
            except _TOGETHER:
                raise  # nobody is left to tell
            except Exception as caught:  # whatever it is, the others must hear of it
                error = caught
            _all_written(site, collectives, error)
            _note_contents(site, owns, collectives)
        except BaseException:  # an interrupt, too, leaves nothing behind
            if owns:
                shutil.rmtree(site.partial, ignore_errors=True)
            raise
        _publish_together(site, owns, collectives)


def _agree_on_names(target: Path, collectives: Collectives) -> _Site:
    mine = (str(target.expanduser()), secrets.token_hex(4))
    name, token = collectives.broadcast_object(mine)
    target = Path(name)
    if target.is_symlink() or target.name in {"", ".."}:
        target = target.resolve()  # what the link leads to is replaced, not the link
    return _Site(
        target=target,
        partial=target.with_name(f".{target.name}.partial-{token}"),
        old=_old(target),
    )


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _break_ground(
    site: _Site,
    place: Place,
    collectives: Collectives,
    series: bool,
    held: contextlib.ExitStack,
) -> bool:
    """Make the partial folder, once per file system; returns whether this process did.

    Its claim on the folder is given to `held`.
    """
    what = f"save_state({str(site.target)!r})"
    owns = place.is_main
    with all_fine(collectives, what):
        if owns:
            _make(site, series, held)
    if place.world_size == place.local_world_size:
        return owns
    with all_fine(collectives, what):
        if place.is_local_main and not site.partial.exists():
            owns = True
            _make(site, series, held)
    return owns


def _make(site: _Site, series: bool, held: contextlib.ExitStack) -> None:
    _check(site.target)
    site.target.parent.mkdir(parents=True, exist_ok=True)
    _clear_up(site, series)
    held.enter_context(claimed(site.partial))
    site.partial.mkdir()


def _check(target: Path) -> None:
    given = str(target)
    if target.exists() and not target.is_dir():
        raise ConfigError(
            f"save_state({given!r}) is a file: a checkpoint is a folder. Give another name."
        )
    if target.exists() and (target.is_mount() or target.samefile(Path.cwd())):
        kind = "a mount point" if target.is_mount() else "the working folder"
        raise ConfigError(
            f"save_state({given!r}) is {kind}, which cannot be replaced in one step by a new "
            f"checkpoint. Give a folder in it: {str(target / 'checkpoint')!r}."
        )


def _clear_up(site: _Site, series: bool) -> None:
    """Finish or undo what an earlier save, which was killed, left half done."""
    if site.old.exists():
        if site.target.exists():
            _retire(site.old, site.target)
        else:
            site.old.rename(site.target)
    stem = r"checkpoint_\d+" if series else re.escape(site.target.name)
    clear_leftovers(site.target.parent, stem)


# ------------------------------------------------------------------------- the step


def _note_contents(site: _Site, owns: bool, collectives: Collectives) -> None:
    error = None
    try:
        if owns:
            manifest.write(site.partial)
    except Exception as caught:  # whatever it is, the others must hear of it
        error = caught
    _all_written(site, collectives, error)


def _publish_together(site: _Site, owns: bool, collectives: Collectives) -> None:
    with all_fine(collectives, f"save_state({str(site.target)!r})"):
        if owns:
            _publish(site)


def _publish(site: _Site) -> None:
    replaces = site.target.exists()
    if replaces:
        site.target.rename(site.old)
    try:
        site.partial.rename(site.target)
    except OSError:
        if replaces:
            site.old.rename(site.target)
        shutil.rmtree(site.partial, ignore_errors=True)
        raise
    sync(site.target.parent)
    if replaces:
        _retire(site.old, site.target)


def _retire(old: Path, new: Path) -> None:
    """Let the user's own files move over, then delete the old checkpoint."""
    for path in old.iterdir():
        if not layout.is_part(path.name) and not os.path.lexists(new / path.name):
            path.rename(new / path.name)
    discard(old, new.name)


def discard(folder: Path, name: str = "") -> None:
    """Delete a checkpoint, whose name is gone before its first file is.

    Args:
        folder: The checkpoint; fine if another process is quicker.
        name: Whose leftover it is if this process dies now; by default the folder's own.
    """
    rubbish = folder.with_name(f".{name or folder.name}.partial-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(rubbish)
        shutil.rmtree(rubbish, ignore_errors=True)


def standing(folder: Path) -> Path:
    """Where the checkpoint of a name is: under it, or beside it if a save was killed in its step.

    Args:
        folder: The checkpoint's name.

    Returns:
        The folder to read.

    Raises:
        ConfigError: There is none.
    """
    folder = folder.expanduser()
    if folder.is_dir():
        return folder
    real = folder.resolve() if folder.is_symlink() else folder
    if not folder.exists() and _old(real).is_dir():
        return _old(real)
    found = "is a file" if folder.exists() else "does not exist"
    beside = sorted(p.name for p in folder.parent.glob("[!.]*") if p.is_dir())
    there = f" There are: {', '.join(beside[:8])}." if beside else ""
    raise ConfigError(
        f"load_state({str(folder)!r}): that folder {found}, so there is nothing to go on from."
        f"{there} Give the folder that save_state returned."
    )


# ------------------------------------------------------------------------- all or nobody


@contextlib.contextmanager
def all_fine(collectives: Collectives, what: str) -> Iterator[None]:
    """A block that every process runs; if it fails on one, it fails on all.

    Args:
        collectives: All processes.
        what: What was asked for, to begin a message with.

    Raises:
        CheckpointFailed: Here it went well, and elsewhere not.
    """
    error = None
    try:
        yield
    except _TOGETHER:
        raise
    except Exception as caught:  # it is raised again once the others know
        error = caught
    failures = _failures(collectives, what, error)
    if error is not None:
        raise error
    if failures:
        raise CheckpointFailed(f"{what} failed. {failures} No process goes on with it.")


def _all_written(site: _Site, collectives: Collectives, error: Exception | None) -> None:
    failures = _failures(collectives, "save_state", error)
    if isinstance(error, UserMistake):
        raise error
    if failures:
        free = format_bytes(shutil.disk_usage(site.target.parent).free)
        raise CheckpointFailed(
            f"save_state({str(site.target)!r}) failed. {failures} The new checkpoint is gone, and "
            f"what had this name before is as it was. {free} are free there. Mend the cause, or "
            "give a folder on another disk, and save again."
        ) from error


def _failures(collectives: Collectives, what: str, error: Exception | None) -> str:
    """What went wrong on which process, in one text, the same on all; empty if nothing did."""
    mine = None if error is None else f"{type(error).__name__}: {error}"
    found = collectives.answers(what, mine)
    return " ".join(f"Process {rank}: {text}." for rank, text in enumerate(found) if text)
