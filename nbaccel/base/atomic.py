"""Files that appear whole or not at all: written beside their place, then given their names.

The next process that writes there removes what a killed one has left: its lock, which the system
releases when its holder dies, tells it. Other such folders are reported to the notebook beforehand.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_INDEX_SUFFIX = ".index.json"
# The name is new, so only a process that is clearing up can hold the lock, and not for long.
_CLAIM_TIMEOUT_S = 10.0
_LONGEST_NAME_BYTES = 200


def partial_name(final_name: str) -> str:
    """What a file or folder is called while it is being written, a new name each time."""
    return f".{_short_name(final_name)}.partial-{secrets.token_hex(4)}"


def _short_name(final_name: str) -> str:
    """A name to which more can be added: a file system takes 255 bytes."""
    return os.fsdecode(os.fsencode(final_name)[:_LONGEST_NAME_BYTES])


@contextlib.contextmanager
def hold_claim(folder: Path) -> Iterator[None]:
    """A block in which no process clears a hidden folder away, unless this process dies in it."""
    # Imported here, because every package of nbaccel imports this module.
    from filelock import FileLock

    lock_path = folder.with_name(f"{folder.name}.lock")
    lock = FileLock(lock_path, timeout=_CLAIM_TIMEOUT_S)
    # A file system without locks: then nothing can be cleared away, and nothing is.
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
        # Another process may have removed the file between its creation and the lock.
        while lock.is_locked and not lock_path.exists():
            lock.release()
            lock.acquire()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # Before the release: a file without a lock on it counts as left behind.
            lock_path.unlink(missing_ok=True)
        lock.release()


def clear_leftovers(parent: Path, name_pattern: str) -> None:
    """Delete what killed processes have left; what is being written stays."""
    from filelock import FileLock

    leftover_pattern = re.compile(rf"(\.(?:{name_pattern})\.partial-[0-9a-f]+)(\.lock)?")
    leftover_names = {
        name_match[1]
        for path in parent.iterdir()
        if (name_match := leftover_pattern.fullmatch(path.name))
    }
    for leftover_name in sorted(leftover_names):
        path = parent / f"{leftover_name}.lock"
        # Raised where it is locked (being written), where there are no locks, or no permission.
        with contextlib.suppress(OSError, NotImplementedError), FileLock(path, timeout=0):
            shutil.rmtree(parent / leftover_name, ignore_errors=True)
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def partial_folder(parent: Path, base_name: str) -> Iterator[Path]:
    """A hidden folder beside the files to be, on the same disk, gone afterwards."""
    clear_leftovers(parent, re.escape(_short_name(base_name)))
    folder = parent / partial_name(base_name)
    with hold_claim(folder):
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def keep_access(new_path: Path, old_path: Path) -> None:
    """Give a file, or a folder with all in it, the permissions and group of what it replaces."""
    if new_path.is_dir():
        _take_access(new_path, old_path)
        for inner_path in list(new_path.iterdir()):
            keep_access(inner_path, old_path / inner_path.name)
    elif not _take_access(new_path, old_path):
        # As a new file's: safetensors makes its own readable by nobody else, whatever the umask.
        sample = new_path.with_name(partial_name("access"))
        sample.touch()
        new_path.chmod(stat.S_IMODE(sample.stat().st_mode))
        sample.unlink()


def _take_access(new_path: Path, old_path: Path) -> bool:
    """Take over permissions and group; False where there is nothing to take them from."""
    try:
        old = old_path.stat()
        new = new_path.stat()
    except FileNotFoundError:
        return False
    if old.st_gid != new.st_gid:
        # Of a group that this user is not in: then its own has them.
        with contextlib.suppress(PermissionError):
            os.chown(new_path, -1, old.st_gid)
    # After that: a change of the group takes bits away.
    new_path.chmod(stat.S_IMODE(old.st_mode))
    return True


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step: readers see the old one or the new one."""
    path = path.resolve()  # a link stays one, and what it leads to is replaced
    with partial_folder(path.parent, path.name) as folder:
        written_file = folder / path.name
        written_file.write_text(text, encoding="utf-8")
        keep_access(written_file, path)
        # Before the rename: after a power failure the name must not lead to a file without content.
        sync_path(written_file)
        written_file.replace(path)
    # The rename is on the disk only once the folder is.
    sync_path(path.parent)


def publish_weights(built_folder: Path, folder: Path, pattern: str) -> None:
    """Move files of weights to their places; stale ones of an earlier save are removed last."""
    sync_tree(built_folder)
    # The index last: it may only name files that are there.
    paths = sorted(built_folder.iterdir(), key=lambda p: (p.suffix == ".json", p.name))
    if len(paths) > 1:
        # Dying between two of them must not leave an index that names old and new ones.
        (folder / (pattern.format(suffix="") + _INDEX_SUFFIX)).unlink(missing_ok=True)
    for path in paths:
        keep_access(path, folder / path.name)
        path.replace(folder / path.name)
    _remove_stale(folder, pattern, {path.name for path in paths})
    sync_path(folder)


def _remove_stale(folder: Path, name_pattern: str, kept: set[str]) -> None:
    name_start, _, name_end = name_pattern.partition("{suffix}")
    index_pattern = re.escape(_INDEX_SUFFIX)
    stale_pattern = (
        rf"{re.escape(name_start)}(-\d{{5}}-of-\d{{5}})?{re.escape(name_end)}({index_pattern})?"
    )
    for path in folder.iterdir():
        if re.fullmatch(stale_pattern, path.name) and path.name not in kept:
            path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder with all it holds is on the disk."""
    for parent, _, names in os.walk(folder):  # it passes over what another process removes
        for path in (*(Path(parent, name) for name in names), Path(parent)):
            # Another process may just be giving a file its final name.
            with contextlib.suppress(FileNotFoundError):
                sync_path(path)


def free_bytes(folder: Path) -> int:
    """What is free on the disk that a folder is, or will be, on."""
    return shutil.disk_usage(nearest_folder(folder)).free


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    absolute = folder.expanduser().absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


@dataclass(frozen=True, slots=True)
class LeftoverFolders:
    """Folders of one process."""

    base: Path  # the folder that holds them
    pattern: str  # which of the folders below it, as `Path.glob` reads it
    whole: bool = False  # whether the base itself goes, too, once nothing is in it

    def remove(self) -> None:
        """Remove them, and the folders above them in which nothing is left."""
        for folder in self.base.glob(self.pattern):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in folder.parents:
                if parent == self.base:
                    break
                # Not empty: another process, or the user, has files there.
                with contextlib.suppress(OSError):
                    parent.rmdir()
        if self.whole:
            with contextlib.suppress(OSError):
                self.base.rmdir()


_LEFTOVER_LISTENERS: list[Callable[[LeftoverFolders, bool], None]] = []


def listen_for_leftovers(listener: Callable[[LeftoverFolders, bool], None]) -> None:
    """Report this process's folders to a listener from now on."""
    # Replaced, not added to: a live worker has a new reporter for each cell.
    _LEFTOVER_LISTENERS[:] = [listener]


def announce_leftover(leftover: LeftoverFolders, *, is_there: bool) -> None:
    """Say what will have to be removed if this process cannot do it."""
    for listener in _LEFTOVER_LISTENERS:
        listener(leftover, is_there)
