"""Is training done in the precision that was asked for? Looked at once, at the first step.

A request that nobody reads ends in fp32 without a word. So the first optimizer step compares what
was asked with what can be seen: Accelerate's own state where it is used, else the autocast dtype
and the parameter dtypes under which the model's layers have run so far. After that one look the
layers are no longer watched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.errors import PrecisionMismatch

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def watch(asked: str) -> Callable[[], None]:
    """Raise in the first optimizer step if training does not use the precision `asked`.

    Args:
        asked: `no`, `fp16`, `bf16` or `fp8`. `no` makes no demand.

    Returns:
        Ends the watch.
    """
    if asked == "no":
        return lambda: None
    seen: set[torch.dtype] = set()
    judged = False

    def after_layer(module: nn.Module, args: Any, output: Any) -> None:
        weights = list(module.parameters(recurse=False))
        if weights and torch.is_grad_enabled():
            device = weights[0].device.type
            on = torch.is_autocast_enabled(device)
            seen.add(torch.get_autocast_dtype(device) if on else weights[0].dtype)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal judged
        if judged:  # torch iterates over its hooks while it calls them: this one has to stay
            return
        judged = True
        layers.remove()
        found = _accelerate() or _observed(seen, asked)
        if found is not None and found != asked:
            raise PrecisionMismatch(
                f"mixed_precision={asked!r} was asked for, but the first optimizer step runs in "
                f"{_say(found)}: nothing in the function reads the request. Use Accelerator() "
                f"without its own mixed_precision, or torch.autocast, or drop the argument."
            )

    steps = register_optimizer_step_pre_hook(before_step)
    layers = nn.modules.module.register_module_forward_hook(after_layer)

    def end() -> None:
        steps.remove()
        layers.remove()

    return end


def _accelerate() -> str | None:
    """What Accelerate's shared state says, if it was set up in this process."""
    module = sys.modules.get("accelerate.state")
    state = getattr(module, "AcceleratorState", None)
    if state is None or not getattr(state, "_shared_state", None):
        return None
    return str(state().mixed_precision)


def _observed(seen: set[torch.dtype], asked: str) -> str | None:
    wanted = _DTYPES.get(asked)
    if wanted is None or not seen:  # fp8 leaves no dtype to see; no layer ran: nothing to judge
        return None
    if wanted in seen:
        return asked
    return "no" if torch.float32 in seen else str(next(iter(seen)))


def _say(found: str) -> str:
    return "fp32" if found == "no" else found
