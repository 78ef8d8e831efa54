"""Collectives over trees of tensors; before each, the processes check that all make the same call.

A collective that only some processes call hangs; one that they call with different shapes returns
garbage (gloo) or kills the process. So before each of nbaccel's own collectives the processes
compare their calls (`call_check`). Where they share memory, tensors of the host go along with the
comparison (`host_tensors`), and nothing is left for the group to do.

Everything works with one process too, where it changes nothing.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from nbaccel.base.errors import CollectiveMismatch, ConfigError
from nbaccel.plan.contracts.place import Place
from nbaccel.train.call_check import DEFAULT_TIMEOUT_S, default_group_check
from nbaccel.train.host_tensors import COPIED_TYPES, NUMBER_TYPES, HostTensors
from nbaccel.train.trees import leaves, map_leaves, map_tensors, slice_rows

__all__ = ["DEFAULT_TIMEOUT_S", "CannotPadNestedTensorWarning", "Collectives"]


# Torch 2.13 has a new name for it and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Gloo does not implement these dtypes. A gather only copies, so their bytes can be sent instead.
_GATHERED_AS_BYTES = frozenset(
    getattr(torch, name)
    for name in ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
)
_DEVICES_OF_GLOO = frozenset({"cpu", "cuda"})
_REDUCTIONS = ("sum", "mean", "max", "none")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left as it is, because nothing says how to pad it."""


class Collectives:
    """What the processes of a run can do together.

    Every method must be called by all processes; each compares the calls first, so that one that
    does not fit the others raises instead of hanging or returning garbage.

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

    def _announce_call(self, what: str, detail: Any = None) -> list[Any]:
        return default_group_check().announce(what, detail, timeout_s=self._timeout_s)

    def _compare_calls(
        self, what: str, detail: Any = None, data: Sequence[memoryview] | None = None
    ) -> list[memoryview] | None:
        return default_group_check().compare(what, detail, data, timeout_s=self._timeout_s)

    def _host_tensors(
        self, what: str, tree: Any, dtypes: frozenset[torch.dtype] = COPIED_TYPES
    ) -> HostTensors:
        exchange = functools.partial(self._compare_calls, what)
        return HostTensors(tree, exchange, default_group_check().data_bytes, dtypes)

    @staticmethod
    def _as_data(item: Any) -> list[memoryview] | None:
        """An object's bytes, if they can go along with a call."""
        data_bytes = default_group_check().data_bytes
        if data_bytes == 0:
            return None
        pickled = pickle.dumps(item)
        return [memoryview(pickled)] if len(pickled) <= data_bytes else None

    def barrier(self, what: str = "wait_for_everyone") -> None:
        """Wait until every process is here."""
        if not self.place.is_alone:
            # Reading every entry of this call means that every process has reached it.
            self._announce_call(what)

    def answers(self, what: str, detail: Any) -> list[Any]:
        """Exchange a small JSON value as a call's detail: no tensor, no device.

        Returns:
            The values of all processes, by rank.
        """
        return [detail] if self.place.is_alone else self._announce_call(what, detail)

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
        signature = _tensor_signature(tree, "gather")
        host_tensors = self._host_tensors("gather", tree)
        if host_tensors.begin(signature):
            return host_tensors.gathered()
        return map_tensors(self._gather_one, tree)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        # The backends refuse tensors that are not contiguous. The result has no gradient, so the
        # copy needs none either.
        local_rows = (tensor[None] if tensor.dim() == 0 else tensor).detach().contiguous()
        local_rows = _where_group_works(local_rows)
        all_rows = local_rows.new_empty(
            (self.place.world_size * local_rows.shape[0], *local_rows.shape[1:])
        )
        if local_rows.dtype in _GATHERED_AS_BYTES:
            _all_gather(all_rows.view(torch.uint8), local_rows.view(torch.uint8))
        else:
            _all_gather(all_rows, local_rows)
        return all_rows.to(tensor.device)

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

    def gather_rows(self, tree: Any, rows: int | None, *, as_objects: bool = False) -> Any:
        """Like :meth:`gather`, or :meth:`gather_object` where there is no tensor, cut to length.

        Args:
            tree: Tensors in containers, or a list of picklable objects.
            rows: How many of the joined rows or objects to keep, from the first; None for all.
            as_objects: Whether to send tensors as objects, so that shapes may differ.

        Returns:
            What the processes gave, joined.
        """
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves(tree))
        if as_objects or not has_tensors:
            objects: Any = self.gather_object(tree)
            # With one process it is what was given, which need not be a list.
            return objects[:rows] if isinstance(objects, Sequence) else objects
        gathered = self.gather(tree)
        return gathered if rows is None else slice_rows(gathered, slice(rows))

    def all_objects(self, item: Any, what: str = "all_objects") -> list[Any]:
        """Every process's picklable object, by rank."""
        if self.place.is_alone:
            return [item]
        data = self._compare_calls(what, None, self._as_data(item))
        if data is not None:
            return [pickle.loads(piece) for piece in data]
        objects_by_rank: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(objects_by_rank, item)
        return objects_by_rank

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
                f"reduce(reduction={reduction!r}) is unknown: the "
                f"processes' values cannot be combined. Give one of {', '.join(_REDUCTIONS)}."
            )
        combined = self._combine(tree, reduction)
        return map_tensors(lambda tensor: self._scale_one(tensor, reduction, scale), combined)

    def _combine(self, tree: Any, reduction: str) -> Any:
        """Sums or maxima over all processes, in new tensors."""
        if not self.place.is_alone:
            signature = _tensor_signature(tree, "reduce")
            dtypes = frozenset() if reduction == "none" else NUMBER_TYPES
            host_tensors = self._host_tensors("reduce", tree, dtypes)
            if host_tensors.begin(signature):
                return host_tensors.combined(self.place.rank, is_maximum=reduction == "max")
        return map_tensors(lambda tensor: self._combine_one(tensor, reduction), tree)

    def _combine_one(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        # `all_reduce` writes into its argument: without the copy the caller's tensor would change.
        combined = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.place.is_alone or reduction == "none":
            return combined
        reduce_op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        combined = _where_group_works(combined)
        dist.all_reduce(combined, reduce_op)
        return combined.to(tensor.device)

    def _scale_one(self, combined: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
        if reduction == "mean":
            combined = combined / self.place.world_size
        return combined if scale == 1.0 else combined * scale

    def broadcast(self, tree: Any, from_process: int = 0) -> Any:
        """Copy one process's tensors into those of all processes, in place.

        Args:
            tree: Tensors of equal shapes on all processes, in containers.
            from_process: Whose values to take.

        Returns:
            The tree that was given.
        """
        if self.place.is_alone:
            return tree
        signature = _tensor_signature(tree, "broadcast")
        is_sender = self.place.rank == from_process
        host_tensors = self._host_tensors("broadcast", tree)
        if host_tensors.begin(signature, is_sent=is_sender):
            received = leaves(host_tensors.received(from_process))
            for tensor, sent in zip(leaves(tree), received, strict=True):
                if not is_sender:
                    # In place as the group does it, also where the tensor requires a gradient.
                    tensor.detach().copy_(sent)
            return tree
        for tensor in leaves(tree):
            sent = _where_group_works(tensor)
            dist.broadcast(sent, from_process)
            if sent is not tensor:
                tensor.copy_(sent)
        return tree

    def broadcast_object(self, item: Any, from_process: int = 0) -> Any:
        """One process's picklable object, on all; what the others give is ignored."""
        return self.broadcast_object_list([item], from_process)[0]

    def broadcast_object_list(self, items: list[Any], from_process: int = 0) -> list[Any]:
        """Copy one process's list of picklable objects into those of all processes, in place.

        Args:
            items: A list, equally long on all processes.
            from_process: Whose objects to take.

        Returns:
            The list that was given.
        """
        if self.place.is_alone:
            return items
        is_sender = self.place.rank == from_process
        own_data = self._as_data(items) if is_sender else []
        data = self._compare_calls("broadcast_object_list", len(items), own_data)
        if data is None:
            dist.broadcast_object_list(items, src=from_process)
        elif not is_sender:
            items[:] = pickle.loads(data[from_process])
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
        if any(map(_is_nested, leaves(tree))):
            return self._pad_around_nested(tree, dim, pad_index, pad_first)
        if self.place.is_alone:
            return tree
        signatures = self._announce_call("pad_across_processes", _tensor_signature(tree, "pad"))
        tensor_counts = [len(signature) for signature in signatures]
        if len(set(tensor_counts)) > 1:
            raise CollectiveMismatch(
                "pad_across_processes got different numbers of tensors by process: "
                f"{tensor_counts}. It is unclear which belong together. Give as many on every "
                "process."
            )
        shapes = list(
            zip(*([shape for _, shape in signature] for signature in signatures), strict=True)
        )
        for tensor_index, shapes_by_rank in enumerate(shapes):
            if len({len(shape) for shape in shapes_by_rank}) > 1:
                by_process = ", ".join(
                    f"process {rank}: {shape}" for rank, shape in enumerate(shapes_by_rank)
                )
                raise CollectiveMismatch(
                    "pad_across_processes got tensors of different numbers of dimensions "
                    f"(tensor {tensor_index}; {by_process}). They cannot be made equal in one "
                    "dimension. Give tensors that have as many on every process."
                )
        # `map_leaves` visits leaves in the order in which `_tensor_signature` listed them.
        shape_iterator = iter(shapes)
        return map_leaves(
            lambda tensor: _pad_tensor(tensor, next(shape_iterator), dim, pad_index, pad_first),
            tree,
        )

    def _pad_around_nested(self, tree: Any, *settings: Any) -> Any:
        warnings.warn(
            "pad_across_processes got a nested tensor: its rows have lengths of their own, so it "
            "stays as it is. Give a padded one (torch.nested.to_padded_tensor) to gather it.",
            CannotPadNestedTensorWarning,
            stacklevel=3,
        )
        tensors = [leaf for leaf in leaves(tree) if not _is_nested(leaf)]
        padded = iter(self.pad_across_processes(tensors, *settings))
        return map_leaves(lambda leaf: leaf if _is_nested(leaf) else next(padded), tree)


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_nested


def _where_group_works(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it in host memory where the group's backend cannot take it.

    gloo takes tensors of CPUs and CUDA GPUs. Given one of torch_xla, it returns at once and changes
    nothing (torch 2.9), so this must not be left to its errors.
    """
    device_type = tensor.device.type
    if device_type in _DEVICES_OF_GLOO:
        return tensor
    backend_parts = str(dist.get_backend_config()).split(",")
    has_own_backend = any(part.partition(":")[0] == device_type for part in backend_parts)
    return tensor if has_own_backend else tensor.cpu()


def _pad_tensor(
    tensor: torch.Tensor,
    shapes_by_rank: tuple[list[int], ...],
    dim: int,
    value: float,
    pad_first: bool,
) -> torch.Tensor:
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor
    rows = max(shape[dim] for shape in shapes_by_rank) - tensor.shape[dim]
    if rows == 0:
        return tensor
    pad_widths = [0, 0] * (tensor.dim() - dim % tensor.dim())
    pad_widths[-2 if pad_first else -1] = rows  # `pad` counts dimensions from the last
    return functional.pad(tensor, pad_widths, value=value)


def _tensor_signature(tree: Any, collective_name: str) -> list[Any]:
    tree_leaves = list(leaves(tree))
    other_types = {
        type(leaf).__name__ for leaf in tree_leaves if not isinstance(leaf, torch.Tensor)
    }
    if other_types:
        raise TypeError(
            f"{collective_name} takes tensors in lists, tuples and dictionaries: got "
            f"{', '.join(sorted(other_types))} in it. Other objects have no fixed size to "
            "exchange. Use gather_object, or gather_for_metrics(..., use_gather_object=True)."
        )
    return [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for leaf in tree_leaves]
