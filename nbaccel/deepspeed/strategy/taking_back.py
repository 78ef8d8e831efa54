"""A module that an engine took apart, made what it was, with trained weights.

DeepSpeed casts a module in place, moves its parameters into flat buffers, or, at stage 3, leaves
placeholders in it, and hooks everywhere. In a script nobody minds; in a notebook the module is
there after training, and is to be looked at, saved, or trained in another way.

    take_back            this process has all of it: no communication
    take_back_together   each process has a part: before another engine gets the module
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.abc import shards
from nbaccel.abc.shards import Remembered
from nbaccel.deepspeed.strategy import pieces
from nbaccel.deepspeed.teardown import destroy, forget_modules, live_engines
from nbaccel.errors import ConfigError

__all__ = ["remember", "take_back", "take_back_together", "unhook"]


# What a module was before its first engine is a fact of this process: in a live worker it outlives
# the Accelerator that prepared it, which the next run of the same cell drops.
_WAS: WeakKeyDictionary[nn.Module, Remembered] = WeakKeyDictionary()


def remember(module: nn.Module) -> Remembered:
    """See :meth:`ShardReader.remember`; of a module that is taken apart, what it was before."""
    cut = any(map(pieces.is_cut, module.parameters()))
    if not cut or module not in _WAS:
        _WAS[module] = shards.remember(module)
    return _WAS[module]


def take_back(module: nn.Module, remembered: Remembered) -> bool:
    """See :meth:`ShardReader.take_back`; engines of this module are destroyed."""
    engines = _engines_of(module)
    if not engines and not any(map(pieces.is_cut, module.parameters())):
        return False
    _restore(module, remembered, _trained(module), engines)
    return True


def take_back_together(module: nn.Module, device: torch.device) -> bool:
    """Make a module whole that earlier engines of all processes have; a collective.

    A cell that prepares a model is run again: without this, hooks of the engine before would run
    beside those of the next one, over process groups that may be gone, and its weights would be
    those in low precision.

    Args:
        module: The module; one that was built in shards stays so.
        device: What the processes communicate with.

    Returns:
        Whether an engine had it.

    Raises:
        ConfigError: Parts of it are nowhere; on every process.
    """
    was = _WAS.get(module)
    cut = was is not None and any(map(pieces.is_cut, module.parameters()))
    built_in_shards = was is not None and any("ds_shape" in own for _, own in was.tensors.values())
    had = torch.tensor(cut and not built_in_shards, dtype=torch.int32, device=device)
    dist.all_reduce(had, dist.ReduceOp.MAX)  # one that failed half-way asks all others to join
    if not had:
        return False
    values = _put_together(module, device)
    _restore(module, was or remember(module), values, _engines_of(module))
    forget_modules()
    return True


@torch.no_grad()
def _put_together(module: nn.Module, device: torch.device) -> dict[int, torch.Tensor]:
    """Whole weights by the identity of their parameters; a collective.

    Where engines had no copy of higher precision, or have forgotten it, the weights stay.
    """
    found: dict[int, torch.Tensor] = {}
    missing: list[str] = []
    for name, parameter in module.named_parameters():
        shape = pieces.shape_of(parameter)
        whole = torch.zeros(shape, dtype=torch.float32, device=device)
        count = torch.zeros((), dtype=torch.int64, device=device)
        for start, values in pieces.local_pieces(parameter) if pieces.is_cut(parameter) else ():
            whole.view(-1)[start : start + values.numel()].copy_(values)
            count += values.numel()
        dist.all_reduce(count)
        if count == whole.numel():
            dist.all_reduce(whole)  # no element is in two parts: adding zeros changes none
            found[id(parameter)] = whole.to(parameter.device)
        elif pieces.is_partitioned(parameter) and parameter.numel() != whole.numel():
            missing.append(name)
    _check_none_missing(module, missing, device)
    return found


def _check_none_missing(module: nn.Module, missing: list[str], device: torch.device) -> None:
    everyones = torch.tensor(len(missing), device=device)
    dist.all_reduce(everyones)
    if everyones:
        raise ConfigError(
            f"{type(module).__name__} was taken apart by an engine that was not finished on all "
            f"processes: {int(everyones)} part(s) of weights are nowhere "
            f"({', '.join(missing[:3]) or 'on other ranks'}). Build the model anew, or restart the "
            "workers (%accelerate restart), which get the notebook's."
        )


def _restore(
    module: nn.Module, was: Remembered, values: Mapping[int, torch.Tensor], engines: list[Any]
) -> None:
    for engine in engines:
        unhook(engine)
        if dist.is_initialized():  # else it was destroyed when its group ended
            destroy(engine)
    for submodule in module.modules():
        # A dictionary of DeepSpeed's own, which gathers what is looked up, now over no group.
        submodule._parameters = dict(dict.items(submodule._parameters))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        whole = values.get(id(tensor), tensor.detach())
        dtype, own = was.tensors.get(name, (whole.dtype, frozenset(vars(tensor))))
        tensor.data = whole.to(dtype)
        tensor.grad = None
        for attribute in vars(tensor).keys() - own:
            delattr(tensor, attribute)
    vars(module).pop("generate", None)


def _engines_of(module: nn.Module) -> list[Any]:
    return [engine for engine in live_engines() if vars(engine).get("module") is module]


def unhook(engine: Any) -> None:
    """Remove the hooks that an engine's `destroy` leaves on the module.

    Args:
        engine: The engine.
    """
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
