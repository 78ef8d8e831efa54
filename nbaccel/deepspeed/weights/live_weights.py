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

from nbaccel.base import torch_private
from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.deepspeed import private_api
from nbaccel.deepspeed.weights.converting import Shard, Written, plan, publishing, write_shard
from nbaccel.deepspeed.weights.torch_archive import DTYPES, Weight

__all__ = ["fp32_state_dict", "save_16bit_weights"]


_COPY_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _LiveTensor:
    """A tensor of the model.

    Attributes:
        weight: The name, shape and type with which it will be written.
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
    live_entries, tied_names = _survey_tensors(
        engine, as_fp32=True, exclude_frozen=exclude_frozen_parameters
    )
    master_gatherer = _MasterGatherer(engine)
    state_dict: dict[str, torch.Tensor] = {}
    for weight_name, live_entry in live_entries.items():
        gathered_tensor = master_gatherer.gather(live_entry)
        if gathered_tensor is not None:
            state_dict[weight_name] = gathered_tensor.to(
                "cpu", torch_dtype(live_entry.weight), copy=True
            )
    return {
        **state_dict,
        **{
            tied_name: state_dict[tied_target]
            for tied_name, tied_target in tied_names.items()
            if tied_target in state_dict
        },
    }


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
    live_entries, tied_names = _survey_tensors(
        engine, as_fp32=False, exclude_frozen=exclude_frozen_parameters
    )
    stored_weights = {
        weight_name: live_entry.weight for weight_name, live_entry in live_entries.items()
    }
    file_shards = plan(stored_weights, tied_names, max_shard_size)
    output_folder = Path(output_dir).expanduser()
    parameter_gatherer = _ParameterGatherer()
    order = (
        stored_weight.name for file_shard in file_shards for stored_weight in file_shard.weights
    )
    # All ranks gather in the same order, that of the files.
    if dist.get_rank() == 0:
        error = _write_shards(output_folder, file_shards, live_entries, parameter_gatherer, order)
    else:
        error = None
        for weight_name in order:
            parameter_gatherer.gather(live_entries[weight_name])
    _check_all_ranks(error, output_folder)
    return Written.of_shards(output_folder, file_shards)


def _write_shards(
    output_folder: Path,
    file_shards: list[Shard],
    live_entries: Mapping[str, _LiveTensor],
    parameter_gatherer: _ParameterGatherer,
    order: Iterator[str],
) -> Exception | None:
    """Rank 0's side. Whatever fails, it takes part in all gathers: the others would wait."""

    def source(weight: Weight) -> Iterator[memoryview]:
        # Taken first: what is left in `write_order` after a failure is gathered for the others.
        next(order)
        tensor = parameter_gatherer.gather(live_entries[weight.name])
        if tensor is not None:
            yield from _bytes_of(tensor)

    error: Exception | None = None
    try:
        with publishing(output_folder, file_shards) as temporary_folder:
            for file_shard in file_shards:
                for _ in write_shard(file_shard, temporary_folder, source):
                    continue
    except Exception as caught:  # whatever it is, the others must hear of it
        error = caught
    for weight_name in order:
        parameter_gatherer.gather(live_entries[weight_name])
    return error


def _check_all_ranks(error: Exception | None, folder: Path) -> None:
    # As text: an exception of any type need not survive pickling.
    rank_errors = [None if error is None else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(rank_errors, src=0)
    if error is not None:
        raise error
    if rank_errors[0] is not None:
        raise CheckpointFailed(
            f"save_16bit_weights({str(folder)!r}) failed on rank 0, which writes. {rank_errors[0]}"
        )


def _bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    # As bytes, since numpy has no bfloat16.
    flat_tensor = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    for first_element in range(0, flat_tensor.numel(), _COPY_CHUNK_BYTES):
        yield flat_tensor[first_element : first_element + _COPY_CHUNK_BYTES].numpy().data


def torch_dtype(weight: Weight) -> torch.dtype:
    """The type of a weight's elements, as torch has it."""
    torch_type = getattr(torch, weight.dtype)
    if not isinstance(torch_type, torch.dtype):
        raise ConfigError(f"{weight.name} is of {weight.dtype}, which torch does not know.")
    return torch_type


# ------------------------------------------------------------------------- what there is


def _survey_tensors(
    engine: Any, *, as_fp32: bool, exclude_frozen: bool
) -> tuple[dict[str, _LiveTensor], dict[str, str]]:
    """All tensors of the model's state dict by name, and names of tied ones with that of each."""
    module = _module_of(engine)
    entries: dict[str, _LiveTensor] = {}
    tied_names: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for weight_name, tensor in _named_tensors(module):
        first_name = first_names.setdefault(id(tensor), weight_name)
        if first_name != weight_name:
            tied_names[weight_name] = first_name
        elif not (exclude_frozen and isinstance(tensor, nn.Parameter) and not tensor.requires_grad):
            entries[weight_name] = _LiveTensor(_weight_of(weight_name, tensor, as_fp32), tensor)
    return entries, {
        weight_name: tied_target
        for weight_name, tied_target in tied_names.items()
        if tied_target in entries
    }


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, in the order of the module's state dict."""
    # Not from `state_dict`, which gives detached tensors: DeepSpeed's attributes are needed, and
    # whether a tensor is a parameter.
    for module_prefix, module_part in module.named_modules(remove_duplicate=False):
        name_prefix = f"{module_prefix}." if module_prefix else ""
        for name, parameter in module_part.named_parameters(recurse=False, remove_duplicate=False):
            yield name_prefix + name, parameter
        passing_buffers = torch_private.non_persistent_buffers(module_part)
        for name, named_buffer in module_part.named_buffers(recurse=False, remove_duplicate=False):
            if name not in passing_buffers:
                yield name_prefix + name, named_buffer


def _weight_of(name: str, tensor: torch.Tensor, as_fp32: bool) -> Weight:
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    if as_fp32 and tensor.is_floating_point():
        dtype = "float32"
    if dtype not in DTYPES:
        raise ConfigError(
            f"{name} is of {dtype}, for which a file of weights has no place: it holds "
            f"{', '.join(DTYPES)}. Convert it, or make it a buffer with persistent=False."
        )
    return Weight(name, shape, dtype)


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


class _ParameterGatherer:
    """Gathers the tensors that the model computes with."""

    def gather(self, live_entry: _LiveTensor) -> torch.Tensor | None:
        """The whole tensor on rank 0, None elsewhere; a collective where it is partitioned."""
        tensor = live_entry.tensor
        if not hasattr(tensor, "ds_id"):
            return tensor.detach() if dist.get_rank() == 0 else None
        import deepspeed

        # A copy, because the gathered tensor is freed with the block.
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone() if dist.get_rank() == 0 else None


class _MasterGatherer(_ParameterGatherer):
    """Gathers the optimizer's fp32 weights; of the others what the model computes with."""

    def __init__(self, engine: Any) -> None:
        self._of_stage_0 = dict(_masters_of_stage_0(engine))

    def gather(self, live_entry: _LiveTensor) -> torch.Tensor | None:
        tensor = live_entry.tensor
        if tensor.requires_grad and private_api.zero3_optimizer(tensor) is not None:
            from deepspeed.utils import safe_get_full_fp32_param

            # A collective, which gives the whole to every rank.
            whole_tensor: torch.Tensor = safe_get_full_fp32_param(tensor)
            return whole_tensor if dist.get_rank() == 0 else None
        if private_api.has_fp32_fragment(tensor):
            return _sum_of_fragments(tensor)
        if id(tensor) in self._of_stage_0:
            return self._of_stage_0[id(tensor)] if dist.get_rank() == 0 else None
        return super().gather(live_entry)


def _sum_of_fragments(parameter: Any) -> torch.Tensor | None:
    """A parameter of ZeRO-1/2, of which each rank's optimizer has a piece, or none.

    Pieces are added up as whole numbers: each bit of the result has come from one rank, so that
    even a minus zero stays what it is.
    """
    whole_tensor = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    fp32_mapping = private_api.fp32_fragment(parameter)
    if fp32_mapping is not None:
        address = fp32_mapping.lp_fragment_address
        whole_tensor.narrow(0, address.start, address.numel).copy_(fp32_mapping.hp_fragment)
    dist.reduce(
        whole_tensor.view(torch.int32), dst=0, group=private_api.data_parallel_group(parameter)
    )
    return whole_tensor.view(parameter.shape) if dist.get_rank() == 0 else None


def _masters_of_stage_0(engine: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """fp32 weights of the wrapper that trains in 16 bit without ZeRO, by the parameter's id."""
    optimizer = engine.optimizer
    # DeepSpeed's fused wrapper keeps flat groups, the other one a tensor for each parameter.
    flat_groups = getattr(optimizer, "fp32_groups_flat", None)
    if flat_groups is not None:
        for group_parameters, flat_group in zip(optimizer.fp16_groups, flat_groups, strict=True):
            flat_pieces = flat_group.detach().split(
                [live_parameter.numel() for live_parameter in group_parameters]
            )
            for live_parameter, flat_piece in zip(group_parameters, flat_pieces, strict=True):
                yield id(live_parameter), flat_piece.view(live_parameter.shape)
        return
    for names in ("fp16_groups", "fp32_groups"):
        if not hasattr(optimizer, names):
            return
    for group_parameters, group_masters in zip(
        optimizer.fp16_groups, optimizer.fp32_groups, strict=True
    ):
        for live_parameter, master_weight in zip(group_parameters, group_masters, strict=True):
            yield id(live_parameter), master_weight.detach()
