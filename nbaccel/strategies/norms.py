"""The norm of gradients that lie in pieces on several processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients down so that their norm over the whole model is at most `max_norm`.

    Args:
        parameters: Sharded or plain; gradients are changed in place. Those of plain ones are
            taken to be equal everywhere.
        max_norm: The norm wanted at most.
        norm_type: The p of the p-norm; infinity for the largest value.

    Returns:
        The norm before: a plain 0-d tensor, equal on all processes. A collective.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    graded = [parameter for parameter in given if parameter.grad is not None]
    # torch's kernels for many tensors take sharded ones or plain ones, never both in one list.
    sharded: list[torch.Tensor] = [p for p in graded if isinstance(p, DTensor)]
    plain = [p for p in graded if not isinstance(p, DTensor)]
    kinds = [kind for kind in (sharded, plain) if kind]
    norms = [_norm(kind, norm_type) for kind in kinds]
    if not norms:
        return torch.tensor(0.0)
    home = norms[0].device
    together = torch.stack([norm.to(home) for norm in norms])
    total: torch.Tensor = torch.linalg.vector_norm(together, norm_type)
    for kind in kinds:
        clip_grads_with_norm_(kind, max_norm, total)
    return total


def _norm(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm: torch.Tensor = get_total_norm(gradients, norm_type)
    if isinstance(norm, DTensor):
        whole: torch.Tensor = norm.full_tensor()
        return whole
    return norm
