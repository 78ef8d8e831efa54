"""One process: alone, or driving all chips, with XLA cutting the program up.

:class:`SpmdStrategy` cuts every parameter along its longest dimension that the number of chips
divides, batches along their first, and XLA's partitioner derives the rest of the program,
collectives included (GSPMD, https://arxiv.org/abs/2105.04663). Numbers are those of one chip.
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch

from nbaccel.base.errors import ConfigError
from nbaccel.plan.contracts.training import Bundle, Place, Strategy
from nbaccel.plan.launch_plan import Choice


class SingleStrategy(Strategy):
    """Nothing is wrapped, nothing is exchanged."""

    name: ClassVar[str] = "single"


_AXIS = "chips"


class SpmdStrategy(Strategy):
    """XLA's partitioner shards weights, optimizer states and batches over all chips."""

    name: ClassVar[str] = "spmd"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        is_xla = place.device.type == "xla"
        runtime = importlib.import_module("torch_xla.runtime") if is_xla else None
        if runtime is None or not runtime.is_spmd():
            raise ConfigError(
                f'strategy="spmd" needs torch_xla in its SPMD mode: this process computes on '
                f"{place.device} without it, and the mode cannot be changed once the runtime runs. "
                'Launch with RunConfig(device="tpu", strategy="spmd"), or set XLA_USE_SPMD=1 '
                "before torch_xla is imported."
            )
        spmd = importlib.import_module("torch_xla.distributed.spmd")
        self._num_chips = int(runtime.global_runtime_device_count())
        self._mesh = spmd.Mesh(list(range(self._num_chips)), (self._num_chips,), (_AXIS,))
        self._mark: Any = spmd.mark_sharding
        self.place_batch = self._deal_out

    def wrap(self, bundle: Bundle) -> Bundle:
        """See :meth:`Strategy.wrap`; marks parameters, whose gradients and states follow them."""
        num_cut = num_all = 0
        for model in bundle.models:
            for parameter in model.parameters():
                divisible = [
                    n for n, size in enumerate(parameter.shape) if not size % self._num_chips
                ]
                axes: list[str | None] = [None] * parameter.dim()
                if divisible:
                    axes[max(divisible, key=lambda dim: parameter.shape[dim])] = _AXIS
                self._mark(parameter, self._mesh, tuple(axes))
                num_cut += _AXIS in axes
                num_all += 1
        self.choices = (
            Choice(
                "sharding",
                f"{self._num_chips} chips",
                f"{num_cut} of {num_all} parameters cut up; the others have no dimension that "
                f"{self._num_chips} divides",
            ),
        )
        return bundle

    def _deal_out(self, batch: torch.Tensor) -> None:
        if batch.dim() and batch.shape[0] % self._num_chips == 0:
            self._mark(batch, self._mesh, (_AXIS, *([None] * (batch.dim() - 1))))
