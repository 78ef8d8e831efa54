"""The norm of gradients that are sharded over several processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale gradients down so that their norm over the whole model is at most `max_norm`."""
    given_parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    with_gradients = [parameter for parameter in given_parameters if parameter.grad is not None]
    # torch's kernels for many tensors take sharded ones or plain ones, never both in one list.
    sharded_parameters: list[torch.Tensor] = [
        item for item in with_gradients if isinstance(item, DTensor)
    ]
    plain_parameters = [item for item in with_gradients if not isinstance(item, DTensor)]
    parameter_groups = [
        parameter_group
        for parameter_group in (sharded_parameters, plain_parameters)
        if parameter_group
    ]
    group_norms = [
        _norm_of_gradients(parameter_group, norm_type) for parameter_group in parameter_groups
    ]
    if not group_norms:
        # As torch's `clip_grad_norm_` for parameters without gradients.
        return torch.tensor(0.0)
    norm_device = group_norms[0].device
    # Offloaded gradients are in host memory, others on the device.
    stacked_norms = torch.stack([norm.to(norm_device) for norm in group_norms])
    total_norm: torch.Tensor = torch.linalg.vector_norm(stacked_norms, norm_type)
    for parameter_group in parameter_groups:
        clip_grads_with_norm_(parameter_group, max_norm, total_norm)
    return total_norm


def _norm_of_gradients(parameters: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total_norm: torch.Tensor = get_total_norm(gradients, norm_type)
    if isinstance(total_norm, DTensor):
        # Each process has the norm of its own shards; `full_tensor` combines them, in a collective.
        full_norm: torch.Tensor = total_norm.full_tensor()
        return full_norm
    return total_norm
