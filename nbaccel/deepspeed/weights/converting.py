"""Whole weights of ZeRO: out of checkpoints, without DeepSpeed and its model, and out of engines.

A few MiB are in memory at a time. Names and the index of several files are those that Hugging
Face's libraries read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import nn

from nbaccel.base import atomic, weight_files
from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.base.quiet_bars import Bar
from nbaccel.base.units import parse_bytes
from nbaccel.deepspeed import private_api
from nbaccel.deepspeed.weights.checkpoint_layout import Weight, checked_bits, read_layout

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
    weights, tied = read_layout(
        checkpoint_dir, tag, exclude_frozen_parameters=exclude_frozen_parameters
    )
    shards = plan(weights, tied, max_shard_size)
    folder = Path(output_dir).expanduser()
    total_bytes = sum(shard.nbytes for shard in shards)
    bar = Bar(total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)
    with bar, publishing(folder, shards) as temporary_folder, checked_bits(weights.values()):
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


# ------------------------------------------------------------------------------ live engines
# Every rank calls these functions; memory beyond the result is that of the largest parameter.

_COPIED_ELEMENTS = 2**22


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
    tensors, tied_names = _survey(engine, as_fp32=True, exclude_frozen=exclude_frozen_parameters)
    of_stage_0 = dict(_masters_of_stage_0(engine.optimizer))
    state_dict: dict[str, torch.Tensor] = {}
    for name, (weight, tensor) in tensors.items():
        gathered = _whole_master(tensor, of_stage_0)
        if gathered is not None:
            state_dict[name] = gathered.to("cpu", weight.dtype, copy=True)
    tied = {name: target for name, target in tied_names.items() if target in state_dict}
    return state_dict | {name: state_dict[target] for name, target in tied.items()}


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
    tensors, tied_names = _survey(engine, as_fp32=False, exclude_frozen=exclude_frozen_parameters)
    weights = {name: weight for name, (weight, _) in tensors.items()}
    shards = plan(weights, tied_names, max_shard_size)
    folder = Path(output_dir).expanduser()
    # All ranks gather in the same order, that of the files.
    ordered = [tensors[weight.name] for shard in shards for weight in shard.weights]
    gathered = (_whole_parameter(tensor) for _, tensor in ordered)
    error = None
    if dist.get_rank() == 0:
        error = _write_shards(folder, shards, gathered)
    # Whatever has failed, rank 0 takes part in all gathers: the others would wait.
    for _ in gathered:
        continue
    # As text: an exception of any type need not survive pickling.
    rank_errors = [None if error is None else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(rank_errors, src=0)
    if error is not None:
        raise error
    if rank_errors[0] is not None:
        raise CheckpointFailed(
            f"save_16bit_weights({str(folder)!r}) failed on rank 0, which writes. {rank_errors[0]}"
        )
    return Written.of_shards(folder, shards)


def _write_shards(
    folder: Path, shards: list[Shard], gathered: Iterator[torch.Tensor | None]
) -> Exception | None:
    """Rank 0's side."""

    def chunks(_: Weight) -> Iterator[torch.Tensor]:
        tensor = next(gathered)
        if tensor is not None:
            yield from torch.split(tensor.detach().to("cpu").reshape(-1), _COPIED_ELEMENTS)

    try:
        with publishing(folder, shards) as temporary_folder:
            for shard in shards:
                for _ in write_shard(shard, temporary_folder, chunks):
                    continue
    except Exception as error:  # whatever it is, the others must hear of it
        return error
    return None


def _survey(
    engine: Any, *, as_fp32: bool, exclude_frozen: bool
) -> tuple[dict[str, tuple[Weight, torch.Tensor]], dict[str, str]]:
    """All tensors with how they will be written, and names of tied ones with that of each."""
    tensors: dict[str, tuple[Weight, torch.Tensor]] = {}
    tied_names: dict[str, str] = {}
    first_names: dict[int, str] = {}
    # With `keep_vars` they are the parameters themselves, with DeepSpeed's attributes.
    for name, tensor in _module_of(engine).state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue  # a module's extra state is no weight
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name:
            tied_names[name] = first_name
        elif not (exclude_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad):
            shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
            is_converted = as_fp32 and tensor.is_floating_point()
            dtype = torch.float32 if is_converted else tensor.dtype
            tensors[name] = (Weight(name, shape, dtype), tensor)
    return tensors, {name: target for name, target in tied_names.items() if target in tensors}


def _module_of(engine: Any) -> nn.Module:
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
    return module


def _whole_parameter(tensor: torch.Tensor) -> torch.Tensor | None:
    """What the model computes with, whole, on rank 0; a collective where it is partitioned."""
    if not hasattr(tensor, "ds_id"):
        return _on_rank_0(tensor.detach())
    import deepspeed

    # A copy, because the gathered tensor is freed with the block.
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone() if dist.get_rank() == 0 else None


def _whole_master(
    tensor: torch.Tensor, of_stage_0: Mapping[int, torch.Tensor]
) -> torch.Tensor | None:
    """The optimizer's fp32 weights on rank 0; where it has none, what the model computes with."""
    is_trained_at_3 = tensor.requires_grad and private_api.zero3_optimizer(tensor) is not None
    if is_trained_at_3 or private_api.has_fp32_fragment(tensor):
        from deepspeed.utils import safe_get_full_fp32_param

        # A collective, which gives the whole to every rank.
        return _on_rank_0(safe_get_full_fp32_param(tensor))
    if id(tensor) in of_stage_0:
        return _on_rank_0(of_stage_0[id(tensor)])
    return _whole_parameter(tensor)


def _on_rank_0(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor if dist.get_rank() == 0 else None


def _masters_of_stage_0(optimizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """fp32 weights of the wrapper that trains in 16 bit without ZeRO, by the parameter's id."""
    # DeepSpeed's fused wrapper keeps flat groups, the other one a tensor for each parameter.
    flat_groups = getattr(optimizer, "fp32_groups_flat", None)
    for number, parameters in enumerate(getattr(optimizer, "fp16_groups", ())):
        if flat_groups is not None:
            sizes = [parameter.numel() for parameter in parameters]
            masters = flat_groups[number].detach().split(sizes)
        else:
            masters = getattr(optimizer, "fp32_groups", {number: ()})[number]
        for parameter, master in zip(parameters, masters, strict=False):
            yield id(parameter), master.detach().view(parameter.shape)
