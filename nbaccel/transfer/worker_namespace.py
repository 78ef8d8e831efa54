"""A worker's namespace: names that come from the notebook, and names that go to it."""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel.base.frames import keep_lines
from nbaccel.config.given_values import closest
from nbaccel.transfer import pickling, sharded_tensors
from nbaccel.transfer.arena import SharedModule
from nbaccel.transfer.free_names import is_users
from nbaccel.transfer.memfd import PackedObject
from nbaccel.transfer.namespace_snapshot import ModuleChange
from nbaccel.transfer.received_modules import ReceivedModules

Load = tuple[dict[str, Any], tuple[tuple[str, SharedModule], ...], tuple[ModuleChange, ...]]
"""The content of a payload: values by name, modules that come whole, each with the key by which
both sides name it from now on, and what has changed in others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceUpdate:
    """What ranks that all lack the same get, with descriptors: the arenas', the payload's."""

    arenas: tuple[tuple[str, int], ...]
    payload: PackedObject
    sources: Mapping[str, list[str]]  # source lines of the cells that the functions in it come from
    forget: tuple[str, ...] = ()  # modules whose original is gone
    forget_arenas: tuple[str, ...] = ()
    reads_arenas: bool = True  # will workers read what was written to arenas they have?


class Namespace:
    """The names of one worker, and the modules among them that came by an arena."""

    def __init__(
        self, user_ns: dict[str, Any], modules: ReceivedModules, rank: int, device: str
    ) -> None:
        self._user_ns = user_ns
        self._rank = rank
        self._device = device
        self.modules = modules
        self._before: dict[str, int] = {}

    def take(self, update: NamespaceUpdate, fds: Sequence[int]) -> None:
        """Bind what came from the notebook, and apply what changed in its modules."""
        *arena_fds, payload_fd = fds
        for (key, num_bytes), fd in zip(update.arenas, arena_fds, strict=True):
            # Before the payload is opened, which refers to these arenas.
            self.modules.open_arena(key, num_bytes, fd)
        keep_lines(update.sources)
        content: Load = pickling.unpack(
            update.payload,
            payload_fd,
            self.modules.mappings,
            device=self._device,
            namespace=self._user_ns,
            find_module=self.modules.module,
        )
        names, modules, changes = content
        for key, shared in modules:
            self.modules.add(key, shared)
        for change in changes:
            self.modules.apply(change)
        self.modules.forget(update.forget, update.forget_arenas)
        self._user_ns.update(names)

    def begin(self) -> None:
        """A cell starts: remember what is bound."""
        self._before = self._snapshot()

    def bound(self) -> tuple[str, ...]:
        """The user's names that were bound, rebound or deleted since `begin`."""
        return tuple(sorted(dict(self._before.items() ^ self._snapshot().items())))

    def _snapshot(self) -> dict[str, int]:
        """Ids, not values: the snapshot must not keep alive what a cell deletes."""
        return {name: id(value) for name, value in self._user_ns.items() if is_users(name)}

    def pack(self, names: Sequence[str]) -> tuple[PackedObject, int]:
        """Pack the values of these names for the notebook, as a dict, with tensors on the CPU."""
        known = [name for name in self._user_ns if is_users(name)]
        missing = [name for name in names if name not in self._user_ns]
        if missing:
            where = f"is not defined in worker {self._rank}"
            lines = [f"name {name!r} {where}.{closest(name, known)}" for name in missing]
            raise NameError("\n".join(lines), name=missing[0])
        sender = _SenderToNotebook(namespace=self._user_ns)
        packed, fd = pickling.pack({name: self._user_ns[name] for name in names}, sender)
        if sender.pieces:
            sys.stderr.write(
                f"nbaccel: rank {self._rank} has only a piece of {sender.pieces} sharded tensor(s) "
                f"in {', '.join(names)}, and that is what comes. For all of it, gather on all "
                "ranks in a cell first: accelerator.get_state_dict(m), or full_tensor().\n"
            )
        return packed, fd


class _SenderToNotebook(pickling.Sender):
    """Replaces what means nothing in the notebook: devices, process groups, wrappers."""

    pieces = 0  # of how many sharded tensors only the part of this rank has been sent

    def reduce(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            inner = value.module if isinstance(value, DistributedDataParallel) else None
            inner = inner or sharded_tensors.module_inside(value)
            if inner is not None:
                return _as_it_is, (inner,)
            for reader in sharded_tensors.shard_readers():
                if (state := reader.plain_state(value)) is not None:
                    return copyreg.__newobj__, (type(value),), state  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor) and (
            sharded_tensors.is_sharded(value) or value.device.type not in ("cpu", "meta")
        ):
            return _as_it_is, (self._at_hand(value),)
        return super().reduce(value)

    def _at_hand(self, tensor: torch.Tensor) -> torch.Tensor:
        values: Any = tensor.detach()
        if sharded_tensors.is_dtensor(tensor):
            self.pieces += not all(placement.is_replicate() for placement in values.placements)
            values = values.to_local()
        elif sharded_tensors.full_shape(tensor) != tuple(tensor.shape):
            self.pieces += 1
            pieces = [piece.detach().cpu() for _, piece in sharded_tensors.pieces(tensor)]
            values = torch.cat(pieces) if pieces else values
        elif sharded_tensors.is_sharded(tensor):
            # A view into a flat buffer: pickling it would send the whole buffer.
            values = values.clone()
        values = values.cpu()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(values, tensor.requires_grad)
        # A leaf keeps its flag, which detach() drops; a result comes without its graph.
        at_hand: torch.Tensor = values.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return at_hand


def _as_it_is(value: Any) -> Any:
    # Pickle can put one object in the place of another only as the result of a call.
    return value
