"""``load_checkpoint_in_model``: a model filled from a checkpoint's files.

Where the dtypes agree, a tensor in host memory is a copy-on-write view of the file: nothing is
copied, several processes share what was read, and a strategy that cuts the model into shards reads
its own part only. Everything else is copied tensor by tensor, and what was read is let go at once,
so that memory never holds more than the model and one tensor. The headers are compared with the
model first (`nbaccel.bigmodel.load_plan`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.bars import Bar
from nbaccel.bigmodel.checkpoint_files import StoredTensor, read_checkpoint
from nbaccel.bigmodel.device_memory import DISK, HOST
from nbaccel.bigmodel.load_plan import (
    LoadPlan,
    Placement,
    inner_model,
    plan_loading,
    tier_of,
)
from nbaccel.bigmodel.offload_folder import offload_weight, save_offload_index
from nbaccel.bigmodel.stored_weights import StoredWeights, WeightFiles
from nbaccel.errors import ConfigError
from nbaccel.strategies import optimizer_shards
from nbaccel.transfer import arena
from nbaccel.transfer.sharded_tensors import fill_local_part, is_dtensor, is_sharded

__all__ = [
    "LoadedWeights",
    "fill_model",
    "load_checkpoint_in_model",
    "load_state_dict",
    "parse_dtype",
    "write_offload_index",
]

_BAR_DELAY_S = 0.5  # a load that is over by then needs no bar


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedWeights:
    """What a load leaves behind for those who move weights later.

    Attributes:
        weights: The weights that stayed in the files, by name.
        stored: Where they are, by name.
    """

    weights: StoredWeights
    stored: Mapping[str, StoredTensor]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Fill a model from a checkpoint.

    Without `device_map` each tensor is filled where it is. One on ``meta`` becomes a view of the
    checkpoint's file in host memory, which takes memory only once it is used: loaded so, and then
    given to `Accelerator.prepare` with FSDP or ZeRO-3, no process ever holds the whole model. Of a
    model that is sharded already each process fills its own part.

    Args:
        model: The model; best built under :func:`init_empty_weights`.
        checkpoint: A file of weights, an index, or a folder with one of them.
        device_map: Module's name → accelerator, ``"cpu"`` or ``"disk"``, such as
            :func:`infer_auto_device_map` makes.
        offload_folder: Where `index.json` says in which files the weights on the ``"disk"`` tier
            are, for :func:`dispatch_model`. Weights are copied there only if they lie in files of
            `torch.save`.
        dtype: Format of floating-point weights; None: that of the model.
        offload_state_dict: Not needed: memory never holds a whole file beside the model.
        offload_buffers: Whether buffers on the ``"disk"`` tier stay there, as parameters do.
        keep_in_fp32_modules: Modules that become float32 where `dtype` is float16.
        offload_8bit_bnb: Refused: bitsandbytes' weights cannot be made here.
        strict: Whether missing and left-over weights are errors.
        full_state_dict: Whether the files hold whole tensors, as all formats here do.
        broadcast_from_rank0: Of a sharded model, only process 0 reads, and sends each its part.

    Raises:
        CheckpointDamaged: Files are missing, truncated, damaged or hold code.
        ConfigError: The checkpoint or the map does not fit the model, or there is no such device.
            Nothing has been changed in either case.
    """
    del offload_state_dict
    _refuse_other_formats(offload_8bit_bnb, full_state_dict=full_state_dict, model=model)
    if device_map is not None and DISK in device_map.values() and offload_folder is None:
        raise ConfigError(
            f"device_map={_shorten_map(device_map)} leaves weights on disk, and no offload_folder "
            "was given: a later dispatch_model would not know where they are. Give offload_folder, "
            "or use load_checkpoint_and_dispatch, which needs none."
        )
    if broadcast_from_rank0 and _is_one_of_several():
        _load_from_first_rank(model, checkpoint, strict=strict)
        return
    loaded = fill_model(
        model,
        checkpoint,
        device_map=device_map,
        dtype=parse_dtype(dtype),
        keep_in_fp32_modules=keep_in_fp32_modules or (),
        offload_buffers=offload_buffers,
        strict=strict,
        needs_mapping=False,
    )
    if offload_folder is not None and loaded.stored:
        write_offload_index(offload_folder, loaded)


def fill_model(
    model: nn.Module,
    checkpoint: str | Path,
    *,
    device_map: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    keep_in_fp32_modules: Sequence[str] = (),
    offload_buffers: bool = False,
    strict: bool = False,
    needs_mapping: bool = True,
) -> LoadedWeights:
    """Fill a model, and tell where weights on the ``disk`` tier are.

    Args:
        model: The model.
        checkpoint: As for :func:`load_checkpoint_in_model`.
        device_map: The same.
        dtype: Format of floating-point weights; None: that of the model.
        keep_in_fp32_modules: Modules that become float32 where `dtype` is float16.
        offload_buffers: Whether buffers stay on disk, too.
        strict: Whether missing and left-over weights are errors.
        needs_mapping: Whether weights on disk are going to be read from the files themselves.

    Returns:
        The weights that stayed in files.

    Raises:
        ConfigError: The checkpoint or the map does not fit the model.
        CheckpointDamaged: Files cannot be used.
    """
    plan = plan_loading(
        model,
        read_checkpoint(checkpoint),
        device_map=device_map,
        dtype=dtype,
        fp32_modules=keep_in_fp32_modules,
        offload_buffers=offload_buffers,
        strict=strict,
    )
    on_disk = plan.on_tier(DISK)
    _check_tiers(plan)
    if needs_mapping:
        _refuse_unmapped(on_disk)
    files = WeightFiles()
    _fill(plan, files)
    stored = {name: placement.stored for placement in on_disk for name in placement.names}
    return LoadedWeights(weights=StoredWeights(files, stored), stored=stored)


def load_state_dict(
    checkpoint_file: str | Path, device_map: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a file, by name; those in host memory are views of it, which cost nothing.

    Args:
        checkpoint_file: A file of weights.
        device_map: Module's name → accelerator, ``"cpu"`` or ``"disk"``; what is not in it, or on
            disk, stays in host memory.

    Raises:
        CheckpointDamaged: The file is truncated, damaged or holds code.
        ConfigError: There is no such file.
    """
    files = WeightFiles()
    state = {}
    for name, stored in read_checkpoint(checkpoint_file).tensors.items():
        tier = HOST if device_map is None else tier_of(name, device_map)
        values = files.view(stored)
        state[name] = values if tier in ("", HOST, DISK) else values.to(tier)
    return state


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Read a format, as ``torch.float16``, ``"float16"`` or ``"torch.float16"``.

    Raises:
        ConfigError: There is none of that name.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"dtype={dtype!r} is no format of torch: weights could not be converted to it. Give "
            'one such as torch.bfloat16 or "float16".'
        )
    return found


# ------------------------------------------------------------------------------ refusals
def _refuse_other_formats(
    offload_8bit_bnb: bool, *, full_state_dict: bool, model: nn.Module
) -> None:
    if offload_8bit_bnb:
        raise ConfigError(
            f"offload_8bit_bnb={offload_8bit_bnb!r} asks for weights of bitsandbytes, which this "
            "version does not make. Load with from_pretrained(quantization_config=...) of "
            "transformers."
        )
    has_shards = any(is_dtensor(tensor) for _, tensor in arena.named_tensors(inner_model(model)))
    if has_shards and not full_state_dict:
        raise ConfigError(
            f"full_state_dict={full_state_dict!r} was given for a sharded model: the files that "
            "are read here hold whole tensors. Leave it out, or load a sharded checkpoint with "
            "Accelerator.load_state."
        )


def _check_tiers(plan: LoadPlan) -> None:
    """Try each device before anything is changed."""
    tiers = {placement.tier for placement in plan.placements} - {None, HOST, DISK}
    problems = []
    for tier in sorted(tiers, key=str):
        try:
            torch.empty(0, device=tier)
        # torch built without a device raises an AssertionError for it.
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            problems.append(
                f"device_map sends {plan.on_tier(tier)[0].names[0]} to {tier!r}, which this "
                f"process cannot use ({str(error).splitlines()[0]}). Nothing has been loaded. "
                'Give a device of this machine, "cpu" or "disk".'
            )
    if problems:
        raise ConfigError(*problems)


def _refuse_unmapped(on_disk: Iterable[Placement]) -> None:
    unmapped = sorted({str(p.stored.path) for p in on_disk if not p.stored.is_mapped})
    if unmapped:
        raise ConfigError(
            f"{', '.join(unmapped)} was written by torch before version 1.6, in a format that must "
            "be read as a whole: weights of it cannot stay on disk. Load it with torch.load and "
            "save it again, best with save_model of an Accelerator (safetensors)."
        )


def _shorten_map(device_map: Mapping[str, Any]) -> str:
    text = str(dict(device_map))
    return text if len(text) <= 80 else f"{text[:77]}..."


# ------------------------------------------------------------------------------ filling
def _fill(plan: LoadPlan, files: WeightFiles) -> None:
    converted = _host_memory(plan)
    total_bytes = sum(p.stored.num_bytes for p in plan.placements if p.tier not in (None, DISK))
    with (
        torch.no_grad(),
        Bar(
            total=total_bytes,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=_BAR_DELAY_S,
            leave=False,
        ) as bar,
    ):
        for placement in plan.placements:
            _fill_one(plan.model, placement, files, converted, bar)


def _host_memory(plan: LoadPlan) -> dict[int, torch.Tensor]:
    """Memory for tensors that come to the host in another dtype than the file's, by `id`."""
    wanted = [
        placement
        for placement in plan.placements
        if _goes_to_host(placement) and placement.dtype != placement.stored.dtype
    ]
    tensors = arena.empty_tensors([(p.stored.shape, p.dtype) for p in wanted])
    return {id(p.tensor): tensor for p, tensor in zip(wanted, tensors, strict=True)}


def _goes_to_host(placement: Placement) -> bool:
    return placement.tier == HOST or (
        placement.tier is None and placement.tensor.is_meta and not is_sharded(placement.tensor)
    )


def _fill_one(
    model: nn.Module,
    placement: Placement,
    files: WeightFiles,
    converted: Mapping[int, torch.Tensor],
    bar: Any,
) -> None:
    stored = placement.stored
    if placement.tier == DISK:
        _put(model, placement, torch.empty(stored.shape, dtype=placement.dtype, device="meta"))
        return
    values = files.view(stored)
    if _goes_to_host(placement) and id(placement.tensor) not in converted:
        if placement.tier is not None:
            files.bring_in(stored, bar.update)
        _put(model, placement, values)
        return
    if _goes_to_host(placement):
        target = converted[id(placement.tensor)]
        target.copy_(values)
        _put(model, placement, target)
    elif placement.tier is None:
        _fill_in_place(placement, values)
    else:
        # To the device first: it converts faster, and host memory need not hold both formats.
        _put(model, placement, values.to(placement.tier).to(placement.dtype))
    files.release(stored)
    bar.update(stored.num_bytes)


def _fill_in_place(placement: Placement, values: torch.Tensor) -> None:
    tensor = placement.tensor
    if is_sharded(tensor):
        fill_local_part(tensor, values)
    elif placement.dtype == tensor.dtype:
        tensor.detach().copy_(values)
    else:
        tensor.data = values.to(tensor.device, placement.dtype)


def _put(model: nn.Module, placement: Placement, values: torch.Tensor) -> None:
    """Give a tensor of the model its values, under all its names."""
    old_tensor = placement.tensor
    new_tensor: torch.Tensor = values
    if isinstance(old_tensor, nn.Parameter):
        can_train = values.dtype.is_floating_point or values.dtype.is_complex
        new_tensor = nn.Parameter(values, requires_grad=old_tensor.requires_grad and can_train)
        # The same object with other values, so that an optimizer made before still steps it.
        with contextlib.suppress(RuntimeError):  # something has a weak reference to it
            torch.utils.swap_tensors(old_tensor, new_tensor)  # type: ignore[no-untyped-call]
            return
    for name in placement.names:
        owner_name, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner_name), own_name, new_tensor)


# ------------------------------------------------------------------------------ several ranks
def _is_one_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _load_from_first_rank(model: nn.Module, checkpoint: str | Path, *, strict: bool) -> None:
    """Process 0 reads, the others get their part of each tensor from it; a collective."""
    is_first = dist.get_rank() == 0
    files, plan = WeightFiles(), None
    outcome: list[Any] = [None, ()]
    if is_first:
        # An error of process 0 is raised on all, so that none waits for it.
        try:
            plan = plan_loading(model, read_checkpoint(checkpoint), strict=strict)
            outcome = ["", [placement.names for placement in plan.placements]]
        except ConfigError as error:
            outcome = [str(error), ()]
    dist.broadcast_object_list(outcome, 0)
    problem, all_names = outcome
    if problem:
        raise ConfigError(problem)
    tensors = dict(arena.named_tensors(inner_model(model)))
    placements = iter(plan.placements if plan is not None else ())
    with torch.no_grad():
        for names in all_names:
            placement = next(placements, None)
            values = files.view(placement.stored) if placement is not None else None
            _receive(tensors[names[0]], values)
            if placement is not None:
                files.release(placement.stored)


def _receive(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    if tensor.is_meta:
        raise ConfigError(
            f"broadcast_from_rank0 sends values into tensors, and one of shape "
            f"{list(tensor.shape)} is on meta, without memory. Prepare the model first, or leave "
            "broadcast_from_rank0 out: then each process reads its part from the file."
        )
    whole = (
        torch.empty(tensor.shape, dtype=tensor.dtype) if values is None else values.to(tensor.dtype)
    )
    if is_dtensor(tensor):
        optimizer_shards.refill_parameter(tensor, whole)
    else:
        tensor.copy_(optimizer_shards.place_like(whole, tensor))


# ------------------------------------------------------------------------------ index of a folder
def write_offload_index(offload_folder: str | Path, loaded: LoadedWeights) -> None:
    """Say in a folder where the weights on disk are, in Accelerate's format.

    Args:
        offload_folder: The folder; made if it is not there.
        loaded: The weights that stayed in files.
    """
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, stored in loaded.stored.items():
        if stored.opened is not None:
            offload_weight(stored.opened, name, folder, index)
            continue
        index[name] = {
            "safetensors_file": str(stored.path.absolute()),
            "weight_name": stored.name,
            "dtype": str(stored.dtype).removeprefix("torch."),
            "shape": list(stored.shape),
        }
    save_offload_index(index, folder)
