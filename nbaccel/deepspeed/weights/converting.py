"""Weights in fp32 out of a checkpoint of ZeRO-0/1/2/3, without DeepSpeed and without its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbaccel.bars import Bar
from nbaccel.deepspeed.weights.layout import read_layout
from nbaccel.deepspeed.weights.reading import Reader, check_records
from nbaccel.deepspeed.weights.writing import Written, plan, publishing, write_shard

if TYPE_CHECKING:
    import torch

__all__ = ["load_fp32_state_dict", "zero_to_fp32"]


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
    check_records(layout.weights.values())
    folder = Path(output_dir).expanduser()
    total = sum(shard.nbytes for shard in shards)
    bar = Bar(total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)
    with bar, publishing(folder, shards) as workshop, Reader() as reader:
        for shard in shards:
            bar.set_description(shard.filename)
            for done in write_shard(shard, workshop, reader.chunks):
                bar.update(done)
    return Written.told(folder, shards)


def load_fp32_state_dict(
    checkpoint_dir: str | Path, tag: str | None = None, *, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint of DeepSpeed, in memory.

    What DeepSpeed calls ``get_fp32_state_dict_from_zero_checkpoint``, with memory for the weights
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
    import torch

    layout = read_layout(checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters)
    check_records(layout.weights.values())
    state: dict[str, torch.Tensor] = {}
    with Reader() as reader:
        for name, weight in layout.weights.items():
            tensor = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype))
            place = tensor.reshape(-1).view(torch.uint8).numpy().data
            done = 0
            for chunk in reader.chunks(weight):
                place[done : done + len(chunk)] = chunk
                done += len(chunk)
            state[name] = tensor
    return state | {name: state[target] for name, target in layout.tied.items()}
