"""Weights of a live engine, gathered on rank 0 one parameter after the other.

Every rank calls these functions; memory beyond the result is that of the largest parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.deepspeed import private_api
from nbaccel.deepspeed.weights.converting import Shard, Written, plan, publishing, write_shard
from nbaccel.deepspeed.weights.state_files import Weight

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


# ------------------------------------------------------------------------- what there is


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


# ------------------------------------------------------------------------- gathering


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
