"""Placeholders of ZeRO-3 in a module: empty parameters, which must not be saved as weights.

A partitioned parameter is a tensor of shape ``(0,)`` while no layer uses it; older versions of
DeepSpeed put ``tensor([1.])`` there. ``model.state_dict()`` and ``torch.save`` take it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import first_few


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 keeps this parameter's numbers elsewhere at the moment."""
    whole_shape = getattr(parameter, "ds_shape", None)
    return whole_shape is not None and tuple(parameter.shape) != tuple(whole_shape)


def placeholders(module_or_state: nn.Module | Mapping[str, Any]) -> list[str]:
    """Names of the parameters that are placeholders of ZeRO-3.

    Parameters of a module have DeepSpeed's attributes. A state dict has only shapes: floating-point
    tensors of shape ``(0,)`` count, and ``tensor([1.])`` where most of its tensors are such.
    """
    if isinstance(module_or_state, nn.Module):
        # With duplicates: a tied parameter is named twice in the state dict, too.
        named = module_or_state.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if is_placeholder(parameter)]
    tensors = {
        name: value for name, value in module_or_state.items() if isinstance(value, torch.Tensor)
    }
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # Taken with `keep_vars`, a state dict has the parameters themselves.
    empty = [
        name
        for name, tensor in floating.items()
        if is_placeholder(tensor) or tuple(tensor.shape) == (0,)
    ]
    # One such tensor may be a weight; where most tensors are one, an old DeepSpeed made them.
    ones = [
        name
        for name, tensor in floating.items()
        if tuple(tensor.shape) == (1,) and not tensor.is_meta and tensor.item() == 1.0
    ]
    return empty + (ones if 2 * len(ones) > len(tensors) > 1 else [])


def check_whole(module_or_state: nn.Module | Mapping[str, Any], thing: str) -> None:
    """Refuse weights that are placeholders of ZeRO-3, before they are saved or loaded."""
    names = placeholders(module_or_state)
    if names:
        raise ConfigError(
            f"{thing}: {len(names)} of the weights are ZeRO-3 placeholders "
            f"({first_few(names, 3)}), tensors of shape (0,) or tensor([1.]) in the place of "
            "parameters that are spread over the ranks. A file of them is worthless. To save whole "
            "weights call nbaccel.fp32_state_dict(engine) or nbaccel.save_16bit_weights(engine, "
            "folder) on every rank, or use accelerator.save_model(model, folder). From a "
            "checkpoint of engine.save_checkpoint, nbaccel.zero_to_fp32(...) makes them."
        )
