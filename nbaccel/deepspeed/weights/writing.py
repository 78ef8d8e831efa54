"""Writes safetensors as a stream: header first, then the bytes of one tensor after the other.

The format (https://github.com/huggingface/safetensors): length of the header as 8 bytes, little
end first; the header, JSON, filled up with blanks; all tensors without gaps. Names and the index
of several files are those that Hugging Face's libraries read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from huggingface_hub import split_state_dict_into_shards_factory

from nbaccel import atomic
from nbaccel.deepspeed.weights.stored import DTYPES, Weight
from nbaccel.disk import free_bytes
from nbaccel.errors import CheckpointFailed, ConfigError
from nbaccel.units import format_bytes, parse_bytes

__all__ = ["Shard", "Written", "plan", "publishing", "write_shard"]

FAMILY = "model{suffix}.safetensors"
_INDEX = FAMILY.format(suffix="") + ".index.json"
_ALIGNED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        files: The files with weights, and their index if there are several.
        num_tensors: How many weights.
        num_bytes: Bytes of all of them, without headers.
    """

    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int

    @classmethod
    def told(cls, folder: Path, shards: Sequence[Shard]) -> Written:
        """What is there once `shards` have been written to `folder`."""
        names = [shard.filename for shard in shards] + [_INDEX] * (len(shards) > 1)
        return cls(
            tuple(folder / name for name in names),
            sum(len(shard.weights) for shard in shards),
            sum(shard.nbytes for shard in shards),
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to be.

    Attributes:
        filename: Its name.
        weights: What it holds, in this order.
        tied: Names of parameters → the name here of the one that each is.
    """

    filename: str
    weights: tuple[Weight, ...]
    tied: Mapping[str, str]

    @property
    def header(self) -> bytes:
        """All that comes before the first tensor."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt", **self.tied}}
        begin = 0
        for weight in self.weights:
            entries[weight.name] = {
                "dtype": DTYPES[weight.dtype][0],
                "shape": list(weight.shape),
                "data_offsets": [begin, begin + weight.nbytes],
            }
            begin += weight.nbytes
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNED_BYTES)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(weight.nbytes for weight in self.weights)


def plan(
    weights: Mapping[str, Weight], tied: Mapping[str, str], max_shard_size: int | str
) -> list[Shard]:
    """Distribute weights over files.

    Args:
        weights: By name.
        tied: Names of parameters → the name in `weights` of the one that each is. They are not
            written twice; the header tells.
        max_shard_size: Most bytes of one file, as a number or ``"5GB"``; a single weight may be
            larger.

    Returns:
        The files.

    Raises:
        ConfigError: There is nothing to write, or the size is none.
    """
    most = parse_bytes(max_shard_size)
    if not most:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r} leaves no room for a weight in a file. Use "
            '"5GB", for example.'
        )
    if not weights:
        raise ConfigError(
            f"There is no weight to write ({len(weights)} found): the checkpoint's parameters may "
            "all be frozen, and frozen ones are left out. Allow them."
        )
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern=FAMILY,
        max_shard_size=most,
    )
    return [
        Shard(
            filename,
            tuple(sorted((weights[name] for name in names), key=_by_alignment)),
            {name: target for name, target in tied.items() if target in set(names)},
        )
        for filename, names in split.filename_to_tensors.items()
    ]


def _by_alignment(weight: Weight) -> int:
    """Large elements first: then each tensor begins at a multiple of its element's size."""
    return -DTYPES[weight.dtype][1]


class Source(Protocol):
    """Gives the bytes of a weight."""

    def __call__(self, weight: Weight) -> Iterator[memoryview]:
        """The bytes of a weight, in order."""


def write_shard(shard: Shard, folder: Path, source: Source) -> Iterator[int]:
    """Write one file.

    Args:
        shard: Which.
        folder: Where to.
        source: What gives the bytes.

    Yields:
        The number of bytes, after each piece that has been written.
    """
    path = folder / shard.filename
    with path.open("wb") as file:
        file.write(shard.header)
        for weight in shard.weights:
            yield from _write(file, weight, source)
    atomic.sync(path)


def _write(file: IO[bytes], weight: Weight, source: Source) -> Iterator[int]:
    done = 0
    for chunk in source(weight):
        file.write(chunk)
        done += len(chunk)
        yield len(chunk)
    if done != weight.nbytes:
        raise CheckpointFailed(
            f"{weight.name} should have {weight.nbytes:,} bytes, and {done:,} were read: a file "
            "changed while it was being read. Try again when nobody writes there."
        )


@contextlib.contextmanager
def publishing(folder: Path, shards: Iterable[Shard]) -> Iterator[Path]:
    """A place to write files in; they take their names together, when all have been written.

    Weights of an earlier save in the folder are replaced; other files stay. If something goes
    wrong, the folder is as it was.

    Args:
        folder: Where the files are to be; made if it does not exist.
        shards: What will be written; the index of several is written here.

    Yields:
        A folder to write them into.

    Raises:
        ConfigError: `folder` is a file, or its disk has too little room.
        CheckpointFailed: The disk was full, or failed.
    """
    shards = list(shards)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make(folder)
        _check_room(folder, shards)
        with atomic.workshop(folder, "model") as workshop:
            yield workshop
            if len(shards) > 1:
                _write_index(shards, workshop / _INDEX)
            atomic.publish(workshop, folder, FAMILY)
    except BaseException as error:  # an interrupt, too, leaves nothing behind
        for path in made:  # a folder that was not there is not there
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise CheckpointFailed(
                f"Writing weights to {folder} failed: {error}. What was written is gone, and what "
                f"was there before is as it was; {format_bytes(free_bytes(folder))} are free. Mend "
                "the cause, or give a folder on another disk."
            ) from error
        raise


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file: weights and their index need a folder. Give a folder's name."
        )
    folder.mkdir(parents=True, exist_ok=True)


def _check_room(folder: Path, shards: list[Shard]) -> None:
    needed = sum(shard.nbytes for shard in shards)
    free = free_bytes(folder)
    if needed > free:
        raise ConfigError(
            f"{folder}: {format_bytes(needed)} of weights are to be written, and its disk has "
            f"{format_bytes(free)} free. Make room, or give a folder on another disk. (Weights of "
            "an earlier save there stay until the new ones are whole.)"
        )


def _write_index(shards: list[Shard], path: Path) -> None:
    names = {weight.name: shard.filename for shard in shards for weight in shard.weights}
    index = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": dict(sorted(names.items())),
    }
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
