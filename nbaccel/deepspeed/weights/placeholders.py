"""Placeholders of ZeRO-3 in a module: empty parameters, which must not be saved as weights.

A partitioned parameter is a tensor of shape ``(0,)`` while no layer uses it; older versions of
DeepSpeed put ``tensor([1.])`` there. ``model.state_dict()`` and ``torch.save`` take it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["check_whole", "is_placeholder", "placeholders"]


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 keeps this parameter's numbers elsewhere at the moment."""
    whole_shape = getattr(parameter, "ds_shape", None)
    return whole_shape is not None and tuple(parameter.shape) != tuple(whole_shape)


def placeholders(module_or_state: nn.Module | Mapping[str, Any]) -> list[str]:
    """Names of the parameters that are placeholders of ZeRO-3.

    Parameters of a module have DeepSpeed's attributes. A state dict has only shapes: floating-point
    tensors of shape ``(0,)`` count, and ``tensor([1.])`` where most of its tensors are such.
    """
    # Imported here, so that this module can be imported without torch.
    import torch
    from torch import nn

    if isinstance(module_or_state, nn.Module):
        # With duplicates: a tied parameter is named twice in the state dict, too.
        named_parameters = module_or_state.named_parameters(remove_duplicate=False)
        return [
            parameter_name
            for parameter_name, parameter in named_parameters
            if is_placeholder(parameter)
        ]
    named_tensors = {
        tensor_name: given_tensor
        for tensor_name, given_tensor in module_or_state.items()
        if isinstance(given_tensor, torch.Tensor)
    }
    empty_names = [
        tensor_name
        for tensor_name, given_tensor in named_tensors.items()
        # Taken with `keep_vars`, a state dict has the parameters themselves.
        if is_placeholder(given_tensor) or _is_empty(given_tensor)
    ]
    # One such tensor may be a weight; where most tensors are one, an old DeepSpeed made them.
    one_names = [
        tensor_name for tensor_name, given_tensor in named_tensors.items() if _is_one(given_tensor)
    ]
    return empty_names + (one_names if 2 * len(one_names) > len(named_tensors) > 1 else [])


def _is_empty(tensor: torch.Tensor) -> bool:
    return tuple(tensor.shape) == (0,) and tensor.is_floating_point()


def _is_one(tensor: torch.Tensor) -> bool:
    # `item` of a tensor on `meta` raises.
    is_single = tuple(tensor.shape) == (1,) and tensor.is_floating_point() and not tensor.is_meta
    return is_single and tensor.item() == 1.0


def check_whole(module_or_state: nn.Module | Mapping[str, Any], thing: str) -> None:
    """Refuse weights that are placeholders of ZeRO-3, before they are saved or loaded."""
    placeholder_names = placeholders(module_or_state)
    if not placeholder_names:
        return
    listed_names = ", ".join(placeholder_names[:3]) + (" …" if placeholder_names[3:] else "")
    raise ConfigError(
        f"{thing}: {len(placeholder_names)} of the weights are ZeRO-3 placeholders "
        f"({listed_names}), tensors of shape (0,) or tensor([1.]) in the place of parameters that "
        "are spread over the ranks. A file of them is worthless. To save whole weights call "
        "nbaccel.fp32_state_dict(engine) or nbaccel.save_16bit_weights(engine, folder) on every "
        "rank, or use accelerator.save_model(model, folder). From a checkpoint of "
        "engine.save_checkpoint, nbaccel.zero_to_fp32(...) makes them."
    )
