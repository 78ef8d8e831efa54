"""What torch's ``fully_shard`` (FSDP2) needs: shards of everything, and whole layers for a moment.

Each process keeps one part of parameters, gradients and optimizer states, in the parameters' own
format (Rajbhandari et al. 2020, ZeRO, section 5.3; the same as ZeRO-3). The layers that are wrapped
on their own are gathered for their forward and backward pass, in the format of the computation, and
the next one is gathered ahead. What no wrapped layer holds belongs to the model itself, which stays
gathered from the forward to the backward pass (torch's documentation of ``reshard_after_forward``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.memory.estimate import Bytes, MemoryEstimate, torch_estimate

if TYPE_CHECKING:
    from torch import nn

    from nbaccel.memory.model_size import Shape

_GATHERED_LAYERS = 2
"""The one that computes and the one that is gathered ahead (torch's default prefetching)."""
_REDUCED_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WrappedSizes:
    """How a model is cut into layers that are gathered together.

    Bytes are of all parameters, and of those that get gradients, in their own formats; numbers of
    parameters are those of the largest wrapped layer, and those that no such layer holds.
    """

    kept_bytes: int
    trained_bytes: int
    largest_layer: int
    root: int


def wrapped_sizes(model: nn.Module, settings: Mapping[str, Any] | None = None) -> WrappedSizes:
    """Find the layers that ``prepare`` would wrap."""
    # Not at the top: it imports torch, which a form without a model need not wait for.
    from nbaccel.config.handlers import FullyShardedDataParallelPlugin
    from nbaccel.strategies.model_blocks import choose_modules

    plugin = FullyShardedDataParallelPlugin(**dict(settings or {}))
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    held_by_layers: set[int] = set()
    largest_layer = 0
    for layer in choose_modules(model, plugin):
        own_keys = {id(parameter) for parameter in layer.parameters()} - held_by_layers
        held_by_layers |= own_keys
        largest_layer = max(largest_layer, sum(sizes[key] for key in own_keys))
    byte_sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    return WrappedSizes(
        kept_bytes=sum(size for size, _ in byte_sizes),
        trained_bytes=sum(size for size, is_trained in byte_sizes if is_trained),
        largest_layer=largest_layer,
        root=sum(size for key, size in sizes.items() if key not in held_by_layers),
    )


def fsdp_estimate(
    shape: Shape,
    sizes: WrappedSizes,
    *,
    compute_bytes: int,
    offloads: bool,
    **inputs: Any,
) -> MemoryEstimate:
    """Sharded training with Adam; `inputs` are those of `torch_estimate`."""
    num_processes: int = inputs["num_processes"]
    world_size = num_processes * inputs["num_nodes"]
    shards = Bytes(
        parameters=-(-sizes.kept_bytes // world_size),
        gradients=-(-sizes.trained_bytes // world_size),
        optimizer=-(-2 * sizes.trained_bytes // world_size),  # Adam's two moments
    )
    gathered = Bytes()
    # A single process gathers nothing: its shard is the whole parameter.
    if world_size > 1 or offloads:
        layer_bytes = compute_bytes * sizes.largest_layer
        # Gradients are whole until they are reduced, from a copy in float32.
        layer_moment = (_GATHERED_LAYERS + 1) * layer_bytes + _REDUCED_BYTES * sizes.largest_layer
        root_moment = (compute_bytes + _REDUCED_BYTES) * sizes.root
        gathered = Bytes(
            buckets=compute_bytes * sizes.root, in_backward=max(layer_moment, root_moment)
        )
    return torch_estimate(
        shape,
        strategy="FSDP, parameters and optimizer on cpu" if offloads else "FSDP",
        states=gathered if offloads else shards + gathered,
        host=shards * num_processes if offloads else Bytes(),
        **inputs,
    )
