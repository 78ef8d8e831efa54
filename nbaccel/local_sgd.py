"""``LocalSGD``: every process trains for itself, and weights are averaged now and then."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from nbaccel.accelerator import Accelerator
from nbaccel.base.errors import ConfigError
from nbaccel.config.capabilities import strategy_row

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LocalSGD"]


class LocalSGD:
    """A block in which gradients stay on their process, and weights are averaged every few steps.

    It communicates less than DDP and gives another result: processes drift apart between averages.
    With one process nothing happens. ::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                ...
                optimizer.step()
                local_sgd.step()

    Args:
        accelerator: It has prepared the model.
        model: The prepared model.
        local_sgd_steps: Calls of `step` from one average to the next.
        enabled: False trains as if the block were not there.

    Raises:
        ConfigError: The model's parameters are sharded, so that no process could step alone; or
            `local_sgd_steps` is less than 1.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if strategy_row(accelerator.plan.strategy).distributed_type:
            raise ConfigError(
                f"LocalSGD cannot go with strategy {accelerator.plan.strategy!r}: parameters are "
                "sharded, and a process alone has only a part of each. Leave the plugin out, which "
                "trains with DDP, or pass enabled=False."
            )
        if local_sgd_steps < 1:
            raise ConfigError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps}) must be at least 1: weights are "
                "averaged after so many steps. Give 1 to average after each."
            )
        self.enabled = enabled and accelerator.use_distributed
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._without_sync = ExitStack()

    def __enter__(self) -> Self:
        if self.enabled:
            self._without_sync.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        # After an error the others would wait for an average that does not come.
        if self.enabled and error is None:
            self._average_weights()
        self._without_sync.close()

    def step(self) -> None:
        """Count one optimizer step; average the weights where it is time to."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average_weights()

    @torch.no_grad()
    def _average_weights(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        means = self.accelerator.reduce([parameter.detach() for parameter in trained], "mean")
        for parameter, mean in zip(trained, means, strict=True):
            parameter.copy_(mean)
