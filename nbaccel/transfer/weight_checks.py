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
from nbaccel.transfer.local_arena import LocalArena

OriginalTensors = Mapping[str, weakref.ref[torch.Tensor]]
"""A module's tensors as they came, by name."""

_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""A large tensor is sampled in so many pieces of this size: training changes nearly all bytes."""


def original_tensors_of(module: nn.Module) -> OriginalTensors:
    """What a module consists of now, to see later what was replaced."""
    return {name: weakref.ref(tensor) for name, tensor in named_tensors(module)}


# ------------------------------------------------------------------------- the same on all ranks


def trained_digest(
    slots: Sequence[Slot],
    module: nn.Module,
    arenas: Mapping[str, LocalArena],
    written: Mapping[str, Sequence[memfd.ByteRange]],
    *,
    own_only: bool = False,
) -> str:
    """A digest of a module's parameters if a rank has trained some of them, else empty.

    Args:
        slots: Where the notebook has its tensors.
        module: What is compared.
        arenas: The rank's.
        written: What it has written to them.
        own_only: Whether only the parameters count that it has trained.
    """
    tensors = dict(named_tensors(module))
    compared = []
    trained = []
    for slot in slots:
        tensor = tensors.get(slot.name)
        if tensor is None or not _is_compared(tensor):
            continue
        compared.append(tensor)
        in_arena = is_in_arena(tensor, slot, arenas[slot.arena].mapping)
        if not in_arena or memfd.overlap(slot.span, written[slot.arena]):
            trained.append(tensor)
    if not trained:
        return ""
    return _digest(trained if own_only else compared)


def digest_of(module: nn.Module) -> str:
    """The digest of a module as it is here, whether or not it was trained."""
    return _digest(tensor for _, tensor in named_tensors(module) if _is_compared(tensor))


def _is_compared(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not sharded_tensors.is_sharded(tensor)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        for sample in _samples(tensor.detach()):
            # Viewed as bytes, because NumPy has no bfloat16.
            digest.update(sample.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _samples(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    length = max(1, _SAMPLE_BYTES // tensor.element_size())
    if tensor.numel() <= length * _NUM_SAMPLES or not tensor.is_contiguous():
        yield tensor.reshape(-1)
        return
    # The first and the last sample lie at the ends.
    flat = tensor.view(-1)
    step = (flat.numel() - length) // (_NUM_SAMPLES - 1)
    for number in range(_NUM_SAMPLES):
        yield flat[number * step : number * step + length]


# ------------------------------------------------------------------------- what fits


def untied_reason(slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor]) -> str:
    """Which names share one tensor in the notebook, and hold different values here."""
    first_names: dict[Slot, str] = {}
    for slot in slots:
        first_name = first_names.setdefault(slot._replace(name=""), slot.name)
        if first_name != slot.name and not _have_same_values(
            tensors[first_name], tensors[slot.name]
        ):
            return f"{first_name} and {slot.name} were tied, and now have different values"
    return ""


def _have_same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    # No rank has all values of a sharded tensor to compare.
    if one is other or sharded_tensors.is_sharded(one) or sharded_tensors.is_sharded(other):
        return True
    if one.device == other.device and one.data_ptr() == other.data_ptr():
        return True
    # Copies with equal values can still be written into one tensor.
    return one.dtype == other.dtype and torch.equal(one.detach().cpu(), other.detach().cpu())


def describe_changes(
    slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor], originals: OriginalTensors
) -> str:
    """What is not as the notebook has it, although the values can be copied there."""
    names_by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    replaced = []
    for slot in slots:
        tensor = tensors[slot.name]
        if _is_own_form(tensor):
            continue
        if tensor.dtype != slot.dtype:
            names_by_dtypes.setdefault((tensor.dtype, slot.dtype), []).append(slot.name)
        elif _is_another(tensor, originals.get(slot.name)):
            replaced.append(slot.name)
    clauses = [
        f"{first_few(names, 2)} came as {_short_dtype(new)} and {_were(names)} cast to "
        f"{_short_dtype(old)}"
        for (new, old), names in names_by_dtypes.items()
    ]
    if replaced:
        clauses.append(f"{first_few(replaced, 2)} {_were(replaced)} replaced")
    clauses += [
        f"{one} and {other} share memory there" for one, other in _newly_shared(slots, tensors)[:2]
    ]
    return "; ".join(clauses)


def _is_own_form(tensor: torch.Tensor) -> bool:
    """Whether an engine shards it or FP8 stores it: by design, so not worth a message."""
    return isinstance(tensor, ScaledTensor) or sharded_tensors.is_sharded(tensor)


def _were(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _newly_shared(
    slots: Sequence[Slot], tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, str]]:
    """Names of tensors that overlap here, and have memory of their own in the notebook."""
    spans = []
    for slot in slots:
        tensor = tensors[slot.name]
        if (
            tensor.device.type == "cpu"
            and not _is_own_form(tensor)
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
        ):
            address = tensor.data_ptr()
            spans.append((address, address + tensor.nbytes, slot.name, (slot.arena, slot.start)))
    return [
        (one_name, other_name)
        for (_, one_end, one_name, one_place), (start, _, other_name, other_place) in (
            itertools.pairwise(sorted(spans))
        )
        if start < one_end and one_place != other_place
    ]


def _is_another(tensor: torch.Tensor, original: weakref.ref[torch.Tensor] | None) -> bool:
    """Whether a parameter was replaced.

    Buffers do not count, because some models create them anew; nor do tensors on a device.
    """
    if not isinstance(tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    return original is not None and original() is not tensor


def _short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
