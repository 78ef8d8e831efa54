"""``GradientSteps``: accumulation, backward passes, clipping, and when gradients are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nbaccel.accelerator.prepared_run import TrainingRun
from nbaccel.accelerator.preparer import PreparedObjects
from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.loops import loop_watch
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.train.gradient import GradientState

# It has no state, so one object serves every batch.
_NO_CONTEXT = contextlib.nullcontext()


class GradientSteps:
    """The way from a loss to gradients that an optimizer can use.

    Attributes:
        step: Batches since the last complete group.
    """

    def __init__(
        self, run: TrainingRun, gradient_state: GradientState, prepared: PreparedObjects
    ) -> None:
        self._run = run
        self._gradient_state = gradient_state
        self._prepared = prepared
        self.step = 0

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Compute gradients of a 0-d loss, scaled for accumulation and fp16."""
        loop_watch.note_loss(loss)
        state = self._gradient_state
        if state.num_steps != 1:
            # Gradients of a group add up; the division makes their sum the mean over the group.
            loss = loss / state.num_steps
        scaler = self._run.precision.scaler
        if scaler is not None:
            loss = scaler.scale(loss)
        with loop_watch.telling():
            self._run.strategy.backward(loss, sync=state.sync_gradients, **options)

    def fused_backward(self, loss: torch.Tensor, learning_rate: float | None) -> None:
        """Backward and step in one, of optimizers that have it; see `Accelerator.lomo_backward`."""
        optimizers = self._prepared.optimizers
        fused_backwards = [
            method
            for optimizer in optimizers
            if (method := getattr(optimizer, "fused_backward", None))
        ]
        if not fused_backwards or learning_rate is None:
            names = [type(optimizer.optimizer).__name__ for optimizer in optimizers]
            raise ConfigError(
                f"lomo_backward(learning_rate={learning_rate!r}) needs a learning rate and an "
                f"optimizer with `fused_backward`; prepared are {names or 'none'}. Prepare "
                "one of lomo_optim, or call accelerator.backward(loss)."
            )
        for fused_backward in fused_backwards:
            fused_backward(loss, learning_rate)

    def accumulate(self, models: tuple[nn.Module, ...]) -> contextlib.AbstractContextManager[None]:
        """Count one batch, and return the context for its forward and backward passes."""
        state = self._gradient_state
        self._count_batch()
        if state.sync_gradients or state.sync_each_batch or self._run.place.is_alone:
            return _NO_CONTEXT
        if len(models) == 1:
            return self._run.strategy.no_sync(models[0])
        return self._no_sync_of_all(models)

    @contextlib.contextmanager
    def _no_sync_of_all(self, models: Iterable[nn.Module]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(self._run.strategy.no_sync(model))
            yield

    def _count_batch(self) -> None:
        state = self._gradient_state
        state.batches_in_group = 1 if state.sync_gradients else state.batches_in_group + 1
        # A short group at the end steps, too, so the next epoch begins with a whole group.
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0

    def resume_at(self, saved_step: int) -> None:
        """Continue where a checkpoint was saved, also within a group of batches."""
        state = self._gradient_state
        self.step = saved_step
        state.batches_in_group = saved_step % state.num_steps
        state.sync_gradients = state.batches_in_group == 0

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16's factor out of gradients, once per step; None for all optimizers."""
        scaler = self._run.precision.scaler
        # GradScalerKwargs(enabled=False) gives a scaler that changes nothing.
        if scaler is None or not scaler.is_enabled():
            return
        gradient_state = self._gradient_state
        if not gradient_state.sync_gradients:
            raise ConfigError(
                f"Gradients were to be unscaled or clipped after batch {self.step} of a group of "
                f"{gradient_state.num_steps}: those of later batches would be added in "
                f"another scale (fp16 multiplies the loss by {scaler.get_scale():.0f}). Clip "
                "under `if accelerator.sync_gradients:`."
            )
        optimizers = self._prepared.optimizers if optimizer is None else optimizer
        for chosen_optimizer in (
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        ):
            torch_optimizer = (
                chosen_optimizer.optimizer
                if isinstance(chosen_optimizer, AcceleratedOptimizer)
                else chosen_optimizer
            )
            # `clip_grad_norm_` may have unscaled them already, and torch raises the second time.
            if not torch_private.gradients_are_unscaled(scaler, torch_optimizer):
                scaler.unscale_(torch_optimizer)

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Scale gradients down to a norm over the whole model; returns the norm before, 0-d."""
        self.unscale_gradients()
        return self._run.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut every element of the gradients to ``[-clip_value, clip_value]``."""
        if self._run.strategy.owns_precision:
            raise ConfigError(
                f"clip_grad_value_({clip_value}) is not available with strategy "
                f"{self._run.initial_plan.strategy!r}: its engine holds the gradients, and clips "
                "by norm alone. Use clip_grad_norm_."
            )
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def join(self, models: Iterable[nn.Module], even_batches: bool | None) -> Iterator[None]:
        """Let processes run out of batches at different times in the block."""
        context = self._run.strategy.join(models)
        if context is None:
            raise ConfigError(
                "join_uneven_inputs is not available with strategy "
                f"{self._run.initial_plan.strategy!r}: its forward passes need every process, so "
                "the process with most batches would wait for ever. Keep even_batches=True."
            )
        previous_settings = [(loader, loader.even_batches) for loader in self._prepared.loaders]
        try:
            if even_batches is not None:
                for loader, _ in previous_settings:
                    loader.even_batches = even_batches
            with context:
                yield
        finally:
            # After an error, too: the loaders are used beyond this block.
            for loader, was_even in previous_settings:
                loader.even_batches = was_even
