"""The notebook's side of copying trained weights back: staging files, and what is done with them.

See the notes in `weight_sync`, which has the workers' side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch.autograd.graph import increment_version

from nbaccel.base.process_death import uninterrupted
from nbaccel.transfer import memfd, weight_checks
from nbaccel.transfer.arena import Arena, Sharing, module_version, named_tensors, refresh_devices
from nbaccel.transfer.weight_sync import WeightReport


class WeightReceiver:
    """The notebook's side: owns the staging files of one launch and applies them at the end."""

    def __init__(self, module_sharing: Sharing, shared_arenas: Mapping[str, Arena]) -> None:
        self._sharing = module_sharing
        self._versions = _module_versions(module_sharing)
        self._arenas = shared_arenas
        self.staging: dict[str, int] = {}
        # An interrupt between creating a file and storing its descriptor would leak it.
        with uninterrupted():
            try:
                for key, arena in shared_arenas.items():
                    self.staging[key] = memfd.create_file("staging", arena.nbytes)
            except OSError:
                self.close()
                raise

    def apply(
        self,
        weight_reports: Sequence[WeightReport],
        whole_files: Mapping[str, int] | None = None,
    ) -> None:
        """Copy the trained values into the notebook's modules, once all ranks have returned."""
        whole_files = whole_files or {}
        stranded_paths = {path for report in weight_reports for path in report.stranded}
        written_ranges = {
            key: memfd.merge_ranges(
                byte_range
                for report in weight_reports
                for byte_range in report.own_bytes.get(key, ())
            )
            for key in self._arenas
        }
        changed_arenas = {
            key: arena
            for key, arena in self._arenas.items()
            if written_ranges[key] or key in whole_files
        }
        # What can fail comes first: afterwards half of the new values may be there.
        for arena in changed_arenas.values():
            arena.leave_file()
        for key, arena in changed_arenas.items():
            stranded_ranges = self._stranded_ranges(arena, stranded_paths)
            if key in whole_files:
                # First, because departed and sharded tensors are in the staging file, which is
                # read after it.
                _read(whole_files[key], arena, [(0, arena.nbytes)], stranded_ranges)
            _read(self.staging[key], arena, written_ranges[key], stranded_ranges)
        # After the arenas: tensors on devices are filled from their host copies there.
        refresh_devices(self._sharing, stranded_paths)
        if changed_arenas:
            self._note_change(stranded_paths)

    def disturbed(self) -> list[str]:
        """Paths of the modules that the notebook has written to meanwhile. Ask before `apply`."""
        versions = _module_versions(self._sharing)
        return [
            path
            for path, version_before in self._versions.items()
            if versions[path] != version_before
        ]

    def differing(self, weight_reports: Sequence[WeightReport]) -> dict[str, str]:
        """Which ranks trained another model than rank 0, whose weights the notebook gets.

        Ask before `apply`: ranks that have what the notebook had have trained nothing.
        """
        messages_by_path = {}
        for module in self._sharing.modules:
            rank_digests = {
                report.rank: report.fingerprints.get(module.path, "") for report in weight_reports
            }
            digest_of_0 = rank_digests.get(0, "")
            # A rank without a digest has trained nothing.
            others = {rank: digest for rank, digest in rank_digests.items() if digest}
            if set(others.values()) <= {digest_of_0}:
                continue
            # Nor has one whose weights equal the notebook's.
            known_digests = {digest_of_0, weight_checks.digest_of(module.module)}
            differing_ranks = sorted(
                rank for rank, digest in others.items() if digest not in known_digests
            )
            if differing_ranks:
                messages_by_path[module.path] = _differing_models_message(
                    module.path, differing_ranks, rank_0_trained=bool(digest_of_0)
                )
        return messages_by_path

    def _note_change(self, stranded_paths: Collection[str]) -> None:
        """Let torch know that the tensors have new values, as if an operation had written them.

        A graph that still needs the old ones says so then, and a pool's workers adopt the new.
        """
        for module in self._sharing.modules:
            if module.path not in stranded_paths:
                module_tensors = dict(named_tensors(module.module))
                written_tensors = [module_tensors[slot.name] for _, slot in module.slots]
                # Inference tensors have no version counter; torch raises for them.
                increment_version([one for one in written_tensors if not one.is_inference()])

    def _stranded_ranges(
        self, arena: Arena, stranded_paths: Collection[str]
    ) -> list[memfd.ByteRange]:
        return [
            (slot.start, slot.start + slot.nbytes)
            for module in self._sharing.modules
            if module.path in stranded_paths
            for tensor_arena, slot in module.slots
            if tensor_arena is arena
        ]

    def close(self, close_files: Callable[[Sequence[int]], None] = memfd.close_all) -> None:
        """Close the staging files."""
        with uninterrupted():
            # Cleared before closing: a second close could hit another file with the same number.
            file_descriptors = list(self.staging.values())
            self.staging.clear()
            close_files(file_descriptors)


def _read(
    file_descriptor: int,
    arena: Arena,
    byte_ranges: list[memfd.ByteRange],
    left_out: list[memfd.ByteRange],
) -> None:
    for first_byte, end_byte in memfd.ranges_without(byte_ranges, left_out):
        memfd.read_at(file_descriptor, arena.view(first_byte, end_byte), first_byte)


def _module_versions(module_sharing: Sharing) -> dict[str, int]:
    return {module.path: module_version(module.module) for module in module_sharing.modules}


def _differing_models_message(
    module_path: str, differing_ranks: Sequence[int], *, rank_0_trained: bool
) -> str:
    """The line about ranks that trained another model than rank 0."""
    rank_names = (
        f"rank{'s' if len(differing_ranks) > 1 else ''} {', '.join(map(str, differing_ranks))}"
    )
    if not rank_0_trained:
        return (
            f"{rank_names} trained {module_path} and rank 0 did not. The notebook gets rank 0's "
            "weights, so what was trained is lost. Train on rank 0, or return the "
            "state_dict from the other ranks."
        )
    return (
        f"The ranks trained different models: {rank_names} ended with other weights of "
        f"{module_path} than rank 0, and the notebook has rank 0's. Nothing averaged the "
        "gradients. Wrap the model in DistributedDataParallel, or pass it through "
        "Accelerator.prepare. (In "
        "DistributedDataParallel already? Then some parameters took no part in the loss: "
        "find_unused_parameters=True.)"
    )
