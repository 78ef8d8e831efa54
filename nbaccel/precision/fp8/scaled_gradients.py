"""``ScaledGradients``: averages gradients that are stored in 8 bits, after each backward pass.

`DistributedDataParallel` copies gradients into float32 buckets, which stay: four bytes per
parameter beside the one that MS-AMP's levels keep. So it is told to leave these weights alone, and
they are averaged here, in buckets that exist for a moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from nbaccel.base import torch_private
from nbaccel.precision.fp8.formats import NumberFormat
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor

_BUCKET_VALUES = 25 * 2**20 // 4  # DDP's 25 MiB of float32


class ScaledGradients:
    """Averages the gradients of some weights over all processes."""

    def __init__(
        self,
        weights: Sequence[ScaledTensor],
        number_format: NumberFormat,
        average: Callable[[torch.Tensor, int], torch.Tensor],
        is_synced: Callable[[], bool],
    ) -> None:
        self._weights = weights
        self._format = number_format
        self._average = average
        self._is_synced = is_synced
        self._is_waiting = False
        self._handles = [
            weight.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            for weight in weights
        ]
        for weight in weights:
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
        was_used = torch.tensor(
            [weight.grad is not None for weight in self._weights],
            dtype=torch.uint8,
            device=self._weights[0].device,
        )
        # A weight that took no part anywhere keeps its gradient, which is none.
        dist.all_reduce(was_used, dist.ReduceOp.MAX)
        weights = [
            weight for weight, used in zip(self._weights, was_used.tolist(), strict=True) if used
        ]
        for number, bucket in enumerate(_buckets(weights)):
            flat = torch.cat([_flat_gradient(weight) for weight in bucket])
            means = torch.split(self._average(flat, number), [item.numel() for item in bucket])
            for weight, mean in zip(bucket, means, strict=True):
                weight.grad = ScaledTensor.of(mean.view(weight.shape), self._format)


def _flat_gradient(weight: ScaledTensor) -> torch.Tensor:
    gradient = weight.grad
    if gradient is None:
        return torch.zeros(weight.numel(), device=weight.device)
    values = gradient.dequantize() if isinstance(gradient, ScaledTensor) else gradient
    return values.reshape(-1)


def _buckets(weights: Sequence[ScaledTensor]) -> Iterator[list[ScaledTensor]]:
    bucket: list[ScaledTensor] = []
    for weight in weights:
        if bucket and sum(item.numel() for item in bucket) + weight.numel() > _BUCKET_VALUES:
            yield bucket
            bucket = []
        bucket.append(weight)
    if bucket:
        yield bucket
