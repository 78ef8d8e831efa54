"""``Drive``: one engine, its backward passes and its steps.

[Note: when it steps] DeepSpeed's engine must be told, before a backward pass, whether it ends a
group of accumulated batches, and reduces gradients in it. The step itself is taken when the loop
asks the optimizer for it, or clips gradients (the engine clips inside its step, with the norm given
to `clip_grad_norm_`), and at the latest before the next forward or backward pass: a loop that
leaves the step to DeepSpeed trains all the same.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from nbaccel.abc.shards import Remembered
from nbaccel.deepspeed.strategy.swapping import Claim
from nbaccel.deepspeed.strategy.taking_back import take_back, unhook
from nbaccel.deepspeed.strategy.troubles import Troubles
from nbaccel.deepspeed.teardown import destroy
from nbaccel.errors import ConfigError

__all__ = ["Drive"]


class Drive:
    """Drives one engine.

    Args:
        engine: Made by ``deepspeed.initialize``.
        claimed: Where it swaps to.
        troubles: Watches what comes of it.
        clipping: The norm that a configuration names itself; None where it was filled in.

    Attributes:
        engine: As given.
        ran: Whether a forward pass is waiting for its backward pass.
    """

    def __init__(
        self, engine: Any, claimed: Claim, troubles: Troubles, clipping: float | None
    ) -> None:
        self.engine = engine
        self.ran = False
        self._hooks = [
            engine.register_forward_pre_hook(lambda *_: self.step()),
            engine.register_forward_hook(self._note_run),
        ]
        self._claimed = claimed
        self._troubles = troubles
        self._clipping = clipping
        self._forced: bool | None = None
        self._due = False
        self._norm: Any = None
        self.was_skipped = False

    def __reduce__(self) -> Any:
        """Refused, for all that refers to it: an engine is this process's part of a whole.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"what holds a {type(self.engine).__name__} (an engine's optimizer, its schedule, an "
            "Accelerator) cannot leave its process. Take accelerator.get_state_dict(model), or "
            "numbers such as optimizer.param_groups[0]['lr']"
        )

    @property
    def can_train(self) -> bool:
        """Whether it has an optimizer."""
        return self.engine.basic_optimizer is not None

    @contextlib.contextmanager
    def syncing(self, wanted: bool) -> Iterator[None]:
        """A block whose backward passes end a group, or do not, whatever the loop says."""
        before, self._forced = self._forced, wanted
        try:
            yield
        finally:
            self._forced = before

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        """Compute and reduce gradients. See [Note: when it steps]."""
        self.step()
        sync = sync if self._forced is None else self._forced
        self.engine.set_gradient_accumulation_boundary(sync)
        self._troubles.see_loss(loss)
        try:
            self.engine.backward(loss, scale_wrt_gas=False, **options)
        except TypeError as error:
            if not options or "unexpected keyword" not in str(error):
                raise
            raise ConfigError(
                f"backward({', '.join(f'{k}={v!r}' for k, v in options.items())}) has an argument "
                f"that DeepSpeed's engine does not take: {error}. Leave it out; retain_graph is "
                "the only one."
            ) from error
        self.ran = False
        self._due = sync

    def _note_run(self, *_: Any) -> None:
        self.ran = self.ran or torch.is_grad_enabled()

    def step(self) -> None:
        """Take the step that is due, if one is."""
        if not self._due:
            return
        self._due = False
        with self._troubles.explained():
            self.engine.step()
        self.was_skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        self._norm = self.engine.get_global_grad_norm()
        self._troubles.after_step(skipped=self.was_skipped)

    def clipped_step(self, max_norm: float) -> torch.Tensor:
        """Take the step that is due with gradients scaled down to a norm.

        Returns:
            The norm before, a 0-d tensor; of the last step where none is due.
        """
        if self._due:
            self._tell_of_two_norms(max_norm)
            if self._clips_itself:
                with self._clipping_at(max_norm):
                    self.step()
            else:
                parameters = self.engine.module.parameters()
                norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
                with self._clipping_at(0.0):
                    self.step()
                self._norm = norm
        device = self.engine.device
        return torch.as_tensor(0.0 if self._norm is None else self._norm, device=device).float()

    def end(self, before: Remembered | None) -> None:
        """Destroy the engine.

        Args:
            before: What its module was, to be made so again; None leaves it as it is.
        """
        for hook in self._hooks:
            hook.remove()
        if before is None:
            unhook(self.engine)
            destroy(self.engine)  # its files stay: weights that are on disk are still to come home
            return
        take_back(self.engine.module, before)
        self._claimed.release()

    @property
    def _clips_itself(self) -> bool:
        """Whether its optimizer clips, and says by which norm; torch's own does neither."""
        return hasattr(self.engine.optimizer, "clip_grad")

    @contextlib.contextmanager
    def _clipping_at(self, max_norm: float) -> Iterator[None]:
        """A block in which steps clip at this norm; those of a loop without the call do not."""
        # DeepSpeed has no public way: the engine reads its configuration, optimizers a copy.
        places = [(self.engine._config, "gradient_clipping")]
        if self._clips_itself:
            places.append((self.engine.optimizer, "clip_grad"))
        before = [getattr(*place) for place in places]
        try:
            for place in places:
                setattr(*place, max_norm)
            yield
        finally:
            for place, value in zip(places, before, strict=True):
                setattr(*place, value)

    def _tell_of_two_norms(self, max_norm: float) -> None:
        said, self._clipping = self._clipping, None
        if said is not None and not math.isclose(said, max_norm):
            warnings.warn(
                f"clip_grad_norm_(max_norm={max_norm}) goes before gradient_clipping={said} of the "
                'DeepSpeed configuration. Write "auto" there, or leave the call out.',
                stacklevel=6,
            )
