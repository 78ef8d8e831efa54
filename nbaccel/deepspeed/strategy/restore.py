"""A module that an engine took apart, made what it was, with trained weights.

Its hooks, functions and registers on the user's modules refer to engines and process groups.

DeepSpeed casts a module in place, moves its parameters into flat buffers, or, at stage 3, leaves
placeholders in it, and hooks everywhere. In a script it does not matter; in a notebook the module
is there after training, and is to be looked at, saved, or trained in another way.

    take_back            this process has all of it: no communication
    take_back_together   each process has a part: before another engine gets the module
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.deepspeed.private_api import ZERO3_MODULE_ATTRIBUTES
from nbaccel.deepspeed.strategy import local_shards
from nbaccel.deepspeed.teardown import destroy, forget_modules, live_engines
from nbaccel.plan.contracts import shards
from nbaccel.plan.contracts.shards import Remembered

__all__ = ["inner_module", "plain_state", "remember", "take_back", "take_back_together", "unhook"]


_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def inner_module(module: nn.Module) -> nn.Module | None:
    """See :meth:`ShardReader.inner_module`."""
    _, _, submodules = torch_private.module_tables(module)
    inner_engine = submodules.get("module")
    return inner_engine if _is_deepspeeds(type(module)) else None


def plain_state(module: nn.Module) -> dict[str, Any] | None:
    """See :meth:`ShardReader.plain_state`."""
    module_state = vars(module)
    module_hooks = [
        hook_handle
        for attribute_name in _HOOK_TABLES
        for hook_handle in (module_state.get(attribute_name) or {}).values()
    ]
    parameter_table, _, _ = torch_private.module_tables(module)
    if not _is_deepspeeds(type(parameter_table)) and not any(map(_is_deepspeeds, module_hooks)):
        return None
    # What is left of the instance's dictionary can be pickled; DeepSpeed's objects refer to engines
    # and process groups, which cannot.
    kept_state = {
        attribute_name: attribute_value
        for attribute_name, attribute_value in module_state.items()
        if attribute_name not in ZERO3_MODULE_ATTRIBUTES
        and not _is_deepspeeds(attribute_value)
        and not _is_deepspeeds(type(attribute_value))
    }
    for attribute_name in _HOOK_TABLES:
        hook_table = module_state.get(attribute_name) or {}
        kept_state[attribute_name] = OrderedDict(
            item for item in hook_table.items() if not _is_deepspeeds(item[1])
        )
    return kept_state | {"_parameters": _plain_table(parameter_table)}


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
    is_cut = any(map(local_shards.is_cut, module.parameters()))
    # A module that is in parts looks like its engine's; only a whole one is looked at again.
    if not is_cut or module not in _REMEMBERED_STATES:
        _REMEMBERED_STATES[module] = shards.remember(module)
    return _REMEMBERED_STATES[module]


def take_back(module: nn.Module, remembered: Remembered) -> bool:
    """See :meth:`ShardReader.take_back`; engines of this module are destroyed."""
    engines = _engines_of(module)
    if not engines and not any(map(local_shards.is_cut, module.parameters())):
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
    is_cut = state_before is not None and any(map(local_shards.is_cut, module.parameters()))
    built_in_shards = state_before is not None and any(
        "ds_shape" in own_attributes for _, own_attributes in state_before.tensors.values()
    )
    had_engine = torch.tensor(is_cut and not built_in_shards, dtype=torch.int32, device=device)
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
    whole_weights: dict[int, torch.Tensor] = {}
    missing_names: list[str] = []
    for parameter_name, cut_parameter in module.named_parameters():
        shape = local_shards.shape_of(cut_parameter)
        whole_tensor = torch.zeros(shape, dtype=torch.float32, device=device)
        element_count = torch.zeros((), dtype=torch.int64, device=device)
        for first_element, values in (
            local_shards.local_pieces(cut_parameter) if local_shards.is_cut(cut_parameter) else ()
        ):
            whole_tensor.view(-1)[first_element : first_element + values.numel()].copy_(values)
            element_count += values.numel()
        dist.all_reduce(element_count)
        # The sum is the same on all ranks, so all take the same branch and none waits alone.
        if element_count == whole_tensor.numel():
            dist.all_reduce(whole_tensor)  # no element is in two parts: adding zeros changes none
            whole_weights[id(cut_parameter)] = whole_tensor.to(cut_parameter.device)
        elif (
            local_shards.is_partitioned(cut_parameter)
            and cut_parameter.numel() != whole_tensor.numel()
        ):
            missing_names.append(parameter_name)
    _check_none_missing(module, missing_names, device)
    return whole_weights


def _check_none_missing(module: nn.Module, names: list[str], device: torch.device) -> None:
    missing_count = torch.tensor(len(names), device=device)
    dist.all_reduce(missing_count)
    if missing_count:
        raise ConfigError(
            f"{type(module).__name__} was taken apart by an engine that was not finished on "
            f"all processes: {int(missing_count)} part(s) of weights are lost "
            f"({', '.join(names[:3]) or 'on other ranks'}). Build a new model, or "
            "restart the workers (%accelerate restart), which get the notebook's."
        )


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
    for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        whole_tensor = whole_values.get(id(tensor), tensor.detach())
        dtype, attributes = state_before.tensors.get(
            tensor_name, (whole_tensor.dtype, frozenset(vars(tensor)))
        )
        # In place: optimizers, tied layers and the notebook's variables refer to this very tensor.
        tensor.data = whole_tensor.to(dtype)
        tensor.grad = None
        # DeepSpeed's attributes would make the parameter look partitioned to the next engine.
        for attribute_name in vars(tensor).keys() - attributes:
            delattr(tensor, attribute_name)
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
    whole_weights: dict[int, torch.Tensor] = {}
    for parameter in filter(local_shards.is_cut, module.parameters()):
        local_parts = local_shards.local_pieces(parameter)
        shape = local_shards.shape_of(parameter)
        whole_tensor = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        # This process has only a part, so the parameter keeps the weights that it has.
        if sum(values.numel() for _, values in local_parts) < whole_tensor.numel():
            continue
        for first_element, values in local_parts:
            whole_tensor.view(-1)[first_element : first_element + values.numel()].copy_(values)
        whole_weights[id(parameter)] = whole_tensor
    return whole_weights
