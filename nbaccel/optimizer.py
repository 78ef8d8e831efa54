"""``AcceleratedOptimizer``: an optimizer that waits while gradients are being accumulated.

[Note: was it skipped?] With scaled gradients a step may not happen. Asking the scaler afterwards
would wait for the device a second time, so a hook on the optimizer records whether it stepped. A
fused optimizer is always called and looks at the flag on the device, where it stays until needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.state import shows
from nbaccel.train.gradient import GradientState

__all__ = ["AcceleratedOptimizer"]


class AcceleratedOptimizer(Optimizer):
    """An optimizer that steps where a group of batches ends, as `Accelerator.prepare` returns it.

    One that is made by hand, without an `Accelerator`, always steps.

    Args:
        optimizer: The optimizer itself; it keeps parameters, state and hooks.
        device_placement: Whether its state goes to the device of its parameters; it does.
        scaler: The scaler of the loss; None where it is not scaled.
        gradient_state: Says whether the current batch ends a group.
        mark_step: Called after a step outside of prepared loaders, which mark steps themselves.

    Attributes:
        optimizer: The optimizer itself.
        gradient_state: As given.
        scaler: As given, or None where it is disabled.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        gradient_state: GradientState | None = None,
        mark_step: Callable[[], None] | None = None,
    ) -> None:
        # Without the base class's constructor: it would make a second state and second groups.
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.gradient_state = gradient_state or GradientState()
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        # Accelerate's name: there are programs that set it.
        self._is_overflow: bool | torch.Tensor = False
        self._has_stepped = False
        self._mark_step = mark_step
        self._watch_steps()
        # Move state that was made on another device to where its parameters are now.
        if any(
            isinstance(value, torch.Tensor)
            # Adam's 0-d `step` is on the CPU on purpose, wherever the parameter is.
            and value.dim() > 0
            and value.device != parameter.device
            for parameter, state in getattr(optimizer, "state", {}).items()
            if isinstance(parameter, torch.Tensor) and isinstance(state, dict)
            for value in state.values()
        ):
            # torch moves state to the device of its parameter when it loads it.
            optimizer.load_state_dict(optimizer.state_dict())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, if the current batch ends a group of accumulated ones.

        Args:
            closure: Evaluates the model again and returns the loss, for optimizers that need it.

        Returns:
            What the optimizer's own step returns; None where nothing was done.

        Raises:
            ConfigError: A closure was given and gradients are scaled.
        """
        if not self.gradient_state.sync_gradients or self.gradient_state.is_skipping:
            return None
        scaler = self.scaler
        if scaler is None:
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
            if self._mark_step is not None and not self.gradient_state.in_dataloader:
                self._mark_step()
            return result
        if closure is not None:
            raise ConfigError(
                f"step(closure={closure!r}) does not work with fp16: the closure's gradients would "
                "not be scaled back. Use mixed_precision='bf16' or 'no', or no closure."
            )
        self._has_stepped = False
        result = scaler.step(self.optimizer)
        if self._has_hook and not torch_private.scales_gradients_itself(self.optimizer):
            self._is_overflow = not self._has_stepped
        else:
            self._is_overflow = _infinity_flag(scaler, self.optimizer)
        # Last, because it clears the flags for infinite gradients.
        scaler.update()
        return result

    # torch wraps each class's `step` for hooks and profiling; the inner one has that already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget gradients, if the current batch ends a group of accumulated ones.

        Args:
            set_to_none: As in torch; None leaves it to the optimizer, whose default is True.
        """
        if not self.gradient_state.sync_gradients:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step did not happen because gradients were infinite."""
        # An engine's optimizer (DeepSpeed) scales losses itself, so only the engine knows.
        flag = getattr(self.optimizer, "step_was_skipped", None)
        if flag is not None:
            return bool(flag)
        if not isinstance(self._is_overflow, bool):
            self._is_overflow = bool(self._is_overflow.item())
        return self._is_overflow

    state = shows("optimizer.state", is_settable=True)
    param_groups = shows("optimizer.param_groups", is_settable=True)
    defaults = shows("optimizer.defaults", is_settable=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters, with settings of their own."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; tensors are moved to their parameters' devices."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Tell optimizers that keep two sets of weights (schedule-free) that training goes on."""
        if callable(train_method := getattr(self.optimizer, "train", None)):
            train_method()

    def eval(self) -> None:
        """Tell optimizers that keep two sets of weights (schedule-free) to show the averaged."""
        if callable(eval_method := getattr(self.optimizer, "eval", None)):
            eval_method()

    def __getattr__(self, name: str) -> Any:
        # Hooks, and attributes that torch's optimizers do not have.
        if name == "optimizer":
            raise AttributeError(f"{type(self).__name__} has no {name!r} before it is constructed")
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        kept = ("optimizer", "gradient_state", "scaler", "_has_stepped")
        # The flag as a bool, and no `_mark_step`: they are of this process's device.
        own = {"_is_overflow": self.step_was_skipped, "_mark_step": None}
        return own | {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch_steps()  # torch leaves hooks behind when it pickles an optimizer

    def _watch_steps(self) -> None:
        # An optimizer around another may have no hooks of torch's: it skipped the constructor.
        self._has_hook = self.scaler is not None and torch_private.has_step_hooks(self.optimizer)
        if self._has_hook:
            self.optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True


def _infinity_flag(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool | torch.Tensor:
    """The scaler's flag for an optimizer, a 0-d float tensor: above 0 for infinite gradients."""
    flags = torch_private.infinity_flags(scaler, optimizer)
    if not flags:
        return False  # no parameter has a gradient
    # A sum is a new tensor: the scaler adds other optimizers' flags to its own in place.
    return torch.stack([flag.to(flags[0].device, non_blocking=True) for flag in flags]).sum()
