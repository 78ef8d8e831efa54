"""Files that appear whole or not at all: written beside their place, then given their names."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["publish", "sync", "sync_tree", "workshop", "write_text"]

_INDEX = ".index.json"


@contextlib.contextmanager
def workshop(parent: Path, name: str) -> Iterator[Path]:
    """A hidden folder beside the files to be, on the same disk, gone afterwards.

    Args:
        parent: The folder where they are to be.
        name: What they are called, for its own name.

    Yields:
        The folder.
    """
    folder = parent / f".{name}.partial-{secrets.token_hex(4)}"
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
