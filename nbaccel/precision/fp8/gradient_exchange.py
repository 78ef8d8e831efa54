"""Means of gradients over processes, sent in 8 bits.

[Note: two shots] Adding numbers in E4M3 loses digits with every addend, whatever the scale. Here
they are added in float32, and only travel in 8 bits:

    1  each process cuts its gradients into as many chunks as there are processes, stores each block
       of 256 values in E4M3 under a scale of its own, and sends every process its chunk
    2  each process averages the chunks that it got in float32, stores the mean in E4M3 in the same
       way, and sends it to all

So a value is rounded twice, however many processes there are, and all processes compute with the
same bits. It takes 2 (N - 1) / N bytes per value, half of what a ring in bfloat16 does.

[Note: DDP's buckets] `DistributedDataParallel` copies gradients into float32 buckets, which stay:
four bytes per parameter beside the one that MS-AMP's levels keep. So it is told to leave these
weights alone, and :class:`ScaledGradients` averages them, in buckets that exist for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.base import torch_private
from nbaccel.precision.fp8.scaled_tensor import (
    E4M3,
    NumberFormat,
    ScaledTensor,
    dequantize,
    power_of_two_scale,
    quantize,
    values_of,
)

BLOCK = 256  # values under one scale

_SCALE_BYTES = 4


def two_shot_mean(values: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The mean over all processes; see [Note: two shots]. A collective."""
    num_ranks = dist.get_world_size(group)
    num_values = values.numel()
    chunk_size = -(-num_values // (num_ranks * BLOCK)) * BLOCK
    padded = torch.zeros(num_ranks * chunk_size, device=values.device)
    padded[:num_values] = values.detach().reshape(-1)
    sent = _sendable(packed_blocks(padded.view(num_ranks, chunk_size)), group)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    mean = unpacked_blocks(received.to(values.device)).mean(dim=0, keepdim=True)
    part = _sendable(packed_blocks(mean), group)
    all_parts = torch.empty_like(sent)
    # torch 2.13 renames it, and warns of the name before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(all_parts, part, group=group)
    return unpacked_blocks(all_parts.to(values.device)).view(-1)[:num_values]


def packed_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Rows of values as bytes: payloads in E4M3, then a scale for each block."""
    num_rows = rows.shape[0]
    blocks = rows.reshape(num_rows, -1, BLOCK)
    scale = power_of_two_scale(blocks.abs().amax(dim=2, keepdim=True), E4M3)
    payload = quantize(blocks, scale, E4M3).to(E4M3.dtype).view(torch.uint8)
    inverse_scale = scale.reciprocal().view(num_rows, -1).view(torch.uint8)
    return torch.cat([payload.view(num_rows, -1), inverse_scale], dim=1)


def unpacked_blocks(packed: torch.Tensor) -> torch.Tensor:
    """The values of :func:`packed_blocks`: ``[rows, n]``, float32."""
    num_rows = packed.shape[0]
    num_blocks = packed.shape[1] // (BLOCK + _SCALE_BYTES)
    payload = packed[:, : num_blocks * BLOCK].reshape(num_rows, num_blocks, BLOCK)
    scale = packed[:, num_blocks * BLOCK :].contiguous().view(torch.float32)
    return dequantize(payload.view(E4M3.dtype), scale.unsqueeze(2)).view(num_rows, -1)


def _sendable(message: torch.Tensor, group: Any) -> torch.Tensor:
    # gloo exchanges chunks in host memory only.
    return message.cpu() if dist.get_backend(group) == dist.Backend.GLOO else message


def fp8_compress_hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of `DistributedDataParallel`: gradients travel in 8 bits."""
    gradients = bucket.buffer()
    mean = two_shot_mean(gradients, group)
    averaged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    averaged.set_result(gradients.copy_(mean.view_as(gradients)))
    return averaged


# torch compares annotations with its own classes, and these are texts here: it refuses the hook.
fp8_compress_hook.__annotations__.clear()


_BUCKET_VALUES = 25 * 2**20 // 4  # DDP's 25 MiB of float32


@dataclass(eq=False)
class ScaledGradients:
    """Averages gradients that are stored in 8 bits after each backward pass."""

    _weights: Sequence[ScaledTensor]
    _format: NumberFormat
    _is_synced: Callable[[], bool]

    def __post_init__(self) -> None:
        self._is_waiting = False
        self._handles = [
            weight.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for weight in self._weights
        ]
        for weight in self._weights:
            # As bytes: gloo has no 8-bit floats.
            dist.broadcast(weight.payload.view(torch.uint8), 0)
            dist.broadcast(weight.inverse_scale, 0)

    def detach(self) -> None:
        """Leave the weights' gradients alone from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, weight: torch.Tensor) -> None:
        if not self._is_waiting and self._is_synced():
            self._is_waiting = True
            torch_private.after_backward(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        self._is_waiting = False
        has_gradient = [weight.grad is not None for weight in self._weights]
        device = self._weights[0].device
        was_used = torch.tensor(has_gradient, dtype=torch.uint8, device=device)
        # A weight that took no part anywhere keeps its gradient, which is none.
        dist.all_reduce(was_used, dist.ReduceOp.MAX)
        pairs = zip(self._weights, was_used.tolist(), strict=True)
        weights = [weight for weight, used in pairs if used]
        for bucket in _buckets(weights):
            gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in bucket]
            flat = torch.cat([values_of(gradient).reshape(-1) for gradient in gradients])
            means = torch.split(two_shot_mean(flat), [item.numel() for item in bucket])
            for weight, mean in zip(bucket, means, strict=True):
                weight.grad = ScaledTensor.of(mean.view(weight.shape), self._format)


def _buckets(weights: Sequence[ScaledTensor]) -> Iterator[list[ScaledTensor]]:
    bucket: list[ScaledTensor] = []
    for weight in weights:
        if bucket and sum(item.numel() for item in bucket) + weight.numel() > _BUCKET_VALUES:
            yield bucket
            bucket = []
        bucket.append(weight)
    if bucket:
        yield bucket
