"""Files that appear whole or not at all: written beside their place, then given their names.

What a process that was killed has left, the next one that writes to that place clears away. A lock
(a file beside the hidden folder, with a lock of the system on it) tells it from what a process that
lives is writing: the system takes the lock off when its holder dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "claimed",
    "clear_leftovers",
    "partial_name",
    "publish",
    "sync",
    "sync_tree",
    "workshop",
    "write_text",
]

_INDEX = ".index.json"
_CLAIM_S = 10.0  # for a name that nobody else has; somebody may just be clearing up


def partial_name(name: str) -> str:
    """What a file or folder is called while it is being written, a new name each time."""
    return f".{name}.partial-{secrets.token_hex(4)}"


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A block in which nobody clears a hidden folder away, unless this process dies in it.

    Args:
        folder: Named by :func:`partial_name`; made in the block, and gone at its end.
    """
    from filelock import FileLock  # only here: all floors import this module

    path = folder.with_name(f"{folder.name}.lock")
    lock = FileLock(path, timeout=_CLAIM_S)
    # A file system without locks: then nobody can clear up, and nobody does.
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
        while lock.is_locked and not path.exists():  # cleared away before it was locked
            lock.release()
            lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        lock.release()


def clear_leftovers(parent: Path, names: str) -> None:
    """Delete what processes that were killed have left; what is being written stays.

    Args:
        parent: The folder.
        names: A regular expression for what they were writing.
    """
    from filelock import FileLock

    pattern = re.compile(rf"(\.(?:{names})\.partial-[0-9a-f]+)(\.lock)?")
    found = {match[1] for path in parent.iterdir() if (match := pattern.fullmatch(path.name))}
    for name in sorted(found):
        path = parent / f"{name}.lock"
        # Locked: it is being written. Or no locks here, or not ours to delete.
        with contextlib.suppress(OSError, NotImplementedError), FileLock(path, timeout=0):
            shutil.rmtree(parent / name, ignore_errors=True)
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def workshop(parent: Path, name: str) -> Iterator[Path]:
    """A hidden folder beside the files to be, on the same disk, gone afterwards.

    Those that killed processes have left under that name are cleared away first.

    Args:
        parent: The folder where they are to be.
        name: What they are called, for its own name.

    Yields:
        The folder.
    """
    clear_leftovers(parent, re.escape(name))
    folder = parent / partial_name(name)
    with claimed(folder):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step: readers see the old one or the new one.

    Args:
        path: The file.
        text: What is to be in it.

    Raises:
        OSError: It cannot be written; what was there is still there.
    """
    with workshop(path.parent, path.name) as folder:
        made = folder / path.name
        made.write_text(text, encoding="utf-8")
        sync(made)
        made.replace(path)
    sync(path.parent)


def publish(made: Path, folder: Path, family: str) -> None:
    """Give files of weights their places; those of an earlier save that do not belong go last.

    Args:
        made: Where they are, whole.
        folder: Where they are to be.
        family: How they are called: ``model{suffix}.safetensors``, where the suffix tells which of
            several a file is; an index has the name of a single file and ``.index.json``.
    """
    sync_tree(made)
    # The index last: it may only name files that are there.
    paths = sorted(made.iterdir(), key=lambda p: (p.suffix == ".json", p.name))
    if len(paths) > 1:
        # Dying between two of them must not leave an index that names old and new ones.
        (folder / (family.format(suffix="") + _INDEX)).unlink(missing_ok=True)
    for path in paths:
        path.replace(folder / path.name)
    _remove_stale(folder, family, {path.name for path in paths})
    sync(folder)


def _remove_stale(folder: Path, family: str, keep: set[str]) -> None:
    start, _, end = family.partition("{suffix}")
    index = re.escape(_INDEX)
    pattern = rf"{re.escape(start)}(-\d{{5}}-of-\d{{5}})?{re.escape(end)}({index})?"
    for path in folder.iterdir():
        if re.fullmatch(pattern, path.name) and path.name not in keep:
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until a folder with all it holds is on the disk."""
    for root, _, names in os.walk(folder):
        for path in [*(Path(root, name) for name in names), Path(root)]:
            # Another process may just be giving a file its final name.
            with contextlib.suppress(FileNotFoundError):
                sync(path)
