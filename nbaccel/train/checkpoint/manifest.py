"""What a checkpoint's files were when it was saved: sizes, and checksums of those that have none.

`nbaccel_manifest.json` lies beside them. A checkpoint without it (Accelerate's, an older one) is
read all the same: its files then have only the checksums of their own formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from nbaccel.atomic import sync
from nbaccel.errors import CheckpointDamaged
from nbaccel.intact import Recorded, digest, is_archive
from nbaccel.train.checkpoint import layout

__all__ = ["read", "write"]


def write(folder: Path) -> None:
    """Note every file of a checkpoint; all processes have written theirs.

    Args:
        folder: The checkpoint.

    Raises:
        OSError: It cannot be written.
    """
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in sorted(_parts(folder))}
    path = folder / layout.MANIFEST
    path.write_text(json.dumps({"version": 1, "files": files}, indent=1) + "\n", encoding="utf-8")
    sync(path)
    sync(folder)


def read(folder: Path) -> Mapping[str, Recorded]:
    """What :func:`write` noted.

    Args:
        folder: The checkpoint.

    Returns:
        By path below the folder; empty where nothing was noted.

    Raises:
        CheckpointDamaged: It is no such file.
    """
    path = folder / layout.MANIFEST
    if not path.exists():
        return {}
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {
            str(name): Recorded(num_bytes=int(entry["bytes"]), xxh3=str(entry.get("xxh3", "")))
            for name, entry in files.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(
            f"{path} is truncated or damaged ({type(error).__name__}: {error}): it has the sizes "
            "and checksums of the checkpoint's other files. Load another checkpoint, or delete "
            "this file to load without them."
        ) from error


def _parts(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if layout.is_part(path.name):
            yield from (p for p in (path, *path.rglob("*")) if p.is_file())


def _entry(path: Path) -> dict[str, int | str]:
    size: dict[str, int | str] = {"bytes": path.stat().st_size}
    has_own = is_archive(path) or path.suffix == ".distcp"  # a row of archives
    return size if has_own else {**size, "xxh3": digest(path)}
