"""How trained weights are copied back: workers write staging files, the notebook reads them.

[Note: writing weights back] Every arena has a *staging* file of the same size and layout, made by
the notebook process for one launch or cell. It is sparse: pages that are not written cost nothing.
Workers put trained values there; once all ranks are done, the notebook reads what was written into
the arena, into pages that it has mapped already. (Mapping the staging file in the arena's place
looks cheaper and is not: the page faults that follow cost several copies.)

A tensor that left the arena (moved to a device, given another dtype) is copied into its slot, cast
to the dtype the notebook has, as `load_state_dict` would; one that equals the notebook's own,
rounded to a shorter format, was not trained and stays as it is there.

Only rank 0's are copied back: digests tell whether all ranks trained the same model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import nn
from torch.autograd.graph import increment_version

from nbaccel.base.processes import uninterrupted
from nbaccel.transfer import memfd, sharded_tensors
from nbaccel.transfer.arena import Arena, Sharing, host_copies, named_tensors

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096  # in so many pieces: training changes nearly all bytes


@dataclass(kw_only=True)
class WeightReport:
    """What one rank put into the staging files."""

    rank: int = 0
    own_bytes: defaultdict[str, list[memfd.ByteRange]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Exactly what this rank has put into each staging file: of a sharded tensor its piece."""
    stranded: dict[str, str] = field(default_factory=dict)  # module's path → why not written back
    state_dicts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Weights on the CPU, so that they are not lost: of modules that are stranded or changed."""
    changes: dict[str, str] = field(default_factory=dict)  # module's path → what is different
    fingerprints: dict[str, str] = field(default_factory=dict)  # module's path → digest, or empty


def is_compared(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that all ranks train alike."""
    return tensor.requires_grad and not sharded_tensors.is_sharded(tensor)


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of their values, of samples where there are many."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        values = tensor.detach().reshape(-1)
        length = _SAMPLE_BYTES // tensor.element_size()
        if values.numel() > length * _NUM_SAMPLES and tensor.is_contiguous():
            # The first and the last sample lie at the ends.
            values = values.unfold(0, length, (values.numel() - length) // (_NUM_SAMPLES - 1))
        # Viewed as bytes, because NumPy has no bfloat16.
        digest.update(values.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class WeightReceiver:
    """The notebook's side: owns the staging files of one launch and applies them at the end."""

    def __init__(self, sharing: Sharing, arenas: Mapping[str, Arena]) -> None:
        self._sharing = sharing
        self._arenas = arenas
        self.staging: dict[str, int] = {}
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
            slot for path, slots, _ in self._sharing.modules for slot in slots if path in stranded
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
                # First: departed and sharded tensors are in the staging file, which is read next.
                arena.fill(whole_files[key], memfd.ranges_without([(0, arena.nbytes)], kept))
            spans = (span for report in reports for span in report.own_bytes.get(key, ()))
            arena.fill(self.staging[key], memfd.ranges_without(memfd.merge_ranges(spans), kept))
        # After the arenas: tensors on devices are filled from their host copies there.
        for tensor, host_copy in host_copies(self._sharing, stranded):
            tensor.copy_(host_copy)
        # Lets a graph that needs the old values say so, and a pool's workers adopt the new.
        for path, slots, module in self._sharing.modules if changed else ():
            if path not in stranded:
                tensors = dict(named_tensors(module))
                written = [tensors[slot.name] for slot in slots]
                # Inference tensors have no version counter; torch raises for them.
                increment_version([tensor for tensor in written if not tensor.is_inference()])

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
            own = digest_of(tensor for _, tensor in named_tensors(module) if is_compared(tensor))
            known = {digest_of_0, own}
            ranks = sorted(rank for rank, digest in trained.items() if digest not in known)
            if ranks:
                messages[path] = _differing_models(path, ranks, rank_0_trained=bool(digest_of_0))
        return messages

    def close(self, close_files: Callable[[Sequence[int]], None] = memfd.close_all) -> None:
        """Close the staging files."""
        with uninterrupted():
            # Cleared before closing: a second close could hit another file with the same number.
            files = list(self.staging.values())
            self.staging.clear()
            close_files(files)


def _differing_models(path: str, ranks: Sequence[int], *, rank_0_trained: bool) -> str:
    names = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if not rank_0_trained:
        return (
            f"{names} trained {path} and rank 0 did not. The notebook gets rank 0's weights, so "
            "what was trained is lost. Train on rank 0, or return the state_dict from the others."
        )
    return (
        f"The ranks trained different models: {names} ended with other weights of {path} than "
        "rank 0, and the notebook has rank 0's. Nothing averaged the gradients. Wrap the model in "
        "DistributedDataParallel, or pass it through Accelerator.prepare. (In DDP already? Then "
        "some parameters took no part in the loss: find_unused_parameters=True.)"
    )
