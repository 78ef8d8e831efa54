"""What goes wrong with DeepSpeed while training, found and explained while it happens.

    loss       no number: weights made in bfloat16 overflow in float16
    steps      skipped one after another: the loss scale is as low as it may be

Each message names the key of the configuration to change. See DeepSpeed's and transformers'
troubleshooting guides.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from nbaccel.base.errors import TrainingDiverged

PATIENCE = 5
"""Steps in a row without a number, or skipped at the lowest loss scale, before it is given up."""

_BF16_KEYS = '"bf16": {"enabled": true} in place of "fp16"'


class Troubles:
    """Watches the losses and steps of one engine."""

    def __init__(self, engine: Any, made_in: str | None) -> None:
        self._engine = engine
        self._made_in = made_in
        self._in_fp16 = bool(engine.fp16_enabled())
        self._bad: torch.Tensor | None = None
        self._bad_steps = 0
        self._stuck_steps = 0
        self._was_warned = False

    def see_loss(self, loss: torch.Tensor) -> None:
        """Note whether it is a number, without waiting for the device."""
        is_bad = ~torch.isfinite(loss.detach())
        # Losses of all batches of a step count; the step itself comes only after the last of them.
        self._bad = is_bad if self._bad is None else self._bad | is_bad

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """A block in which the exception by which DeepSpeed gives up says what to change."""
        try:
            yield
        except Exception as error:  # DeepSpeed raises a bare one at the floor of its loss scale
            # Whatever else a step raises has a subclass of `Exception` as its type.
            if type(error) is not Exception or not self._at_floor:
                raise
            raise TrainingDiverged(self._scale_text("is as low as it may be")) from error

    def after_step(self, *, skipped: bool) -> None:
        """Look at what the step brought."""
        # DeepSpeed's step has waited for the device already, to look for overflow: reading the
        # value here costs nothing more.
        is_bad = self._bad is not None and bool(self._bad.item())
        self._bad = None
        self._bad_steps = self._bad_steps + 1 if is_bad else 0
        self._stuck_steps = self._stuck_steps + 1 if skipped and self._at_floor else 0
        if self._stuck_steps >= PATIENCE:
            raise TrainingDiverged(self._scale_text(f"stayed there for {PATIENCE} steps"))
        if is_bad and self._in_fp16 and self._bad_steps >= PATIENCE:
            raise TrainingDiverged(self._nan_text(skipped=skipped))
        if is_bad and not self._was_warned:
            # Once: a loss that has become NaN usually stays so, in every step to come.
            self._was_warned = True
            warnings.warn(self._nan_text(skipped=skipped), stacklevel=2)

    @property
    def _at_floor(self) -> bool:
        loss_scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if not self._in_fp16 or loss_scaler is None:
            return False
        # Only DeepSpeed's dynamic scaler has `min_scale`.
        return bool(loss_scaler.cur_scale <= max(getattr(loss_scaler, "min_scale", 1), 1))

    def _nan_text(self, *, skipped: bool) -> str:
        number = self._engine.global_steps
        loss_text = f"The loss is NaN or infinite after optimizer step {number}."
        if self._in_fp16 and self._made_in == "bfloat16":
            return (
                f"{loss_text} The model's weights were made in bfloat16 and train in float16, "
                f"whose largest number is 65504: activations overflow. Set {_BF16_KEYS}, or leave "
                "both out to train in float32."
            )
        if self._in_fp16:
            return (
                f"{loss_text} float16 holds numbers up to 65504 only. Set {_BF16_KEYS}, or a lower "
                "optimizer.params.lr, or a smaller gradient_clipping."
            )
        result = "The step was skipped." if skipped else "The weights are invalid by now."
        return (
            f"{loss_text} {result} Set a lower optimizer.params.lr, a smaller "
            "gradient_clipping, or scheduler.params.warmup_num_steps, and look for NaN or "
            "infinity in the inputs."
        )

    def _scale_text(self, event: str) -> str:
        loss_scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        scale = getattr(loss_scaler, "cur_scale", "?")
        hint = (
            " Its weights were made in bfloat16, whose range float16 does not have."
            if self._made_in == "bfloat16"
            else ""
        )
        return (
            f"Every step overflows in float16: the loss scale {scale} {event} "
            f"(fp16.min_loss_scale), after {self._engine.skipped_steps} skipped steps, so that "
            f"nothing is trained.{hint} Set {_BF16_KEYS}, or a lower optimizer.params.lr."
        )
