"""Is training done in the precision that was asked for? Looked at once, at the first step.

A request that nobody reads ends in fp32 without a word. So the first optimizer step compares what
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

from nbaccel import _accelerate
from nbaccel.capabilities import precision_row
from nbaccel.errors import PrecisionMismatch

_IN_USE: list[str] = []
"""The precision of the newest `Accelerator` of this process; a list, so that it can be changed."""


def note(precision: str) -> None:
    """An `Accelerator` says in which precision it trains.

    Args:
        precision: Its name.
    """
    _IN_USE[:] = [precision]


def watch(asked_precision: str) -> Callable[[], None]:
    """Raise in the first optimizer step if training does not use the precision `asked_precision`.

    Args:
        asked_precision: The precision by name; `no` makes no demand.

    Returns:
        Ends the watch.
    """
    if asked_precision == "no":
        return lambda: None
    seen_dtypes: set[torch.dtype] = set()
    are_torchs = True
    was_judged = False

    def after_layer(called_layer: nn.Module, args: Any, layer_output: Any) -> None:
        nonlocal are_torchs
        layer_weights = list(called_layer.parameters(recurse=False))
        if layer_weights and torch.is_grad_enabled():
            are_torchs = are_torchs and type(called_layer).__module__.startswith("torch.nn.")
            device_type = layer_weights[0].device.type
            is_autocasting = torch.is_autocast_enabled(device_type)
            seen_dtypes.add(
                torch.get_autocast_dtype(device_type) if is_autocasting else layer_weights[0].dtype
            )

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal was_judged
        if was_judged:  # torch iterates over its hooks while it calls them: this one has to stay
            return
        was_judged = True
        layer_hook.remove()
        found_precision = _accelerate.mixed_precision() or _observed(
            seen_dtypes, asked_precision, are_torchs=are_torchs
        )
        if found_precision is not None and found_precision != asked_precision:
            raise PrecisionMismatch(
                f"mixed_precision={asked_precision!r} was asked for, but the first optimizer step "
                "runs in "
                f"{_precision_words(found_precision)}: nothing in the function reads the request. "
                "Use Accelerator() "
                f"without its own mixed_precision, or torch.autocast, or drop the argument."
            )

    step_hook = register_optimizer_step_pre_hook(before_step)
    layer_hook = nn.modules.module.register_module_forward_hook(after_layer)

    def end() -> None:
        step_hook.remove()
        layer_hook.remove()

    return end


def _observed(
    seen_dtypes: set[torch.dtype], asked_precision: str, *, are_torchs: bool
) -> str | None:
    """The precision that layers have shown; None where they leave it open."""
    if not seen_dtypes:  # no layer ran: nothing to judge
        return None
    asked_dtype = precision_row(asked_precision).dtype
    if not asked_dtype:  # such as fp8, which is in the layers and not in dtypes that can be seen
        return _of_dtypes(seen_dtypes) if are_torchs and asked_precision not in _IN_USE else None
    return (
        asked_precision if getattr(torch, asked_dtype) in seen_dtypes else _of_dtypes(seen_dtypes)
    )


def _of_dtypes(seen_dtypes: set[torch.dtype]) -> str:
    return "no" if torch.float32 in seen_dtypes else str(next(iter(seen_dtypes)))


def _precision_words(found_precision: str) -> str:
    return "fp32" if found_precision == "no" else found_precision
