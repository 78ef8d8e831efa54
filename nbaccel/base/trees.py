"""Batches and outputs as trees: tensors nested in lists, tuples, named tuples and mappings.

Containers keep their type. Many tensors can also be one, for one collective of them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


def map_leaves(fn: Callable[[Any], Any], tree: Any, skip_keys: frozenset[str] = frozenset()) -> Any:
    """Apply a function to everything that is no container; containers keep their type."""
    if isinstance(tree, torch.Tensor):  # first, because it is what most trees are
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return sequence_like(tree, [map_leaves(fn, item, skip_keys) for item in tree])
    if isinstance(tree, Mapping):
        new_items = {
            key: value if key in skip_keys else map_leaves(fn, value, skip_keys)
            for key, value in tree.items()
        }
        return _mapping_like(tree, new_items)
    return fn(tree)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor; other leaves stay as they are."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def leaves(tree: Any) -> list[Any]:
    """Everything that is no container, in the order of :func:`map_leaves`."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return [tree]
    return [leaf for item in tree for leaf in leaves(item)]


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move all tensors, and other leaves that have a method ``to``, to a device.

    Args:
        tensor: A batch.
        device: Where to.
        non_blocking: Whether the copies may still be under way when this returns.
        skip_keys: Keys of mappings, at any depth, whose values stay where they are.

    Returns:
        The batch, there; containers keep their type.
    """
    stay_keys = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        to = getattr(leaf, "to", None)
        # A class shows the `to` of its instances, which cannot be called on it.
        if to is None or isinstance(leaf, type):
            return leaf
        try:
            return to(device, non_blocking=non_blocking)
        except TypeError:  # a `to` of another signature
            return to(device)

    if isinstance(tensor, Mapping) and hasattr(tensor, "to") and not isinstance(tensor, dict):
        # A BatchEncoding has more inside than its items, and moves all of it.
        return move_leaf(tensor)
    return map_leaves(move_leaf, tensor, stay_keys)


def find_batch_size(data: Any) -> int | None:
    """Rows of the first tensor with a dimension; None where there is none."""
    for leaf in leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return None


def slice_rows(tree: Any, rows: slice) -> Any:
    """These rows of every tensor, along its first dimension."""
    return map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, tree)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join equal trees: tensors along a dimension, other leaves must be equal and are kept."""
    first = data[0]
    if isinstance(first, (list, tuple)):
        return sequence_like(first, [concatenate(items, dim) for items in zip(*data, strict=True)])
    if isinstance(first, Mapping):
        joined = {key: concatenate([tree[key] for tree in data], dim) for key in first}
        return _mapping_like(first, joined)
    return torch.cat(list(data), dim) if isinstance(first, torch.Tensor) else first


def sequence_like(example: Any, new_items: list[Any]) -> Any:
    """Items in a sequence of the type of another: a list, a tuple, a named tuple."""
    if isinstance(example, tuple) and hasattr(example, "_fields"):  # a named tuple
        return type(example)(*new_items)
    return type(example)(new_items)


def _mapping_like(example: Mapping[Any, Any], new_items: dict[Any, Any]) -> Any:
    if type(example) is dict:
        return new_items
    mapping_type: Callable[..., Any] = type(example)
    if hasattr(example, "__dataclass_fields__"):  # outputs of transformers
        return mapping_type(**new_items)
    if not isinstance(example, MutableMapping):
        return mapping_type(new_items)
    # A copy keeps what a new one would lose, such as `default_factory`.
    mapping_copy = copy.copy(example)
    for key, value in new_items.items():
        mapping_copy[key] = value
    return mapping_copy


def names_by_tensor(named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, list[str]]:
    """The names of each tensor, by its id; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
    return names


def tensor_digest(tensor: torch.Tensor) -> str:
    """A text that is equal for tensors of equal bits, and almost never for others."""
    import xxhash  # here, since most programs need none

    host = tensor.detach().cpu().contiguous()
    return xxhash.xxh3_128_hexdigest(host.reshape(-1).view(torch.uint8).numpy().data)


def average(tensors: Sequence[torch.Tensor], world_size: int, *, by_host: bool = False) -> None:
    """Average tensors over all processes in place, in one collective for each data type."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        reduced = flat.cpu() if by_host else flat
        dist.all_reduce(reduced)
        means: Any = (reduced / world_size).to(flat.device)  # torch's `split` has no types
        pieces = means.split([tensor.numel() for tensor in alike])
        for tensor, piece in zip(alike, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
