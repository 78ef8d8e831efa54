"""float32, bfloat16 and float16 by torch's own autocast.

[Note: the wrapped forward] A model's `forward` is replaced on the instance by an
:class:`AutocastForward`, so the model stays the user's own object: what wraps it later (DDP,
`fully_shard`, `torch.compile`) calls the new forward by itself. The replacement is an object of a
class, not a closure, because models are pickled for workers and deep-copied.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from nbaccel.config.handlers import AutocastKwargs, GradScalerKwargs
from nbaccel.plan.contracts.precision import Precision, PrecisionSettings
from nbaccel.precision.scaler import LossScaler

if TYPE_CHECKING:
    from typing_extensions import Self

_SHORT_DTYPES = frozenset({torch.float16, torch.bfloat16})


class AutocastForward:
    """A model's forward that computes in a lower precision and returns float32."""

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        device_type: str,
        dtype: torch.dtype,
        enabled: bool,
        cache_enabled: bool | None,
    ) -> None:
        self.forward = forward
        self.__wrapped__ = forward  # `inspect.signature` follows this to the model's own arguments
        self.device_type = device_type
        self.dtype = dtype
        self.enabled = enabled
        self.cache_enabled = cache_enabled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; the same arguments, float32 in what it returns."""
        # A context of its own for each call: one that is shared is not reentrant.
        with torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled):
            output = self.forward(*args, **kwargs)
        return as_float32(output)


class _AutocastPrecision(Precision):
    """The common part of the three precisions."""

    def __init__(
        self, device: torch.device, autocast: AutocastKwargs, scaler: GradScalerKwargs
    ) -> None:
        self._device_type = device.type
        self._settings = autocast

    @classmethod
    def build(cls, settings: PrecisionSettings) -> Self:
        """See :meth:`Precision.build`."""
        return cls(settings.device, settings.autocast, settings.scaler)

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
        model.__dict__["forward"] = AutocastForward(
            forward,
            device_type=self._device_type,
            dtype=self.dtype,
            enabled=self._settings.enabled,
            cache_enabled=self._settings.cache_enabled,
        )

    def unwrap_forward(self, model: nn.Module) -> None:
        """See :meth:`Precision.unwrap_forward`; nothing happens to a model that is not wrapped."""
        self.take_off_autocast(model)

    def take_off_autocast(self, model: nn.Module) -> None:
        """Give a model its own forward back; nothing happens to one that is not wrapped."""
        wrapper = model.__dict__.get("forward")
        if not isinstance(wrapper, AutocastForward):
            return
        del model.__dict__["forward"]
        model.__dict__.pop("_original_forward", None)
        # A forward that the user had set on the instance is put back; one of the class needs no
        # entry.
        if not _is_own_method(model, wrapper.forward):
            model.__dict__["forward"] = wrapper.forward

    def autocast(self, settings: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """See :meth:`Precision.autocast`."""
        if self.dtype is None:
            return super().autocast(settings)
        autocast_settings = settings or self._settings
        return torch.autocast(
            self._device_type,
            self.dtype,
            autocast_settings.enabled,
            cache_enabled=autocast_settings.cache_enabled,
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

    def __init__(
        self, device: torch.device, autocast: AutocastKwargs, scaler: GradScalerKwargs
    ) -> None:
        super().__init__(device, autocast, scaler)
        self.scaler = LossScaler(device.type, **scaler.to_dict())


def _is_own_method(model: nn.Module, forward: Callable[..., Any]) -> bool:
    return (
        getattr(forward, "__self__", None) is model
        and getattr(forward, "__func__", None) is type(model).forward
    )


def as_float32(tree: Any) -> Any:
    """Turn float16 and bfloat16 tensors into float32 ones."""
    if isinstance(tree, torch.Tensor):
        return tree.float() if tree.dtype in _SHORT_DTYPES else tree
    if not _has_short_tensors(tree):
        return tree
    if isinstance(tree, Mapping):
        return _cast_mapping(tree)
    if isinstance(tree, (list, tuple)):
        return _cast_sequence(tree)
    return _cast_dataclass(tree)


def _has_short_tensors(tree: Any) -> bool:
    # Checked before rebuilding, because torch.compile cannot compare containers by `is`.
    if isinstance(tree, torch.Tensor):
        return tree.dtype in _SHORT_DTYPES
    if isinstance(tree, Mapping):
        return any(_has_short_tensors(item) for item in tree.values())
    if isinstance(tree, (list, tuple)):
        return any(_has_short_tensors(item) for item in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return any(_has_short_tensors(getattr(tree, name)) for name in _set_fields(tree))
    return False


def _cast_mapping(tree: Mapping[Any, Any]) -> Any:
    items = {key: as_float32(value) for key, value in tree.items()}
    if type(tree) is dict:
        return items
    mapping_type: Callable[..., Any] = type(tree)
    if hasattr(tree, "__dataclass_fields__"):  # outputs of transformers
        return mapping_type(**items)
    if not isinstance(tree, MutableMapping):
        return mapping_type(items)
    # A copy keeps what a new one would lose, such as `default_factory`.
    mapping_copy = copy.copy(tree)
    for key, value in items.items():
        mapping_copy[key] = value
    return mapping_copy


def _cast_sequence(tree: list[Any] | tuple[Any, ...]) -> Any:
    cast_items = [as_float32(tree_item) for tree_item in tree]
    if hasattr(tree, "_make"):  # a named tuple, whose constructor takes no sequence
        return tree._make(cast_items)
    return cast_items if type(tree) is list else type(tree)(cast_items)


def _cast_dataclass(tree: Any) -> Any:
    dataclass_copy = copy.copy(tree)
    for name in _set_fields(tree):
        # Frozen dataclasses refuse a plain assignment.
        object.__setattr__(dataclass_copy, name, as_float32(getattr(tree, name)))
    return dataclass_copy


def _set_fields(tree: Any) -> list[str]:
    # A field with init=False and without a default need not exist.
    return [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
