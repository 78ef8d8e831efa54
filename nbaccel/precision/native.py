"""float32, bfloat16 and float16 by torch's own autocast.

[Note: the wrapped forward] A model's `forward` is replaced on the instance by an
:class:`AutocastForward`, so the model stays the user's own object: what wraps it later (DDP,
`fully_shard`, `torch.compile`) calls the new forward by itself. The replacement is an object of a
class, not a closure, because models are pickled for workers and deep-copied.

[Note: when the factor changes] torch wants `update` once per iteration, after all optimizers have
stepped. A training loop written for one optimizer updates after each step: then the second
optimizer's gradients are divided by a factor they were not multiplied with, or twice by it if they
had been unscaled for clipping. So an update of a :class:`LossScaler` waits until the factor is
needed again: for the next loss, for a checkpoint, or for an optimizer that steps a second time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import UserMistake
from nbaccel.base.trees import leaves, map_leaves
from nbaccel.config.handlers import AutocastKwargs
from nbaccel.plan.contracts.training import Precision, PrecisionSettings


class LossScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` whose `update` may be called after every optimizer's step."""

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
        self._begin_step_of(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients are infinite; returns what its step returns."""
        self._begin_step_of(optimizer)
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

    def _begin_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_enabled():
            return
        if torch_private.scale_tensor(self) is None:
            raise UserMistake(
                f"{type(optimizer).__name__} cannot step with mixed_precision='fp16': no loss went "
                "through accelerator.backward(), which keeps small gradients from becoming zero in "
                "float16. Write accelerator.backward(loss) in place of loss.backward()."
            )
        # A second step of the same optimizer belongs to the next iteration.
        if self._waiting and torch_private.has_stepped(self, optimizer):
            self._finish_unscaled()

    def _finish_unscaled(self) -> None:
        if self._waiting:
            self._waiting = False
            # Without any gradient no flag was recorded, and torch's `update` would raise.
            if self.is_enabled() and torch_private.infinity_flags(self):
                super().update()


_SHORT_DTYPES = frozenset({torch.float16, torch.bfloat16})


@dataclass(eq=False)
class WrappedForward:
    """What a precision puts in the place of a model's forward, and takes off again."""

    forward: Callable[..., Any]

    def __post_init__(self) -> None:
        # `inspect.signature` follows this to the model's own arguments.
        self.__wrapped__ = self.forward


@dataclass(eq=False)
class AutocastForward(WrappedForward):
    """A model's forward that computes in a lower precision and returns float32."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A context of its own for each call: one that is shared is not reentrant.
        with torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled):
            output = self.forward(*args, **kwargs)
        return as_float32(output)


def restore_forward(model: nn.Module, forward: Any) -> None:
    """Take off what a model's forward was wrapped in; the forward of its class needs no entry."""
    model.__dict__.pop("forward", None)
    model.__dict__.pop("_original_forward", None)
    is_own = getattr(forward, "__self__", None) is model
    if not is_own or getattr(forward, "__func__", None) is not type(model).forward:
        model.__dict__["forward"] = forward


class _AutocastPrecision(Precision):
    """The common part of the three precisions."""

    def __init__(self, settings: PrecisionSettings) -> None:
        self._device_type = settings.device.type
        self._settings = settings.autocast

    @classmethod
    def build(cls, settings: PrecisionSettings) -> _AutocastPrecision:
        return cls(settings)

    def wrap_forward(self, model: nn.Module) -> None:
        """See :meth:`Precision.wrap_forward`; replaces what an earlier precision put there."""
        # A second Accelerator would otherwise nest its autocast around the first one's.
        self.take_off_autocast(model)
        if self.dtype is None:
            return
        forward = model.forward
        # `__dict__`, because a compiled module passes attributes on to the module inside it.
        # Accelerate and its users look for the first forward under `_original_forward`.
        model.__dict__["_original_forward"] = forward
        settings = self._settings
        model.__dict__["forward"] = AutocastForward(
            forward, self._device_type, self.dtype, settings.enabled, settings.cache_enabled
        )

    def unwrap_forward(self, model: nn.Module) -> None:
        self.take_off_autocast(model)

    def take_off_autocast(self, model: nn.Module) -> None:
        while isinstance(wrapper := model.__dict__.get("forward"), WrappedForward):
            restore_forward(model, wrapper.forward)

    def autocast(self, settings: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        if self.dtype is None:
            return super().autocast(settings)
        given = settings or self._settings
        return torch.autocast(
            self._device_type, self.dtype, given.enabled, cache_enabled=given.cache_enabled
        )


class Fp32(_AutocastPrecision):
    """float32 throughout: nothing is changed."""

    name: ClassVar[str] = "no"


class Bf16(_AutocastPrecision):
    """bfloat16 where it is safe; its range is that of float32, so nothing is scaled."""

    name: ClassVar[str] = "bf16"
    dtype = torch.bfloat16


class Fp16(_AutocastPrecision):
    """float16 where it is safe; the loss is scaled, because small gradients would vanish."""

    name: ClassVar[str] = "fp16"
    dtype = torch.float16

    def __init__(self, settings: PrecisionSettings) -> None:
        super().__init__(settings)
        self.scaler = LossScaler(settings.device.type, **settings.scaler.to_dict())


def as_float32(tree: Any) -> Any:
    """Turn float16 and bfloat16 tensors into float32 ones."""
    # Checked before rebuilding, because torch.compile cannot compare containers by `is`.
    return map_leaves(_leaf_as_float32, tree) if _has_short_tensors(tree) else tree


def _has_short_tensors(tree: Any) -> bool:
    return any(
        leaf.dtype in _SHORT_DTYPES
        if isinstance(leaf, torch.Tensor)
        else any(_has_short_tensors(getattr(leaf, name)) for name in _set_fields(leaf))
        for leaf in leaves(tree)
    )


def _leaf_as_float32(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.float() if leaf.dtype in _SHORT_DTYPES else leaf
    if not _has_short_tensors(leaf):
        return leaf
    dataclass_copy = copy.copy(leaf)
    for name in _set_fields(leaf):
        # Frozen dataclasses refuse a plain assignment.
        object.__setattr__(dataclass_copy, name, as_float32(getattr(leaf, name)))
    return dataclass_copy


def _set_fields(leaf: Any) -> list[str]:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return []
    # A field with init=False and without a default need not exist.
    return [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
