"""Collectives over trees of tensors; before each, the processes check that all make the same call.

A collective that only some processes call hangs; one that they call with different shapes returns
garbage (gloo) or kills the process. So before each of nbaccel's own collectives every process
writes into the rendezvous store what it is about to do, and reads what the others wrote:

    process 0   call 12: gather  float32 (8, 10)  train.py:31
    process 1   call 12: gather  float32 (7, 10)  train.py:31    → all raise, with both shapes
    process 2   call 11: …                  → after a while: who is missing, last seen where

The store is TCP on the host: it synchronises no GPU. Each process has two keys, for even and odd
calls: a process in call `n` has read all of call `n - 1`, so no entry is overwritten unread. And
the keys of a missing process still say where it was last.

Everything works with one process too, where it changes nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from nbaccel import frames, torch_private
from nbaccel.abc.place import Place
from nbaccel.errors import CollectiveMismatch, CollectiveTimeout, ConfigError
from nbaccel.train.trees import leaves, map_leaves, map_tensors, slice_rows
from nbaccel.units import format_seconds

__all__ = ["DEFAULT_TIMEOUT_S", "CollectiveCheck", "Collectives", "default_group_check"]


DEFAULT_TIMEOUT_S = 600.0
_WARN_AFTER_S = 30.0
_MOST_POLL_S = 0.02  # at most, between two reads of the store
# Of the time already waited: a short wait ends with little delay, a long one uses little CPU.
_POLL_SHARE = 0.1

# Weak keys: a check ends with its group, and a new group at the same address gets a new one.
_CHECKS_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveCheck] = (
    weakref.WeakKeyDictionary()
)


def default_group_check() -> CollectiveCheck:
    """The check of the default process group; the first use is itself a collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()  # a live worker joins the group here
    process_group: Any = dist.group.WORLD
    if process_group not in _CHECKS_BY_GROUP:
        _CHECKS_BY_GROUP[process_group] = CollectiveCheck(rank, world_size)
    return _CHECKS_BY_GROUP[process_group]


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnnouncedCall:
    """The entry of one process in the store."""

    call_number: int
    collective_name: str
    detail: Any
    file_name: str
    line_number: int
    function_name: str

    def describe(self) -> str:
        if self.call_number < 0:
            return "not seen in any collective of nbaccel yet"
        source_frame = frames.Frame(
            file=self.file_name, line=self.line_number, function=self.function_name
        )
        code_line = frames.source_line(source_frame)
        return f"{self.collective_name}, {frames.place(source_frame)}" + (
            f": {code_line}" if code_line else ""
        )


class CollectiveCheck:
    """Compares the calls of the processes of one group.

    Made by :func:`default_group_check`, together with the other processes.

    Args:
        rank: This process's number.
        world_size: How many there are.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._call_number = 0
        # A store outlives a process group; a second group on it must not find the first one's keys.
        shared_token = [secrets.token_hex(4)]
        dist.broadcast_object_list(shared_token, src=0)
        default_store = torch_private.default_store()  # the store the group itself uses
        self._call_store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"nbaccel/{shared_token[0]}", default_store
        )
        # `multi_get` blocks until all its keys exist. With these entries it returns even if a
        # process never reaches a collective, so that process can be named.
        for parity in (0, 1):
            self._call_store.set(f"{parity}/{rank}", json.dumps([-1, "", None, "", 0, ""]))

    def announce(
        self,
        what: str,
        detail: Any = None,
        *,
        same: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Any]:
        """Announce this process's call, and read what the others announced.

        Args:
            what: Name of the collective.
            detail: Further information for the others; JSON.
            same: Whether all details must be equal.
            timeout_s: How long to wait for a process before giving up, in seconds.

        Returns:
            The details of all processes, by rank.

        Raises:
            CollectiveMismatch: Others do something else, or (`same`) with another detail.
            CollectiveTimeout: A process did not call in time, or has ended.
        """
        call_number, self._call_number = self._call_number, self._call_number + 1
        own_entry = json.dumps([call_number, what, detail, *_user_frame()])
        try:
            self._call_store.set(f"{call_number % 2}/{self._rank}", own_entry)
            all_entries = self._await_others(call_number, own_entry, timeout_s)
        except dist.DistNetworkError as error:
            raise CollectiveTimeout(
                f"Process {self._rank} is in {_parse_call(own_entry).describe()}, but process 0 "
                "has left: its function returned or it died, and with it the store through which "
                "processes meet. Every process must call every collective equally often; look "
                "for an `if` or a `break` around this line that process 0 does not take."
            ) from error
        # After all have come: a mismatch is raised on every process, so none is left waiting.
        self._check_agreement(all_entries, same)
        return [entry.detail for entry in all_entries]

    def _await_others(
        self, call_number: int, own_entry: str, timeout_s: float
    ) -> list[_AnnouncedCall]:
        start_time = time.monotonic()
        # A timeout below a minute still gets its warning before the error.
        worry_s = min(_WARN_AFTER_S, timeout_s / 2)
        while True:
            all_entries = self._read_calls(call_number % 2)
            if all(entry.call_number == call_number for entry in all_entries):
                return all_entries
            waited_s = time.monotonic() - start_time
            if waited_s >= timeout_s:
                raise CollectiveTimeout(self._describe_missing(all_entries, own_entry, waited_s))
            if waited_s >= worry_s:
                worry_s = math.inf
                sys.stderr.write(
                    f"nbaccel: {self._describe_missing(all_entries, own_entry, waited_s)}\n"
                )
            time.sleep(min(_MOST_POLL_S, waited_s * _POLL_SHARE))

    def _read_calls(self, parity: int) -> list[_AnnouncedCall]:
        store_keys = [f"{parity}/{rank}" for rank in range(self._world_size)]
        return [_parse_call(entry_json) for entry_json in self._call_store.multi_get(store_keys)]

    def _describe_missing(
        self, all_entries: list[_AnnouncedCall], own_json: str, waited_s: float
    ) -> str:
        own_entry = _parse_call(own_json)
        # A late process wrote its last entry under the key of the other parity, or is calls behind.
        previous_entries = self._read_calls(1 - own_entry.call_number % 2)
        missing_ranks = [
            rank
            for rank, entry in enumerate(all_entries)
            if entry.call_number != own_entry.call_number
        ]
        message_lines = [
            f"process {self._rank} has waited {format_seconds(waited_s)} in "
            f"{own_entry.describe()}.",
            f"{len(missing_ranks)} of {self._world_size} processes did not come:",
        ]
        for rank in missing_ranks:
            last_entry = max(
                (all_entries[rank], previous_entries[rank]), key=lambda entry: entry.call_number
            )
            seen_prefix = "last seen in " if last_entry.call_number >= 0 else ""
            message_lines.append(f"  process {rank}: {seen_prefix}{last_entry.describe()}")
        message_lines.append(
            "A collective must be called by all processes, equally often. Look for an `if` or a "
            "`break` that only some of them take, or a process that is merely slow (then give "
            "InitProcessGroupKwargs(timeout=...))."
        )
        return "\n".join(message_lines)

    def _check_agreement(self, all_entries: list[_AnnouncedCall], must_be_same: bool) -> None:
        collective_names = {entry.collective_name for entry in all_entries}
        if len(collective_names) > 1:
            raise CollectiveMismatch(
                "The processes call different collectives at the same time:\n"
                + "\n".join(
                    f"  process {rank}: {entry.describe()}"
                    for rank, entry in enumerate(all_entries)
                )
                + "\nThey would wait for each other for ever. Let all of them run the same calls."
            )
        if must_be_same and any(entry.detail != all_entries[0].detail for entry in all_entries):
            raise CollectiveMismatch(
                f"{all_entries[0].collective_name} got other data on some processes:\n"
                + "\n".join(
                    f"  process {rank}: {_describe_detail(entry.detail)} ({entry.describe()})"
                    for rank, entry in enumerate(all_entries)
                )
                + "\nThe result would be garbage. Make them equal first: "
                "accelerator.pad_across_processes(tensor, dim=0), or gather_object for what has "
                "no fixed size."
            )


def _parse_call(entry_json: bytes | str) -> _AnnouncedCall:
    call_number, collective_name, detail, file_name, line_number, function_name = json.loads(
        entry_json
    )
    return _AnnouncedCall(
        call_number=call_number,
        collective_name=collective_name,
        detail=detail,
        file_name=file_name,
        line_number=line_number,
        function_name=function_name,
    )


def _describe_detail(entry_detail: Any) -> str:
    if isinstance(entry_detail, list) and entry_detail and isinstance(entry_detail[0], list):
        return ", ".join(f"{dtype} {tuple(shape)}" for dtype, shape in entry_detail)
    return str(entry_detail)


def _user_frame() -> tuple[str, int, str]:
    """File, line and function of the innermost code that is not in a library."""
    python_frame = sys._getframe(1)  # noqa: SLF001 - the only way to the frames above
    # The outermost frame is not tested: it is the answer where all code is in libraries.
    while python_frame.f_back is not None:
        source_frame = frames.Frame(
            file=python_frame.f_code.co_filename,
            line=python_frame.f_lineno,
            function=python_frame.f_code.co_name,
        )
        if not source_frame.is_library:
            return source_frame.file, source_frame.line, source_frame.function
        python_frame = python_frame.f_back
    return python_frame.f_code.co_filename, python_frame.f_lineno, python_frame.f_code.co_name


# Torch 2.13 has a new name for it and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Gloo does not implement these dtypes. A gather only copies, so their bytes can be sent instead.
_GATHERED_AS_BYTES = frozenset(
    getattr(torch, name)
    for name in ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
)
_DEVICES_OF_GLOO = frozenset({"cpu", "cuda"})
_REDUCTIONS = ("sum", "mean", "max", "none")


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

    def _announce_call(self, what: str, detail: Any = None, *, same: bool = False) -> list[Any]:
        return default_group_check().announce(what, detail, same=same, timeout_s=self._timeout_s)

    def barrier(self, what: str = "wait_for_everyone") -> None:
        """Wait until every process is here."""
        if not self.place.is_alone:
            # Reading every entry of this call means that every process has reached it.
            self._announce_call(what)

    def answers(self, what: str, detail: Any) -> list[Any]:
        """Exchange a small JSON value through the store: no tensor, no device.

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
        self._announce_call("gather", _tensor_signature(tree, "gather"), same=True)
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
        self._announce_call(what)
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
        if not self.place.is_alone:
            self._announce_call("reduce", _tensor_signature(tree, "reduce"), same=True)
        return map_tensors(lambda tensor: self._reduce_one(tensor, reduction, scale), tree)

    def _reduce_one(self, tensor: torch.Tensor, reduction: str, scale: float) -> torch.Tensor:
        # `all_reduce` writes into its argument: without the copy the caller's tensor would change.
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self.place.is_alone and reduction != "none":
            reduce_op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            reduced = _where_group_works(reduced)
            dist.all_reduce(reduced, reduce_op)
            reduced = reduced.to(tensor.device)
        if reduction == "mean":
            reduced = reduced / self.place.world_size
        return reduced if scale == 1.0 else reduced * scale

    def broadcast(self, tree: Any, from_process: int = 0) -> Any:
        """Copy one process's tensors into those of all processes, in place.

        Args:
            tree: Tensors of equal shapes on all processes, in containers.
            from_process: Whose values to take.

        Returns:
            The tree that was given.
        """
        if not self.place.is_alone:
            self._announce_call("broadcast", _tensor_signature(tree, "broadcast"), same=True)
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
        if not self.place.is_alone:
            self._announce_call("broadcast_object_list", len(items), same=True)
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
    pad_value: float,
    pad_first: bool,
) -> torch.Tensor:
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor
    missing_rows = max(shape[dim] for shape in shapes_by_rank) - tensor.shape[dim]
    if missing_rows == 0:
        return tensor
    pad_widths = [0, 0] * (tensor.dim() - dim % tensor.dim())
    pad_widths[-2 if pad_first else -1] = missing_rows  # `pad` counts dimensions from the last
    return functional.pad(tensor, pad_widths, value=pad_value)


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
