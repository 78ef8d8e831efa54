"""``GradientSteps``: accumulation, backward passes, clipping, and when gradients are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nbaccel.accelerator.prepared_run import TrainingRun
from nbaccel.accelerator.preparer import Preparer
from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.config.handlers import AutocastKwargs, GradientAccumulationPlugin
from nbaccel.loops import loop_watch
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.train.progress import Progress

# It has no state, so one object serves every batch.
_NO_CONTEXT = contextlib.nullcontext()


class GradientSteps(Preparer):
    """The way from a loss to gradients that an optimizer can use."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self._progress: Progress[Any] | None = None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends with an optimizer step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches for one optimizer step; may be changed while training."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        GradientAccumulationPlugin(num_steps=value)  # refuses what makes no sense
        self.gradient_state.num_steps = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer left its last step out, because gradients were infinite."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients, scaled for accumulation and fp16.

        Args:
            loss: A 0-d tensor, mean over the batch.
            **kwargs: Arguments of ``Tensor.backward``.
        """
        if self._progress is not None:
            # The loss as the user computed it: `backward` divides it by the accumulation steps.
            self._progress.note_loss(loss)
        loop_watch.note_loss(loss)
        state = self.gradient_state
        if state.num_steps != 1:
            # Gradients of a group add up; the division makes their sum the mean over the group.
            loss = loss / state.num_steps
        scaler = self._run.precision.scaler
        if scaler is not None:
            loss = scaler.scale(loss)
        with loop_watch.telling():
            self._run.strategy.backward(loss, sync=state.sync_gradients, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward and step in one, of optimizers that have it (LOMO).

        Args:
            loss: A 0-d tensor.
            learning_rate: The learning rate of this step.

        Raises:
            ConfigError: No prepared optimizer has it, or there is no learning rate.
        """
        optimizers = self._optimizers
        found = [getattr(optimizer, "fused_backward", None) for optimizer in optimizers]
        fused_backwards = list(filter(None, found))
        if not fused_backwards or learning_rate is None:
            names = [type(optimizer.optimizer).__name__ for optimizer in optimizers]
            raise ConfigError(
                f"lomo_backward(learning_rate={learning_rate!r}) needs a learning rate and an "
                f"optimizer with `fused_backward`; prepared are {names or 'none'}. Prepare "
                "one of lomo_optim, or call accelerator.backward(loss)."
            )
        for fused_backward in fused_backwards:
            fused_backward(loss, learning_rate)

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context for one batch, in which gradients are reduced only if it completes a group.

        Args:
            *models: The models that are trained in the block.
        """
        state = self.gradient_state
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
        state = self.gradient_state
        state.batches_in_group = 1 if state.sync_gradients else state.batches_in_group + 1
        # A short group at the end steps, too, so the next epoch begins with a whole group.
        if state.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave gradients of backward passes in the block on their process."""
        with self._run.strategy.no_sync(model):
            yield

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Reduce gradients in the block's backward, though the forwards ran under `no_sync`."""
        with self._run.strategy.sync_in_backward(model):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16's factor out of the gradients; what was done already is not done again.

        Args:
            optimizer: One prepared optimizer, or several; None for all.

        Raises:
            ConfigError: The group of batches is not complete yet.
        """
        scaler = self._run.precision.scaler
        # GradScalerKwargs(enabled=False) gives a scaler that changes nothing.
        if scaler is None or not scaler.is_enabled():
            return
        gradient_state = self.gradient_state
        if not gradient_state.sync_gradients:
            raise ConfigError(
                f"Gradients were to be unscaled or clipped after batch {self.step} of a group of "
                f"{gradient_state.num_steps}: those of later batches would be added in "
                f"another scale (fp16 multiplies the loss by {scaler.get_scale():.0f}). Clip "
                "under `if accelerator.sync_gradients:`."
            )
        optimizers = self._optimizers if optimizer is None else optimizer
        for chosen in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            inner = chosen.optimizer if isinstance(chosen, AcceleratedOptimizer) else chosen
            # `clip_grad_norm_` may have unscaled them already, and torch raises the second time.
            if not torch_private.gradients_are_unscaled(scaler, inner):
                scaler.unscale_(inner)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a norm over the whole model.

        Args:
            parameters: Parameters of a prepared model.
            max_norm: Largest norm to leave.
            norm_type: Which norm.

        Returns:
            The norm before, a 0-d tensor.
        """
        self.unscale_gradients()
        return self._run.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut every element of the gradients to ``[-clip_value, clip_value]``.

        Raises:
            ConfigError: The strategy's engine holds the gradients.
        """
        if self._run.strategy.owns_precision:
            raise ConfigError(
                f"clip_grad_value_({clip_value}) is not available with strategy "
                f"{self._run.initial_plan.strategy!r}: its engine holds the gradients, and clips "
                "by norm alone. Use clip_grad_norm_."
            )
        self.unscale_gradients()
        nn.utils.clip_grad_value_(parameters, clip_value)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in the accelerator's precision inside the block (a loss, for example)."""
        with self._run.precision.autocast(autocast_handler):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[nn.Module], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let processes run out of batches at different times.

        Args:
            joinables: The prepared models that are trained in the block.
            even_batches: The loaders' setting meanwhile; None leaves them unchanged.

        Raises:
            ConfigError: The strategy cannot do it.
        """
        context = self._run.strategy.join(joinables)
        if context is None:
            raise ConfigError(
                "join_uneven_inputs is not available with strategy "
                f"{self._run.initial_plan.strategy!r}: its forward passes need every process, so "
                "the process with most batches would wait for ever. Keep even_batches=True."
            )
        previous_settings = [(loader, loader.even_batches) for loader in self._dataloaders]
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
