"""Weights in fp32 out of a checkpoint of ZeRO-0/1/2/3, without DeepSpeed and without its model.

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
from typing import IO, TYPE_CHECKING, Protocol

from huggingface_hub import split_state_dict_into_shards_factory

from nbaccel.base import atomic
from nbaccel.base.disk import free_bytes
from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.base.quiet_bars import Bar
from nbaccel.base.units import format_bytes, parse_bytes
from nbaccel.deepspeed.weights.checkpoint_layout import read_layout
from nbaccel.deepspeed.weights.fp32_reading import Reader, check_records
from nbaccel.deepspeed.weights.torch_archive import DTYPES, Weight

if TYPE_CHECKING:
    import torch


__all__ = [
    "Shard",
    "Written",
    "load_fp32_state_dict",
    "plan",
    "publishing",
    "write_shard",
    "zero_to_fp32",
]


FAMILY = "model{suffix}.safetensors"
_INDEX_FILE = FAMILY.format(suffix="") + ".index.json"
_ALIGNED_BYTES = 8


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a conversion.

    Attributes:
        files: The files with weights, and their index if there are several.
        num_tensors: How many weights.
        num_bytes: Bytes of all of them, without headers.
        tied: Names of tied parameters that are not in the files → the name of their tensor there.
    """

    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int
    tied: Mapping[str, str]

    @classmethod
    def of_shards(cls, output_folder: Path, file_shards: Sequence[Shard]) -> Written:
        """What is there once `file_shards` have been written to `output_folder`."""
        file_names = [file_shard.filename for file_shard in file_shards] + [_INDEX_FILE] * (
            len(file_shards) > 1
        )
        return cls(
            tuple(output_folder / file_name for file_name in file_names),
            sum(len(file_shard.weights) for file_shard in file_shards),
            sum(file_shard.nbytes for file_shard in file_shards),
            {
                weight_name: tied_target
                for file_shard in file_shards
                for weight_name, tied_target in file_shard.tied.items()
            },
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to write.

    Attributes:
        filename: Its name.
        weights: What it holds, in this order.
        tied: Names of tied parameters → the name here of the tensor that is written for each.
    """

    filename: str
    weights: tuple[Weight, ...]
    tied: Mapping[str, str]

    @property
    def header(self) -> bytes:
        """All that comes before the first tensor."""
        # Hugging Face's libraries look for "format", and for the names of tied tensors beside it.
        entries: dict[str, object] = {"__metadata__": {"format": "pt", **self.tied}}
        first_byte = 0
        for weight in self.weights:
            entries[weight.name] = {
                "dtype": DTYPES[weight.dtype][0],
                "shape": list(weight.shape),
                "data_offsets": [first_byte, first_byte + weight.nbytes],
            }
            first_byte += weight.nbytes
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        # Padded, so that the first tensor begins at a multiple of eight bytes and can be mapped.
        text += b" " * (-len(text) % _ALIGNED_BYTES)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(weight.nbytes for weight in self.weights)


def plan(
    stored_weights: Mapping[str, Weight], tied_names: Mapping[str, str], max_shard_size: int | str
) -> list[Shard]:
    """Distribute weights over files."""
    most_bytes = parse_bytes(max_shard_size)
    if not most_bytes:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r} leaves no room for a weight in a file. Use "
            '"5GB", for example.'
        )
    if not stored_weights:
        raise ConfigError(
            f"There is no weight to write ({len(stored_weights)} found): the checkpoint's "
            "parameters may all be frozen, and frozen ones are left out. Allow them."
        )
    shard_split = split_state_dict_into_shards_factory(
        dict(stored_weights),
        get_storage_size=lambda stored_weight: stored_weight.nbytes,
        filename_pattern=FAMILY,
        max_shard_size=most_bytes,
    )
    return [
        Shard(
            shard_name,
            tuple(
                sorted(
                    (stored_weights[weight_name] for weight_name in weight_names), key=_by_alignment
                )
            ),
            {
                weight_name: tied_target
                for weight_name, tied_target in tied_names.items()
                if tied_target in set(weight_names)
            },
        )
        for shard_name, weight_names in shard_split.filename_to_tensors.items()
    ]


def _by_alignment(weight: Weight) -> int:
    """Large elements first, so that each tensor begins at a multiple of its element's size."""
    return -DTYPES[weight.dtype][1]


class WeightSource(Protocol):
    """Gives the bytes of a weight."""

    def __call__(self, weight: Weight) -> Iterator[memoryview]:
        """The bytes of a weight, in order."""


def write_shard(shard: Shard, output_folder: Path, weight_source: WeightSource) -> Iterator[int]:
    """Write one file."""
    path = output_folder / shard.filename
    with path.open("wb") as file:
        file.write(shard.header)
        for stored_weight in shard.weights:
            yield from _write_weight(file, stored_weight, weight_source)
    # Flushed before it gets its name: after a crash a name must not lead to a file without content.
    atomic.sync_path(path)


def _write_weight(file: IO[bytes], weight: Weight, source: WeightSource) -> Iterator[int]:
    done_bytes = 0
    for chunk in source(weight):
        file.write(chunk)
        done_bytes += len(chunk)
        yield len(chunk)
    if done_bytes != weight.nbytes:
        raise CheckpointFailed(
            f"{weight.name} should have {weight.nbytes:,} bytes, and "
            f"{done_bytes:,} were read: a file changed while it was being read. Try again when "
            "no other process writes there."
        )


@contextlib.contextmanager
def publishing(output_folder: Path, shards: Iterable[Shard]) -> Iterator[Path]:
    """A place to write files in; they take their names together, when all have been written.

    Weights of an earlier save in the folder are replaced; other files stay. If something goes
    wrong, the folder is as it was.
    """
    # An iterable may be used only once, and is used three times here.
    shards = list(shards)
    made_folders = [
        made_folder
        for made_folder in (output_folder, *output_folder.parents)
        if not made_folder.exists()
    ]
    try:
        _make_folder(output_folder)
        # Earlier weights there do not count as room: they stay until the new ones are complete.
        _check_disk_room(output_folder, shards)
        with atomic.partial_folder(output_folder, "model") as temporary_folder:
            yield temporary_folder
            if len(shards) > 1:
                _write_index(shards, temporary_folder / _INDEX_FILE)
            atomic.publish_weights(temporary_folder, output_folder, FAMILY)
    except BaseException as error:  # an interrupt, too, leaves nothing behind
        for made_folder in made_folders:
            # Only empty ones: another process may have written there meanwhile.
            with contextlib.suppress(OSError):
                made_folder.rmdir()
        if isinstance(error, OSError):
            raise CheckpointFailed(
                f"Writing weights to {output_folder} failed: {error}. What was written is gone, "
                "and what was there before is as it was; "
                f"{format_bytes(free_bytes(output_folder))} are free. Remove the cause, or give a "
                "folder on another disk."
            ) from error
        raise


def _make_folder(output_folder: Path) -> None:
    if output_folder.exists() and not output_folder.is_dir():
        raise ConfigError(
            f"{output_folder} is a file: weights and their index need a folder. Give a folder's "
            "name."
        )
    output_folder.mkdir(parents=True, exist_ok=True)


def _check_disk_room(folder: Path, file_shards: list[Shard]) -> None:
    needed_bytes = sum(file_shard.nbytes for file_shard in file_shards)
    available_bytes = free_bytes(folder)
    if needed_bytes > available_bytes:
        raise ConfigError(
            f"{folder}: {format_bytes(needed_bytes)} of weights are to be written, and "
            f"its disk has {format_bytes(available_bytes)} free. Make room, or give a folder on "
            "another disk. (Weights of an earlier save there stay until the new ones are whole.)"
        )


def _write_index(file_shards: list[Shard], path: Path) -> None:
    file_by_weight = {
        stored_weight.name: file_shard.filename
        for file_shard in file_shards
        for stored_weight in file_shard.weights
    }
    content = {
        "metadata": {"total_size": sum(file_shard.nbytes for file_shard in file_shards)},
        "weight_map": dict(sorted(file_by_weight.items())),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def zero_to_fp32(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    *,
    tag: str | None = None,
    max_shard_size: int | str = "5GB",
    exclude_frozen_parameters: bool = False,
    progress: bool = False,
) -> Written:
    """Convert a checkpoint of DeepSpeed into fp32 weights that Hugging Face's libraries read.

    It is a stream: a few MiB are in memory at a time, whatever the model's size. Neither the model
    nor DeepSpeed is needed, and no code that might be in the checkpoint is run. What is to be read
    is compared with the checksums that `torch.save` wrote, before anything is written. All files
    appear together at the end, or none; weights of an earlier save in `output_dir` are replaced
    then, and its other files stay. Of tied parameters one is written, and the file tells.

    Args:
        checkpoint_dir: What ``save_checkpoint`` was given, or the folder of one tag in it.
        output_dir: Folder for ``model.safetensors``, or several files and an index; made if it
            does not exist.
        tag: Which save; None for the one that ``latest`` names.
        max_shard_size: Most bytes of one file, as a number or text (``"5GB"``).
        exclude_frozen_parameters: Leave out what was not trained.
        progress: Show a bar.

    Returns:
        What was written.

    Raises:
        CheckpointDamaged: Files are torn, or their bytes are not those that were saved.
        ConfigError: There is no such checkpoint, it cannot be converted, or the disk has too
            little room. Nothing has been written then.
        CheckpointFailed: A file could not be read or written; `output_dir` is as it was.
    """
    checkpoint_layout = read_layout(
        checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters
    )
    file_shards = plan(checkpoint_layout.weights, checkpoint_layout.tied, max_shard_size)
    # Before anything is written: a separate pass, since checksums cover whole records.
    check_records(checkpoint_layout.weights.values())
    output_folder = Path(output_dir).expanduser()
    total_bytes = sum(file_shard.nbytes for file_shard in file_shards)
    progress_bar = Bar(
        total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress
    )
    with (
        progress_bar,
        publishing(output_folder, file_shards) as temporary_folder,
        Reader() as weight_reader,
    ):
        for file_shard in file_shards:
            progress_bar.set_description(file_shard.filename)
            for done_bytes in write_shard(file_shard, temporary_folder, weight_reader.chunks):
                progress_bar.update(done_bytes)
    return Written.of_shards(output_folder, file_shards)


def load_fp32_state_dict(
    checkpoint_dir: str | Path, tag: str | None = None, *, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint of DeepSpeed, in memory.

    As DeepSpeed's ``get_fp32_state_dict_from_zero_checkpoint``, but with memory for the weights
    once, not twice; the model and DeepSpeed are not needed.

    Args:
        checkpoint_dir: What ``save_checkpoint`` was given, or the folder of one tag in it.
        tag: Which save; None for the one that ``latest`` names.
        exclude_frozen_parameters: Leave out what was not trained.

    Returns:
        Names and tensors on the CPU, for ``load_state_dict``. What is of floating point is fp32;
        tied parameters are one tensor.

    Raises:
        CheckpointDamaged: Files are torn, or their bytes are not those that were saved.
        ConfigError: There is no such checkpoint, or it cannot be converted.
        CheckpointFailed: A file could not be read.
    """
    # Here, because the command that writes files does without torch.
    import torch

    checkpoint_layout = read_layout(
        checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters
    )
    check_records(checkpoint_layout.weights.values())
    state_dict: dict[str, torch.Tensor] = {}
    with Reader() as weight_reader:
        for weight_name, weight in checkpoint_layout.weights.items():
            tensor = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype))
            # Read into the tensor's memory: bytes that are converted later would be there twice.
            target_bytes = tensor.reshape(-1).view(torch.uint8).numpy().data
            done_bytes = 0
            for chunk in weight_reader.chunks(weight):
                target_bytes[done_bytes : done_bytes + len(chunk)] = chunk
                done_bytes += len(chunk)
            state_dict[weight_name] = tensor
    return state_dict | {
        weight_name: state_dict[tied_target]
        for weight_name, tied_target in checkpoint_layout.tied.items()
    }
