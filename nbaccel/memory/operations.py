"""How much a model computes: counted on a copy without memory, as activations are measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from nbaccel.memory.activations import call, mapped, on_fake_copy

if TYPE_CHECKING:
    from torch import nn

__all__ = ["forward_operations"]

_PER_PARAMETER = 2
"""A multiplication and an addition for each number that a parameter meets."""


def forward_operations(model: nn.Module, sample_batch: Any) -> float:
    """Count the floating-point operations of one forward pass.

    Matrix products, convolutions and attention are counted, by torch's own counter; what else a
    model does is a small part of its time.
    """
    counter = FlopCounterMode(display=False)

    def count(twin: nn.Module, batch: Any) -> float:
        with counter, torch.no_grad():
            call(twin, batch)
        return float(counter.get_total_flops())

    try:
        return on_fake_copy(model, sample_batch, count)
    except Exception:  # the model's own code may need values, and fail in any way
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return float(_PER_PARAMETER * parameters * _num_rows(sample_batch))


def _num_rows(sample_batch: Any) -> int:
    """Samples, or tokens where the batch is of whole numbers: each meets every parameter."""
    rows = [1]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 2 and not tensor.is_floating_point():
            rows.append(tensor.numel())
        elif tensor.ndim:
            rows.append(tensor.shape[0])
        return tensor

    mapped(sample_batch, note)
    return max(rows)
