"""``DdpStrategy``: every process holds the whole model, and gradients are averaged."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.training_libraries import attribute
from nbaccel.config.handlers import DDPCommunicationHookType, DistributedDataParallelKwargs
from nbaccel.plan.contracts.training import Bundle, Place, Precision, Strategy, TrainingRequest
from nbaccel.precision.fp8.gradient_exchange import fp8_compress_hook

_Hook = Callable[[Any, Any], Any]
_Kind = DDPCommunicationHookType

_HOOKS: dict[DDPCommunicationHookType, _Hook] = {
    # What DDP does without a hook; a wrapper needs one to call.
    _Kind.NO: default_hooks.allreduce_hook,
    _Kind.FP16: default_hooks.fp16_compress_hook,
    _Kind.BF16: default_hooks.bf16_compress_hook,
    _Kind.FP8: fp8_compress_hook,
    _Kind.POWER_SGD: powerSGD_hook.powerSGD_hook,
    _Kind.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[DDPCommunicationHookType, Callable[[_Hook], _Hook]] = {
    _Kind.FP16: default_hooks.fp16_compress_wrapper,
    _Kind.BF16: default_hooks.bf16_compress_wrapper,
}
_WITH_STATE = (_Kind.POWER_SGD, _Kind.BATCHED_POWER_SGD)
_NOT_TORCHS = (*DistributedDataParallelKwargs.OWN, "check_reduction")


class DdpStrategy(Strategy):
    """Torch's ``DistributedDataParallel``."""

    name: ClassVar[str] = "ddp"

    def __init__(
        self, place: Place, settings: DistributedDataParallelKwargs, precision: Precision
    ) -> None:
        super().__init__(place)
        kind = _Kind(settings.comm_hook)
        wrapper = _Kind(settings.comm_wrapper)
        mistakes = []
        if wrapper is not _Kind.NO and wrapper not in _WRAPPERS:
            mistakes.append(
                f"DistributedDataParallelKwargs(comm_wrapper={wrapper.value!r}) cannot wrap "
                "another compression: only a cast can. Give 'fp16' or 'bf16' as comm_wrapper, and "
                f"{wrapper.value!r} as comm_hook."
            )
        state_option = settings.comm_state_option
        if state_option and kind not in _WITH_STATE:
            mistakes.append(
                f"DistributedDataParallelKwargs(comm_state_option={state_option!r}) has no effect "
                f"with comm_hook={kind.value!r}: only PowerSGD keeps a state. Leave it out, or "
                "give comm_hook='power_sgd'."
            )
        if mistakes:
            raise ConfigError(*mistakes)
        # pytorch/pytorch#75157 made orthogonalization batched, and left this hook as it was.
        if kind is _Kind.BATCHED_POWER_SGD:
            warnings.warn(
                f"DistributedDataParallelKwargs(comm_hook={kind.value!r}) will end training at its "
                f"first compressed step, number {state_option.get('start_powerSGD_iter', 1000)}: "
                "torch (seen up to 2.13) passes two-dimensional matrices to a function that takes "
                "only batches of them. Give 'power_sgd', which compresses better.",
                stacklevel=2,
            )
        self._settings = settings
        self._precision = precision

    @classmethod
    def build(
        cls, place: Place, settings: Any, *, precision: Precision, asked: TrainingRequest
    ) -> DdpStrategy:
        return cls(place, settings, precision)

    def wrap(self, bundle: Bundle) -> Bundle:
        """See :meth:`Strategy.wrap`; a collective."""
        return dataclasses.replace(bundle, models=tuple(map(self._wrapped, bundle.models)))

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :meth:`Strategy.no_sync`; the forward belongs into the context, too."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :meth:`Strategy.sync_in_backward`; for one backward."""
        return _reducing(model) if isinstance(model, DistributedDataParallel) else nullcontext()

    def join(self, models: Iterable[nn.Module], **options: Any) -> AbstractContextManager[None]:
        joinable: list[Joinable] = [model for model in models if isinstance(model, Joinable)]
        return Join(joinable, **options) if joinable else nullcontext()

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            return model
        names = self._precision.own_gradients(model)
        # DDP raises for a model that has nothing for it to average.
        if not any(p.requires_grad and name not in names for name, p in model.named_parameters()):
            if names:
                # In every pass: what was averaged before is equal everywhere, and stays as it is.
                self._precision.average_gradients(model, lambda: True)
            return model
        if names:
            torch_private.exclude_from_ddp(model, names)
        settings = self._settings.to_kwargs()
        arguments = {name: settings[name] for name in settings if name not in _NOT_TORCHS}
        device = self.place.device
        # torch refuses `device_ids` for a model on the CPU.
        device_ids = None if device.type == "cpu" else [device]
        ddp = DistributedDataParallel(model, device_ids=device_ids, **arguments)
        self._compress(ddp)
        if names:
            self._precision.average_gradients(model, lambda: bool(ddp.require_backward_grad_sync))
        return ddp

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See :meth:`Strategy.optimizer_state`; a collective where the state is divided."""
        if not hasattr(optimizer, "consolidate_state_dict"):
            return optimizer.state_dict()
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if self.place.is_main else {}

    def _compress(self, model: DistributedDataParallel) -> None:
        kind = _Kind(self._settings.comm_hook)
        wrapper = _Kind(self._settings.comm_wrapper)
        if kind is _Kind.NO and wrapper is _Kind.NO:
            return
        hook = _HOOKS[kind]
        state = None
        if kind in _WITH_STATE:
            state = powerSGD_hook.PowerSGDState(None, **self._settings.comm_state_option)
        if wrapper is not _Kind.NO:
            hook = _WRAPPERS[wrapper](hook)
        try:
            model.register_comm_hook(state, hook)
        except TypeError as error:  # bfloat16 needs NCCL 2.10, says torch
            raise ConfigError(
                f"DistributedDataParallelKwargs(comm_hook={kind.value!r}, "
                f"comm_wrapper={wrapper.value!r}) does not work with the "
                f"{self.place.backend or 'default'} process group on {self.place.device}: {error}. "
                "Gradients would be sent uncompressed. Give 'fp16', or leave it out."
            ) from error


@contextmanager
def _reducing(model: DistributedDataParallel) -> Iterator[None]:
    with attribute(model, "require_backward_grad_sync", True):
        # Forwards under no_sync did not prepare the reducer, which would leave gradients unreduced.
        model.reducer.prepare_for_backward([])
        yield
