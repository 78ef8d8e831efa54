"""A module that an engine of this one process took apart, made what it was, with trained weights.

DeepSpeed casts a module in place, moves its parameters into flat buffers, or, at stage 3, leaves
placeholders in it, and hooks everywhere. In a script nobody minds; in a notebook the module is
there after training, and is to be looked at, saved, or trained in another way.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.deepspeed.strategy import pieces

__all__ = ["Remembered", "remember", "take_back"]


@dataclass(frozen=True)
class Remembered:
    """What a module was.

    Attributes:
        tensors: Format and attributes of each parameter and buffer, by name.
    """

    tensors: dict[str, tuple[torch.dtype, frozenset[str]]]


def remember(module: nn.Module) -> Remembered:
    """See :meth:`ShardReader.remember`."""
    named = (*module.named_parameters(), *module.named_buffers())
    return Remembered({name: (t.dtype, frozenset(vars(t))) for name, t in named})


def take_back(module: nn.Module, remembered: Remembered) -> bool:
    """See :meth:`ShardReader.take_back`; engines of this module are destroyed."""
    engines = _engines_of(module)
    if not engines and not any(map(pieces.is_cut, module.parameters())):
        return False
    values = _trained(module)
    for engine in engines:
        _unhook(engine)
        if dist.is_initialized():  # else it was destroyed when its group ended
            engine.destroy()
    for submodule in module.modules():
        # A dictionary of DeepSpeed's own, which gathers what is looked up.
        submodule._parameters = dict(submodule._parameters)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        whole = values.get(id(tensor), tensor.detach())
        dtype, own = remembered.tensors.get(name, (whole.dtype, frozenset(vars(tensor))))
        tensor.data = whole.to(dtype)
        tensor.grad = None
        for attribute in vars(tensor).keys() - own:
            delattr(tensor, attribute)
    vars(module).pop("generate", None)
    return True


def _engines_of(module: nn.Module) -> list[Any]:
    loaded = sys.modules.get("deepspeed.runtime.engine")
    if loaded is None:
        return []
    kind = loaded.DeepSpeedEngine
    # By its type: `isinstance` would ask the object, and some objects of torch warn when asked.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return [engine for engine in found if vars(engine).get("module") is module]


def _unhook(engine: Any) -> None:
    """Remove the hooks that `destroy` leaves on the module."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        hook = getattr(engine, name, None)
        if hook is not None:
            hook.remove()


@torch.no_grad()
def _trained(module: nn.Module) -> dict[int, torch.Tensor]:
    """Whole float32 weights by the identity of their parameters; none where no copy has them."""
    found: dict[int, torch.Tensor] = {}
    for parameter in filter(pieces.is_cut, module.parameters()):
        parts = pieces.local_pieces(parameter)
        shape = pieces.shape_of(parameter)
        whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        if sum(values.numel() for _, values in parts) < whole.numel():
            continue
        for start, values in parts:
            whole.view(-1)[start : start + values.numel()].copy_(values)
        found[id(parameter)] = whole
    return found
