"""Collectives over trees of tensors, each announced by a roll call.

Everything works with one process too, where it changes nothing.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from nbaccel.abc.place import Place
from nbaccel.errors import CollectiveMismatch, ConfigError
from nbaccel.train.rollcall import DEFAULT_TIMEOUT_S, of_default_group
from nbaccel.train.trees import leaves, map_leaves, map_tensors

__all__ = ["Collectives"]

# Torch 2.13 has a new name for it and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Gloo knows no such numbers, but any bytes.
_TRAVELS_AS_BYTES = frozenset(
    getattr(torch, name)
    for name in ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
)
_REDUCTIONS = ("sum", "mean", "max", "none")


class Collectives:
    """What the processes of a run can do together.

    Every method must be called by all processes; each is a roll call first, so that a call that
    does not fit the others' raises instead of hanging or returning garbage.

    Args:
        place: This process among the others.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        CollectiveMismatch: (All methods) the processes' calls or data do not go together.
        CollectiveTimeout: (All methods) some did not come.
    """

    def __init__(self, place: Place, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.place = place
        self._timeout_s = timeout_s

    def _roll_call(self, what: str, detail: Any = None, *, same: bool = False) -> list[Any]:
        return of_default_group().answer(what, detail, same=same, timeout_s=self._timeout_s)

    def barrier(self, what: str = "wait_for_everyone") -> None:
        """Wait until every process is here."""
        if not self.place.is_alone:
            self._roll_call(what)

    def answers(self, what: str, detail: Any) -> list[Any]:
        """Exchange a small JSON value, by way of the store: no tensor, no device.

        Returns:
            Everybody's value, by rank.
        """
        return [detail] if self.place.is_alone else self._roll_call(what, detail)

    def gather(self, tree: Any) -> Any:
        """Join every process's tensors along their first dimension, in order of rank.

        Args:
            tree: Tensors of shape `[n, ...]`, equal on all processes, in containers; a 0-d tensor
                counts as one row.

        Returns:
            The same containers with tensors of shape `[world_size * n, ...]`; with one process, as
            it was.

        Raises:
            TypeError: Something in it is no tensor.
        """
        if self.place.is_alone:
            return tree
        self._roll_call("gather", _signature(tree, "gather"), same=True)
        return map_tensors(self._gather_one, tree)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        local = (tensor[None] if tensor.dim() == 0 else tensor).detach().contiguous()
        whole = local.new_empty((self.place.world_size * local.shape[0], *local.shape[1:]))
        if local.dtype in _TRAVELS_AS_BYTES:
            _all_gather(whole.view(torch.uint8), local.view(torch.uint8))
        else:
            _all_gather(whole, local)
        return whole

    def gather_object(self, items: Any) -> list[Any]:
        """Join every process's list of picklable objects, in order of rank.

        Args:
            items: A list (or another iterable) of any length on each process.

        Returns:
            One list of all; with one process, what was given.
        """
        if self.place.is_alone:
            return items  # type: ignore[no-any-return]
        return list(itertools.chain.from_iterable(self.all_objects(items, "gather_object")))

    def all_objects(self, item: Any, what: str = "all_objects") -> list[Any]:
        """Every process's picklable object, by rank."""
        if self.place.is_alone:
            return [item]
        self._roll_call(what)
        found: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(found, item)
        return found

    def reduce(self, tree: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """Combine every process's tensors element by element.

        Args:
            tree: Tensors of equal shapes on all processes, in containers.
            reduction: ``sum``, ``mean``, ``max``, or ``none`` for no combination.
            scale: Factor on the result.

        Returns:
            The same containers with new tensors of the same shapes. A mean of whole numbers is
            float32.

        Raises:
            ConfigError: The reduction is unknown.
            TypeError: Something in it is no tensor.
        """
        if reduction not in _REDUCTIONS:
            raise ConfigError(
                f"reduce(reduction={reduction!r}) is unknown: nothing says how to combine the "
                f"processes' values. Give one of {', '.join(_REDUCTIONS)}."
            )
        if not self.place.is_alone:
            self._roll_call("reduce", _signature(tree, "reduce"), same=True)
        return map_tensors(lambda t: self._reduce_one(t, reduction, scale), tree)

    def _reduce_one(self, tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self.place.is_alone and reduction != "none":
            op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            dist.all_reduce(total, op)
        if reduction == "mean":
            total = total / self.place.world_size
        return total if scale == 1.0 else total * scale

    def broadcast(self, tree: Any, from_process: int = 0) -> Any:
        """Copy one process's tensors into everybody's, in place.

        Args:
            tree: Tensors of equal shapes on all processes, in containers.
            from_process: Whose values to take.

        Returns:
            The tree that was given.
        """
        if not self.place.is_alone:
            self._roll_call("broadcast", _signature(tree, "broadcast"), same=True)
            for tensor in leaves(tree):
                dist.broadcast(tensor, from_process)
        return tree

    def broadcast_object(self, item: Any, from_process: int = 0) -> Any:
        """One process's picklable object, on all; what the others give is not looked at."""
        return self.broadcast_object_list([item], from_process)[0]

    def broadcast_object_list(self, items: list[Any], from_process: int = 0) -> list[Any]:
        """Copy one process's list of picklable objects into everybody's, in place.

        Args:
            items: A list, equally long on all processes.
            from_process: Whose objects to take.

        Returns:
            The list that was given.
        """
        if not self.place.is_alone:
            self._roll_call("broadcast_object_list", len(items), same=True)
            dist.broadcast_object_list(items, src=from_process)
        return items

    def pad_across_processes(
        self, tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Make every process's tensors equally long in one dimension, so that they can be gathered.

        Args:
            tree: Tensors whose other dimensions are equal on all processes, in containers.
            dim: The dimension; a tensor without it stays as it is.
            pad_index: What to fill with.
            pad_first: Whether to fill at the beginning instead of the end.

        Returns:
            The same containers with tensors as long as the longest of all processes.
        """
        if self.place.is_alone:
            return tree
        everybody = self._roll_call("pad_across_processes", _signature(tree, "pad"))
        counts = [len(one) for one in everybody]
        if len(set(counts)) > 1:
            raise CollectiveMismatch(
                f"pad_across_processes got different numbers of tensors by process: {counts}. "
                "Nothing says which belong together. Give as many on every process."
            )
        shapes = list(zip(*([shape for _, shape in one] for one in everybody), strict=True))
        for number, found in enumerate(shapes):
            if len({len(shape) for shape in found}) > 1:
                by_process = ", ".join(f"process {r}: {shape}" for r, shape in enumerate(found))
                raise CollectiveMismatch(
                    f"pad_across_processes got tensors of different numbers of dimensions "
                    f"(tensor {number}; {by_process}). They cannot be made equal in one dimension. "
                    "Give tensors that have as many on every process."
                )
        sizes = iter(shapes)
        return map_leaves(lambda t: _padded(t, next(sizes), dim, pad_index, pad_first), tree)


def _padded(
    tensor: torch.Tensor, shapes: tuple[list[int], ...], dim: int, fill: float, first: bool
) -> torch.Tensor:
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor
    missing = max(shape[dim] for shape in shapes) - tensor.shape[dim]
    if missing == 0:
        return tensor
    widths = [0, 0] * (tensor.dim() - dim % tensor.dim())
    widths[-2 if first else -1] = missing  # `pad` counts dimensions from the last
    return functional.pad(tensor, widths, value=fill)


def _signature(tree: Any, what: str) -> list[Any]:
    found = list(leaves(tree))
    odd = {type(leaf).__name__ for leaf in found if not isinstance(leaf, torch.Tensor)}
    if odd:
        raise TypeError(
            f"{what} takes tensors in lists, tuples and dictionaries: got {', '.join(sorted(odd))} "
            "in it. Other objects have no fixed size to exchange. Use gather_object, or "
            "gather_for_metrics(..., use_gather_object=True)."
        )
    return [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for leaf in found]
