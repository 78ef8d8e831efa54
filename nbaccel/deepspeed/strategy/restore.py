"""A module that an engine took apart, made what it was, with trained weights.

Its hooks, functions and registers on the user's modules refer to engines and process groups.

DeepSpeed casts a module in place, moves its parameters into flat buffers, or, at stage 3, leaves
placeholders in it, and hooks everywhere. In a script it does not matter; in a notebook the module
is there after training, and is to be looked at, saved, or trained in another way.

    take_back            this process has all of it: no communication
    take_back_together   each process has a part: before another engine gets the module

The capability row names this module as DeepSpeed's :class:`~nbaccel.abc.ShardReader`; what is in
``__all__`` are its functions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.deepspeed.environment import (
    destroy,
    forget_groups,
    forget_modules,
    live_engines,
    tear_down,
)
from nbaccel.deepspeed.private_api import ZERO3_MODULE_ATTRIBUTES
from nbaccel.deepspeed.strategy import local_shards
from nbaccel.deepspeed.strategy.engines import building_whole
from nbaccel.deepspeed.strategy.local_shards import (
    assign,
    hold,
    is_cut,
    leave,
    local_pieces,
    whole_shape,
)
from nbaccel.deepspeed.weights.state_files import check_whole
from nbaccel.plan.contracts import training
from nbaccel.plan.contracts.training import Piece, Remembered

__all__ = [
    "assign",
    "building_whole",
    "check_whole",
    "forget_groups",
    "hold",
    "inner_module",
    "is_cut",
    "leave",
    "local_pieces",
    "plain_state",
    "remember",
    "take_back",
    "tear_down",
    "whole_shape",
]
_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def inner_module(module: nn.Module) -> nn.Module | None:
    """See :meth:`ShardReader.inner_module`."""
    _, _, submodules = torch_private.module_tables(module)
    inner_engine = submodules.get("module")
    return inner_engine if _is_deepspeeds(type(module)) else None


def plain_state(module: nn.Module) -> dict[str, Any] | None:
    """See :meth:`ShardReader.plain_state`."""
    own = vars(module)
    hooks = [hook for name in _HOOK_TABLES for hook in (own.get(name) or {}).values()]
    parameters, _, _ = torch_private.module_tables(module)
    if not _is_deepspeeds(type(parameters)) and not any(map(_is_deepspeeds, hooks)):
        return None
    # What is left of the instance's dictionary can be pickled; DeepSpeed's objects refer to engines
    # and process groups, which cannot.
    kept = {
        name: value
        for name, value in own.items()
        if name not in ZERO3_MODULE_ATTRIBUTES
        and not _is_deepspeeds(value)
        and not _is_deepspeeds(type(value))
    }
    for name in _HOOK_TABLES:
        table = own.get(name) or {}
        kept[name] = OrderedDict(item for item in table.items() if not _is_deepspeeds(item[1]))
    return kept | {"_parameters": _plain_table(parameters)}


def _plain_table(parameter_table: Any) -> dict[str, Any]:
    """A module's parameters by name, in a dictionary that is not DeepSpeed's."""
    # Through `dict.items`, since DeepSpeed's dictionary gathers what its `__getitem__` looks up.
    return dict(dict.items(parameter_table))


def _is_deepspeeds(inspected_object: Any) -> bool:
    """Whether a class, a function or a method was defined in DeepSpeed."""
    # Some hooks are `functools.partial` objects, which name their function in `func`.
    name = getattr(getattr(inspected_object, "func", inspected_object), "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "deepspeed"


# What a module was before its first engine is a fact of this process: in a live worker it outlives
# the Accelerator that prepared it, which the next run of the same cell drops.
_REMEMBERED_STATES: WeakKeyDictionary[nn.Module, Remembered] = WeakKeyDictionary()


def remember(module: nn.Module) -> Remembered:
    """See :meth:`ShardReader.remember`; of a module that is taken apart, what it was before."""
    # A module that is in parts looks like its engine's; only a whole one is looked at again.
    if module not in _REMEMBERED_STATES or not any(map(is_cut, module.parameters())):
        _REMEMBERED_STATES[module] = training.remember(module)
    return _REMEMBERED_STATES[module]


def take_back(module: nn.Module, remembered: Remembered) -> bool:
    """See :meth:`ShardReader.take_back`; engines of this module are destroyed."""
    engines = _engines_of(module)
    if not engines and not any(map(is_cut, module.parameters())):
        return False
    _restore_module(module, remembered, _trained_weights(module), engines)
    return True


def take_back_together(module: nn.Module, device: torch.device) -> bool:
    """Make a module whole that earlier engines of all processes have; a collective.

    A cell that prepares a model is run again: without this, hooks of the engine before would run
    beside those of the next one, over process groups that may be gone, and its weights would be
    those in low precision.
    """
    state_before = _REMEMBERED_STATES.get(module)
    is_taken_apart = state_before is not None and any(map(is_cut, module.parameters()))
    built_in_shards = state_before is not None and any(
        "ds_shape" in own_attributes for _, own_attributes in state_before.tensors.values()
    )
    is_engines = is_taken_apart and not built_in_shards
    had_engine = torch.tensor(is_engines, dtype=torch.int32, device=device)
    # The ranks must agree: if `prepare` failed on some of them, those have no engine, and still
    # have to take part in the collectives below.
    dist.all_reduce(had_engine, dist.ReduceOp.MAX)
    if not had_engine:
        return False
    whole_values = _put_together(module, device)
    _restore_module(module, state_before or remember(module), whole_values, _engines_of(module))
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
        shape = local_shards.shape_of(parameter)
        whole = torch.zeros(shape, dtype=torch.float32, device=device)
        num_own = _fill_in(whole, local_pieces(parameter) if is_cut(parameter) else ())
        count = torch.tensor(num_own, dtype=torch.int64, device=device)
        dist.all_reduce(count)
        # The sum is the same on all ranks, so all take the same branch and none waits alone.
        if count == whole.numel():
            dist.all_reduce(whole)  # no element is in two parts: adding zeros changes none
            found[id(parameter)] = whole.to(parameter.device)
        elif local_shards.is_partitioned(parameter) and parameter.numel() != whole.numel():
            missing.append(name)
    missing_count = torch.tensor(len(missing), device=device)
    dist.all_reduce(missing_count)
    if missing_count:
        raise ConfigError(
            f"{type(module).__name__} was taken apart by an engine that was not finished on "
            f"all processes: {int(missing_count)} part(s) of weights are lost "
            f"({', '.join(missing[:3]) or 'on other ranks'}). Build a new model, or "
            "restart the workers (%accelerate restart), which get the notebook's."
        )
    return found


def _fill_in(whole: torch.Tensor, pieces: Iterable[Piece]) -> int:
    """Write pieces into a tensor, and count their elements."""
    count = 0
    for first, values in pieces:
        whole.view(-1)[first : first + values.numel()].copy_(values)
        count += values.numel()
    return count


def _restore_module(
    module: nn.Module,
    state_before: Remembered,
    whole_values: Mapping[int, torch.Tensor],
    module_engines: list[Any],
) -> None:
    for engine in module_engines:
        unhook(engine)
        if dist.is_initialized():  # otherwise it was destroyed together with its process group
            destroy(engine)
    for inner_submodule in module.modules():
        # DeepSpeed's dictionary gathers what is looked up, over a group that is gone by now.
        parameter_table, _, _ = torch_private.module_tables(inner_submodule)
        torch_private.replace_parameter_table(inner_submodule, _plain_table(parameter_table))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        whole = whole_values.get(id(tensor), tensor.detach())
        as_it_was = (whole.dtype, frozenset(vars(tensor)))
        dtype, attributes = state_before.tensors.get(name, as_it_was)
        # In place: optimizers, tied layers and the notebook's variables refer to this very tensor.
        tensor.data = whole.to(dtype)
        tensor.grad = None
        # DeepSpeed's attributes would make the parameter look partitioned to the next engine.
        for attribute in vars(tensor).keys() - attributes:
            delattr(tensor, attribute)
    # It is the wrapper that keeps ranks in step, which hides the method of the class.
    vars(module).pop("generate", None)


def _engines_of(module: nn.Module) -> list[Any]:
    return [engine for engine in live_engines() if vars(engine).get("module") is module]


def unhook(engine: Any) -> None:
    """Remove the hooks that an engine's `destroy` leaves on the module."""
    for name in ("module_forward_pre_hook", "module_forward_post_hook"):
        handle = getattr(engine, name, None)
        if handle is not None:
            handle.remove()


@torch.no_grad()
def _trained_weights(module: nn.Module) -> dict[int, torch.Tensor]:
    """Whole float32 weights by the identity of their parameters; none where no copy has them."""
    found: dict[int, torch.Tensor] = {}
    for parameter in filter(is_cut, module.parameters()):
        shape = local_shards.shape_of(parameter)
        whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        # Where this process has only a part, the parameter keeps the weights that it has.
        if _fill_in(whole, local_pieces(parameter)) >= whole.numel():
            found[id(parameter)] = whole
    return found
