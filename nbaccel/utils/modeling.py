"""Facts about modules and weights; what spreads a model over devices is still to come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nbaccel import torch_private
from nbaccel._later import BIG_MODEL_INFERENCE, missing_name_of
from nbaccel.config.enumerations import CustomDtype
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

_BYTES = {CustomDtype.INT2: 1 / 4, CustomDtype.INT4: 1 / 2, CustomDtype.FP8: 1}

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


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Bytes of one number of a format; those of ``torch.bool`` count as one bit."""
    if isinstance(dtype, CustomDtype):
        return _BYTES[dtype]
    return 1 / 8 if dtype is torch.bool else dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Equal for two tensors if, and only if, they are views of the same memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name.

    Args:
        module: Whose.
        include_buffers: Whether buffers, too.
        recurse: Whether those of submodules, too.
        remove_non_persistent: Whether to leave out buffers that are not in the state dict.

    Yields:
        Names and tensors.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        kept = module.state_dict(keep_vars=True) if remove_non_persistent else None
        for name, buffer in module.named_buffers(recurse=recurse):
            if kept is None or name in kept:
                yield name, buffer


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one tensor, together; sorted."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


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
