"""Is training done in the requested precision? Looked at once, at the first optimizer step.

A request that no code reads silently ends in fp32. So the first optimizer step compares what
was asked with what can be seen: Accelerate's own state where it is used, else the autocast dtype
and the parameter dtypes under which the model's layers have run so far. After that one look the
layers are no longer watched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.base import accelerate_library
from nbaccel.base.errors import PrecisionMismatch
from nbaccel.config.capabilities import precision_row

_IN_USE: list[str] = []
"""The precision of the newest `Accelerator` of this process; a list, so that it can be changed."""


def note(precision: str) -> None:
    """An `Accelerator` says in which precision it trains."""
    _IN_USE[:] = [precision]


def watch(asked_precision: str) -> Callable[[], None]:
    """Raise in the first optimizer step if training does not use `asked_precision`."""
    if asked_precision == "no":
        return lambda: None
    seen_dtypes: set[torch.dtype] = set()
    only_torch_layers = True
    was_judged = False

    def after_layer(called_layer: nn.Module, args: Any, layer_output: Any) -> None:
        nonlocal only_torch_layers
        layer_weights = list(called_layer.parameters(recurse=False))
        # Layers without weights have no dtype of their own; evaluation may use another precision.
        if layer_weights and torch.is_grad_enabled():
            only_torch_layers = only_torch_layers and type(called_layer).__module__.startswith(
                "torch.nn."
            )
            device_type = layer_weights[0].device.type
            is_autocasting = torch.is_autocast_enabled(device_type)
            seen_dtypes.add(
                torch.get_autocast_dtype(device_type) if is_autocasting else layer_weights[0].dtype
            )

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal was_judged
        # Not removed instead: torch iterates over its hooks while it calls them.
        if was_judged:
            return
        was_judged = True
        layer_hook.remove()
        found_precision = accelerate_library.mixed_precision() or _observed(
            seen_dtypes, asked_precision, only_torch_layers=only_torch_layers
        )
        if found_precision is not None and found_precision != asked_precision:
            raise PrecisionMismatch(
                f"mixed_precision={asked_precision!r} was asked for, but the first optimizer step "
                f"runs in {_precision_words(found_precision)}: nothing in the function reads the "
                "request. Use Accelerator() without its own mixed_precision, or torch.autocast, or "
                "drop the argument."
            )

    step_hook = register_optimizer_step_pre_hook(before_step)
    layer_hook = nn.modules.module.register_module_forward_hook(after_layer)

    def end() -> None:
        step_hook.remove()
        layer_hook.remove()

    return end


def _observed(
    seen_dtypes: set[torch.dtype], precision: str, *, only_torch_layers: bool
) -> str | None:
    """The precision that layers have shown; None where they leave it open."""
    # No layer ran, so there is nothing to judge.
    if not seen_dtypes:
        return None
    dtype = precision_row(precision).dtype
    # Such as fp8, which is a property of the layers and not a dtype that can be seen here.
    if not dtype:
        return _of_dtypes(seen_dtypes) if only_torch_layers and precision not in _IN_USE else None
    return precision if getattr(torch, dtype) in seen_dtypes else _of_dtypes(seen_dtypes)


def _of_dtypes(seen_dtypes: set[torch.dtype]) -> str:
    return "no" if torch.float32 in seen_dtypes else str(next(iter(seen_dtypes)))


def _precision_words(precision: str) -> str:
    return "fp32" if precision == "no" else precision
