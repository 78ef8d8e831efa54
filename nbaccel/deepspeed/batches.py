"""A batch of a notebook: a tensor, or tensors in dicts, lists and tuples, and a model called on it.

The first dimension of its tensors counts samples. How many there are can be changed, to try another
batch size with data of the same kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nbaccel.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["call", "loss_of", "mapped", "num_samples", "resized"]


def mapped(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A batch of the same form with each tensor changed.

    Args:
        batch: A tensor, or a dict, list or tuple of batches; anything else stays.
        change: What becomes of a tensor.

    Returns:
        The new batch. A mapping of any kind becomes a dict.
    """
    import torch

    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(mapped(value, change) for value in batch)
    return batch


def num_samples(batch: Any) -> int:
    """How many samples a batch has.

    Args:
        batch: A batch.

    Returns:
        The first dimension of its first tensor that has one.

    Raises:
        ConfigError: There is no tensor in it.
    """
    found = [tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()]
    if not found:
        raise ConfigError(
            f"sample_batch is a {type(batch).__name__} without tensors: nothing can be measured "
            "with it. Give what your loader gives: a tensor, or a dict or tuple of tensors whose "
            "first dimension counts samples."
        )
    return int(found[0])


def resized(batch: Any, samples: int) -> Any:
    """A batch of another size: the first samples, or all of them again and again.

    Args:
        batch: A batch.
        samples: How many samples it is to have.

    Returns:
        The new batch. Tensors without the dimension that counts samples are as they were.
    """
    have = num_samples(batch)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != have or have == samples:
            return tensor
        times = -(-samples // have)
        return tensor.repeat(times, *[1] * (tensor.dim() - 1))[:samples].clone()

    return mapped(batch, change)


def call(model: Callable[..., Any], batch: Any, *, module: nn.Module | None = None) -> Any:
    """Call a model on a batch.

    Args:
        model: The model, or an engine around it.
        batch: A mapping is given as keyword arguments, a list or tuple as positional ones. Of
            these a model takes as many as it has arguments for: with ``(inputs, targets)`` and a
            model of one argument the targets are left out.
        module: The model inside ``model``, whose signature counts.

    Returns:
        What the model returns.
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (list, tuple)):
        return model(*batch[: _most_arguments(module or model)])
    return model(batch)


def loss_of(output: Any) -> torch.Tensor:
    """Something to begin a backward pass from.

    Args:
        output: What a model returned.

    Returns:
        Its ``loss``, or else the sum of all its floating-point tensors that have gradients.

    Raises:
        ConfigError: No tensor in it has gradients.
    """
    import torch

    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    parts = [tensor.float().sum() for tensor in _tensors(output) if tensor.requires_grad]
    if not parts:
        raise ConfigError(
            f"The model returned a {type(output).__name__} without a tensor that has gradients: "
            "there is no backward pass to measure. Give a model whose parameters are trained."
        )
    return torch.stack(parts).sum()


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    mapped(batch, found.append)
    if not found and not isinstance(batch, (Mapping, list, tuple)):  # an output of some class
        mapped(vars(batch) if hasattr(batch, "__dict__") else None, found.append)
    return iter(found)


def _most_arguments(model: Any) -> int | None:
    """How many positional arguments a model takes; None where there is no limit."""
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    except (TypeError, ValueError):  # written in C, or traced
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
