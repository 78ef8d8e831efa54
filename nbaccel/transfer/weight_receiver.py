"""The notebook's side of copying trained weights back: staging files, and what is done with them.

See the notes in `weight_writer`, which has the workers' side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.autograd.graph import increment_version

from nbaccel.base.processes import uninterrupted
from nbaccel.transfer import memfd
from nbaccel.transfer.arena import Arena, Sharing, module_version, named_tensors, refresh_devices
from nbaccel.transfer.weight_writer import WeightReport, digest_of


class WeightReceiver:
    """The notebook's side: owns the staging files of one launch and applies them at the end."""

    def __init__(self, sharing: Sharing, arenas: Mapping[str, Arena]) -> None:
        self._sharing = sharing
        self._versions = self._versions_now()
        self._arenas = arenas
        self.staging: dict[str, int] = {}
        # An interrupt between creating a file and storing its descriptor would leak it.
        with uninterrupted():
            try:
                for key, arena in arenas.items():
                    self.staging[key] = memfd.create_file("staging", arena.nbytes)
            except OSError:
                self.close()
                raise

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The notebook's modules that get weights, each with its path."""
        return [(shared.path, shared.module) for shared in self._sharing.modules]

    def apply(
        self, reports: Sequence[WeightReport], whole_files: Mapping[str, int] | None = None
    ) -> None:
        """Copy the trained values into the notebook's modules, once all ranks have returned."""
        whole_files = whole_files or {}
        stranded = {path for report in reports for path in report.stranded}
        left_out = [
            slot
            for shared in self._sharing.modules
            if shared.path in stranded
            for slot in shared.slots
        ]
        changed = {key for report in reports for key, spans in report.own_bytes.items() if spans}
        changed.update(whole_files)
        # What can fail comes first: afterwards half of the new values may be there.
        for key in changed:
            self._arenas[key].leave_file()
        for key in changed:
            arena = self._arenas[key]
            kept = [slot.span for slot in left_out if slot.arena == key]
            if key in whole_files:
                # First, because departed and sharded tensors are in the staging file, which is
                # read after it.
                _read(whole_files[key], arena, [(0, arena.nbytes)], kept)
            spans = (span for report in reports for span in report.own_bytes.get(key, ()))
            _read(self.staging[key], arena, memfd.merge_ranges(spans), kept)
        # After the arenas: tensors on devices are filled from their host copies there.
        refresh_devices(self._sharing, stranded)
        # Lets a graph that needs the old values say so, and a pool's workers adopt the new.
        for path, slots, module in self._sharing.modules if changed else ():
            if path not in stranded:
                tensors = dict(named_tensors(module))
                written = [tensors[slot.name] for slot in slots]
                # Inference tensors have no version counter; torch raises for them.
                increment_version([tensor for tensor in written if not tensor.is_inference()])

    def disturbed(self) -> list[str]:
        """Paths of the modules that the notebook has written to meanwhile. Ask before `apply`."""
        versions = self._versions_now()
        return [path for path, before in self._versions.items() if versions[path] != before]

    def differing(self, reports: Sequence[WeightReport]) -> dict[str, str]:
        """Which ranks trained another model than rank 0's, by module path. Ask before `apply`."""
        messages = {}
        for path, _, module in self._sharing.modules:
            digests = {report.rank: report.fingerprints.get(path, "") for report in reports}
            digest_of_0 = digests.get(0, "")
            # A rank without a digest has trained nothing.
            trained = {rank: digest for rank, digest in digests.items() if digest}
            if set(trained.values()) <= {digest_of_0}:
                continue
            # Nor has one whose weights equal the notebook's.
            known = {digest_of_0, digest_of(module)}
            ranks = sorted(rank for rank, digest in trained.items() if digest not in known)
            if ranks:
                messages[path] = _differing_models(path, ranks, rank_0_trained=bool(digest_of_0))
        return messages

    def _versions_now(self) -> dict[str, int]:
        return {path: module_version(module) for path, _, module in self._sharing.modules}

    def close(self, close_files: Callable[[Sequence[int]], None] = memfd.close_all) -> None:
        """Close the staging files."""
        with uninterrupted():
            # Cleared before closing: a second close could hit another file with the same number.
            files = list(self.staging.values())
            self.staging.clear()
            close_files(files)


def _read(
    fd: int, arena: Arena, spans: list[memfd.ByteRange], left_out: list[memfd.ByteRange]
) -> None:
    for start, end in memfd.ranges_without(spans, left_out):
        memfd.read_at(fd, arena.view(start, end), start)


def _differing_models(path: str, ranks: Sequence[int], *, rank_0_trained: bool) -> str:
    """The line about ranks that trained another model than rank 0."""
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if not rank_0_trained:
        return (
            f"{names} trained {path} and rank 0 did not. The notebook gets rank 0's weights, so "
            "what was trained is lost. Train on rank 0, or return the state_dict from the other "
            "ranks."
        )
    return (
        f"The ranks trained different models: {names} ended with other weights of {path} than "
        "rank 0, and the notebook has rank 0's. Nothing averaged the gradients. Wrap the model in "
        "DistributedDataParallel, or pass it through Accelerator.prepare. (In "
        "DistributedDataParallel already? Then some parameters took no part in the loss: "
        "find_unused_parameters=True.)"
    )
