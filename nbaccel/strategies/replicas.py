"""``ReplicasStrategy``: whole models, and gradients averaged once per optimizer step.

For devices on which torch's ``DistributedDataParallel`` does not work: its hooks reduce gradients
bucket by bucket while the backward pass runs, and a device that records operations first would have
to run a program for each bucket. Here one collective reduces all of them when they are complete, so
a recording device makes it part of the step's program.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base.errors import CollectiveMismatch
from nbaccel.base.trees import average, tensor_digest
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import Bundle, Place, Strategy


class ReplicasStrategy(Strategy):
    """Every process holds the whole model."""

    # To average again what is equal everywhere changes nothing: several backward passes add up.

    name: ClassVar[str] = "replicas"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._device = registry.device(place.device_name)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._equal_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._has_new_gradients = False

    def before_placement(self, models: Iterable[nn.Module]) -> None:
        # Later each tensor that is compared would be copied back.
        for model in models:
            if model not in self._equal_models:
                self._equal_models.add(model)
                _take_weights_of_first(model)

    def wrap(self, bundle: Bundle) -> Bundle:
        """See :meth:`Strategy.wrap`; a collective: all processes begin with process 0's weights."""
        self.before_placement(bundle.models)
        for model in bundle.models:
            if model in self._models:
                continue
            self._models.add(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    hooked: Any = parameter
                    hooked.register_post_accumulate_grad_hook(self._note_gradient)
        for optimizer in bundle.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._before_step)
        return bundle

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        super().backward(loss, sync=sync, **options)
        if sync:
            self.average_gradients()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        self.average_gradients()
        return super().clip_grad_norm(parameters, max_norm, norm_type)

    def join(self, models: Iterable[nn.Module], **options: Any) -> None:
        """See :meth:`Strategy.join`; always None: every step needs every process."""

    def average_gradients(self) -> None:
        """Average what backward passes have left since the last time; a collective."""
        if not self._has_new_gradients:
            return
        self._has_new_gradients = False
        parameters = [p for model in self._models for p in model.parameters() if p.requires_grad]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not self._device.average_gradients(gradients, self.place.world_size):
            # gloo would add up what does not belong together, or wait for ever.
            sizes = [gradient.numel() for gradient in gradients]
            own_counts = torch.tensor([len(sizes), sum(sizes)])
            all_counts = [torch.empty_like(own_counts) for _ in range(self.place.world_size)]
            dist.all_gather(all_counts, own_counts)
            if any(not torch.equal(counts, own_counts) for counts in all_counts):
                by_process = ", ".join(
                    f"process {rank}: {int(counts[0])}" for rank, counts in enumerate(all_counts)
                )
                raise CollectiveMismatch(
                    f"The processes have gradients of different parameters ({by_process} of them): "
                    "they cannot be averaged. Let every process use the same parts of the model in "
                    "each step, or add 0 * parameter.sum() of the unused ones to the loss."
                )
            average(gradients, self.place.world_size, by_host=True)

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self._has_new_gradients = True

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.average_gradients()


def _take_weights_of_first(model: nn.Module) -> None:
    """Copy process 0's parameters and buffers to all processes that have others."""
    named_tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own_digests = {name: tensor_digest(tensor) for name, tensor in named_tensors.items()}
    digests_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests_by_rank, own_digests)
    first_digests = digests_by_rank[0]
    with torch.no_grad():
        for name, tensor in named_tensors.items():
            # The usual case: all of them took the notebook's model.
            if all(digests.get(name) == first_digests[name] for digests in digests_by_rank):
                continue
            host = tensor.cpu().contiguous()
            dist.broadcast(host, 0)
            tensor.copy_(host.to(tensor.device))
