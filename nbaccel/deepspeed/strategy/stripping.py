"""What is left of a module without what DeepSpeed put on it: that can leave the process.

Its hooks, functions and registers on the user's modules refer to engines and process groups.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

__all__ = ["inner_module", "plain_state"]

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NUMBERS = frozenset(
    {
        "_external_params",
        "_original_parameters",
        "applied_pre_backward_ref_cnt",
        "ds_grads_remaining",
        "ds_id",
        "ds_recompute_parameters",
    }
)
"""Attributes of plain types that ZeRO-3 gives each module; others are of its own types."""


def inner_module(module: nn.Module) -> nn.Module | None:
    """See :meth:`ShardReader.inner_module`."""
    inner = module._modules.get("module")
    return inner if _is_deepspeeds(type(module)) else None


def plain_state(module: nn.Module) -> dict[str, Any] | None:
    """See :meth:`ShardReader.plain_state`."""
    state = vars(module)
    hooks = [hook for name in _TABLES for hook in (state.get(name) or {}).values()]
    if not _is_deepspeeds(type(module._parameters)) and not any(map(_is_deepspeeds, hooks)):
        return None
    kept = {
        name: value
        for name, value in state.items()
        if name not in _NUMBERS and not _is_deepspeeds(value) and not _is_deepspeeds(type(value))
    }
    for name in _TABLES:
        table = state.get(name) or {}
        kept[name] = OrderedDict(item for item in table.items() if not _is_deepspeeds(item[1]))
    # Past its own `__getitem__`, which gathers what is looked up.
    return kept | {"_parameters": dict(dict.items(module._parameters))}


def _is_deepspeeds(thing: Any) -> bool:
    """Whether a class, a function or a method was defined in DeepSpeed."""
    name = getattr(getattr(thing, "func", thing), "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] == "deepspeed"
