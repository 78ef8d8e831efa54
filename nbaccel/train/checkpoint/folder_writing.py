"""A checkpoint appears whole or not at all, whenever the processes die and whichever fails.

`nbaccel_manifest.json` has sizes and checksums of its files. A checkpoint without it (Accelerate's,
an older one) can be read, too: only the checksums of the files' own formats are checked then.

    process 0                       the others
    ---------                       ----------
    clears leftovers away
    makes .ckpt.partial-3f9a   ──►  learn the name
    writes its files                write their files
    waits for the disk              wait for the disk
        ◄── all processes say: written, or what went wrong ──►
    notes sizes and checksums
    ckpt → .ckpt.old  (if there)
    .ckpt.partial-3f9a → ckpt
    .ckpt.old → gone                continue when process 0 is done

Between the two renames there is no ``ckpt``, but ``.ckpt.old`` is whole: :func:`find_checkpoint`
finds it, and the next save puts it back. A user's own files in ``ckpt`` move over into the new one.

Where nodes do not share a file system, process 0 of each node does on its disk what process 0
does, and writes there all that its node needs. Shards are not sent to other nodes: such a folder is
a part of a checkpoint, which its manifest says, and which fits only the ranks that wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbaccel.base import errors
from nbaccel.base.atomic import clear_leftovers, hold_claim, keep_access, sync_path, sync_tree
from nbaccel.base.log import write_notice
from nbaccel.base.trees import leaves, map_tensors
from nbaccel.base.units import format_bytes, number_ranges
from nbaccel.base.weight_files import Recorded, digest, is_archive
from nbaccel.plan.contracts.training import Place, ShardedCheckpoints
from nbaccel.train.checkpoint import files
from nbaccel.train.collectives import Collectives


def write_manifest(folder: Path, part_entry: Mapping[str, Any] | None = None) -> None:
    """Note every file of a checkpoint; all processes have written theirs."""
    own_paths = [path for path in folder.iterdir() if files.is_checkpoint_part(path.name)]
    inner_paths = [path for own_path in own_paths for path in own_path.rglob("*")]
    paths = sorted(path for path in (*own_paths, *inner_paths) if path.is_file())
    entries: dict[str, dict[str, int | str]] = {}
    for path in paths:
        entry = entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size}
        # Archives have a CRC per record, so a hash would read all weights once more for nothing.
        if path.suffix != ".distcp" and not is_archive(path):
            entry["xxh3"] = digest(path)
    manifest_path = folder / files.MANIFEST_FILE
    manifest: dict[str, Any] = {"version": 1, "files": entries}
    if part_entry is not None:
        manifest["part"] = dict(part_entry)
    manifest_path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync_path(manifest_path)
    # The names of files are in the folder's own record, which syncing a file does not write.
    sync_path(folder)


def read_manifest(folder: Path) -> Mapping[str, Recorded]:
    """Read what :func:`write_manifest` wrote."""
    manifest_path = folder / files.MANIFEST_FILE
    if not manifest_path.exists():
        return {}
    return files.read_noted(
        manifest_path,
        lambda content: {
            str(file_name): Recorded(
                num_bytes=int(file_entry["bytes"]), xxh3=str(file_entry.get("xxh3", ""))
            )
            for file_name, file_entry in content["files"].items()
        },
        "the sizes and checksums of the checkpoint's other files. Load another checkpoint, or "
        "delete this file to load without them.",
    )


@contextlib.contextmanager
def new_checkpoint(
    target: Path,
    place: Place,
    collectives: Collectives,
    *,
    series: bool = False,
    sharder: ShardedCheckpoints | None = None,
) -> Iterator[tuple[Path, Path, FolderDisks]]:
    """Build a folder together; it gets its name only if every process has succeeded."""
    # Process 0's name and token hold for all: a number or time in a name may differ elsewhere.
    proposal = (str(target.expanduser()), secrets.token_hex(4))
    agreed_name, token = collectives.broadcast_object(proposal)
    target = Path(agreed_name)
    if target.is_symlink() or target.name in {"", ".."}:
        target = target.resolve()  # what the link leads to is replaced, not the link
    partial_folder = target.with_name(f".{target.name}.partial-{token}")
    text = f"save_state({str(target)!r})"
    with contextlib.ExitStack() as claims:
        # Made once per file system.
        made_folder = place.is_main
        with all_succeed(collectives, text):
            if made_folder:
                _prepare_target(target, partial_folder, series, claims)
        if place.world_size > place.local_world_size:
            with all_succeed(collectives, text):
                # A node that does not see process 0's folder has a file system of its own.
                if place.is_local_main and not partial_folder.exists():
                    made_folder = True
                    _prepare_target(target, partial_folder, series, claims)
        try:
            disks = FolderDisks.find(place, collectives, made_folder=made_folder)
            disks.tell(target, sharder)
            with all_succeed(collectives, text, written_to=target.parent):
                yield partial_folder, target, disks
                # Before the exchange, in which each process says that its files are on the disk.
                sync_tree(partial_folder)
            is_part = sharder is not None and not disks.is_shared
            with all_succeed(collectives, text, written_to=target.parent):
                if made_folder:
                    write_manifest(partial_folder, disks.part_entry if is_part else None)
        except BaseException:  # an interrupt must leave nothing behind either
            if made_folder:
                shutil.rmtree(partial_folder, ignore_errors=True)
            raise
        with all_succeed(collectives, text):
            if made_folder:
                _rename_into_place(partial_folder, target)


def _waiting_name(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")


def _prepare_target(
    target: Path, partial_folder: Path, series: bool, claims: contextlib.ExitStack
) -> None:
    text = f"save_state({str(target)!r})"
    if target.exists() and not target.is_dir():
        raise errors.ConfigError(f"{text} is a file: a checkpoint is a folder. Give another name.")
    if target.exists() and (target.is_mount() or target.samefile(Path.cwd())):
        refused_kind = "a mount point" if target.is_mount() else "the working folder"
        raise errors.ConfigError(
            f"{text} is {refused_kind}, which cannot be replaced in one step by a new checkpoint. "
            f"Give a folder in it: {str(target / 'checkpoint')!r}."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    waiting_folder = _waiting_name(target)
    # It waits only between the two renames, so `target` tells whether the second one happened.
    if waiting_folder.exists():
        if target.exists():
            _retire_old_checkpoint(waiting_folder, target)
        else:
            waiting_folder.rename(target)
    clear_leftovers(target.parent, r"checkpoint_\d+" if series else re.escape(target.name))
    # Claimed before it exists: a save of another process would take it for a leftover.
    claims.enter_context(hold_claim(partial_folder))
    partial_folder.mkdir()


def _rename_into_place(partial_folder: Path, target: Path) -> None:
    waiting_folder = _waiting_name(target)
    replaces = target.exists()
    keep_access(partial_folder, target)
    if replaces:
        target.rename(waiting_folder)
    try:
        partial_folder.rename(target)
    except OSError:
        if replaces:
            waiting_folder.rename(target)
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    # Before the old checkpoint is deleted: after a power failure one of the two must be there.
    sync_path(target.parent)
    if replaces:
        _retire_old_checkpoint(waiting_folder, target)


def _retire_old_checkpoint(old_folder: Path, new_folder: Path) -> None:
    for path in old_folder.iterdir():
        if not files.is_checkpoint_part(path.name) and not os.path.lexists(new_folder / path.name):
            path.rename(new_folder / path.name)
    discard_checkpoint(old_folder, new_folder.name)


def discard_checkpoint(folder: Path, leftover_name: str = "") -> None:
    """Delete a checkpoint, whose name is gone before its first file is."""
    leftover = folder.with_name(f".{leftover_name or folder.name}.partial-{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(leftover)
        # What cannot be deleted has the name of a leftover, which a later save clears away.
        shutil.rmtree(leftover, ignore_errors=True)


def find_checkpoint(folder: Path) -> Path:
    """Where the checkpoint of a name is: under it, or beside it if a save was killed."""
    folder = folder.expanduser()
    if folder.is_dir():
        return folder
    # A save through a link replaces what the link leads to, so the old folder waits there.
    resolved_folder = folder.resolve() if folder.is_symlink() else folder
    if not folder.exists() and _waiting_name(resolved_folder).is_dir():
        return _waiting_name(resolved_folder)
    problem = "is a file" if folder.exists() else "does not exist"
    neighbours = sorted(path.name for path in folder.parent.glob("[!.]*") if path.is_dir())
    text = f" There are: {', '.join(neighbours[:8])}." if neighbours else ""
    raise errors.ConfigError(
        f"load_state({str(folder)!r}): that folder {problem}, so there is nothing to "
        f"continue from.{text} Give the folder that save_state returned."
    )


@contextlib.contextmanager
def all_succeed(
    collectives: Collectives, text: str, *, written_to: Path | None = None
) -> Iterator[None]:
    """A block that every process runs, writing to a folder or not; one's failure raises on all."""
    error = None
    try:
        yield
    except (errors.CollectiveMismatch, errors.CollectiveTimeout):
        raise  # a further exchange would only fail or wait in the same way
    except Exception as caught:  # of any kind: the others must be told before it is raised
        error = caught
    own_failure = None if error is None else f"{type(error).__name__}: {error}"
    by_rank = enumerate(collectives.answers(text, own_failure))
    failures = " ".join(f"Process {rank}: {failure}." for rank, failure in by_rank if failure)
    if not failures:
        return
    # What to correct is said best by the mistake itself; the others get the summary.
    if error is not None and (written_to is None or isinstance(error, errors.UserMistake)):
        raise error
    if written_to is None:
        raise errors.CheckpointFailed(f"{text} failed. {failures} All processes have stopped it.")
    free_space = format_bytes(shutil.disk_usage(written_to).free)
    raise errors.CheckpointFailed(
        f"{text} failed. {failures} The new checkpoint has been "
        f"removed, and an earlier one of this name is unchanged. {free_space} are free there. "
        "Remove the cause, or give a folder on another disk, and save again."
    ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderDisks:
    """Which processes see the same folder of a checkpoint."""

    rank: int  # this process
    makers: tuple[int, ...]  # by rank, the process that made the folder which that rank sees
    host_names: tuple[str, ...]  # by rank

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
        hosts = sorted({n for n, made in zip(self.host_names, self.makers, strict=True) if made})
        _tell_once(
            f"nbaccel: {', '.join(hosts)} {'does' if len(hosts) == 1 else 'do'} not share "
            f"{folder.parent.resolve()} with the first host, {self.host_names[0]}: each host keeps "
            "a checkpoint that is complete for its own processes. "
            + _CONSEQUENCES["" if sharder is None else sharder.shard_kind].format(len(self.makers))
        )


_tell_once = functools.cache(lambda text: write_notice(f"{text}\n"))

_SHARDS_TEXT = (
    "Weights and optimizer are in shards, so what a host has is only a part: training can go on "
    "from it with {} processes on the same hosts in the same order. With another number, or "
    "without one of these hosts, it cannot be loaded. Give a folder that all hosts see, or "
)
_CONSEQUENCES = {
    "": "Start them on the same hosts to go on from it, or give a folder that all hosts see.",
    "fsdp": f"{_SHARDS_TEXT}FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT'), "
    "which writes a whole checkpoint on each host.",
    "deepspeed": f"{_SHARDS_TEXT}keep whole weights beside it (accelerator.save_model). If this is "
    'what you want, say so in DeepSpeed\'s configuration: "checkpoint": '
    '{{"use_node_local_storage": true}}.',
}
"""By the kind of shards; none where a checkpoint is whole."""


def send_to_writers(
    state: Any, writers: Sequence[int], collectives: Collectives, *, what: str
) -> Any:
    """Let all processes that write a state have it, where only process 0 has it; a collective."""
    rank = collectives.place.rank
    if len(writers) < 2 or not any(collectives.answers(what, rank in writers and not state)):
        return state
    group = dist.new_group(list(writers), backend="gloo")  # all processes enter and leave
    try:
        if rank not in writers:
            return state
        outlines = [_map_each_once(lambda tensor: tensor.detach().to("meta"), state)]
        dist.broadcast_object_list(outlines, src=0, group=group)
        # On the CPU, where a gathered state lies.
        received = state
        if rank != 0:
            received = _map_each_once(
                lambda outline: torch.empty(outline.shape, dtype=outline.dtype), outlines[0]
            )
        sent_tensors = {id(leaf): leaf for leaf in leaves(received) if torch.is_tensor(leaf)}
        for tensor in sent_tensors.values():
            # As bytes, because gloo does not know every format.
            flat_tensor = tensor.detach().cpu().contiguous().reshape(-1)
            if flat_tensor.numel():
                dist.broadcast(flat_tensor.view(torch.uint8), src=0, group=group)
    finally:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return received


def _map_each_once(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Apply a function to every tensor; tied ones stay one, so that a file has them once."""
    tensors = {id(leaf): leaf for leaf in leaves(tree) if torch.is_tensor(leaf)}
    mapped = {number: fn(tensor) for number, tensor in tensors.items()}
    return map_tensors(lambda tensor: mapped[id(tensor)], tree)


def check_is_own_part(folder: Path, place: Place) -> None:
    """Refuse a part of a checkpoint that other ranks than this process's have written."""
    ranks, host_names = ranks_and_hosts(folder)
    if not ranks or (place.rank in ranks and place.world_size == len(host_names)):
        return
    hosts = list(dict.fromkeys(host_names))
    counts = ", ".join(f"{host_names.count(host)} on {host}" for host in hosts)
    other_hosts = [host for host in hosts if host != host_names[ranks[0]]]
    raise errors.ConfigError(
        f"The checkpoint {str(folder)!r} has only the shards of rank {number_ranges(ranks)} of "
        f"{len(host_names)}, and this is rank {place.rank} of {place.world_size} on "
        f"{socket.gethostname()}: it was saved without a shared disk, and the other shards were "
        f"written on {', '.join(other_hosts)}. Nothing has been loaded. Start {len(host_names)} "
        f"processes as then ({counts}, in this order), or load one that is whole, or on a disk "
        "that all hosts see."
    )


def ranks_and_hosts(folder: Path) -> tuple[list[int], list[str]]:
    """Who has written a checkpoint that is one host's part, and all hosts; empty for others."""
    try:
        entry = json.loads((folder / files.MANIFEST_FILE).read_text(encoding="utf-8"))["part"]
        return [int(rank) for rank in entry["ranks"]], list(entry["hosts"])
    # Without a manifest or its entry it is no part; a damaged one is reported by its reader.
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return [], []
