"""Checks of a module in a worker before its weights are copied back.

Two questions are answered:

- Did all ranks train the same model? Each rank takes a digest of the parameters that it trained,
  and the notebook compares them. A plain loop without DDP trains a different model in each process,
  and only rank 0's is copied back.
- Do the values fit into the notebook's tensors as they are? Tied weights that came apart do not,
  and another dtype loses digits.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import xxhash
from torch import nn

from nbaccel.base.units import first_few
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor
from nbaccel.transfer import memfd, sharded_tensors
from nbaccel.transfer.arena import Slot, is_in_arena, named_tensors

OriginalTensors = Mapping[str, weakref.ref[torch.Tensor]]
"""A module's tensors as they came, by name."""

ArenaSlots = Sequence[tuple[str, Slot]]
"""Where the notebook has each tensor of a module: key of the arena, slot."""

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""A large tensor is sampled in so many pieces of this size: training changes nearly all bytes."""


def original_tensors_of(module: nn.Module) -> OriginalTensors:
    """What a module consists of now, to see later what was replaced."""
    return {name: weakref.ref(compared_tensor) for name, compared_tensor in named_tensors(module)}


def fingerprint_of(
    arena_slots: ArenaSlots,
    module: nn.Module,
    arena_mappings: Mapping[str, memfd.Mapping],
    written_ranges: Mapping[str, Sequence[memfd.ByteRange]],
    *,
    own_only: bool = False,
) -> str:
    """A digest of the parameters of a module that a rank has trained."""
    module_tensors = dict(named_tensors(module))
    trainable_tensors = [
        (arena_key, arena_slot, module_tensors[arena_slot.name])
        for arena_key, arena_slot in arena_slots
        if arena_slot.name in module_tensors and _is_compared(module_tensors[arena_slot.name])
    ]
    own_tensors = [
        tensor_place
        for tensor_place in trainable_tensors
        if _is_written(*tensor_place, arena_mappings, written_ranges)
    ]
    return (
        _digest_tensors(
            compared_tensor
            for _, _, compared_tensor in (own_tensors if own_only else trainable_tensors)
        )
        if own_tensors
        else ""
    )


def digest_of(module: nn.Module) -> str:
    """The digest of a module as it is here, whether or not it was trained."""
    return _digest_tensors(
        compared_tensor
        for _, compared_tensor in named_tensors(module)
        if _is_compared(compared_tensor)
    )


def _is_compared(compared_tensor: torch.Tensor) -> bool:
    return compared_tensor.requires_grad and not sharded_tensors.is_sharded(compared_tensor)


def _is_written(
    key: str,
    slot: Slot,
    tensor: torch.Tensor,
    arena_mappings: Mapping[str, memfd.Mapping],
    written_ranges: Mapping[str, Sequence[memfd.ByteRange]],
) -> bool:
    if not is_in_arena(tensor, slot, arena_mappings[key]):
        return True
    return any(
        first_byte < slot.start + slot.nbytes and slot.start < end_byte
        for first_byte, end_byte in written_ranges[key]
    )


def _digest_tensors(module_tensors: Iterable[torch.Tensor]) -> str:
    tensor_digest = xxhash.xxh3_64()
    for compared_tensor in module_tensors:
        for sampled_piece in _sampled_pieces(compared_tensor.detach()):
            # Viewed as bytes, because NumPy has no bfloat16.
            tensor_digest.update(sampled_piece.contiguous().cpu().view(torch.uint8).numpy().data)
    return tensor_digest.hexdigest()


def _sampled_pieces(compared_tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    sample_elements = max(1, _SAMPLE_BYTES // compared_tensor.element_size())
    if (
        compared_tensor.numel() <= sample_elements * _NUM_SAMPLES
        or not compared_tensor.is_contiguous()
    ):
        yield compared_tensor.reshape(-1)
        return
    # The first and the last sample lie at the ends.
    flat_tensor = compared_tensor.view(-1)
    step = (flat_tensor.numel() - sample_elements) // (_NUM_SAMPLES - 1)
    for number in range(_NUM_SAMPLES):
        yield flat_tensor[number * step : number * step + sample_elements]


def untied_reason(
    arena_slots: ArenaSlots, current_tensors: Mapping[str, torch.Tensor]
) -> str | None:
    """Which names share one tensor in the notebook, and hold different values here."""
    first_names: dict[tuple[object, ...], str] = {}
    for arena_key, arena_slot in arena_slots:
        tensor_place = (
            arena_key,
            arena_slot.start,
            arena_slot.offset,
            arena_slot.shape,
            arena_slot.stride,
            arena_slot.dtype,
        )
        first_name = first_names.setdefault(tensor_place, arena_slot.name)
        if first_name != arena_slot.name and not _have_same_values(
            current_tensors[first_name], current_tensors[arena_slot.name]
        ):
            return f"{first_name} and {arena_slot.name} were tied, and now have different values"
    return None


def _have_same_values(one_tensor: torch.Tensor, other_tensor: torch.Tensor) -> bool:
    if (
        one_tensor is other_tensor
        # No rank has all values of a sharded tensor to compare.
        or sharded_tensors.is_sharded(one_tensor)
        or sharded_tensors.is_sharded(other_tensor)
    ):
        return True
    if (
        one_tensor.device == other_tensor.device
        and one_tensor.data_ptr() == other_tensor.data_ptr()
    ):
        return True
    # Copies with equal values can still be written into one tensor.
    return one_tensor.dtype == other_tensor.dtype and torch.equal(
        one_tensor.detach().cpu(), other_tensor.detach().cpu()
    )


def describe_changes(
    arena_slots: ArenaSlots,
    current_tensors: Mapping[str, torch.Tensor],
    original_tensors: OriginalTensors,
) -> str:
    """What is not as the notebook has it, although the values can be copied there."""
    names_by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    replaced_names = []
    for _, arena_slot in arena_slots:
        compared_tensor = current_tensors[arena_slot.name]
        # Engines and FP8 shard and store by design, so neither is worth a message.
        is_stored = isinstance(compared_tensor, ScaledTensor)
        if is_stored or sharded_tensors.is_sharded(compared_tensor):
            continue
        if compared_tensor.dtype != arena_slot.dtype:
            names_by_dtypes.setdefault((compared_tensor.dtype, arena_slot.dtype), []).append(
                arena_slot.name
            )
        elif _is_another(compared_tensor, original_tensors.get(arena_slot.name)):
            replaced_names.append(arena_slot.name)
    change_clauses = [
        f"{first_few(tensor_names, 2)} came as {_short_dtype(new_dtype)} and "
        f"{'was' if len(tensor_names) == 1 else 'were'} cast to {_short_dtype(old_dtype)}"
        for (new_dtype, old_dtype), tensor_names in names_by_dtypes.items()
    ]
    if replaced_names:
        change_clauses.append(
            f"{first_few(replaced_names, 2)} "
            f"{'was' if len(replaced_names) == 1 else 'were'} replaced"
        )
    change_clauses += [
        f"{one_name} and {other_name} share memory there"
        for one_name, other_name in _newly_shared(arena_slots, current_tensors)[:2]
    ]
    return "; ".join(change_clauses)


def _newly_shared(
    arena_slots: ArenaSlots, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, str]]:
    """Names of tensors that overlap here, and have memory of their own in the notebook."""
    byte_spans = sorted(
        (
            compared_tensor.data_ptr(),
            compared_tensor.data_ptr() + compared_tensor.nbytes,
            arena_slot.name,
            (arena_key, arena_slot.start),
        )
        for arena_key, arena_slot in arena_slots
        if (compared_tensor := tensors[arena_slot.name]).device.type == "cpu"
        and not isinstance(compared_tensor, ScaledTensor)
        and not sharded_tensors.is_sharded(compared_tensor)
        and compared_tensor.layout is torch.strided
        and compared_tensor.is_contiguous()
    )
    return [
        (one_name, other_name)
        for (_, one_end, one_name, one_place), (other_begin, _, other_name, other_place) in (
            itertools.pairwise(byte_spans)
        )
        if other_begin < one_end and one_place != other_place
    ]


def _is_another(tensor: torch.Tensor, original_reference: weakref.ref[torch.Tensor] | None) -> bool:
    """Whether a parameter was replaced.

    Buffers do not count, because some models create them anew; nor do tensors on a device.
    """
    if not isinstance(tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    return original_reference is not None and original_reference() is not tensor


def _short_dtype(element_type: torch.dtype) -> str:
    return str(element_type).removeprefix("torch.")
