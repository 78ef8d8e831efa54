"""Weights of a live engine, gathered on rank 0 one parameter after the other.

Every rank calls these functions; memory beyond the result is that of the largest parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.deepspeed.weights.stored import DTYPES, Weight
from nbaccel.deepspeed.weights.writing import Shard, Written, plan, publishing, write_shard
from nbaccel.errors import CheckpointFailed, ConfigError

__all__ = ["fp32_state_dict", "save_16bit_weights"]

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Live:
    """A tensor of the model.

    Attributes:
        weight: What it will be.
        tensor: The parameter or buffer.
    """

    weight: Weight
    tensor: torch.Tensor


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
    live, tied = _survey(engine, fp32=True, exclude_frozen=exclude_frozen_parameters)
    masters = _Masters(engine)
    state: dict[str, torch.Tensor] = {}
    for name, entry in live.items():
        gathered = masters.gather(entry)
        if gathered is not None:
            state[name] = gathered.to("cpu", torch_dtype(entry.weight), copy=True)
    return {**state, **{n: state[target] for n, target in tied.items() if target in state}}


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
    live, tied = _survey(engine, fp32=False, exclude_frozen=exclude_frozen_parameters)
    weights = {name: entry.weight for name, entry in live.items()}
    shards = plan(weights, tied, max_shard_size)
    folder = Path(output_dir).expanduser()
    parameters = _Parameters()
    order = (weight.name for shard in shards for weight in shard.weights)
    if dist.get_rank() == 0:
        error = _write(folder, shards, live, parameters, order)
    else:
        error = None
        for name in order:
            parameters.gather(live[name])
    _hear(error, folder)
    return Written.told(folder, shards)


def _write(
    folder: Path,
    shards: list[Shard],
    live: Mapping[str, _Live],
    parameters: _Parameters,
    order: Iterator[str],
) -> Exception | None:
    """Rank 0's side. Whatever fails, it takes part in all gathers: the others would wait."""

    def source(weight: Weight) -> Iterator[memoryview]:
        next(order)
        gathered = parameters.gather(live[weight.name])
        if gathered is not None:
            yield from _bytes_of(gathered)

    error: Exception | None = None
    try:
        with publishing(folder, shards) as workshop:
            for shard in shards:
                for _ in write_shard(shard, workshop, source):
                    continue
    except Exception as caught:  # whatever it is, the others must hear of it
        error = caught
    for name in order:
        parameters.gather(live[name])
    return error


def _hear(error: Exception | None, folder: Path) -> None:
    told = [None if error is None else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(told, src=0)
    if error is not None:
        raise error
    if told[0] is not None:
        raise CheckpointFailed(
            f"save_16bit_weights({str(folder)!r}) failed on rank 0, which writes. {told[0]}"
        )


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    for begin in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[begin : begin + _CHUNK_BYTES].numpy().data


def torch_dtype(weight: Weight) -> torch.dtype:
    """The type of a weight's elements, as torch has it."""
    found = getattr(torch, weight.dtype)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{weight.name} is of {weight.dtype}, which torch does not know.")
    return found


# ------------------------------------------------------------------------- what there is


def _survey(
    engine: Any, *, fp32: bool, exclude_frozen: bool
) -> tuple[dict[str, _Live], dict[str, str]]:
    """All tensors of the model's state dict by name, and names of tied ones with that of each."""
    module = _module(engine)
    found: dict[str, _Live] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in _named(module):
        same = first.setdefault(id(tensor), name)
        if same != name:
            tied[name] = same
        elif not (exclude_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad):
            found[name] = _Live(_weight(name, tensor, fp32), tensor)
    return found, {name: target for name, target in tied.items() if target in found}


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, in the order of the module's state dict."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        begin = f"{prefix}." if prefix else ""
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            yield begin + name, parameter
        passing = part._non_persistent_buffers_set
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if name not in passing:
                yield begin + name, buffer


def _weight(name: str, tensor: torch.Tensor, fp32: bool) -> Weight:
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    if fp32 and tensor.is_floating_point():
        dtype = "float32"
    if dtype not in DTYPES:
        raise ConfigError(
            f"{name} is of {dtype}, for which a file of weights has no place: it holds "
            f"{', '.join(DTYPES)}. Convert it, or make it a buffer with persistent=False."
        )
    return Weight(name, shape, dtype)


def _module(engine: Any) -> nn.Module:
    module = getattr(engine, "module", None)
    if not isinstance(module, nn.Module) or not hasattr(engine, "zero_optimization_stage"):
        raise ConfigError(
            f"A {type(engine).__name__} is no engine of DeepSpeed, so it has no weights of ZeRO to "
            "gather. Give what deepspeed.initialize returned as its first value."
        )
    parallel = getattr(engine, "mp_world_size", 1)
    if parallel > 1 or getattr(engine, "has_moe_layers", False):
        kind = f"tensor parallelism over {parallel} ranks" if parallel > 1 else "experts"
        raise ConfigError(
            f"This engine's model has {kind}: its weights are cut in a way that ZeRO does not know "
            "of. Save a checkpoint, and make a universal one of it with ds_to_universal."
        )
    return module


# ------------------------------------------------------------------------- gathering


class _Parameters:
    """Gathers what the model computes with."""

    def gather(self, live: _Live) -> torch.Tensor | None:
        """The whole tensor on rank 0, None elsewhere; a collective where it is partitioned."""
        tensor = live.tensor
        if not hasattr(tensor, "ds_id"):
            return tensor.detach() if dist.get_rank() == 0 else None
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone() if dist.get_rank() == 0 else None


class _Masters(_Parameters):
    """Gathers what the optimizer trains, in fp32; of the rest what the model computes with.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        self._of_stage_0 = dict(_masters_of_stage_0(engine))

    def gather(self, live: _Live) -> torch.Tensor | None:
        tensor = live.tensor
        optimizer: Any = getattr(tensor, "_z3_optimizer", None)  # none where it only infers
        if tensor.requires_grad and optimizer is not None:
            whole: torch.Tensor = optimizer.get_full_hp_param(tensor)
            return whole if dist.get_rank() == 0 else None
        if hasattr(tensor, "_hp_mapping"):
            return _sum_of_fragments(tensor)
        if id(tensor) in self._of_stage_0:
            return self._of_stage_0[id(tensor)] if dist.get_rank() == 0 else None
        return super().gather(live)


def _sum_of_fragments(parameter: Any) -> torch.Tensor | None:
    """A parameter of ZeRO-1/2, of which each rank's optimizer has a piece, or none.

    Pieces are added up as whole numbers: each bit of the result has come from one rank, so that
    even a minus zero stays what it is.
    """
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    mapping = parameter._hp_mapping
    if mapping is not None:
        place = mapping.lp_fragment_address
        whole.narrow(0, place.start, place.numel).copy_(mapping.hp_fragment)
    dist.reduce(whole.view(torch.int32), dst=0, group=parameter._dp_group)
    return whole.view(parameter.shape) if dist.get_rank() == 0 else None


def _masters_of_stage_0(engine: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """fp32 weights of the wrapper that trains in 16 bit without ZeRO, by the parameter's id."""
    optimizer = engine.optimizer
    flat = getattr(optimizer, "fp32_groups_flat", None)
    if flat is not None:
        for parameters, group in zip(optimizer.fp16_groups, flat, strict=True):
            pieces = group.detach().split([parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                yield id(parameter), piece.view(parameter.shape)
        return
    for names in ("fp16_groups", "fp32_groups"):
        if not hasattr(optimizer, names):
            return
    for parameters, group in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(parameters, group, strict=True):
            yield id(parameter), master.detach()
