"""Checkpoints of hosts without a shared disk: who sees which folder, and what it is good for.

    shared disk                       disks of their own
    -----------                       ------------------
    ckpt   all ranks write into it    alpha: ckpt   the files of ranks 0 and 1
                                      beta:  ckpt   the files of ranks 2 and 3

What is whole (weights in one file, schedulers) is written into each folder. Shards are not sent to
other hosts: they are the part that is too large for one. Such a folder is a part of a checkpoint,
which its manifest says, and which fits only the ranks that wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import write_notice
from nbaccel.base.units import number_ranges
from nbaccel.plan.contracts.training import Place, ShardedCheckpoints
from nbaccel.train.checkpoint import layout
from nbaccel.train.collectives import Collectives
from nbaccel.train.trees import leaves, map_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderDisks:
    """Which processes see the same folder of a checkpoint.

    Attributes:
        rank: This process.
        makers: By rank, the process that made the folder which that rank sees.
        host_names: By rank.
    """

    rank: int
    makers: tuple[int, ...]
    host_names: tuple[str, ...]

    @classmethod
    def find(cls, place: Place, collectives: Collectives, *, made_folder: bool) -> FolderDisks:
        """Find out; a collective."""
        if place.world_size == place.local_world_size:
            names = (socket.gethostname(),) * place.world_size
            return cls(rank=place.rank, makers=(0,) * place.world_size, host_names=names)
        main = place.rank - place.local_rank
        answers = collectives.answers(
            "save_state: disks", [made_folder, main, socket.gethostname()]
        )
        has_made = [answer[0] for answer in answers]
        return cls(
            rank=place.rank,
            # A node without a folder of its own sees that of process 0.
            makers=tuple(node if has_made[node] else 0 for _, node, _ in answers),
            host_names=tuple(host_name for _, _, host_name in answers),
        )

    @property
    def made_folder(self) -> bool:
        """Whether this process has made the folder that it sees."""
        return self.makers[self.rank] == self.rank

    @property
    def is_shared(self) -> bool:
        """Whether all processes see one folder."""
        return not any(self.makers)

    @property
    def ranks_by_folder(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that write into one folder, for each; empty where there is one folder."""
        if self.is_shared:
            return ()
        return tuple(
            tuple(rank for rank, own_maker in enumerate(self.makers) if own_maker == maker)
            for maker in sorted(set(self.makers))
        )

    @property
    def part_entry(self) -> dict[str, Any]:
        """What the manifest of one host's part says of it: who has written it, and all hosts."""
        own_maker = self.makers[self.rank]
        ranks_here = [rank for rank, maker in enumerate(self.makers) if maker == own_maker]
        return {"ranks": ranks_here, "hosts": list(self.host_names)}

    def tell(self, folder: Path, sharder: ShardedCheckpoints | None) -> None:
        """Let process 0 say, once for a folder, that disks are not shared and what follows."""
        if self.rank or self.is_shared or (sharder is not None and sharder.keeps_own_disks):
            return
        hosts = {name for name, maker in zip(self.host_names, self.makers, strict=True) if maker}
        _tell_of_own_disks(
            str(folder.parent),
            tuple(sorted(hosts)),
            self.host_names[0],
            len(self.makers),
            "" if sharder is None else sharder.shard_kind,
        )


_WHOLE_TEXT = "Start them on the same hosts to go on from it, or give a folder that all hosts see."
_SHARDS_TEXT = (
    "Weights and optimizer are in shards, so what a host has is only a part: training can go on "
    "from it with {num_processes} processes on the same hosts in the same order. With another "
    "number, or without one of these hosts, it cannot be loaded. {remedy}"
)
_SHARD_REMEDIES = {
    "fsdp": (
        "Give a folder that all hosts see, or "
        "FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT'), which writes a whole "
        "checkpoint on each host."
    ),
    "deepspeed": (
        "Give a folder that all hosts see, or keep whole weights beside it "
        "(accelerator.save_model). If this is what you want, say so in DeepSpeed's configuration: "
        '"checkpoint": {"use_node_local_storage": true}.'
    ),
}


@functools.cache
def _tell_of_own_disks(
    parent_folder: str, hosts: tuple[str, ...], first_host: str, num_processes: int, shard_kind: str
) -> None:
    """Say once what a user has to know of checkpoints on several disks."""
    does = "does" if len(hosts) == 1 else "do"
    text = _SHARD_REMEDIES.get(shard_kind, "")
    write_notice(
        f"nbaccel: {', '.join(hosts)} {does} not share {Path(parent_folder).resolve()} with the "
        f"first host, {first_host}: each host keeps a checkpoint that is complete for its own "
        "processes. "
        + (
            _SHARDS_TEXT.format(num_processes=num_processes, remedy=text)
            if shard_kind
            else _WHOLE_TEXT
        )
        + "\n"
    )


# ------------------------------------------------------------------------- what is whole


def send_to_writers(
    state: Any, writers: Sequence[int], collectives: Collectives, *, what: str
) -> Any:
    """Let all processes that write a state have it, where only process 0 has it; a collective."""
    rank = collectives.place.rank
    lacks_state = rank in writers and not state
    if len(writers) < 2 or not any(collectives.answers(what, lacks_state)):
        return state
    with _group_of(writers) as group:
        if rank not in writers:
            return state
        outlines = [_map_each_once(lambda tensor: tensor.detach().to("meta"), state)]
        dist.broadcast_object_list(outlines, src=0, group=group)
        # On the CPU, where a gathered state lies.
        received = state if rank == 0 else _map_each_once(_empty_for, outlines[0])
        sent_tensors = {id(leaf): leaf for leaf in leaves(received) if torch.is_tensor(leaf)}
        for tensor in sent_tensors.values():
            # As bytes, because gloo does not know every format.
            flat_tensor = tensor.detach().cpu().contiguous().reshape(-1)
            if flat_tensor.numel():
                dist.broadcast(flat_tensor.view(torch.uint8), src=0, group=group)
    return received


def _map_each_once(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Apply a function to every tensor; tied ones stay one, so that a file has them once."""
    mapped_by_id: dict[int, torch.Tensor] = {}

    def map_one(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in mapped_by_id:
            mapped_by_id[id(tensor)] = fn(tensor)
        return mapped_by_id[id(tensor)]

    return map_tensors(map_one, tree)


def _empty_for(outline: torch.Tensor) -> torch.Tensor:
    return torch.empty(outline.shape, dtype=outline.dtype)


@contextlib.contextmanager
def _group_of(ranks: Sequence[int]) -> Iterator[Any]:
    """A group of these ranks for CPU tensors; all processes enter and leave."""
    group = dist.new_group(list(ranks), backend="gloo")
    try:
        yield group
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


# ------------------------------------------------------------------------- one host's part


def ranks_of_part(folder: Path) -> tuple[int, ...]:
    """The ranks whose shards a checkpoint has, if it is one host's part; empty otherwise."""
    return tuple(_part_entry(folder).get("ranks", ()))


def check_is_own_part(folder: Path, place: Place) -> None:
    """Refuse a part of a checkpoint that other ranks than this process's have written."""
    entry = _part_entry(folder)
    ranks = entry.get("ranks", ())
    host_names = entry.get("hosts", ())
    if not ranks or (place.rank in ranks and place.world_size == len(host_names)):
        return
    hosts = list(dict.fromkeys(host_names))
    counts = ", ".join(f"{host_names.count(host)} on {host}" for host in hosts)
    other_hosts = [host for host in hosts if host != host_names[ranks[0]]]
    raise ConfigError(
        f"The checkpoint {str(folder)!r} has only the shards of rank {number_ranges(ranks)} of "
        f"{len(host_names)}, and this is rank {place.rank} of {place.world_size} on "
        f"{socket.gethostname()}: it was saved without a shared disk, and the other shards were "
        f"written on {', '.join(other_hosts)}. Nothing has been loaded. Start {len(host_names)} "
        f"processes as then ({counts}, in this order), or load a checkpoint that was saved in a "
        "folder that all hosts see, or whole."
    )


def _part_entry(folder: Path) -> dict[str, Any]:
    try:
        entry = json.loads((folder / layout.MANIFEST_FILE).read_text(encoding="utf-8"))["part"]
        return {"ranks": [int(rank) for rank in entry["ranks"]], "hosts": list(entry["hosts"])}
    # Without a manifest or its entry it is no part; a damaged one is reported by its reader.
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
