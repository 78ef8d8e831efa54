"""``load_checkpoint_in_model``: a model filled from a checkpoint's files.

Where the dtypes agree, a tensor in host memory is a copy-on-write view of the safetensors file:
nothing is copied, several processes share what was read, and a strategy that cuts the model into
shards reads its own part only. Everything else is copied tensor by tensor, and what was read is let
go at once: memory holds the model and one portion. First the headers are compared with the model:
`Placement`s say which stored tensor goes where, or all that is wrong, before anything is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import mapped_files, torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger, progress_bar
from nbaccel.base.trees import names_by_tensor
from nbaccel.base.units import first_few
from nbaccel.bigmodel.checkpoint_files import (
    CheckpointTensor,
    StoredWeights,
    WeightFiles,
    read_checkpoint,
)
from nbaccel.bigmodel.device_map import DISK, HOST
from nbaccel.bigmodel.module_sizes import get_non_persistent_buffers, owner_in
from nbaccel.bigmodel.offload_folder import offload_weight, save_offload_index
from nbaccel.bigmodel.tensor_placing import as_dtype
from nbaccel.strategies import optimizer_shards
from nbaccel.transfer import arena
from nbaccel.transfer.arena import named_tensors
from nbaccel.transfer.sharded_tensors import (
    fill_local_part,
    full_shape,
    is_dtensor,
    is_sharded,
    module_inside,
)

_log = get_logger(__name__)

_MOST_LISTED = 10
_PORTION_BYTES = 16 << 20  # copied at a time
_BAR_DELAY_S = 0.5  # a load that is over by then needs no bar


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
    safetensors file in host memory, which takes memory only once it is used: loaded so, and then
    given to `Accelerator.prepare` with FSDP or ZeRO-3, no process ever holds the whole model. Of a
    model that is sharded already each process fills its own part. The file may be deleted or
    replaced afterwards, but must not be overwritten in place while the model lives, as ``cp`` onto
    it does, and safetensors before 0.8. Weights in files of `torch.save` are copied.

    Args:
        model: The model; best built under :func:`init_empty_weights`.
        checkpoint: A file of weights, an index, or a folder with one of them.
        device_map: Module's name → accelerator, ``"cpu"`` or ``"disk"``, such as
            :func:`infer_auto_device_map` makes.
        offload_folder: Where `index.json` says in which files the weights on the ``"disk"`` tier
            are, for :func:`dispatch_model`. Only weights in files of `torch.save` are copied there.
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
    if offload_8bit_bnb:
        raise ConfigError(
            f"offload_8bit_bnb={offload_8bit_bnb!r}: bitsandbytes' weights are not made here. Load "
            "with from_pretrained(quantization_config=...) of transformers."
        )
    tensors = named_tensors(inner_model(model))
    sharded_name = next((name for name, tensor in tensors if is_sharded(tensor)), None)
    if sharded_name is not None and not full_state_dict:
        raise ConfigError(
            f"full_state_dict={full_state_dict!r} was given for a sharded model: files here hold "
            "whole tensors. Leave it out, or load a sharded checkpoint with Accelerator.load_state."
        )
    _refuse_map(device_map, sharded_name)
    if device_map is not None and DISK in device_map.values() and offload_folder is None:
        raise ConfigError(
            f"device_map={_shorten_map(device_map)} leaves weights on disk, and no offload_folder "
            "was given: a later dispatch_model would not know where they are. Give offload_folder, "
            "or use load_checkpoint_and_dispatch, which needs none."
        )
    if broadcast_from_rank0 and dist.is_initialized() and dist.get_world_size() > 1:
        _load_from_first_rank(model, checkpoint, strict=strict)
        return
    weights = fill_model(
        model,
        checkpoint,
        needs_mapping=False,
        device_map=device_map,
        dtype=None if dtype is None else as_dtype(dtype),
        fp32_modules=keep_in_fp32_modules or (),
        offload_buffers=offload_buffers,
        strict=strict,
    )
    if offload_folder is not None and weights.stored:
        write_offload_index(offload_folder, weights)


def fill_model(
    model: nn.Module, checkpoint: str | Path, *, needs_mapping: bool = True, **how: Any
) -> StoredWeights:
    """Fill a model as :func:`plan_loading` says; returns the weights that stay in the files."""
    placements = plan_loading(model, checkpoint, **how)
    on_disk = [placement for placement in placements if placement.tier == DISK]
    # By their texts, since what a user gives need not be hashable.
    placed = (p for p in reversed(placements) if p.tier not in (None, HOST, DISK))
    problems = []
    for tier_text, placement in sorted({repr(p.tier): p for p in placed}.items()):
        try:
            torch.empty(0, device=placement.tier)
        # torch built without a device raises an AssertionError for it.
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            problems.append(
                f"device_map sends {placement.names[0]} to {tier_text}, which this "
                f"process cannot use ({str(error).splitlines()[0]}). Nothing has been loaded. "
                'Give a device of this machine, "cpu" or "disk".'
            )
    if problems:
        raise ConfigError(*problems)
    unmapped = sorted({str(p.stored.path) for p in on_disk if not p.stored.is_mapped})
    if needs_mapping and unmapped:
        raise ConfigError(
            f"{', '.join(unmapped)} was written by torch before version 1.6, in a format that must "
            "be read as a whole: weights of it cannot stay on disk. Load it with torch.load and "
            "save it again, best with save_model of an Accelerator (safetensors)."
        )
    empty_names = [p.names[0] for p in placements if p.tensor.is_meta and is_sharded(p.tensor)]
    if empty_names:
        raise ConfigError(
            f"{len(empty_names)} sharded weights are on meta ({first_few(empty_names, 3)}), "
            "without memory for their values. Nothing has been loaded. Call "
            'model.to_empty(device="cpu") (or another device) before, or load before sharding.'
        )
    files = WeightFiles()
    files.map_files(placement.stored for placement in placements)
    _fill(inner_model(model), placements, files)
    stored = {name: placement.stored for placement in on_disk for name in placement.names}
    return StoredWeights(files, stored)


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
    for name, stored in read_checkpoint(checkpoint_file).items():
        tier = HOST if device_map is None else tier_of(name, device_map)
        values = files.view(stored)
        state[name] = values if tier in ("", HOST, DISK) else values.to(tier)
    return state


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One tensor of the model, and what it is filled from."""

    names: tuple[str, ...]  # its names in the model; several where it is tied
    tensor: torch.Tensor
    stored: CheckpointTensor  # what it is filled from
    tier: Any  # what the device map says of it; None where there is no map
    dtype: torch.dtype  # its dtype afterwards


def plan_loading(
    model: nn.Module,
    source: str | Path,
    *,
    device_map: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    fp32_modules: Collection[str] = (),
    offload_buffers: bool = False,
    strict: bool = False,
) -> list[Placement]:
    """Compare a checkpoint's headers with a model; what goes where, in the order of the files."""
    content = read_checkpoint(source)
    model = inner_model(model)
    unsaved_names = get_non_persistent_buffers(model, recurse=True, fqns=True)
    saved = {name: tensor for name, tensor in named_tensors(model) if name not in unsaved_names}
    groups: list[_TensorGroup] = [
        (tuple(names), saved[names[0]]) for names in names_by_tensor(saved.items()).values()
    ]
    buffer_names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    mistakes: list[str] = []
    placements: list[Placement] = []
    for names, tensor in groups:
        stored = next((content[name] for name in names if name in content), None)
        if stored is None:
            continue
        if stored.shape != full_shape(tensor):
            mistakes.append(
                f"{names[0]} has shape {list(full_shape(tensor))} in the model and "
                f"{list(stored.shape)} in {stored.path.name}"
            )
            continue
        if stored.dtype.is_complex and not tensor.dtype.is_complex:
            mistakes.append(
                f"{names[0]} is real in the model and {stored.dtype} in {stored.path.name}"
            )
        tier = None if device_map is None else tier_of(names[0], device_map)
        if device_map is not None and (tier is None or tier == ""):
            mistakes.append(f"{names[0]} has no device in device_map")
        if tier == DISK and not offload_buffers and buffer_names.issuperset(names):
            tier = HOST
        target_dtype = tensor.dtype
        if dtype is not None and tensor.dtype.is_floating_point:
            keeps_fp32 = any(name in fp32_modules for name in names[0].split("."))
            target_dtype = torch.float32 if keeps_fp32 and dtype is torch.float16 else dtype
        placements.append(
            Placement(names=names, tensor=tensor, stored=stored, tier=tier, dtype=target_dtype)
        )
    mistakes += _coverage_mistakes(groups, source, content.keys(), strict=strict)
    if mistakes:
        shown = first_few(mistakes, _MOST_LISTED, separator="\n  ")
        raise ConfigError(
            f"{source} does not fit {type(model).__name__}:\n  {shown}\nNothing has been loaded. "
            "Build the model from the configuration that the checkpoint was saved with, or give "
            f"the checkpoint of this model.{_prefix_hint(groups, content.keys())}"
        )
    _warn_of_empty_buffers(model, unsaved_names)
    placements.sort(key=lambda p: (str(p.stored.path), p.stored.first_byte))
    return placements


def inner_model(model: nn.Module) -> nn.Module:
    """The user's own module inside wrappers of DDP, of a compiler or of an engine."""
    while True:
        outer_model = model
        model = torch_private.uncompiled(model)
        model = module_inside(model) or model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        if model is outer_model:
            return model


def tier_of(tensor_name: str, device_map: Mapping[str, Any]) -> Any:
    """What a device map says of a tensor: the entry of the nearest module around it."""
    tier = device_map.get(owner_in(tensor_name, device_map) or "", "")
    return HOST if isinstance(tier, torch.device) and tier.type == "cpu" else tier


_TensorGroup = tuple[tuple[str, ...], torch.Tensor]
"""A tensor of the state dict, with all its names."""


def _coverage_mistakes(
    groups: list[_TensorGroup], source: str | Path, stored_names: KeysView[str], *, strict: bool
) -> Iterator[str]:
    all_names = {name for names, _ in groups for name in names}
    unused_names = sorted(stored_names - all_names)
    if all_names and unused_names and len(unused_names) == len(stored_names):
        # The model would stay as it is, and a warning is soon scrolled away.
        yield (
            f"none of the {len(unused_names)} names in the file is in the model: "
            f"{first_few(unused_names, _MOST_LISTED)}; the model has "
            f"{first_few(sorted(all_names), _MOST_LISTED)}"
        )
        return
    missing = [(names[0], tensor) for names, tensor in groups if stored_names.isdisjoint(names)]
    without_values = [name for name, tensor in missing if strict or tensor.is_meta]
    if without_values:
        how = " (strict=True)" if strict else ", and have no values in the model either"
        listed = first_few(without_values, _MOST_LISTED)
        yield f"{len(without_values)} weights are not in the checkpoint{how}: {listed}"
    elif missing:
        listed = first_few([name for name, _ in missing], _MOST_LISTED)
        text = "%d weights of the model are not in %s and keep their values: %s"
        _log.warning(text, len(missing), source, listed)
    if unused_names:
        listed = first_few(unused_names, _MOST_LISTED)
        if strict:
            yield f"{len(unused_names)} tensors of it are not in the model (strict=True): {listed}"
        else:
            text = "%d tensors of %s are not in the model and are not used: %s"
            _log.warning(text, len(unused_names), source, listed)


def _warn_of_empty_buffers(model: nn.Module, unsaved_names: Collection[str]) -> None:
    """Name buffers that no checkpoint holds, and that have no values: a pass would fail at them."""
    empty_names = [
        name for name, buffer in model.named_buffers() if name in unsaved_names and buffer.is_meta
    ]
    if empty_names:
        text = "%d buffers of %s are on meta and in no checkpoint, as they are not persistent: %s. "
        text += "Build the model under init_empty_weights(include_buffers=False), or set them."
        listed = first_few(empty_names, _MOST_LISTED)
        _log.warning(text, len(empty_names), type(model).__name__, listed)


_WRAPPER_PREFIXES = ("module.", torch_private.COMPILED_PREFIX, "model.")
"""What DistributedDataParallel, torch.compile and classes around a model put before names."""


def _prefix_hint(groups: list[_TensorGroup], file_names: KeysView[str]) -> str:
    all_names = {name for names, _ in groups for name in names}
    for prefix in _WRAPPER_PREFIXES if all_names.isdisjoint(file_names) else ():
        if not all_names.isdisjoint(name.replace(prefix, "") for name in file_names):
            return f" Without {prefix!r} in the file's names they fit: rename them."
        if not all_names.isdisjoint(prefix + name for name in file_names):
            return f" With {prefix!r} before the file's names they fit: rename them."
    return ""


def _refuse_map(device_map: Any, sharded_name: str | None) -> None:
    if device_map is None:
        return
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f"device_map={device_map!r} says of no module where it goes: this function needs a "
            "mapping. Give infer_auto_device_map(model), or call load_checkpoint_and_dispatch."
        )
    if sharded_name is not None:
        raise ConfigError(
            f"device_map={_shorten_map(device_map)} was given for a model whose {sharded_name} is "
            "cut into shards, which the strategy has placed. Leave device_map out."
        )


def _shorten_map(device_map: Mapping[str, Any]) -> str:
    text = str(dict(device_map))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fill(model: nn.Module, placements: Sequence[Placement], files: WeightFiles) -> None:
    # Memory for tensors that come to the host and cannot be views of the file, by `id`.
    wanted = [p for p in placements if _goes_to_host(p) and _must_be_copied(p)]
    tensors = arena.empty_tensors([(p.stored.shape, p.dtype) for p in wanted])
    converted = {id(p.tensor): tensor for p, tensor in zip(wanted, tensors, strict=True)}
    with (
        torch.no_grad(),
        progress_bar(
            total=sum(p.stored.num_bytes for p in placements if _is_read_now(p)),
            desc="loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=_BAR_DELAY_S,
            leave=False,
        ) as bar,
    ):
        for placement in placements:
            _fill_one(model, placement, files, converted, bar)


def _goes_to_host(placement: Placement) -> bool:
    return placement.tier == HOST or (
        placement.tier is None and placement.tensor.is_meta and not is_sharded(placement.tensor)
    )


def _must_be_copied(placement: Placement) -> bool:
    # torch.save empties a file that it writes over, which takes the pages from a model that was
    # loaded from it, and ends the process. safetensors collects the bytes first.
    is_torch_mapping = placement.stored.opened is not None and placement.stored.is_mapped
    return is_torch_mapping or placement.dtype != placement.stored.dtype


def _is_read_now(placement: Placement) -> bool:
    return placement.tier != DISK and (
        placement.tier is not None or _must_be_copied(placement) or not _goes_to_host(placement)
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
        if _is_read_now(placement):
            files.bring_in(stored, bar.update)
        _put(model, placement, values)
        return
    if _goes_to_host(placement):
        target = converted[id(placement.tensor)]
        _copy_in_portions(target, values)
        _put(model, placement, target)
    elif placement.tier is None:
        tensor = placement.tensor
        if is_sharded(tensor):
            fill_local_part(tensor, values)
        elif placement.dtype == tensor.dtype:
            _copy_in_portions(tensor.detach(), values)
        else:
            tensor.data = values.to(tensor.device, placement.dtype)
    else:
        # To the device first: it converts faster, and host memory need not hold both formats.
        _put(model, placement, values.to(placement.tier).to(placement.dtype))
    files.release(stored)
    bar.update(stored.num_bytes)


def _copy_in_portions(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy, with cast; pages of a file are let go as they have been read."""
    # A single tensor may be a tenth of a model: read as a whole it would be in memory twice.
    if not (target.is_contiguous() and values.is_contiguous()):
        target.copy_(values)
        return
    flat_target = target.view(-1)
    flat_values = values.view(-1)
    num_elements = max(1, _PORTION_BYTES // values.element_size())
    for first_element in range(0, values.numel(), num_elements):
        portion = flat_values[first_element : first_element + num_elements]
        flat_target[first_element : first_element + num_elements].copy_(portion)
        mapped_files.drop_pages(portion.data_ptr(), portion.nbytes)


def _put(model: nn.Module, placement: Placement, values: torch.Tensor) -> None:
    old_tensor = placement.tensor
    new_tensor: torch.Tensor = values
    if isinstance(old_tensor, nn.Parameter):
        can_train = values.dtype.is_floating_point or values.dtype.is_complex
        new_tensor = nn.Parameter(values, requires_grad=old_tensor.requires_grad and can_train)
        if _replace_values(old_tensor, new_tensor):
            return
    for name in placement.names:
        owner_name, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner_name), own_name, new_tensor)


def _replace_values(old_parameter: nn.Parameter, new_parameter: nn.Parameter) -> bool:
    """Let the same object have other values, so that an optimizer made before still steps it."""
    if old_parameter.requires_grad == new_parameter.requires_grad:
        with contextlib.suppress(RuntimeError):  # one of the two is on meta
            old_parameter.data = new_parameter.data
            if old_parameter.grad is not None and old_parameter.grad.dtype != old_parameter.dtype:
                old_parameter.grad = None
            return True
    own_class = type(old_parameter)
    attributes = dict(vars(old_parameter))
    with contextlib.suppress(RuntimeError):  # something else refers to its values
        torch.utils.swap_tensors(old_parameter, new_parameter)  # type: ignore[no-untyped-call]
        # Marks that libraries put on parameters, and their own classes of them.
        old_parameter.__class__ = own_class
        vars(old_parameter).update(attributes)
        return True
    return False


def _load_from_first_rank(model: nn.Module, checkpoint: str | Path, *, strict: bool) -> None:
    """Process 0 reads, the others get their part of each tensor from it; a collective."""
    files = WeightFiles()
    placements: list[Placement] = []
    outcome: list[Any] = [None, ()]
    if dist.get_rank() == 0:
        # An error of process 0 is raised on all, so that none waits for it.
        try:
            placements = plan_loading(model, checkpoint, strict=strict)
            files.map_files(placement.stored for placement in placements)
            outcome = [None, [(p.names[0], p.stored.shape) for p in placements]]
        except ConfigError as error:
            outcome = [error, ()]
    dist.broadcast_object_list(outcome, 0)
    problem, expected = outcome
    if problem is not None:
        raise problem
    tensors = dict(named_tensors(inner_model(model)))
    own_problems = []
    for name, shape in expected:
        tensor = tensors.get(name)
        if tensor is None or full_shape(tensor) != shape:
            own_problems.append(f"{name} of shape {list(shape)} is not in the model")
        elif tensor.is_meta:
            own_problems.append(f"{name} is on meta, without memory that values could be sent to")
    all_problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_problems, own_problems)
    for rank, problems in enumerate(all_problems):
        if problems:
            raise ConfigError(
                f"broadcast_from_rank0={True} cannot send {len(problems)} weights to process "
                f"{rank}: {first_few(problems, 3)}. Nothing has been loaded. Build the same model "
                "in all processes and prepare it first, or leave broadcast_from_rank0 out: then "
                "each process reads its part from the file."
            )
    with torch.no_grad():
        for number, (name, _) in enumerate(expected):
            stored = placements[number].stored if placements else None
            _receive(tensors[name], None if stored is None else files.view(stored))
            if stored is not None:
                files.release(stored)


def _receive(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    if values is None:
        values = torch.empty(full_shape(tensor), dtype=tensor.dtype)
    whole = values.to(tensor.dtype)
    if is_dtensor(tensor):
        optimizer_shards.refill_parameter(tensor, whole)
        return
    # Sent where the process group's backend works: on the device of the model.
    received = optimizer_shards.place_like(whole, tensor)
    if is_sharded(tensor):
        fill_local_part(tensor, received)
    else:
        tensor.detach().copy_(received)


def write_offload_index(offload_folder: str | Path, weights: StoredWeights) -> None:
    """Say in a folder where the weights on disk are, in Accelerate's format."""
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, stored in weights.stored.items():
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
