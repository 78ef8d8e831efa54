"""Facts about modules and weights; what spreads a model over devices is still to come."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nbaccel import torch_private
from nbaccel._later import BIG_MODEL_INFERENCE, missing_name_of
from nbaccel.bigmodel.module_tensors import (
    dtype_byte_size,
    find_tied_parameters,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
)
from nbaccel.state import PartialState
from nbaccel.units import parse_bytes
from nbaccel.utils.environment import parse_choice_from_env

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_max_memory",
    "get_mixed_precision_context_manager",
    "get_non_persistent_buffers",
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

align_module_device = missing_name_of("align_module_device", BIG_MODEL_INFERENCE, __name__)
calculate_maximum_sizes = missing_name_of("calculate_maximum_sizes", BIG_MODEL_INFERENCE, __name__)
check_device_map = missing_name_of("check_device_map", BIG_MODEL_INFERENCE, __name__)
check_tied_parameters_in_config = missing_name_of(
    "check_tied_parameters_in_config", BIG_MODEL_INFERENCE, __name__
)
check_tied_parameters_on_same_device = missing_name_of(
    "check_tied_parameters_on_same_device", BIG_MODEL_INFERENCE, __name__
)
compute_module_sizes = missing_name_of("compute_module_sizes", BIG_MODEL_INFERENCE, __name__)
get_balanced_memory = missing_name_of("get_balanced_memory", BIG_MODEL_INFERENCE, __name__)
get_max_layer_size = missing_name_of("get_max_layer_size", BIG_MODEL_INFERENCE, __name__)
get_max_memory = missing_name_of("get_max_memory", BIG_MODEL_INFERENCE, __name__)
infer_auto_device_map = missing_name_of("infer_auto_device_map", BIG_MODEL_INFERENCE, __name__)
load_checkpoint_in_model = missing_name_of(
    "load_checkpoint_in_model", BIG_MODEL_INFERENCE, __name__
)
load_offloaded_weights = missing_name_of("load_offloaded_weights", BIG_MODEL_INFERENCE, __name__)
load_state_dict = missing_name_of("load_state_dict", BIG_MODEL_INFERENCE, __name__)
retie_parameters = missing_name_of("retie_parameters", BIG_MODEL_INFERENCE, __name__)
set_module_tensor_to_device = missing_name_of(
    "set_module_tensor_to_device", BIG_MODEL_INFERENCE, __name__
)


def convert_file_size_to_int(size: int | str) -> int:
    """Read a size: ``"5GB"`` is five billion bytes, ``"5GiB"`` counts in 1024."""
    return parse_bytes(size)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether parameters are kept elsewhere while they are not used: never, in this version."""
    return False


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
