"""What ZeRO-3 leaves in a module: parameters without numbers, which must not be saved as weights.

A partitioned parameter is a tensor of shape ``(0,)`` while no layer uses it; older versions of
DeepSpeed put ``tensor([1.])`` there. ``model.state_dict()`` and ``torch.save`` take it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["check_whole", "is_placeholder", "placeholders"]


def is_placeholder(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 has this parameter's numbers elsewhere at the moment.

    Args:
        parameter: A parameter of a module.

    Returns:
        True where its shape is not the one that it was made with.
    """
    whole = getattr(parameter, "ds_shape", None)
    return whole is not None and tuple(parameter.shape) != tuple(whole)


def placeholders(module_or_state: nn.Module | Mapping[str, Any]) -> list[str]:
    """Names of the parameters that are placeholders of ZeRO-3.

    A module tells it. A state dict has nothing but shapes: floating-point tensors of shape ``(0,)``
    count, and those that are ``tensor([1.])`` where most of its tensors are.

    Args:
        module_or_state: A module, or the state dict of one, wherever it comes from.

    Returns:
        Their names.
    """
    import torch
    from torch import nn

    if isinstance(module_or_state, nn.Module):
        named = module_or_state.named_parameters(remove_duplicate=False)
        return [name for name, parameter in named if is_placeholder(parameter)]
    tensors = {n: t for n, t in module_or_state.items() if isinstance(t, torch.Tensor)}
    empty = [n for n, t in tensors.items() if is_placeholder(t) or _is_empty(t)]
    ones = [n for n, t in tensors.items() if _is_one(t)]
    return empty + (ones if 2 * len(ones) > len(tensors) > 1 else [])


def _is_empty(tensor: torch.Tensor) -> bool:
    return tuple(tensor.shape) == (0,) and tensor.is_floating_point()


def _is_one(tensor: torch.Tensor) -> bool:
    is_single = tuple(tensor.shape) == (1,) and tensor.is_floating_point() and not tensor.is_meta
    return is_single and tensor.item() == 1.0


def check_whole(module_or_state: nn.Module | Mapping[str, Any], what: str) -> None:
    """Refuse weights that are placeholders of ZeRO-3, before they are saved or loaded.

    Args:
        module_or_state: A module, or the state dict of one.
        what: What was asked for, to begin the message with: ``"save_model('out')"``.

    Raises:
        ConfigError: Some are; it names them and says how to get the weights.
    """
    found = placeholders(module_or_state)
    if not found:
        return
    named = ", ".join(found[:3]) + (" …" if found[3:] else "")
    raise ConfigError(
        f"{what}: {len(found)} of the weights are ZeRO-3 placeholders ({named}), tensors of shape "
        "(0,) or tensor([1.]) in the place of parameters that are spread over the ranks. A file "
        "of them is worthless. To save whole weights call nbaccel.fp32_state_dict(engine) or "
        "nbaccel.save_16bit_weights(engine, folder) on every rank, or use "
        "accelerator.save_model(model, folder). From a checkpoint of engine.save_checkpoint, "
        "nbaccel.zero_to_fp32(...) makes them."
    )
