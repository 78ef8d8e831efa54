"""A worker's namespace: names that come from the notebook, and names that go to it."""

from __future__ import annotations

import copyreg
import difflib
import linecache
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbaccel.launch.sharing import home, parcel, shards
from nbaccel.pool.arrivals import Arrivals
from nbaccel.pool.cargo import Cargo, Load
from nbaccel.pool.names import is_users
from nbaccel.pool.travel import Reducer, arriving

__all__ = ["Namespace"]


class Namespace:
    """The names of one worker, and the modules among them that came by an arena.

    Args:
        user_ns: The worker's persistent namespace, which cells run in.
        rank: The worker's rank.
        device: Where tensors go that live on an accelerator at the notebook's.
        num_nodes: Machines that take part.
        share_back: Whether weights go home.
    """

    def __init__(
        self,
        user_ns: dict[str, Any],
        *,
        rank: int,
        device: str,
        num_nodes: int = 1,
        share_back: bool = True,
    ) -> None:
        self._user_ns = user_ns
        self._rank = rank
        self._device = device
        self._arrivals = Arrivals(rank=rank, num_nodes=num_nodes, share_back=share_back)
        self._before: dict[str, int] = {}

    def take(self, cargo: Cargo, fds: Sequence[int], wanted: Sequence[str]) -> None:
        """Bind what came from the notebook, and carry over what changed in its modules.

        Args:
            cargo: What came on the channel.
            fds: The descriptors that came with it; they stay the caller's.
            wanted: The names to bind.
        """
        for (key, nbytes), fd in zip(cargo.arenas, fds, strict=False):
            self._arrivals.open_arena(key, nbytes, fd)
        found = cargo.of(self._rank)
        if found is None:
            return
        part, place = found
        for name, lines in part.sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        with arriving(self._user_ns, self._arrivals.module):
            load: Load = parcel.unpack(
                part.parcel, fds[place], self._arrivals.mappings, device=self._device
            )
        for key, manifest, module in load.modules:
            self._arrivals.add(key, manifest, module)
        for update in load.updates:
            self._arrivals.apply(update)
        self._arrivals.forget(part.forget, part.forget_arenas)
        self._user_ns.update((name, load.names[name]) for name in wanted)

    # ------------------------------------------------------------------- around a cell

    def begin(self) -> None:
        """A cell starts: remember what is bound."""
        self._before = self._snapshot()

    def bound(self) -> tuple[str, ...]:
        """The user's names that were bound, rebound or deleted since `begin`."""
        before, after = self._before, self._snapshot()
        return tuple(n for n in before | after if before.get(n) != after.get(n))

    def _snapshot(self) -> dict[str, int]:
        """Ids, not values: what a cell deletes must not be kept alive for it."""
        return {name: id(value) for name, value in self._user_ns.items() if is_users(name)}

    def dirty(self) -> tuple[str, ...]:
        """Keys of the notebook's modules whose weights may have changed."""
        return self._arrivals.dirty()

    def write_home(self, staging: Mapping[str, int]) -> tuple[home.HomeReport, dict[str, int]]:
        """Write the changed weights into staging files: rank 0 all, others their shards.

        Args:
            staging: Descriptors of the notebook's staging files, by key of the arena.

        Returns:
            What was written, and the files of this rank's own that hold whole arenas, by key.
        """
        return self._arrivals.write_home(staging)

    def settle(self) -> None:
        """The notebook has the weights: share the pages again that are the same everywhere."""
        self._arrivals.settle()

    # ------------------------------------------------------------------- to the notebook

    def pack(self, names: Sequence[str]) -> tuple[parcel.Parcel, int]:
        """Pack the values of these names for the notebook, as a dict.

        Tensors come to the CPU. A sharded tensor comes whole if every rank has all of it; else this
        rank's piece does, and a line on stderr says so. A model in DDP comes without the wrapper,
        which is of no use where there is no process group.

        Returns:
            The parcel and its file's descriptor, which the caller closes.

        Raises:
            NameError: If a name is not bound here.
        """
        missing = [name for name in names if name not in self._user_ns]
        if missing:
            raise NameError(self._not_bound(missing), name=missing[0])
        reducer = _HomeReducer(self._user_ns)
        sender = parcel.Sender.create()
        sender.reduce = reducer
        packed, fd = parcel.pack({name: self._user_ns[name] for name in names}, sender)
        if reducer.pieces:
            sys.stderr.write(
                f"nbaccel: rank {self._rank} has only a piece of {reducer.pieces} sharded "
                f"tensor(s) in {', '.join(names)}, and that is what comes. For all of it, gather "
                "on all ranks in a cell first: accelerator.get_state_dict(m), or full_tensor().\n"
            )
        return packed, fd

    def _not_bound(self, missing: Sequence[str]) -> str:
        lines = []
        for name in missing:
            known = [n for n in self._user_ns if is_users(n)]
            close = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            lines.append(f"name {name!r} is not defined in worker {self._rank}.{hint}")
        return "\n".join(lines)


class _HomeReducer(Reducer):
    """What travels to the notebook must mean something there: no devices, no process groups."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__(namespace)
        self.pieces = 0

    def __call__(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):
            inner = obj.module if isinstance(obj, DistributedDataParallel) else None
            inner = inner or shards.inner_module(obj)
            state = shards.plain_state(obj)
            if inner is not None:
                return _as_it_is, (inner,)
            if state is not None:
                return copyreg.__newobj__, (type(obj),), state  # type: ignore[attr-defined]
        if isinstance(obj, torch.Tensor) and (
            shards.is_sharded(obj) or obj.device.type not in ("cpu", "meta")
        ):
            return _as_it_is, (self._at_hand(obj),)
        return super().__call__(obj)

    def _at_hand(self, tensor: torch.Tensor) -> torch.Tensor:
        values: Any = tensor.detach()
        if shards.is_dtensor(tensor):
            self.pieces += not all(p.is_replicate() for p in values.placements)
            values = values.to_local()
        elif shards.whole_shape(tensor) != tuple(tensor.shape):
            self.pieces += 1
            parts = [part.detach().cpu() for _, part in shards.pieces(tensor)]
            values = torch.cat(parts) if parts else values
        elif shards.is_sharded(tensor):
            values = values.clone()  # of a flat buffer: all of that would come along
        values = values.cpu()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(values, tensor.requires_grad)
        found: torch.Tensor = values.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return found


def _as_it_is(value: Any) -> Any:
    return value
