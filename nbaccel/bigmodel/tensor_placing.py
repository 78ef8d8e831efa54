"""Puts single tensors of a module on devices, and ties parameters again that were one.

It places what it is given and reads no files; where a model's parts belong is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.torch_private import module_tables, store_own_tensor
from nbaccel.plan import registry

PlacedTensors = MutableMapping[Any, torch.Tensor]
"""Where one group of tied tensors has been placed already: devices (or their names) → tensors."""


def as_device(device: torch.device | str | int) -> torch.device:
    """A device by its name or number."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{device!r} is no device of this machine ({error}), so nothing can be placed on it. "
            'Name one as torch does: "cpu", "meta", "cuda:0", or the number of an accelerator.'
        ) from None


def usable_device(device: torch.device | str | int) -> torch.device:
    """A device that tensors can be made on."""
    found_device = as_device(device)
    try:
        torch.empty(0, device=found_device)
    # AssertionError without CUDA, ModuleNotFoundError without XLA.
    except Exception as error:  # each backend raises its own
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"Tensors cannot be made on {device!r} here ({type(error).__name__}: {first_line}). "
            'Choose another device, such as "cpu" or "meta".'
        ) from None
    return found_device


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are one; ``cuda`` without a number counts as ``cuda:0``."""
    if first_device.type != second_device.type:
        return False
    if first_device.type == "cpu":
        return first_device == second_device
    return (first_device.index or 0) == (second_device.index or 0)


def is_accelerator(device: torch.device) -> bool:
    """Whether tensors there are neither in host memory nor without memory."""
    return device.type not in ("cpu", "meta")


def own_module(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The submodule that a parameter or buffer belongs to, and its name there."""
    module_name, _, last_name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(module_name)
    except AttributeError as error:
        raise ConfigError(
            f"{type(module).__name__} has no tensor {tensor_name!r} ({error}), so none can be "
            "placed. Take a name from its state_dict()."
        ) from None
    parameters, buffers, _ = module_tables(owner)
    if last_name not in parameters and last_name not in buffers:
        there = ", ".join([*parameters, *buffers]) or "none"
        raise ConfigError(
            f"{type(owner).__name__} has no parameter or buffer {last_name!r} (asked for as "
            f"{tensor_name!r}), so it cannot be placed. It has: {there}."
        )
    return owner, last_name


def parameter_like(example: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter with the class, attributes and `requires_grad` of another."""
    wants_gradient = example.requires_grad and (data.is_floating_point() or data.is_complex())
    # A tensor class of its own (as DTensor) counts as a parameter without being a subclass.
    is_subclass = nn.Parameter in type(example).__mro__
    # The constructor of a subclass may ask for anything; its base class's only for these.
    made_class = type(example) if is_subclass else nn.Parameter
    made: nn.Parameter = nn.Parameter.__new__(made_class, data, wants_gradient)
    vars(made).update(vars(example))
    return made


def placed_on(group: Mapping[Any, torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The tensor of a tied group that is on a device already."""
    places = group.items()
    found = (placed for where, placed in places if check_device_same(as_device(where), device))
    return next(found, None)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Any = None,
    tied_params_map: dict[int, PlacedTensors] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer of a module on a device; the module holds a new tensor then.

    Class, attributes and `requires_grad` of a parameter are kept. A parameter that is there
    already, with no value to take, stays the same object.

    Args:
        module: The module.
        tensor_name: The tensor's name in it, submodules included.
        device: Where to.
        value: New values, of the same shape; needed where the tensor is on ``meta``. They are
            shared, not copied, where device and format are right already.
        dtype: The format to take floating-point values in; None: the one that the tensor has.
        fp16_statistics: Of 8-bit weights of bitsandbytes; must be None.
        tied_params_map: For the addresses (``data_ptr()``) of tied tensors: where the group has
            been placed. What it has on the device is used again, what is new there is added.
        non_blocking: Whether the copy may still be under way when this returns.
        clear_cache: Whether to give back the memory that torch caches on an accelerator.

    Raises:
        ConfigError: There is no such tensor or device, shapes differ, values are lacking, or
            statistics are given. Nothing has been changed then.
    """
    if fp16_statistics is not None:
        raise ConfigError(
            f"fp16_statistics for {tensor_name!r} ({type(fp16_statistics).__name__}) belong to "
            "8-bit weights of bitsandbytes, which nbaccel does not place. Load the model with "
            "transformers' BitsAndBytesConfig whole on one GPU, or offload it without quantization."
        )
    owner, last_name = own_module(module, tensor_name)
    target = as_device(device)
    current: Any = getattr(owner, last_name)
    if not isinstance(current, torch.Tensor):
        raise ConfigError(
            f"{last_name!r} of {type(owner).__name__} is {current}, so it has no shape that a "
            "tensor could be placed for. Leave it out, or build the module with it."
        )
    group = _tied_group(tied_params_map, current, value)
    placed = None if group is None else placed_on(group, target)
    if placed is None:
        if value is None:
            if current.is_meta and target.type != "meta":
                raise ConfigError(
                    f"{tensor_name!r} is on meta, without values, so there is nothing to copy to "
                    f"{target}. Pass them as value=."
                )
        elif current.shape != (shape := torch.as_tensor(value).shape):
            raise ConfigError(
                f"{tensor_name!r} has the shape {tuple(current.shape)}, and the value given for it "
                f"{tuple(shape)}: they belong to different models. Check that the checkpoint is "
                "this model's, and that its configuration is the same."
            )
        wanted_dtype = None if dtype is None else as_dtype(dtype)
        placed = _placed_tensor(current, value, target, wanted_dtype, non_blocking)
        if group is not None:
            group[device] = placed
    store_own_tensor(owner, last_name, placed)
    if clear_cache and is_accelerator(target):
        registry.device_runtime(target.type).empty_cache()


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A format by its name, as ``torch.float16``, ``"float16"`` or ``"torch.float16"``."""
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"dtype={dtype!r} is no format of torch {torch.__version__}, so nothing can have it, "
            'and no size can be told. Name one such as "float16" or "bfloat16".'
        )
    return found


def _tied_group(
    tied_params_map: dict[int, PlacedTensors] | None, current: torch.Tensor, value: Any
) -> PlacedTensors | None:
    """The group of tied tensors that a value, or else what it replaces, belongs to."""
    for member in (value, current):
        # Tensors without memory all have the address 0.
        if tied_params_map and isinstance(member, torch.Tensor) and (key := member.data_ptr()):
            group = tied_params_map.get(key)
            if group is not None:
                return group
    return None


def _placed_tensor(
    current: torch.Tensor,
    value: Any,
    target: torch.device,
    dtype: torch.dtype | None,
    non_blocking: bool,
) -> torch.Tensor:
    """What the module is to hold: `current` itself where nothing changes."""
    source = current if value is None else torch.as_tensor(value)
    # Values take the tensor's format, or the given one; from the latter integers keep theirs.
    if dtype is None:
        dtype = current.dtype
    elif not (source.is_floating_point() or source.is_complex()):
        dtype = source.dtype
    data = source.detach().to(target, dtype, non_blocking=non_blocking)
    if not isinstance(current, nn.Parameter):
        return data
    stays = value is None and data.dtype == current.dtype
    if stays and check_device_same(current.device, target):
        return current
    return parameter_like(current, data)


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Let parameters that were one tensor be one again.

    Args:
        model: The model.
        tied_params: Groups of names, as `find_tied_parameters` gives them. A group becomes its
            first tensor that is not on ``meta``; one that is there altogether stays as it is.

    Raises:
        ConfigError: The model has no tensor of one of the names.
    """
    for group in tied_params:
        owners = [own_module(model, tied_name) for tied_name in group]
        members = (getattr(owner, last_name) for owner, last_name in owners)
        shared = next((m for m in members if m is not None and not m.is_meta), None)
        if shared is not None:
            for owner, last_name in owners:
                store_own_tensor(owner, last_name, shared)
