"""``LossScaler``: torch's gradient scaler, correct for several optimizers too.

[Note: when the factor changes] torch wants `update` once per iteration, after all optimizers have
stepped. A training loop written for one optimizer updates after each step: then the second
optimizer's gradients are divided by a factor they were not multiplied with, or twice by it if they
had been unscaled for clipping. Here an update waits until the factor is needed again: for the
next loss, for a checkpoint, or for an optimizer that steps a second time.
"""

from __future__ import annotations

from typing import Any

import torch

from nbaccel.base import torch_private
from nbaccel.base.errors import UserMistake


class LossScaler(torch.amp.GradScaler):
    """A ``GradScaler`` whose `update` may be called after every optimizer's step.

    Takes the arguments of ``torch.amp.GradScaler``.
    """

    def __init__(self, device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._waiting = False

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Let the factor grow or shrink before it is next used; a `new_scale` holds at once."""
        if new_scale is None:
            self._waiting = True
            return
        self._waiting = False
        super().update(new_scale)

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or an iterable of losses, by the factor."""
        self._finish_unscaled()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the factor, once per backward."""
        self._check_scaled(optimizer)
        self._finish_optimizer(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients are infinite; returns what its step returns."""
        self._check_scaled(optimizer)
        self._finish_optimizer(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def get_scale(self) -> float:
        """The factor on the next loss; waits for the device."""
        self._finish_unscaled()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Factor and settings, as ``torch.amp.GradScaler`` keeps them."""
        self._finish_unscaled()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; a waiting update is dropped."""
        # Otherwise the waiting update would change the factor that is loaded.
        self._finish_unscaled()
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self._finish_unscaled()
        return super().__getstate__()

    def _check_scaled(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_enabled() and torch_private.scale_tensor(self) is None:
            raise UserMistake(
                f"{type(optimizer).__name__} cannot step with mixed_precision='fp16': no loss went "
                "through accelerator.backward(), which multiplies it so that small gradients "
                "do not become zero in float16. Write accelerator.backward(loss) in place of "
                "loss.backward()."
            )

    def _finish_unscaled(self) -> None:
        if self._waiting:
            self._waiting = False
            # Without any gradient no flag was recorded, and torch's `update` would raise.
            if self.is_enabled() and torch_private.infinity_flags(self):
                super().update()

    def _finish_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        # A second step of the same optimizer belongs to the next iteration.
        if self.is_enabled() and self._waiting and torch_private.has_stepped(self, optimizer):
            self._finish_unscaled()
