"""Files of torch.distributed.checkpoint (DCP), looked at before torch unpickles what is in them.

``.metadata`` is a pickle that torch reads without care; here only the classes of DCP itself are
looked up. A ``.distcp`` file is a row of archives, as `torch.save` writes them: tensors, and
objects that torch would unpickle without care, too. Each is read as an archive with its checksums,
and objects as plain data.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from nbaccel.errors import CheckpointDamaged
from nbaccel.intact import Window, archive_problem

__all__ = ["read_metadata", "shard_problems"]

_METADATA = ".metadata"
_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}
_REMEDY = "Nothing has been loaded. Load another checkpoint, or copy it again."


class _OfDcp(pickle.Unpickler):
    """Looks up the classes that describe a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A class by its name.

        Raises:
            UnpicklingError: It is no description.
        """
        found = None
        if (module, name) in _NAMES:
            found = super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        elif module == _DESCRIPTIONS and "." not in name:
            found = super().find_class(module, name)
            if not isinstance(found, type) or found.__module__ != module:
                found = None
        if found is None:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which may run code")
        return found


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint says that it has, without running code.

    Args:
        folder: The checkpoint.

    Returns:
        Names, shapes, and where they lie.

    Raises:
        CheckpointDamaged: It is missing, damaged, or holds something else.
    """
    path = folder / _METADATA
    if not path.is_file():
        raise CheckpointDamaged(
            f"{path} is missing, which tells where the shards lie. The save was interrupted, or "
            f"not all was copied (its name begins with a dot). {_REMEDY}"
        )
    try:
        with path.open("rb") as file:
            found = _OfDcp(file).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointDamaged(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is truncated, damaged or "
            f"of something else. {_REMEDY}"
        ) from error
    if not isinstance(found, Metadata) or found.storage_data is None:
        raise CheckpointDamaged(f"{path} does not tell where shards lie. {_REMEDY}")
    return found


def shard_problems(folder: Path, metadata: Metadata, first: int, step: int) -> list[str]:
    """What is wrong with files of shards.

    Args:
        folder: The checkpoint.
        metadata: What it says that it has.
        first: Number of the first file to read.
        step: Every how manieth file, from there, is read: the others are read by other processes.

    Returns:
        A sentence for each file; none if all are whole.
    """
    entries = sorted(
        (str(info.relative_path), int(info.offset), int(info.length), index.fqn)
        for index, info in metadata.storage_data.items()
        if not info.transform_descriptors  # compressed by an extension of the user's
    )
    files = [(n, list(e)) for n, e in itertools.groupby(entries, key=lambda entry: entry[0])]
    plain = {
        name
        for name, kept in metadata.state_dict_metadata.items()
        if isinstance(kept, BytesStorageMetadata)
    }
    return [
        f"{folder / name} {problem}. {_REMEDY}"
        for name, own in files[first::step]
        if (problem := next(_problems(folder, name, own, plain), ""))
    ]


def _problems(
    folder: Path, name: str, entries: list[tuple[str, int, int, str]], plain: set[str]
) -> Iterator[str]:
    path = folder / name
    if Path(name).name != name:
        yield "is not in the folder: a checkpoint's files lie beside each other"
    elif not path.is_file():
        yield "is missing"
    else:
        size = path.stat().st_size
        end = max(offset + length for _, offset, length, _ in entries)
        if size < end:
            yield f"has {size:,} bytes, and its shards end at byte {end:,}: it is truncated"
            return
        with path.open("rb") as file:
            for _, offset, length, entry in entries:
                yield from _entry_problem(file, offset, length, entry if entry in plain else "")


def _entry_problem(file: IO[bytes], offset: int, length: int, plain: str) -> Iterator[str]:
    window = io.BufferedReader(Window(file, offset, length))
    problem = archive_problem(window, length)
    if problem:
        yield f"{problem} (at byte {offset:,})"
    elif plain:
        window.seek(0)
        try:
            torch.load(window, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            yield f"holds something else than plain data as {plain}, which may run code"
