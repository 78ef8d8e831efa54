"""The notebook's side of copying trained weights back: staging files, and what is done with them.

See the notes in `weight_sync`, which has the workers' side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.autograd.graph import increment_version

from nbaccel.base.process_death import uninterrupted
from nbaccel.transfer import memfd, weight_checks
from nbaccel.transfer.arena import Arena, Sharing, module_version, named_tensors, refresh_devices
from nbaccel.transfer.weight_sync import WeightReport

__all__ = ["WeightReceiver"]


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
        weight_reports: Iterable[WeightReport],
        whole_files: Mapping[str, int] | None = None,
    ) -> None:
        """Copy the trained values into the notebook's modules, once all ranks have returned."""
        merged_report = WeightReport()
        for weight_report in weight_reports:
            merged_report.complete |= weight_report.complete
            merged_report.stranded |= weight_report.stranded
            for arena_key, byte_ranges in weight_report.written.items():
                merged_report.written.setdefault(arena_key, []).extend(byte_ranges)
        written_keys = {*merged_report.complete, *merged_report.written, *(whole_files or {})}
        # What can fail comes first: afterwards half of the new values may be there.
        for arena_key in written_keys & self._arenas.keys():
            self._arenas[arena_key].leave_file()
        for arena_key, arena in self._arenas.items():
            self._apply_one(arena_key, arena, merged_report, (whole_files or {}).get(arena_key))
        # After the arenas: tensors on devices are filled from their host copies there.
        refresh_devices(self._sharing, merged_report.stranded)
        if written_keys:
            self._note_change(merged_report)

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
                weight_report.rank: weight_report.fingerprints.get(module.path, "")
                for weight_report in weight_reports
            }
            differing_ranks = weight_checks.differing_ranks(rank_digests)
            # A rank whose weights equal the notebook's has trained nothing that could be lost.
            if differing_ranks:
                notebook_digest = weight_checks.digest_of(module.module)
                differing_ranks = [
                    rank_number
                    for rank_number in differing_ranks
                    if rank_digests[rank_number] != notebook_digest
                ]
            if differing_ranks:
                trained_by_0 = bool(rank_digests.get(0))
                messages_by_path[module.path] = _differing_models_message(
                    module.path, differing_ranks, rank_0_trained=trained_by_0
                )
        return messages_by_path

    def _note_change(self, merged_report: WeightReport) -> None:
        """Let torch know that the tensors have new values, as if an operation had written them.

        A graph that still needs the old ones says so then, and a pool's workers adopt the new.
        """
        for module in self._sharing.modules:
            if module.path not in merged_report.stranded:
                module_tensors = dict(named_tensors(module.module))
                written_tensors = [module_tensors[slot.name] for _, slot in module.slots]
                increment_version(
                    [
                        module_tensor
                        for module_tensor in written_tensors
                        # Inference tensors have no version counter; torch raises for them.
                        if not module_tensor.is_inference()
                    ]
                )

    def _apply_one(
        self, key: str, arena: Arena, merged_report: WeightReport, whole_file: int | None
    ) -> None:
        whole_range = [(0, arena.nbytes)]
        written_ranges = memfd.merge_ranges(merged_report.written.get(key, []))
        if whole_file is not None:
            # First, because departed and sharded tensors are in the staging file, which is read
            # after it.
            self._read(whole_file, arena, whole_range, merged_report)
        elif key in merged_report.complete:
            written_ranges = whole_range
        self._read(self.staging[key], arena, written_ranges, merged_report)

    def _read(
        self,
        file_descriptor: int,
        arena: Arena,
        byte_ranges: list[memfd.ByteRange],
        merged_report: WeightReport,
    ) -> None:
        for first_byte, end_byte in memfd.ranges_without(
            byte_ranges, self._stranded_ranges(arena, merged_report.stranded)
        ):
            memfd.read_at(file_descriptor, arena.view(first_byte, end_byte), first_byte)

    def _stranded_ranges(
        self, arena: Arena, stranded_modules: Mapping[str, str]
    ) -> list[memfd.ByteRange]:
        return memfd.merge_ranges(
            (slot.start, slot.start + slot.nbytes)
            for module in self._sharing.modules
            if module.path in stranded_modules
            for tensor_arena, slot in module.slots
            if tensor_arena is arena
        )

    def close(self, close_files: Callable[[Sequence[int]], None] = memfd.close_all) -> None:
        """Close the staging files."""
        with uninterrupted():
            # Cleared before closing: a second close could hit another file with the same number.
            file_descriptors = list(self.staging.values())
            self.staging.clear()
            close_files(file_descriptors)


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
