"""Weights in fp32 out of a checkpoint of ZeRO-0/1/2/3, without DeepSpeed and without its model.

The format (https://github.com/huggingface/safetensors): length of the header as 8 bytes, little
end first; the header, JSON, filled up with blanks; all tensors without gaps. The library writes
what is in memory, and here a few MiB are. Names and the index of several files are those that
Hugging Face's libraries read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from nbaccel.base import atomic
from nbaccel.base.disk import free_bytes
from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.base.quiet_bars import Bar
from nbaccel.base.units import format_bytes, parse_bytes
from nbaccel.deepspeed.weights.checkpoint_layout import read_layout
from nbaccel.deepspeed.weights.state_files import Weight, check_bits

_FAMILY = "model{suffix}.safetensors"
_INDEX_FILE = _FAMILY.format(suffix="") + ".index.json"
_ALIGNED_BYTES = 8
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""A type's code in safetensors."""


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
        end = 0
        for weight in self.weights:
            begin, end = end, end + weight.nbytes
            entries[weight.name] = {
                "dtype": DTYPE_CODES[weight.dtype],
                "shape": list(weight.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        # Padded, so that the first tensor begins at a multiple of eight bytes and can be mapped.
        text += b" " * (-len(text) % _ALIGNED_BYTES)
        return len(text).to_bytes(8, "little") + text

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
        tied: dict[str, str] = {}
        for shard in shards:
            tied |= shard.tied
        num_tensors = sum(len(shard.weights) for shard in shards)
        num_bytes = sum(shard.nbytes for shard in shards)
        return cls(tuple(folder / name for name in names), num_tensors, num_bytes, tied)


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
        if weight.dtype not in DTYPE_CODES:
            raise ConfigError(
                f"{weight.name} is of {weight.dtype}, for which a file of weights has no place. "
                "Convert it, or make it a buffer with persistent=False."
            )
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern=_FAMILY,
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
    with path.open("wb") as file:
        file.write(shard.header)
        for weight in shard.weights:
            done_bytes = 0
            for chunk in read(weight):
                file.write(as_bytes(chunk))
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


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a tensor of one dimension."""
    # As bytes, since numpy has no bfloat16.
    return flat.view(torch.uint8).numpy().data


@contextlib.contextmanager
def publishing(folder: Path, shards: Sequence[Shard]) -> Iterator[Path]:
    """A place to write files in; they take their names together, when all have been written.

    Weights of an earlier save in the folder are replaced; other files stay. If something goes
    wrong, the folder is as it was.
    """
    made_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _make_folder(folder, sum(shard.nbytes for shard in shards))
        with atomic.partial_folder(folder, "model") as temporary_folder:
            yield temporary_folder
            if len(shards) > 1:
                _write_index(shards, temporary_folder / _INDEX_FILE)
            atomic.publish_weights(temporary_folder, folder, _FAMILY)
    except BaseException as error:  # an interrupt, too, leaves nothing behind
        for made_folder in made_folders:
            # Only empty ones: another process may have written there meanwhile.
            with contextlib.suppress(OSError):
                made_folder.rmdir()
        if isinstance(error, OSError):
            raise CheckpointFailed(
                f"Writing weights to {folder} failed: {error}. What was written is gone, and what "
                f"was there before is as it was; {format_bytes(free_bytes(folder))} are free. "
                "Remove the cause, or give a folder on another disk."
            ) from error
        raise


def _make_folder(folder: Path, needed_bytes: int) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file: weights and their index need a folder. Give a folder's name."
        )
    folder.mkdir(parents=True, exist_ok=True)
    # Earlier weights there do not count as room: they stay until the new ones are complete.
    available_bytes = free_bytes(folder)
    if needed_bytes > available_bytes:
        raise ConfigError(
            f"{folder}: {format_bytes(needed_bytes)} of weights are to be written, and its disk "
            f"has {format_bytes(available_bytes)} free. Make room, or give a folder on another "
            "disk. (Weights of an earlier save there stay until the new ones are whole.)"
        )


def _write_index(shards: Sequence[Shard], path: Path) -> None:
    content = {
        "metadata": {"total_size": sum(shard.nbytes for shard in shards)},
        "weight_map": dict(
            sorted((weight.name, shard.filename) for shard in shards for weight in shard.weights)
        ),
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
    layout = read_layout(checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters)
    shards = plan(layout.weights, layout.tied, max_shard_size)
    # Before anything is written: a separate pass, since checksums cover whole records.
    check_bits(layout.weights.values())
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
    layout = read_layout(checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters)
    check_bits(layout.weights.values())
    state_dict: dict[str, torch.Tensor] = {}
    for name, weight in layout.weights.items():
        flat = torch.empty(weight.numel, dtype=weight.dtype)
        begin = 0
        for chunk in weight.chunks():
            flat[begin : begin + chunk.numel()] = chunk
            begin += chunk.numel()
        state_dict[name] = flat.view(weight.shape)
    return state_dict | {name: state_dict[target] for name, target in layout.tied.items()}
