"""What an `Accelerator` can be asked: names that users of Accelerate read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.abc.place import Place
from nbaccel.abc.precision import Precision
from nbaccel.abc.strategy import Strategy
from nbaccel.accelerator.arguments import Request
from nbaccel.capabilities import strategy_row
from nbaccel.config.handlers import (
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from nbaccel.plan.training import TrainingPlan
from nbaccel.state import AcceleratorState, distributed_type
from nbaccel.train.checkpoint import Checkpoints
from nbaccel.train.collectives import Collectives
from nbaccel.train.flow import Processes
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import PreparedLoader
from nbaccel.train.optimizer import PreparedOptimizer
from nbaccel.train.progress import Progress
from nbaccel.train.scheduler import PreparedScheduler
from nbaccel.train.trackers import GeneralTracker

__all__ = ["Facts"]


class Facts(Processes):
    """An accelerator's state, and the names by which it is read.

    Args:
        request: What was asked.
        place: Where this process stands.
        plan: What was decided.
        strategy: How models are trained together.
        precision: In which format.
        collectives: What the processes do together.
        trackers: Who is told of metrics, not begun yet.
        dynamo: How models are compiled, if they are.

    Attributes:
        plan: What was decided, and why: ``print(accelerator.plan.explain())``.
        gradient_state: Where the accumulation of gradients stands.
        trackers: Those that `init_trackers` has begun.
        step: Batches since the last complete group.
    """

    def __init__(
        self,
        request: Request,
        *,
        place: Place,
        plan: TrainingPlan,
        strategy: Strategy,
        precision: Precision,
        collectives: Collectives,
        trackers: Sequence[type[GeneralTracker] | GeneralTracker],
        dynamo: TorchDynamoPlugin,
    ) -> None:
        super().__init__(place, collectives)
        self.plan = plan
        self.gradient_state = GradientState(request.accumulation)
        self._request = request
        self._strategy = strategy
        self._dynamo = dynamo
        self._precision = precision
        self._models: list[nn.Module] = []  # as `prepare` returned them
        self._optimizers: list[PreparedOptimizer] = []
        self._schedulers: list[PreparedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []
        self._checkpoints = Checkpoints(request.project, place, collectives)
        self._custom_objects: list[Any] = []
        self._progress: Progress[Any] | None = None
        self._trigger = False
        self._wanted_trackers = tuple(trackers)
        self.trackers: list[GeneralTracker] = []
        self.step = 0

    # --------------------------------------------------------------------- the run

    @property
    def distributed_type(self) -> DistributedType:
        """How processes train together."""
        own = strategy_row(self.plan.strategy).distributed_type
        return DistributedType(own) if own else distributed_type(self._place)

    @property
    def state(self) -> AcceleratorState:
        """This process and how it trains, as one object to print."""
        return AcceleratorState(
            self._place,
            self._collectives,
            distributed_type=self.distributed_type,
            mixed_precision=self.mixed_precision,
            fsdp_plugin=self._request.fsdp,
            deepspeed_plugins=self._request.deepspeed,
            dynamo_plugin=self._dynamo,
        )

    @property
    def multi_device(self) -> bool:
        """Whether several devices train together."""
        return self.use_distributed and self.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``."""
        return self.plan.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether torch's autocast is in use."""
        return self._precision.dtype is not None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss, under fp16."""
        return self._precision.scaler

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by ``fully_shard``."""
        return self.distributed_type is DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> Any:
        """How DeepSpeed shards models; None where it does not."""
        plugins = self._request.deepspeed
        return None if plugins is None else plugins.active

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """DeepSpeed's configuration, without ``"auto"`` once a model is prepared."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else dict(plugin.deepspeed_config)

    @property
    def parallelism_config(self) -> None:
        """None: this version does not mix parallelisms, and refuses the configuration."""
        return None

    @property
    def fp8_backend(self) -> None:
        """None: this version does not compute in fp8, and refuses to."""
        return None

    # --------------------------------------------------------------------- gradients

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch at hand ends with an optimizer step."""
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

    # --------------------------------------------------------------------- data

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are shared out."""
        return self._request.data

    @property
    def split_batches(self) -> bool:
        """Whether each batch is cut into a slice per process."""
        return self._request.data.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether process 0 reads for all."""
        return self._request.data.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all processes get equally many batches."""
        return self._request.data.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._request.data.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends on seed and epoch alone."""
        return self._request.data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device do not wait."""
        return self._request.data.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether torchdata's loader is used."""
        return self._request.data.use_stateful_dataloader

    # --------------------------------------------------------------------- project

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Where checkpoints and logs go."""
        return self._request.project

    @property
    def project_dir(self) -> str | Path | None:
        """Folder of the project."""
        return self._request.project.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Folder of the trackers."""
        return self._request.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint."""
        return self._request.project.iteration
