"""How large a model is, as far as memory depends on it.

Tied weights count once. Parameters on ``meta`` count with their future size, and ZeRO-3's
placeholders with the size of what they stand for. DeepSpeed's count, by address, finds one or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError
from nbaccel.base.units import first_few

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that memory depends on, in numbers of parameters."""

    total: int
    largest_layer: int
    """Of the module that has most of its own, children not counted."""
    trainable: int
    sizes: tuple[int, ...] = ()
    """Elements of each parameter; empty where only the sums are known."""

    def at_most(self, threshold: int) -> int:
        """How many parameters are in tensors of at most so many elements."""
        return sum(size for size in self.sizes if size <= threshold)


def measure(model: nn.Module, *, trains: bool = True) -> Shape:
    """Count a model."""
    # By id, not by address: all tensors on `meta` have the address 0.
    parameters = {id(p): p for p in model.parameters()}.values()
    return Shape(
        total=_count(parameters),
        largest_layer=max(_count(module.parameters(recurse=False)) for module in model.modules()),
        trainable=_count(p for p in parameters if p.requires_grad) if trains else 0,
        sizes=tuple(_numel(p) for p in parameters),
    )


def refuse_unsized(model: Any) -> None:
    """Refuse a class in the place of a model, and a model whose weights have no shape yet."""
    if isinstance(model, type):
        raise ConfigError(
            f"model={model.__name__} is a class, no module: it has no weights before it is "
            f"called. Give an object of it: {model.__name__}(...)."
        )
    unsized_names = [
        parameter_name
        for parameter_name, parameter in getattr(model, "named_parameters", dict)() or ()
        if hasattr(parameter, "materialize")  # of torch's lazy modules, with torch not imported
    ]
    if unsized_names:
        raise ConfigError(
            f"This {type(model).__name__} has weights without a shape "
            f"({first_few(unsized_names, 2)}), which torch makes in the first forward pass: its "
            "memory is unknown. Call it once: model(sample_batch)."
        )


def shape_of(model_or_shape: Any) -> Shape:
    """Read what a user gives as a model's size."""
    if isinstance(model_or_shape, Shape):
        return model_or_shape
    # By its method: for plain numbers torch need not be imported.
    if callable(getattr(model_or_shape, "modules", None)):
        refuse_unsized(model_or_shape)
        return measure(model_or_shape)
    try:
        total, largest = (int(number) for number in model_or_shape)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A model's memory cannot be estimated from {model_or_shape!r}: its size is unknown. "
            "Give the module (it may be on meta), or (parameters, parameters of the largest layer)."
        ) from error
    if not 0 < largest <= total:
        raise ConfigError(
            f"A model of {total:_} parameters cannot have a largest layer of {largest:_}: the "
            "estimate would mean nothing. Give (parameters, parameters of the largest layer)."
        )
    return Shape(total=total, largest_layer=largest, trainable=total)


def _count(parameters: Iterable[Any]) -> int:
    return sum(_numel(p) for p in parameters)


def _numel(parameter: Any) -> int:
    # `ds_numel` is what ZeRO-3 writes on a parameter before it leaves a placeholder.
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())
