"""Weights in fp32 out of a checkpoint of ZeRO-0/1/2/3, without DeepSpeed and without its model.

A few MiB are in memory at a time. Names and the index of several files are those that Hugging
Face's libraries read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from nbaccel.base import atomic, weight_files
from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.base.quiet_bars import Bar
from nbaccel.base.units import parse_bytes
from nbaccel.deepspeed.weights.checkpoint_layout import read_layout
from nbaccel.deepspeed.weights.state_files import Weight, check_bits

_INDEX_FILE = weight_files.FILE_PATTERN.format(suffix="") + ".index.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file to write, with its weights in this order."""

    filename: str
    weights: tuple[Weight, ...]
    tied: Mapping[str, str]
    """Names of tied parameters → the name here of the tensor that is written for each."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(weight.nbytes for weight in self.weights)


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
    def of_shards(cls, folder: Path, shards: Sequence[Shard]) -> Written:
        """What is there once `shards` have been written to `folder`."""
        names = [shard.filename for shard in shards] + [_INDEX_FILE] * (len(shards) > 1)
        return cls(
            files=tuple(folder / name for name in names),
            num_tensors=sum(len(shard.weights) for shard in shards),
            num_bytes=sum(shard.nbytes for shard in shards),
            tied={name: target for shard in shards for name, target in shard.tied.items()},
        )


def plan(
    weights: Mapping[str, Weight], tied_names: Mapping[str, str], max_shard_size: int | str
) -> list[Shard]:
    """Distribute weights over files."""
    most_bytes = parse_bytes(max_shard_size)
    if not most_bytes:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r} leaves no room for a weight in a file. Use "
            '"5GB", for example.'
        )
    if not weights:
        raise ConfigError(
            f"There is no weight to write ({len(weights)} found): the checkpoint's parameters may "
            "all be frozen, and frozen ones are left out. Allow them."
        )
    for weight in weights.values():
        if weight_files.dtype_code(weight.dtype) is None:
            raise ConfigError(
                f"{weight.name} is of {weight.dtype}, for which a file of weights has no place. "
                "Convert it, or make it a buffer with persistent=False."
            )
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern=weight_files.FILE_PATTERN,
        max_shard_size=most_bytes,
    )
    shards = []
    for file_name, names in split.filename_to_tensors.items():
        # Large elements first, so that each tensor begins at a multiple of its element's size.
        ordered = sorted((weights[name] for name in names), key=lambda w: -w.dtype.itemsize)
        tied = {name: target for name, target in tied_names.items() if target in names}
        shards.append(Shard(file_name, tuple(ordered), tied))
    return shards


def write_shard(
    shard: Shard, folder: Path, read: Callable[[Weight], Iterator[torch.Tensor]]
) -> Iterator[int]:
    """Write one file; gives the bytes that each step has written."""
    path = folder / shard.filename
    head, _ = weight_files.head_of_file(
        ((w.name, weight_files.dtype_code(w.dtype), w.shape, w.nbytes) for w in shard.weights),
        # Hugging Face's libraries look there for the names of tied tensors.
        shard.tied,
    )
    with path.open("wb") as file:
        file.write(head)
        for weight in shard.weights:
            done_bytes = 0
            for chunk in read(weight):
                # As bytes, since numpy has no bfloat16.
                file.write(chunk.view(torch.uint8).numpy().data)
                done_bytes += chunk.nbytes
                yield chunk.nbytes
            if done_bytes != weight.nbytes:
                raise CheckpointFailed(
                    f"{weight.name} should have {weight.nbytes:,} bytes, and {done_bytes:,} were "
                    "read: a file changed while it was being read. Try again when no other "
                    "process writes there."
                )
    # Flushed before it gets its name: after a crash a name must not lead to a file without content.
    atomic.sync_path(path)


@contextlib.contextmanager
def publishing(folder: Path, shards: Sequence[Shard]) -> Iterator[Path]:
    """A place to write `shards` in: all of them appear in `folder` at the end, or none."""
    num_bytes = sum(shard.nbytes for shard in shards)
    with weight_files.publishing(folder, num_bytes) as temporary_folder:
        yield temporary_folder
        if len(shards) > 1:
            files = {weight.name: one.filename for one in shards for weight in one.weights}
            index = {
                "metadata": {"total_size": num_bytes},
                "weight_map": dict(sorted(files.items())),
            }
            text = json.dumps(index, indent=2) + "\n"
            (temporary_folder / _INDEX_FILE).write_text(text, encoding="utf-8")


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
    weights, tied = read_layout(
        checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters
    )
    shards = plan(weights, tied, max_shard_size)
    # Before anything is written: a separate pass, since checksums cover whole records.
    check_bits(weights.values())
    folder = Path(output_dir).expanduser()
    total_bytes = sum(shard.nbytes for shard in shards)
    bar = Bar(total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)
    with bar, publishing(folder, shards) as temporary_folder:
        for shard in shards:
            bar.set_description(shard.filename)
            for done_bytes in write_shard(shard, temporary_folder, Weight.chunks):
                bar.update(done_bytes)
    return Written.of_shards(folder, shards)


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
    weights, tied = read_layout(
        checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters
    )
    check_bits(weights.values())
    state_dict: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        flat = torch.empty(weight.numel, dtype=weight.dtype)
        begin = 0
        for chunk in weight.chunks():
            flat[begin : begin + chunk.numel()] = chunk
            begin += chunk.numel()
        state_dict[name] = flat.view(weight.shape)
    return state_dict | {name: state_dict[target] for name, target in tied.items()}
