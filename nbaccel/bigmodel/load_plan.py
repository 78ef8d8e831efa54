"""Which stored tensor goes where in a model, decided and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.log import get_logger
from nbaccel.base.units import first_few
from nbaccel.bigmodel.checkpoint_files import CheckpointContent, CheckpointTensor
from nbaccel.bigmodel.device_map import DISK, HOST
from nbaccel.bigmodel.module_sizes import get_non_persistent_buffers, names_upwards
from nbaccel.transfer.arena import named_tensors
from nbaccel.transfer.sharded_tensors import full_shape, module_inside

_log = get_logger(__name__)

_MOST_LISTED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One tensor of the model, and what it is filled from.

    Attributes:
        names: Its names in the model; several where it is tied.
        tensor: The tensor as it is now.
        stored: What it is filled from.
        tier: What the device map says of it; None where there is no map.
        dtype: Its dtype afterwards.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    stored: CheckpointTensor
    tier: Any
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of it in memory, in its dtype."""
        return int(torch.Size(self.stored.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What a load will do.

    Attributes:
        model: The user's own module, inside wrappers.
        placements: In the order of the files, so that these are read from begin to end.
    """

    model: nn.Module
    placements: tuple[Placement, ...]

    def on_tier(self, *tiers: Any) -> tuple[Placement, ...]:
        """Those of some tiers."""
        return tuple(placement for placement in self.placements if placement.tier in tiers)


def plan_loading(
    model: nn.Module,
    content: CheckpointContent,
    *,
    device_map: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    fp32_modules: Collection[str] = (),
    offload_buffers: bool = False,
    strict: bool = False,
) -> LoadPlan:
    """Compare a checkpoint's headers with a model."""
    model = inner_model(model)
    groups = _tensor_groups(model)
    buffer_names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    mistakes: list[str] = []
    placements: list[Placement] = []
    for names, tensor in groups:
        stored = next((content.tensors[name] for name in names if name in content.tensors), None)
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
        placements.append(
            Placement(
                names=names,
                tensor=tensor,
                stored=stored,
                tier=tier,
                dtype=_target_dtype(names[0], tensor, dtype, fp32_modules),
            )
        )
    mistakes += _coverage_mistakes(groups, content, strict=strict)
    if mistakes:
        raise _mismatch_error(model, content, mistakes, _prefix_hint(groups, content))
    _warn_of_empty_buffers(model)
    placements.sort(key=lambda p: (str(p.stored.path), p.stored.first_byte))
    return LoadPlan(model=model, placements=tuple(placements))


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
    around = (name for name in names_upwards(tensor_name) if name in device_map)
    tier = device_map.get(next(around, ""), "")
    return HOST if isinstance(tier, torch.device) and tier.type == "cpu" else tier


def _tensor_groups(model: nn.Module) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Each tensor of the state dict once, with all its names."""
    unsaved_names = get_non_persistent_buffers(model, recurse=True, fqns=True)
    names_by_id: dict[int, list[str]] = {}
    tensors_by_id: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(model):
        if name not in unsaved_names:
            names_by_id.setdefault(id(tensor), []).append(name)
            tensors_by_id[id(tensor)] = tensor
    return [(tuple(names), tensors_by_id[key]) for key, names in names_by_id.items()]


def _target_dtype(
    tensor_name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | None,
    fp32_modules: Collection[str],
) -> torch.dtype:
    if dtype is None or not tensor.dtype.is_floating_point:
        return tensor.dtype
    parts = tensor_name.split(".")
    if dtype is torch.float16 and any(name in parts for name in fp32_modules):
        return torch.float32
    return dtype


def _coverage_mistakes(
    groups: list[tuple[tuple[str, ...], torch.Tensor]],
    content: CheckpointContent,
    *,
    strict: bool,
) -> Iterator[str]:
    """Weights without a value, and values without a weight."""
    all_names = {name for names, _ in groups for name in names}
    unused_names = sorted(content.tensors.keys() - all_names)
    if all_names and unused_names and len(unused_names) == len(content.tensors):
        # The model would stay as it is, and a warning is soon scrolled away.
        yield (
            f"none of the {len(unused_names)} names in the file is in the model: "
            f"{first_few(unused_names, _MOST_LISTED)}; the model has "
            f"{first_few(sorted(all_names), _MOST_LISTED)}"
        )
        return
    missing = [
        (names[0], tensor)
        for names, tensor in groups
        if not any(name in content.tensors for name in names)
    ]
    without_values = [name for name, tensor in missing if strict or tensor.is_meta]
    if without_values:
        yield (
            f"{len(without_values)} weights are not in the checkpoint, and have no values in the "
            f"model either: {first_few(without_values, _MOST_LISTED)}"
            if not strict
            else f"{len(without_values)} weights are not in the checkpoint (strict=True): "
            f"{first_few(without_values, _MOST_LISTED)}"
        )
    elif missing:
        _log.warning(
            "%d weights of %s are not in %s and keep their values: %s",
            len(missing),
            "the model",
            content.source,
            first_few([name for name, _ in missing], _MOST_LISTED),
        )
    if unused_names and strict:
        yield (
            f"{len(unused_names)} tensors of the checkpoint are not in the model (strict=True): "
            f"{first_few(unused_names, _MOST_LISTED)}"
        )
    elif unused_names:
        _log.warning(
            "%d tensors of %s are not in the model and are not used: %s",
            len(unused_names),
            content.source,
            first_few(unused_names, _MOST_LISTED),
        )


def _warn_of_empty_buffers(model: nn.Module) -> None:
    """Name buffers that no checkpoint holds, and that have no values: a pass would fail at them."""
    unsaved_names = get_non_persistent_buffers(model, recurse=True, fqns=True)
    empty_names = [
        name for name, buffer in model.named_buffers() if name in unsaved_names and buffer.is_meta
    ]
    if empty_names:
        _log.warning(
            "%d buffers of %s are on meta and in no checkpoint, because they are not persistent: "
            "%s. Build the model under init_empty_weights(include_buffers=False), or set them.",
            len(empty_names),
            type(model).__name__,
            first_few(empty_names, _MOST_LISTED),
        )


def _mismatch_error(
    model: nn.Module, content: CheckpointContent, mistakes: list[str], prefix_hint: str
) -> ConfigError:
    shown = "".join(f"\n  {mistake}" for mistake in mistakes[:_MOST_LISTED])
    rest = len(mistakes) - _MOST_LISTED
    text = f"\n  and {rest} more" if rest > 0 else ""
    return ConfigError(
        f"{content.source} does not fit {type(model).__name__}:{shown}{text}\n"
        "Nothing has been loaded. Build the model from the configuration that the checkpoint was "
        f"saved with, or give the checkpoint of this model.{prefix_hint}"
        f"{_conversion_hint(model, mistakes)}"
    )


_WRAPPER_PREFIXES = ("module.", torch_private.COMPILED_PREFIX, "model.")
"""What DistributedDataParallel, torch.compile and classes around a model put before names."""


def _prefix_hint(
    groups: list[tuple[tuple[str, ...], torch.Tensor]], content: CheckpointContent
) -> str:
    """What would make names fit of which none does."""
    all_names = {name for names, _ in groups for name in names}
    file_names = content.tensors.keys()
    if not all_names.isdisjoint(file_names):
        return ""
    for prefix in _WRAPPER_PREFIXES:
        if not all_names.isdisjoint(name.replace(prefix, "") for name in file_names):
            return (
                f" Without {prefix!r} in the file's names they fit: save the model without its "
                "wrapper (accelerator.unwrap_model), or rename the file's keys."
            )
        if not all_names.isdisjoint(prefix + name for name in file_names):
            return (
                f" With {prefix!r} before the file's names they fit: load them into the model's "
                f"{prefix.removesuffix('.')}, or rename the file's keys."
            )
    return ""


def _conversion_hint(model: nn.Module, mistakes: list[str]) -> str:
    """Of models of transformers, whose published files may have the names of an older version."""
    has_other_names = any(
        "not in the checkpoint" in mistake or "none of the" in mistake for mistake in mistakes
    )
    if not has_other_names or not callable(getattr(model, "save_pretrained", None)):
        return ""
    return (
        " Or do the names differ because the files are older than this version of transformers? "
        "Its from_pretrained converts them: save the model again with "
        "save_pretrained(folder, save_original_format=False)."
    )
