"""Damage as files really meet it: cut short, emptied, flipped, replaced, turned hostile."""

from __future__ import annotations

import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch


def truncate(path: Path) -> None:
    """Cut the last third off, as a full disk or a copy that broke off does."""
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path: Path) -> None:
    """Leave none of it, as a crash before the data reached the disk does."""
    os.truncate(path, 0)


def remove(path: Path) -> None:
    """Lose it."""
    path.unlink()


def replace_by_text(path: Path) -> None:
    """Put a file of something else in its place."""
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def flip_a_bit(path: Path, seed: int = 0) -> None:
    """Flip one bit of what it holds: of an archive's tensors where it has any."""
    begin, size = _content(path)
    place = begin + random.Random(seed).randrange(size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def _content(path: Path) -> tuple[int, int]:
    if not zipfile.is_zipfile(path):
        return path.stat().st_size // 2, path.stat().st_size // 2
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        tensors = [r for r in records if "/data/" in r.filename]
        record = max(tensors or records, key=lambda r: r.file_size)
        fields = record.header_offset + 26
        with path.open("rb") as file:
            file.seek(fields)
            name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        return record.header_offset + 30 + name + extra, record.file_size


class _Runs:
    """Unpickled without care, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def make_evil(path: Path) -> None:
    """A pickle that runs code: `<its name>-was-here` is what it makes."""
    torch.save({"state": _Runs(path.with_name(f"{path.name}-was-here"))}, path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "empty": empty,
    "missing": remove,
    "text": replace_by_text,
    "flipped": flip_a_bit,
    "evil": make_evil,
}


def damaged_copy(folder: Path, to: Path, name: str, damage: str) -> Path:
    """A copy of a checkpoint in which one file is damaged.

    Args:
        folder: The checkpoint.
        to: Where the copy is to be; what was there is replaced.
        name: Of the file, below the folder.
        damage: A key of `DAMAGES`.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    DAMAGES[damage](to / name)
    return to
