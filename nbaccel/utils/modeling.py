"""Facts about modules and weights, and what spreads a model over devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.log import get_logger
from nbaccel.base.public_names import hand_on
from nbaccel.base.units import first_few, parse_bytes
from nbaccel.bigmodel.checkpoint_loading import (
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_state_dict as load_state_dict,
)
from nbaccel.bigmodel.device_map import (
    check_device_map as check_device_map,
    clean_device_map as clean_device_map,
    fallback_allocate as fallback_allocate,
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
)
from nbaccel.bigmodel.module_sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    dtype_byte_size as dtype_byte_size,
    find_tied_parameters as find_tied_parameters,
    get_max_layer_size as get_max_layer_size,
    get_module_leaves as get_module_leaves,
    get_module_size_with_ties as get_module_size_with_ties,
    get_non_persistent_buffers as get_non_persistent_buffers,
    id_tensor_storage as id_tensor_storage,
    named_module_tensors as named_module_tensors,
)
from nbaccel.bigmodel.offload_folder import load_offloaded_weights as load_offloaded_weights
from nbaccel.bigmodel.tensor_placing import (
    check_device_same as check_device_same,
    retie_parameters as retie_parameters,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from nbaccel.hooks import each_hook
from nbaccel.state import PartialState
from nbaccel.utils.environment import parse_choice_from_env

_MOST_NAMES_TOLD = 5
_state_log = get_logger(__name__)


def convert_file_size_to_int(size: int | str) -> int:
    """Read a size: ``"5GB"`` is five billion bytes, ``"5GiB"`` counts in 1024."""
    return parse_bytes(size)


def is_peft_model(model: nn.Module) -> bool:
    """Whether it is a model of peft, also inside a wrapper."""
    inner = torch_private.uncompiled(getattr(model, "module", model))
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(inner).__mro__)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """What scales losses under fp16, for this process's device."""
    return torch.amp.GradScaler(PartialState().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """``torch.autocast`` for this process's device where it is wanted, else nothing happens."""
    if not native_amp:
        return nullcontext()
    formats = {"fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = formats.get(parse_choice_from_env("ACCELERATE_MIXED_PRECISION"), torch.bfloat16)
    options = autocast_kwargs.to_kwargs() if autocast_kwargs is not None else {}
    return torch.autocast(PartialState().device.type, dtype=dtype, **options)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module itself has a hook that brings its weights in when it runs."""
    return _offloading_hook(module) is not None


def _offloading_hook(module: nn.Module) -> Any:
    hooks = (hook for hook in each_hook(module) if getattr(hook, "offload", False) is True)
    return next(hooks, None)


@contextlib.contextmanager
def align_module_device(
    module: nn.Module, execution_device: torch.device | str | int | None = None
) -> Iterator[None]:
    """A block in which a module has its weights, on one device.

    Args:
        module: The module. What is in its submodules moves only where its hook includes them.
        execution_device: Where to; None: where its hook computes, or nothing without a hook.

    Yields:
        Nothing. Afterwards everything is where it was.
    """
    hook = _offloading_hook(module)
    if hook is not None:
        usual_device = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            # Those of other libraries bring weights in as part of a call.
            if hasattr(hook, "bring_in"):
                hook.bring_in(module)
            else:
                hook.pre_forward(module)
            yield
        finally:
            if hasattr(hook, "send_out"):
                hook.send_out(module)
            else:
                hook.post_forward(module, None)
            hook.execution_device = usual_device
    elif execution_device is None:
        yield
    else:
        devices = {name: tensor.device for name, tensor in module.named_parameters(recurse=False)}
        try:
            for name in devices:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, device in devices.items():
                set_module_tensor_to_device(module, name, device)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """A state dict in host memory, with offloaded weights; warns of those without values."""
    there = model.state_dict().items()
    state: dict[str, Any] = {n: it.to("cpu") if _has_values(it) else it for n, it in there}
    for module_name, module in model.named_modules():
        if has_offloaded_params(module):
            prefix = f"{module_name}." if module_name else ""
            with align_module_device(module, "cpu"):
                own_state = module.state_dict(prefix=prefix)
            state |= {name: value for name, value in own_state.items() if _has_values(value)}
    lacking = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if lacking:
        _state_log.warning(
            "%d tensors are on meta without values, so they are not in the state dict: %s",
            len(lacking),
            first_few(lacking, _MOST_NAMES_TOLD),
        )
    return {name: value for name, value in state.items() if name not in lacking}


def _has_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Put the offloaded tensors of `module_name`'s module into a state dict with their names."""
    owner_name = module_name.rpartition(".")[0]
    target = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, target):
        for name, value in module.state_dict(prefix=f"{owner_name}.").items():
            if name in state_dict:
                state_dict[name] = value
    return state_dict


hand_on(globals())
