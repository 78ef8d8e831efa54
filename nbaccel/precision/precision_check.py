"""Is training done in the requested precision? Looked at once, at the first optimizer step.

A request that no code reads silently ends in fp32. So what was asked is compared with what can be
seen: Accelerate's own state where it is used, else the dtypes under which layers have run so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.base import training_libraries
from nbaccel.base.errors import PrecisionMismatch
from nbaccel.config.capabilities import precision_row

_IN_USE: list[str] = []
"""The precision of the newest `Accelerator` of this process; a list, so that it can be changed."""


def note(precision: str) -> None:
    """An `Accelerator` says in which precision it trains."""
    _IN_USE[:] = [precision]


def watch(asked: str) -> Callable[[], None]:
    """Raise in the first optimizer step if training does not use the precision `asked` for."""
    if asked == "no":
        return lambda: None
    seen: set[torch.dtype] = set()
    only_torch_layers = True
    was_judged = False

    def after_layer(layer: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal only_torch_layers
        weights = list(layer.parameters(recurse=False))
        # Layers without weights have no dtype of their own; evaluation may use another precision.
        if weights and torch.is_grad_enabled():
            only_torch_layers &= type(layer).__module__.startswith("torch.nn.")
            kind = weights[0].device.type
            is_autocasting = torch.is_autocast_enabled(kind)
            seen.add(torch.get_autocast_dtype(kind) if is_autocasting else weights[0].dtype)

    def before_step(_optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal was_judged
        # Not removed instead: torch iterates over its hooks while it calls them.
        if was_judged:
            return
        was_judged = True
        layer_hook.remove()
        found = training_libraries.accelerates_precision() or _observed(
            seen, asked, only_torch_layers=only_torch_layers
        )
        if found is not None and found != asked:
            raise PrecisionMismatch(
                f"mixed_precision={asked!r} was asked for, but the first optimizer step runs in "
                f"{'fp32' if found == 'no' else found}: nothing in the function reads the request. "
                "Use Accelerator() without its own mixed_precision, or torch.autocast, or drop the "
                "argument."
            )

    step_hook = register_optimizer_step_pre_hook(before_step)
    layer_hook = nn.modules.module.register_module_forward_hook(after_layer)

    def end() -> None:
        step_hook.remove()
        layer_hook.remove()

    return end


def _observed(seen: set[torch.dtype], asked: str, *, only_torch_layers: bool) -> str | None:
    """The precision that layers have shown; None where they leave it open."""
    # No layer ran, so there is nothing to judge.
    if not seen:
        return None
    dtype = precision_row(asked).dtype
    if dtype:
        return asked if getattr(torch, dtype) in seen else _of_dtypes(seen)
    # Such as fp8, which is a property of the layers and not a dtype that can be seen here.
    return _of_dtypes(seen) if only_torch_layers and asked not in _IN_USE else None


def _of_dtypes(seen: set[torch.dtype]) -> str:
    return "no" if torch.float32 in seen else str(next(iter(seen)))
