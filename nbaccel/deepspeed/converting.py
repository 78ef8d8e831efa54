"""Whole weights of ZeRO: out of checkpoints, without DeepSpeed and its model, and out of engines.

A few MiB are in memory at a time. Names and the index of several files are those that Hugging
Face's libraries read.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from nbaccel.base import weight_files
from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.base.log import progress_bar
from nbaccel.base.trees import names_by_tensor
from nbaccel.base.units import parse_bytes
from nbaccel.deepspeed import library
from nbaccel.deepspeed.checkpoint_layout import Weight, checked_bits, read_layout

_COPIED_ELEMENTS = 2**22  # of a weight of an engine, at a time
_INDEX_FILE = weight_files.FILE_PATTERN.format(suffix="") + ".index.json"
_FLUSHED_BYTES = 64 << 20  # of a file, handed to the disk at a time


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


def write_files(
    weights: Mapping[str, Weight],
    tied: Mapping[str, str],
    output_dir: str | Path,
    max_shard_size: int | str,
    *,
    progress: bool = False,
) -> Written:
    """Write weights and the names of tied ones: all files appear together at the end, or none."""
    shards = _distributed(weights, max_shard_size)
    folder = Path(output_dir).expanduser()
    total_bytes = sum(weight.nbytes for weight in weights.values())
    bar = progress_bar(
        total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress
    )
    publishing = weight_files.publishing(folder, total_bytes)
    with bar, publishing as temporary_folder, checked_bits(weights.values()):
        for file_name, shard in shards.items():
            bar.set_description(file_name)
            # Hugging Face's libraries look there for the names of tied tensors.
            names = {weight.name for weight in shard}
            tied_here = {name: target for name, target in tied.items() if target in names}
            _write_file(temporary_folder / file_name, shard, tied_here, bar)
        if len(shards) > 1:
            files = {weight.name: file for file, shard in shards.items() for weight in shard}
            metadata = {"total_size": total_bytes}
            index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
            text = json.dumps(index, indent=2) + "\n"
            (temporary_folder / _INDEX_FILE).write_text(text, encoding="utf-8")
    file_names = [*shards, *[_INDEX_FILE] * (len(shards) > 1)]
    paths = tuple(folder / file_name for file_name in file_names)
    return Written(paths, len(weights), total_bytes, dict(tied))


def _distributed(
    weights: Mapping[str, Weight], max_shard_size: int | str
) -> dict[str, list[Weight]]:
    """The weights of each file, in the order in which they are written."""
    most_bytes = parse_bytes(max_shard_size)
    if not most_bytes:
        raise ConfigError(f'max_shard_size={max_shard_size!r} leaves no room in a file. Use "5GB".')
    if not weights:
        raise ConfigError(
            f"There is no weight to write ({len(weights)} found): all may be frozen, and are left "
            "out. Allow them."
        )
    for weight in weights.values():
        if weight_files.dtype_code(weight.dtype) is None:
            raise ConfigError(
                f"{weight.name} is of {weight.dtype}, which no file of weights can have. Convert "
                "it."
            )
    split = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: weight.nbytes,
        filename_pattern=weight_files.FILE_PATTERN,
        max_shard_size=most_bytes,
    )
    # Large elements first, so that each tensor begins at a multiple of its element's size.
    return {
        file_name: sorted((weights[name] for name in names), key=lambda w: -w.dtype.itemsize)
        for file_name, names in split.filename_to_tensors.items()
    }


def _write_file(path: Path, weights: list[Weight], tied: Mapping[str, str], bar: Any) -> None:
    head, _ = weight_files.head_of_file(
        ((w.name, weight_files.dtype_code(w.dtype), w.shape, w.nbytes) for w in weights), tied
    )
    waiting_bytes = 0
    with path.open("wb") as file:
        file.write(head)
        for weight in weights:
            done_bytes = 0
            for chunk in weight.chunks():
                # As bytes, since numpy has no bfloat16.
                file.write(chunk.view(torch.uint8).numpy().data)
                done_bytes += chunk.nbytes
                waiting_bytes += chunk.nbytes
                if waiting_bytes >= _FLUSHED_BYTES:
                    # The disk writes meanwhile; older pages stay in memory for the next reader.
                    begin = file.tell() - waiting_bytes
                    os.posix_fadvise(file.fileno(), begin, waiting_bytes, os.POSIX_FADV_DONTNEED)
                    waiting_bytes = 0
                bar.update(chunk.nbytes)
            if done_bytes != weight.nbytes:
                raise CheckpointFailed(
                    f"{weight.name} should have {weight.nbytes:,} bytes, and {done_bytes:,} were "
                    "read: a file changed meanwhile. Try again when nobody writes there."
                )


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
    is compared with the checksums that `torch.save` wrote, while it is read. All files appear
    together at the end, or none; weights of an earlier save in `output_dir` are replaced
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
    weights, tied = read_layout(checkpoint_dir, tag, exclude_frozen_parameters)
    return write_files(weights, tied, output_dir, max_shard_size, progress=progress)


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
    weights, tied = read_layout(checkpoint_dir, tag, exclude_frozen_parameters)
    state_dict: dict[str, torch.Tensor] = {}
    with checked_bits(weights.values()):
        for name, weight in weights.items():
            flat = torch.empty(weight.numel, dtype=weight.dtype)
            begin = 0
            for chunk in weight.chunks():
                flat[begin : begin + chunk.numel()] = chunk
                begin += chunk.numel()
            state_dict[name] = flat.view(weight.shape)
    return state_dict | {name: state_dict[target] for name, target in tied.items()}


# Every rank calls these functions, and rank 0 alone holds the result.


def fp32_state_dict(
    engine: Any, *, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """The fp32 weights of a live DeepSpeed engine, of any stage and offload; a collective.

    What the optimizer trains is taken from the optimizer, whose weights are fp32 whatever the model
    computes in. Frozen parameters and buffers of floating point are the model's, as fp32.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        exclude_frozen_parameters: Leave out what is not trained.

    Returns:
        On rank 0 names and tensors on the CPU, for ``load_state_dict``; on the others nothing. Tied
        parameters are one tensor.

    Raises:
        ConfigError: This is no engine of DeepSpeed, or one whose weights are also cut in another
            way.
    """
    state = _weights_of(engine, exclude_frozen_parameters)
    of_stage_0 = dict(_masters_of_stage_0(engine.optimizer))
    # By identity: tied parameters are one tensor of several names.
    whole: dict[int, torch.Tensor] = {}
    for tensor in {id(value): value for value in state.values()}.values():
        gathered = _whole_master(tensor, of_stage_0)
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        if gathered is not None:
            whole[id(tensor)] = gathered.to("cpu", dtype, copy=True)
    return {name: whole[id(value)] for name, value in state.items() if id(value) in whole}


def save_16bit_weights(
    engine: Any,
    output_dir: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    exclude_frozen_parameters: bool = False,
) -> Written:
    """Write the weights of a live engine in the precision that the model computes in; a collective.

    It needs no setting: with ``stage3_gather_16bit_weights_on_model_save`` off, DeepSpeed's
    ``save_16bit_model`` writes nothing and says nothing. Rank 0 writes each weight as soon as it
    has it, so no rank ever holds the model.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        output_dir: Folder for ``model.safetensors``, or several files and an index. All files
            appear together at the end, or none.
        max_shard_size: Most bytes of one file, as a number or text (``"5GB"``).
        exclude_frozen_parameters: Leave out what is not trained.

    Returns:
        What was written, the same on all ranks.

    Raises:
        ConfigError: This is no engine of DeepSpeed, or one whose weights are also cut in another
            way, or the disk has too little room.
        CheckpointFailed: On every rank, if rank 0 could not write; the folder is as it was.
    """
    state = _weights_of(engine, exclude_frozen_parameters)
    weights: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    for name, *further_names in names_by_tensor(state.items()).values():
        shape = tuple(getattr(state[name], "ds_shape", state[name].shape))
        weights[name] = Weight(name, shape, state[name].dtype)
        tied |= dict.fromkeys(further_names, name)
    # All ranks gather in the same order, that of the files.
    ordered = itertools.chain.from_iterable(_distributed(weights, max_shard_size).values())
    gathered = (_whole_parameter(state[weight.name]) for weight in ordered)
    error = written = None
    if dist.get_rank() == 0:
        read_once = {
            name: _EngineWeight(name, weight.shape, weight.dtype, gathered=gathered)
            for name, weight in weights.items()
        }
        try:
            written = write_files(read_once, tied, output_dir, max_shard_size)
        except Exception as caught:  # whatever it is, the others must hear of it
            error = caught
    # Whatever has failed, rank 0 takes part in all gathers: the others would wait.
    for _ in gathered:
        continue
    # As text: an exception of any type need not survive pickling.
    told: list[Any] = [written, error and f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(told, src=0)
    if error is not None:
        raise error
    if told[1] is not None:
        raise CheckpointFailed(
            f"save_16bit_weights({str(output_dir)!r}) failed on rank 0, which writes. {told[1]}"
        )
    result: Written = told[0]
    return result


@dataclass(frozen=True, slots=True)
class _EngineWeight(Weight):
    """A weight of a live engine, which all ranks put together when rank 0 writes it."""

    gathered: Iterator[torch.Tensor | None] = field(kw_only=True)
    """All weights, in the order in which they are written."""

    def chunks(self) -> Iterator[torch.Tensor]:
        """See :meth:`Weight.chunks`; once."""
        tensor = next(self.gathered)
        if tensor is not None:
            yield from torch.split(tensor.detach().to("cpu").reshape(-1), _COPIED_ELEMENTS)


def _weights_of(engine: Any, exclude_frozen: bool) -> dict[str, torch.Tensor]:
    """The parameters themselves, with DeepSpeed's attributes, and the buffers that are saved."""
    module = getattr(engine, "module", None)
    if not isinstance(module, nn.Module) or not hasattr(engine, "zero_optimization_stage"):
        raise ConfigError(
            f"A {type(engine).__name__} is no engine of DeepSpeed, so it has no weights of ZeRO to "
            "gather. Give what deepspeed.initialize returned as its first value."
        )
    ranks = getattr(engine, "mp_world_size", 1)
    if ranks > 1 or getattr(engine, "has_moe_layers", False):
        cut_kind = f"tensor parallelism over {ranks} ranks" if ranks > 1 else "experts"
        raise ConfigError(
            f"This engine's model has {cut_kind}: its weights are cut in a way that ZeRO cannot "
            "put together. Save a checkpoint, and make a universal one of it with ds_to_universal."
        )
    return {
        name: tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
        # A module's extra state is no weight.
        if isinstance(tensor, torch.Tensor)
        and (tensor.requires_grad or not exclude_frozen or not isinstance(tensor, nn.Parameter))
    }


def _whole_parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """What the model computes with, whole, on rank 0; a collective where it is partitioned."""
    if not hasattr(tensor, "ds_id"):
        return _on_rank_0(tensor.detach())
    import deepspeed

    # A copy, because the gathered tensor is freed with the block.
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone() if dist.get_rank() == 0 else None


def _whole_master(tensor: torch.Tensor, masters: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The optimizer's fp32 weights on rank 0; where it has none, what the model computes with."""
    is_trained_at_3 = tensor.requires_grad and library.zero3_optimizer(tensor) is not None
    if is_trained_at_3 or library.has_fp32_fragment(tensor):
        from deepspeed.utils import safe_get_full_fp32_param

        # A collective, which gives the whole to every rank.
        return _on_rank_0(safe_get_full_fp32_param(tensor))
    master = masters.get(id(tensor))
    return _whole_parameter(tensor) if master is None else _on_rank_0(master)


def _on_rank_0(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if dist.get_rank() == 0 else None


def _masters_of_stage_0(optimizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """fp32 weights of the wrapper that trains in 16 bit without ZeRO, by the parameter's id."""
    # DeepSpeed's fused wrapper keeps flat groups, the other one a tensor for each parameter.
    flat_groups = getattr(optimizer, "fp32_groups_flat", None)
    for number, parameters in enumerate(getattr(optimizer, "fp16_groups", ())):
        if flat_groups is not None:
            masters = flat_groups[number].detach().split([p.numel() for p in parameters])
        else:
            masters = getattr(optimizer, "fp32_groups", {number: ()})[number]
        for parameter, master in zip(parameters, masters, strict=False):
            yield id(parameter), master.detach().view(parameter.shape)
