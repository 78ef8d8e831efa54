"""Trained weights in the notebook: staging files are read into the arenas once all is written.

See [Note: the way home] in `home`, which is the workers' side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch.autograd.graph import increment_version

from nbaccel.launch.sharing import memory, trained
from nbaccel.launch.sharing.arena import Arena, Sharing, named_tensors, refresh_devices, version
from nbaccel.launch.sharing.home import HomeReport
from nbaccel.launch.system import uninterrupted

__all__ = ["Homecoming"]


class Homecoming:
    """The notebook's side: owns the staging files of one launch and applies them at the end.

    Args:
        sharing: The modules.
        arenas: The arenas that get staging files, by key.
    """

    def __init__(self, sharing: Sharing, arenas: Mapping[str, Arena]) -> None:
        self._sharing = sharing
        self._versions = _versions(sharing)
        self._arenas = arenas
        self.staging: dict[str, int] = {}
        with uninterrupted():  # which would cost a descriptor that nobody knows yet
            try:
                for key, arena in arenas.items():
                    self.staging[key] = memory.create_file("staging", arena.nbytes)
            except OSError:
                self.close()
                raise

    def apply(self, reports: Iterable[HomeReport], whole: Mapping[str, int] | None = None) -> None:
        """Let the notebook's modules have the trained values. Call once all ranks have returned.

        Args:
            reports: What the ranks wrote.
            whole: Descriptors of the files that hold complete arenas, where these are a rank's own.
        """
        merged = HomeReport()
        for report in reports:
            merged.complete |= report.complete
            merged.stranded |= report.stranded
            for key, ranges in report.written.items():
                merged.written.setdefault(key, []).extend(ranges)
        for key, arena in self._arenas.items():
            self._apply_one(key, arena, merged, (whole or {}).get(key))
        refresh_devices(self._sharing, merged.stranded)
        if merged.complete or merged.written:
            self._note_change(merged)

    def disturbed(self) -> list[str]:
        """Paths of the modules that the notebook has written to meanwhile. Ask before `apply`."""
        now = _versions(self._sharing)
        return [path for path, version in self._versions.items() if now[path] != version]

    def differing(self, reports: Sequence[HomeReport]) -> dict[str, str]:
        """Which ranks trained another model than rank 0, whose weights come home.

        Ask before `apply`: ranks that have what the notebook had have trained nothing.

        Returns:
            Path of the module → what to tell the user. Rank 0 alone may train.
        """
        found = {}
        for module in self._sharing.modules:
            digests = {r.rank: r.fingerprints.get(module.path, "") for r in reports}
            ranks = trained.differing_ranks(digests)
            if ranks:
                before = trained.digest_of(module.module)
                ranks = [rank for rank in ranks if digests[rank] != before]
            if ranks:
                trained_by_0 = bool(digests.get(0))
                found[module.path] = _differs(module.path, ranks, rank_0_trained=trained_by_0)
        return found

    def _note_change(self, merged: HomeReport) -> None:
        """Let torch know that the tensors have new values, as if an operation had written them.

        A graph that still needs the old ones says so then, and a pool's workers adopt the new.
        """
        for module in self._sharing.modules:
            if module.path not in merged.stranded:
                tensors = dict(named_tensors(module.module))
                written = [tensors[slot.name] for _, slot in module.slots]
                increment_version([t for t in written if not t.is_inference()])

    def _apply_one(self, key: str, arena: Arena, merged: HomeReport, whole: int | None) -> None:
        everything = [(0, arena.nbytes)]
        written = memory.merge(merged.written.get(key, []))
        if whole is not None:
            self._read(whole, arena, everything, merged)
        elif key in merged.complete:
            written = everything
        self._read(self.staging[key], arena, written, merged)

    def _read(self, fd: int, arena: Arena, ranges: list[memory.Range], merged: HomeReport) -> None:
        for start, stop in _without(ranges, self._stranded_ranges(arena, merged.stranded)):
            memory.read_at(fd, arena.view(start, stop), start)

    def _stranded_ranges(self, arena: Arena, stranded: Mapping[str, str]) -> list[memory.Range]:
        return memory.merge(
            (slot.start, slot.start + slot.nbytes)
            for module in self._sharing.modules
            if module.path in stranded
            for home, slot in module.slots
            if home is arena
        )

    def close(self, dispose: Callable[[Sequence[int]], None] = memory.close_all) -> None:
        """Give the staging files up.

        Args:
            dispose: Closes descriptors. Freeing gigabytes takes a tenth of a second each: better
                where nobody waits for it.
        """
        with uninterrupted():
            fds = list(self.staging.values())
            self.staging.clear()
            dispose(fds)


def _versions(sharing: Sharing) -> dict[str, int]:
    return {shared.path: version(shared.module) for shared in sharing.modules}


def _differs(path: str, ranks: Sequence[int], *, rank_0_trained: bool) -> str:
    """The line about ranks that trained another model than rank 0.

    Args:
        path: The module, as the user would write it.
        ranks: These ranks.
        rank_0_trained: Whether rank 0 trained the module at all.
    """
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if not rank_0_trained:
        return (
            f"{who} trained {path} and rank 0 did not. The notebook gets rank 0's weights, so what "
            "was trained is lost. Train on rank 0, or return the state_dict from the other ranks."
        )
    return (
        f"The ranks trained different models: {who} ended with other weights of {path} than rank "
        "0, and the notebook has rank 0's. Nothing averaged the gradients. Wrap the model in "
        "DistributedDataParallel, or pass it through Accelerator.prepare. (In "
        "DistributedDataParallel already? Then some parameters took no part in the loss: "
        "find_unused_parameters=True.)"
    )


def _without(ranges: list[memory.Range], left_out: list[memory.Range]) -> Iterator[memory.Range]:
    for start, stop in ranges:
        inside = [
            (max(a, start) - start, min(b, stop) - start)
            for a, b in left_out
            if a < stop and start < b
        ]
        for a, b in memory.gaps(inside, stop - start):
            yield (start + a, start + b)
