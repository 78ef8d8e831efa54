"""Members of Accelerate's `Accelerator` for which nbaccel itself has no use, or other names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from nbaccel.accelerator.facts import Facts
from nbaccel.config.enumerations import LoggerType
from nbaccel.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from nbaccel.errors import ConfigError, PlatformUnsupported

__all__ = ["PeerNames"]


class PeerNames(Facts):
    """What code written for Accelerate reads beside."""

    # --------------------------------------------------------------------- settings

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs:
        """Arguments of DDP."""
        return self._request.handlers.ddp

    @property
    def init_handler(self) -> InitProcessGroupKwargs:
        """Arguments of the process group."""
        return self._request.handlers.process_group

    @property
    def autocast_handler(self) -> AutocastKwargs:
        """Arguments of autocast."""
        return self._request.handlers.autocast

    @property
    def scaler_handler(self) -> GradScalerKwargs:
        """Arguments of fp16's scaler."""
        return self._request.handlers.scaler

    @property
    def profile_handler(self) -> ProfileKwargs:
        """Arguments of the profiler."""
        return self._request.handlers.profile

    @property
    def log_with(self) -> list[Any]:
        """Trackers that were asked for and can be had: names, and objects that were given."""
        return [
            (LoggerType(one.name) if one.name in LoggerType else one.name)
            if isinstance(one, type)
            else one
            for one in self._wanted_trackers
        ]

    @property
    def flag_tensor(self) -> torch.Tensor | None:
        """Whether `set_trigger` was called since the last `check_trigger`: a 0-d 1, or None."""
        return torch.tensor(1, device=self.device) if self._trigger else None

    # --------------------------------------------------------------------- parallelism

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models are sharded by ``fully_shard``, which can go with other parallelisms."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Whether this process is the one of its node that writes whole weights."""
        return self.is_local_main_process

    @property
    def torch_device_mesh(self) -> None:
        """None: this version mixes no parallelisms, and makes no mesh for them."""
        return None

    @property
    def tensor_parallel_rank(self) -> int:
        """Raises: there is no tensor parallelism."""
        return self._no_rank("tensor")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Raises: there is no pipeline parallelism."""
        return self._no_rank("pipeline")

    @property
    def context_parallel_rank(self) -> int:
        """Raises: there is no context parallelism."""
        return self._no_rank("context")

    @property
    def data_parallel_rank(self) -> int:
        """Raises: there is only one kind of parallelism, whose rank is `process_index`."""
        return self._no_rank("data")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Raises: as `data_parallel_rank`."""
        return self._no_rank("data")

    def _no_rank(self, kind: str) -> NoReturn:
        raise PlatformUnsupported(
            f"There is no {kind} parallelism beside others in a run of type "
            f"{self.distributed_type.value}: this version mixes none, and a process has one "
            "number. Use accelerator.process_index."
        )

    @contextlib.contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Nothing happens in the block: sequences are not cut up over processes here.

        Args:
            buffers: Left as they are.
            buffer_seq_dims: Not used.
            no_restore_buffers: Not used.
        """
        del buffers, buffer_seq_dims, no_restore_buffers
        yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """The loader as it is: sequences are not cut up over processes here.

        Args:
            dl: A loader.
            model: Not used.
        """
        del model
        return dl

    # --------------------------------------------------------------------- models and optimizers

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether transformers has spread a model over several places (``device_map``)."""
        return any(len(getattr(m, "hf_device_map", None) or ()) > 1 for m in model.modules())

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward and step in one, of optimizers that have it (LOMO).

        Args:
            loss: A 0-d tensor.
            learning_rate: Of this step.

        Raises:
            ConfigError: No prepared optimizer has it, or there is no learning rate.
        """
        fused = [f for o in self._optimizers if (f := getattr(o, "fused_backward", None))]
        if not fused or learning_rate is None:
            kinds = [type(optimizer.optimizer).__name__ for optimizer in self._optimizers]
            raise ConfigError(
                f"lomo_backward(learning_rate={learning_rate!r}) needs a learning rate and an "
                f"optimizer with `fused_backward`; prepared are {kinds or 'none'}. Prepare one of "
                "lomo_optim, or call accelerator.backward(loss)."
            )
        for backward in fused:
            backward(loss, learning_rate)
