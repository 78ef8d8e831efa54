"""Collectives over trees of tensors; processes check that all make the same call (`call_check`).

A collective that only some processes call hangs; one that they call with different shapes returns
garbage (gloo) or kills the process. With one process nothing is changed.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from nbaccel.base.errors import CollectiveMismatch, ConfigError
from nbaccel.base.trees import leaves, map_leaves, map_tensors, slice_rows, tensor_digest
from nbaccel.base.units import first_few
from nbaccel.plan.contracts.training import Place
from nbaccel.train.call_check import DEFAULT_TIMEOUT_S, default_group_check

# Torch 2.13 has a new name for it and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Gloo does not implement these dtypes. What only copies can send their bytes instead.
_COPIED_AS_BYTES = frozenset(
    getattr(torch, name)
    for name in ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
)
_REDUCTIONS = ("sum", "mean", "max", "none")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left as it is, because nothing says how to pad it."""


class Collectives:
    """What the processes of a run can do together; each method is called by all of them."""

    def __init__(self, place: Place, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.place = place
        self._timeout_s = timeout_s

    def _compare_calls(self, what: str, detail: Hashable = None) -> None:
        default_group_check().compare(what, detail, self._timeout_s)

    def barrier(self, what: str = "wait_for_everyone") -> None:
        """Wait until every process is here."""
        if self.place.is_alone:
            return
        if "cpu:" in str(dist.get_backend_config()):
            self._compare_calls(what)
            dist.barrier()
        else:
            # A barrier of the device waits until it has done all that it was given.
            self.answers(what, None)

    def answers(self, what: str, detail: Any) -> list[Any]:
        """Exchange a small JSON value as a call's detail: no tensor, no device."""
        if self.place.is_alone:
            return [detail]
        return default_group_check().announce(what, detail, timeout_s=self._timeout_s)

    def gather(self, tree: Any) -> Any:
        """Join every process's tensors along their first dimension, in order of rank."""
        if self.place.is_alone:
            return tree
        self._compare_calls("gather", _tensor_signature(tree, "gather"))
        return map_tensors(self._gather_one, tree)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        # The result has no gradient, so a copy needs none either.
        rows = tensor if tensor.dim() else tensor[None]
        # Detached only if needed: gloo's thread may free the new object, waiting for Python's lock.
        local_rows = _as_sent(rows.detach() if rows.requires_grad else rows)
        num_rows = self.place.world_size * local_rows.shape[0]
        all_rows = local_rows.new_empty((num_rows, *local_rows.shape[1:]))
        _all_gather(_copyable(all_rows), _copyable(local_rows))
        return all_rows.to(tensor.device)

    def gather_object(self, items: Any) -> list[Any]:
        """Join every process's list of picklable objects, in order of rank."""
        if self.place.is_alone:
            return items  # type: ignore[no-any-return]
        return list(itertools.chain.from_iterable(self.all_objects(items, "gather_object")))

    def gather_rows(self, tree: Any, rows: int | None, *, as_objects: bool = False) -> Any:
        """Like :meth:`gather`, or :meth:`gather_object` where there is no tensor, cut to length."""
        if as_objects or not any(isinstance(leaf, torch.Tensor) for leaf in leaves(tree)):
            objects: Any = self.gather_object(tree)
            # With one process it is what was given, which need not be a list.
            return objects[:rows] if isinstance(objects, Sequence) else objects
        gathered = self.gather(tree)
        return gathered if rows is None else slice_rows(gathered, slice(rows))

    def all_objects(self, item: Any, what: str = "all_objects") -> list[Any]:
        """Every process's picklable object, by rank."""
        if self.place.is_alone:
            return [item]
        self._compare_calls(what)
        objects_by_rank: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(objects_by_rank, item)
        return objects_by_rank

    def reduce(self, tree: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """Combine every process's tensors element by element."""
        if reduction not in _REDUCTIONS:
            raise ConfigError(
                f"reduce(reduction={reduction!r}) is unknown: the "
                f"processes' values cannot be combined. Give one of {', '.join(_REDUCTIONS)}."
            )
        if not self.place.is_alone:
            self._compare_calls("reduce", _tensor_signature(tree, "reduce"))
        return map_tensors(lambda tensor: self._reduce_one(tensor, reduction, scale), tree)

    def _reduce_one(self, tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
        # `all_reduce` writes into its argument: without the copy the caller's tensor would change.
        combined = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self.place.is_alone and reduction != "none":
            reduce_op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            sent = _as_sent(combined)
            dist.all_reduce(sent, reduce_op)
            combined = sent.to(tensor.device)
        if reduction == "mean":
            combined = combined / self.place.world_size
        return combined if scale == 1.0 else combined * scale

    def broadcast(self, tree: Any, from_process: int = 0) -> Any:
        """Copy one process's tensors into those of all processes, in place."""
        if self.place.is_alone:
            return tree
        self._compare_calls("broadcast", _tensor_signature(tree, "broadcast"))
        for tensor in leaves(tree):
            target = tensor.detach() if tensor.requires_grad else tensor
            sent = _as_sent(target)
            dist.broadcast(_copyable(sent), from_process)
            if sent is not target:
                target.copy_(sent)
        return tree

    def broadcast_object(self, item: Any, from_process: int = 0) -> Any:
        """One process's picklable object, on all; what the others give is ignored."""
        return self.broadcast_object_list([item], from_process)[0]

    def broadcast_object_list(self, items: list[Any], from_process: int = 0) -> list[Any]:
        """Copy one process's list of picklable objects into those of all processes, in place."""
        if self.place.is_alone:
            return items
        self._compare_calls("broadcast_object_list", len(items))
        dist.broadcast_object_list(items, src=from_process)
        return items

    def pad_across_processes(
        self, tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Make all processes' tensors equally long in one dimension, so that they can be joined."""
        if any(map(_is_nested, leaves(tree))):
            warnings.warn(
                "pad_across_processes got a nested tensor: its rows have lengths of their own, so "
                "it stays as it is. Give a padded one: torch.nested.to_padded_tensor.",
                CannotPadNestedTensorWarning,
                stacklevel=2,
            )
            others = [leaf for leaf in leaves(tree) if not _is_nested(leaf)]
            padded = iter(self.pad_across_processes(others, dim, pad_index, pad_first))
            return map_leaves(lambda leaf: leaf if _is_nested(leaf) else next(padded), tree)
        if self.place.is_alone:
            return tree
        signatures = self.answers("pad_across_processes", _tensor_signature(tree, "pad"))
        shapes_by_rank = [[shape for _, shape in signature] for signature in signatures]
        if len({tuple(map(len, shapes)) for shapes in shapes_by_rank}) > 1:
            found = ", ".join(f"process {rank}: {it}" for rank, it in enumerate(shapes_by_rank))
            raise CollectiveMismatch(
                "pad_across_processes got different numbers of tensors, or of their dimensions "
                f"({found}): it is unclear which belong together. Give as many tensors with as "
                "many dimensions on every process."
            )
        # `map_leaves` visits leaves in the order in which `_tensor_signature` listed them.
        shapes_by_leaf = zip(*shapes_by_rank, strict=True)

        def pad(tensor: torch.Tensor) -> torch.Tensor:
            shapes = next(shapes_by_leaf)
            if not -tensor.dim() <= dim < tensor.dim():
                return tensor
            rows = max(shape[dim] for shape in shapes) - tensor.shape[dim]
            if rows == 0:
                return tensor
            pad_widths = [0, 0] * (tensor.dim() - dim % tensor.dim())
            pad_widths[-2 if pad_first else -1] = rows  # torch counts them from the last
            return functional.pad(tensor, pad_widths, value=pad_index)

        return map_leaves(pad, tree)


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_nested


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the group's backend takes it, or a copy: contiguous, maybe in host memory."""
    # gloo takes tensors of CPUs and CUDA GPUs. Given one of torch_xla, it returns at once and
    # changes nothing (torch 2.9), so this must not be left to its errors.
    if tensor.is_conj() or tensor.is_neg():  # a view that has the bytes of what it is a view of
        tensor = tensor.resolve_conj().resolve_neg()
    plain = tensor.contiguous()
    if plain.is_cpu or plain.is_cuda:
        return plain
    device_type = plain.device.type
    backend_parts = str(dist.get_backend_config()).split(",")
    has_own_backend = any(part.partition(":")[0] == device_type for part in backend_parts)
    return plain if has_own_backend else plain.cpu()


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _COPIED_AS_BYTES else tensor


def _tensor_signature(tree: Any, collective_name: str) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    if isinstance(tree, torch.Tensor):
        return ((tree.dtype, tree.shape),)
    tree_leaves = leaves(tree)
    others = (leaf for leaf in tree_leaves if not isinstance(leaf, torch.Tensor))
    other_types = {type(leaf).__name__ for leaf in others}
    if other_types:
        raise TypeError(
            f"{collective_name} takes tensors in lists, tuples and dictionaries: got "
            f"{', '.join(sorted(other_types))} in it. Other objects have no fixed size to "
            "exchange. Use gather_object, or gather_for_metrics(..., use_gather_object=True)."
        )
    return tuple((leaf.dtype, leaf.shape) for leaf in tree_leaves)


_MOST_DIFFERENCES = 10


def find_differences(facts: Mapping[str, Any], collectives: Collectives) -> list[str]:
    """Compare facts over the processes; a collective."""
    facts_by_rank = collectives.answers("check_in_sync", dict(facts))
    message_lines = []
    # A process may lack names that another one has.
    for fact_name in dict.fromkeys(name for rank_facts in facts_by_rank for name in rank_facts):
        values = [rank_facts.get(fact_name, "missing") for rank_facts in facts_by_rank]
        others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if others:
            # Digests of parameters would tell a reader nothing.
            is_printable = all(isinstance(value, (str, float)) for value in values)
            shown_values = f": {', '.join(map(str, values))} by process" if is_printable else ""
            message_lines.append(
                f"{fact_name} differs from process 0's on process {', '.join(others)}{shown_values}"
            )
    return message_lines


def check_in_sync(
    models: Iterable[nn.Module],
    optimizers: Iterable[Any],
    loaders: Iterable[Any],
    collectives: Collectives,
) -> bool:
    """Compare what the processes train, and warn on process 0 where they differ; a collective."""
    facts: dict[str, Any] = {
        f"model {index}: {name}": [tensor_digest(parameter)]
        for index, model in enumerate(models)
        for name, parameter in model.named_parameters()
        # No two processes share the shards of one.
        if not hasattr(parameter, "placements")
    }
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            facts[f"learning rate of optimizer {index}, group {group_index}"] = float(group["lr"])
    for index, loader in enumerate(loaders):
        batches = f"{loader.batches_seen} (epoch {loader.iteration})"
        facts[f"batches used of loader {index}"] = batches
    differences = find_differences(facts, collectives)
    if differences and collectives.place.is_main:
        listed = first_few(differences, _MOST_DIFFERENCES, separator="\n  ")
        warnings.warn(
            f"The processes have drifted apart:\n  {listed}\nThey train different models from here "
            "on. Look for code that changes weights on one process only, different seeds before "
            "the model was built, or a `break` that only some take.",
            stacklevel=3,  # past Accelerator.check_in_sync
        )
    return not differences
