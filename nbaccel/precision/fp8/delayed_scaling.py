"""``AmaxHistory``: scales that follow from the largest magnitudes of earlier steps.

Delayed scaling (Micikevicius et al., arXiv 2209.05433; the knobs are TransformerEngine's) casts a
tensor with a scale that is known before the tensor is, so that it is read once. Magnitudes are
collected while a step computes, and become scales after it, the same on all processes.

A scale that is too small costs nearly nothing, since FP8 is a floating-point format; one that is
too large cuts values off. So a layer without a history takes the scale of the tensor at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.base.errors import ConfigError
from nbaccel.precision.fp8.formats import NumberFormat, power_of_two_scale

INPUT = 0
WEIGHT = 1
GRADIENT = 2


class AmaxHistory:
    """Magnitudes and scales of all layers of a model.

    Attributes:
        amaxes: Magnitudes of the step at hand: ``[3, layers]``, float32.
        scales: ``[3, layers]``, float32; 0 where there is no history.
    """

    def __init__(
        self,
        layer_names: Sequence[str],
        formats: tuple[NumberFormat, NumberFormat, NumberFormat],
        *,
        length: int,
        margin: int,
        interval: int,
        takes_latest: bool,
        device: torch.device,
    ) -> None:
        self._names = list(layer_names)
        self._formats = formats
        self._margin = margin
        self._interval = interval
        self._takes_latest = takes_latest
        self._step = 0
        self._history = torch.zeros(length, 3, len(self._names), device=device)
        self.amaxes = torch.zeros(3, len(self._names), device=device)
        self.scales = torch.zeros(3, len(self._names), device=device)

    @torch.no_grad()
    def update(self) -> None:
        """Take the magnitudes of the step into account; a collective in a process group."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.amaxes, dist.ReduceOp.MAX)
        self._history[self._step % self._history.shape[0]] = torch.where(
            torch.isfinite(self.amaxes), self.amaxes, 0.0
        )
        self._step += 1
        if self._step % self._interval == 0:
            self._compute_scales()
        self.amaxes.zero_()

    def _compute_scales(self) -> None:
        row = self._history[(self._step - 1) % self._history.shape[0]]
        deciding = row if self._takes_latest else self._history.amax(dim=0)
        for kind, number_format in enumerate(self._formats):
            new_scales = power_of_two_scale(deciding[kind], number_format, self._margin)
            # A layer that did not take part keeps its scale.
            self.scales[kind] = torch.where(deciding[kind] > 0, new_scales, self.scales[kind])

    def state_dict(self) -> dict[str, Any]:
        """History and scales, to continue with the same."""
        return {
            "layers": self._names,
            "step": self._step,
            "history": self._history.clone(),
            "scales": self.scales.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""
        if state["layers"] != self._names or state["history"].shape != self._history.shape:
            raise ConfigError(
                f"The saved scales of fp8 are those of {len(state['layers'])} layers over "
                f"{len(state['history'])} steps; this model has {len(self._names)} over "
                f"{len(self._history)}. They would belong to other tensors. Prepare the model with "
                "the settings that it was saved with, or delete the file with the scales."
            )
        self._step = int(state["step"])
        self._history.copy_(state["history"])
        self.scales.copy_(state["scales"])
        self.amaxes.zero_()
