"""``RunDescription``: how a run trains and what it was asked, under Accelerate's names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from nbaccel.accelerator.prepared_run import TrainingRun, one_of
from nbaccel.base.errors import PlatformUnsupported
from nbaccel.config import handlers
from nbaccel.config.capabilities import device_row, precision_row, strategy_row
from nbaccel.plan.training_plan import TrainingPlan
from nbaccel.state import AcceleratorState, ProcessInfo, distributed_type, shows


def _missing_rank(parallelism_kind: str) -> property:

    def rank(self: RunDescription) -> NoReturn:
        raise PlatformUnsupported(
            f"There is no {parallelism_kind} parallelism in a run of type "
            f"{self.distributed_type.value}: none are mixed. Use accelerator.process_index."
        )

    return property(rank, doc="Raises: parallelisms are not mixed; the rank is `process_index`.")


def _handler(kind: type[Any], meaning: str) -> Any:

    def one(self: RunDescription) -> Any:
        return one_of(self._run.request.handlers, kind)

    return property(one, doc=meaning)


class RunDescription(ProcessInfo):
    """What can be read of a run: it holds before anything is prepared, and trains nothing."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run.collectives)
        self._run = run
        self._said_in_state: dict[str, handlers.DistributedType] = {}

    plan: TrainingPlan = shows("_run.plan")
    """What was decided, and why: ``print(accelerator.plan.explain())``."""

    @property
    def distributed_type(self) -> handlers.DistributedType:
        """How processes train together."""
        if "distributed_type" in self._said_in_state:
            return self._said_in_state["distributed_type"]
        row_type = strategy_row(self.plan.strategy).distributed_type
        return handlers.DistributedType(row_type) if row_type else distributed_type(self._place)

    @property
    def state(self) -> AcceleratorState:
        """This process and how it trains, as one object to print."""
        return AcceleratorState(
            self._collectives,
            distributed_type=self.distributed_type,
            mixed_precision=self.mixed_precision,
            fsdp_plugin=self._run.request.settings_of("fsdp_plugin"),
            deepspeed_plugins=self._run.request.settings_of("deepspeed_plugin"),
            dynamo_plugin=self._run.dynamo,
            said=self._said_in_state,
        )

    @property
    def multi_device(self) -> bool:
        """Whether several devices train together."""
        return self.use_distributed and not device_row(self._place.device_name).in_host_memory

    mixed_precision: str = shows("plan.mixed_precision")
    """The row of the precision: ``no``, ``fp16``, ``bf16`` or ``fp8``, for example."""

    @property
    def native_amp(self) -> bool:
        """Whether torch's autocast is in use."""
        return self._run.precision.dtype is not None

    scaler: torch.amp.GradScaler | None = shows("_run.precision.scaler")
    """What scales the loss, under fp16."""

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by ``fully_shard``."""
        return self.distributed_type is handlers.DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> Any:
        """How DeepSpeed shards models; None where it does not."""
        plugins = self._run.request.settings_of("deepspeed_plugin")
        return None if plugins is None else plugins.active

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """DeepSpeed's configuration, without ``"auto"`` once a model is prepared."""
        plugin = self.deepspeed_plugin
        return None if plugin is None else dict(plugin.deepspeed_config)

    parallelism_config = None
    """None: this version does not mix parallelisms, and refuses the configuration."""

    @property
    def fp8_backend(self) -> str | None:
        """The library that computes in fp8; None where nothing does."""
        if not precision_row(self.mixed_precision).has_backends:
            return None
        choices = self.plan.choices
        return next((str(one.value) for one in choices if one.name == "fp8.backend"), None)

    @property
    def dataloader_config(self) -> handlers.DataLoaderConfiguration:
        """How loaders are shared out; what is set holds for loaders that are prepared later."""
        return self._run.request.data

    @dataloader_config.setter
    def dataloader_config(self, value: handlers.DataLoaderConfiguration) -> None:
        self._run = replace(self._run, request=replace(self._run.request, data=value))

    split_batches: bool = shows("_run.request.data.split_batches")
    """Whether each batch is cut into a slice per process."""
    dispatch_batches: bool | None = shows("_run.request.data.dispatch_batches")
    """Whether process 0 reads for all."""
    even_batches: bool = shows("_run.request.data.even_batches", is_settable=True)
    """Whether all processes get equally many batches."""
    use_seedable_sampler: bool = shows("_run.request.data.use_seedable_sampler")
    """Whether shuffling depends on seed and epoch alone."""
    non_blocking: bool = shows("_run.request.data.non_blocking")
    """Whether copies to the device do not wait."""
    use_stateful_dataloader: bool = shows("_run.request.data.use_stateful_dataloader")
    """Whether torchdata's loader is used."""

    project_configuration: handlers.ProjectConfiguration = shows("_run.request.project")
    """Where checkpoints and logs go."""
    project_dir: str | Path | None = shows("_run.request.project.project_dir")
    """Folder of the project."""
    logging_dir: str | Path | None = shows("_run.request.project.logging_dir")
    """Folder of the trackers."""
    save_iteration: int = shows("_run.request.project.iteration")
    """Number of the next checkpoint."""

    ddp_handler = _handler(handlers.DistributedDataParallelKwargs, "Arguments of DDP.")
    init_handler = _handler(handlers.InitProcessGroupKwargs, "Arguments of the process group.")
    autocast_handler = _handler(handlers.AutocastKwargs, "Arguments of autocast.")
    scaler_handler = _handler(handlers.GradScalerKwargs, "Arguments of fp16's scaler.")
    profile_handler = _handler(handlers.ProfileKwargs, "Arguments of the profiler.")

    is_composable_parallelism_enabled: bool = shows("is_fsdp2")
    """Whether models are sharded by ``fully_shard``, which can go with other parallelisms."""
    should_save_model: bool = shows("is_local_main_process")
    """Whether this process is the one of its node that writes whole weights."""
    torch_device_mesh = None
    """None: this version mixes no parallelisms, and makes no mesh for them."""
    tensor_parallel_rank = _missing_rank("tensor")
    pipeline_parallel_rank = _missing_rank("pipeline")
    context_parallel_rank = _missing_rank("context")
    data_parallel_rank = _missing_rank("data")
    data_parallel_shard_rank = _missing_rank("data")

    @contextlib.contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Nothing happens in the block: sequences are not divided over processes here."""
        yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """The loader as it is: sequences are not divided over processes here."""
        return dl

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether transformers has spread a model over several places (``device_map``)."""
        device_maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(len(device_map or ()) > 1 for device_map in device_maps)
