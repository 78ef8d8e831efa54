"""Facts about modules and weights, and what spreads a model over devices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.units import parse_bytes
from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model, load_state_dict
from nbaccel.bigmodel.device_map import (
    check_device_map,
    clean_device_map,
    fallback_allocate,
    infer_auto_device_map,
)
from nbaccel.bigmodel.memory_budgets import get_balanced_memory, get_max_memory
from nbaccel.bigmodel.module_sizes import (
    calculate_maximum_sizes,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_module_leaves,
    get_module_size_with_ties,
)
from nbaccel.bigmodel.module_tensors import (
    dtype_byte_size,
    find_tied_parameters,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
)
from nbaccel.bigmodel.offload_folder import load_offloaded_weights
from nbaccel.bigmodel.offloaded_state import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from nbaccel.bigmodel.tensor_placing import (
    check_device_same,
    retie_parameters,
    set_module_tensor_to_device,
)
from nbaccel.state import PartialState
from nbaccel.utils.environment import parse_choice_from_env

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_device_same",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "fallback_allocate",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]


def convert_file_size_to_int(size: int | str) -> int:
    """Read a size: ``"5GB"`` is five billion bytes, ``"5GiB"`` counts in 1024."""
    return parse_bytes(size)


def is_peft_model(model: nn.Module) -> bool:
    """Whether it is a model of peft, also inside a wrapper."""
    inner: Any = getattr(model, "module", model)
    inner = torch_private.uncompiled(inner)
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(inner).__mro__)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """What scales losses under fp16, for this process's device.

    Args:
        distributed_type: Not used; Accelerate chooses by it between scalers of other devices.
        **kwargs: Arguments of ``torch.amp.GradScaler``.
    """
    del distributed_type
    return torch.amp.GradScaler(PartialState().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """``torch.autocast`` for this process's device, or a context in which nothing happens.

    Args:
        native_amp: Whether autocast is wanted at all.
        autocast_kwargs: An `AutocastKwargs`.
    """
    if not native_amp:
        return nullcontext()
    formats = {"fp16": torch.float16, "bf16": torch.bfloat16}
    autocast_dtype = formats.get(
        parse_choice_from_env("ACCELERATE_MIXED_PRECISION"), torch.bfloat16
    )
    options = autocast_kwargs.to_kwargs() if autocast_kwargs is not None else {}
    autocast_context: AbstractContextManager[Any] = torch.autocast(
        PartialState().device.type, dtype=autocast_dtype, **options
    )
    return autocast_context
