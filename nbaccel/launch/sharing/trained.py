"""What became of a module in a worker, beyond its values: is it the one that the notebook knows?

Two questions, asked when weights come home:

- Did all ranks train the same model? Each rank takes a digest of the parameters that it trained,
  and the notebook compares them. A plain loop without DDP trains a different model in each process,
  and only rank 0's comes home.
- Do the values fit into the notebook's tensors as they are? Tied weights that came apart do not,
  and another dtype loses digits.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import xxhash
from torch import nn

from nbaccel.launch.sharing import memory, shards
from nbaccel.launch.sharing.arena import Slot, named_tensors, stayed
from nbaccel.units import first_few

__all__ = [
    "Origin",
    "came_apart",
    "changes",
    "differing_ranks",
    "digest_of",
    "fingerprint_of",
    "origin",
]

Origin = Mapping[str, weakref.ref[torch.Tensor]]
"""A module's tensors as they came, by name."""

Slots = Sequence[tuple[str, Slot]]
"""Where the notebook has each tensor of a module: key of the arena, slot."""

_SAMPLES = 16
_SAMPLE_BYTES = 4096
"""Of a large tensor, so many pieces of this size are read: training changes nearly all bytes."""


def origin(module: nn.Module) -> Origin:
    """What a module consists of now, to see later what was replaced."""
    return {name: weakref.ref(tensor) for name, tensor in named_tensors(module)}


def fingerprint_of(
    slots: Slots,
    module: nn.Module,
    mappings: Mapping[str, memory.Mapping],
    written: Mapping[str, Sequence[memory.Range]],
    *,
    own_only: bool = False,
) -> str:
    """A digest of the parameters of a module that a rank has trained.

    Args:
        slots: Where the notebook has the module's tensors.
        module: The module, as it is here.
        mappings: This rank's mappings of the arenas, by key.
        written: The bytes of each that this rank has written.
        own_only: Whether parameters that this rank has not written are passed over: it sees the
            notebook's values there, which other ranks may change.

    Returns:
        Equal where the sampled bytes of all parameters are equal; empty if this rank has written
        none of them. Tensors that need no gradient are passed over (BatchNorm's statistics differ
        between ranks by design), and so are sharded ones (no two ranks have the same).
    """
    tensors = dict(named_tensors(module))
    trainable = [
        (key, slot, tensors[slot.name])
        for key, slot in slots
        if slot.name in tensors and _is_compared(tensors[slot.name])
    ]
    own = [place for place in trainable if _is_written(*place, mappings, written)]
    return _digest(tensor for _, _, tensor in (own if own_only else trainable)) if own else ""


def digest_of(module: nn.Module) -> str:
    """The digest of a module as it is here, whether or not anybody has trained it."""
    return _digest(tensor for _, tensor in named_tensors(module) if _is_compared(tensor))


def _is_compared(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not shards.is_sharded(tensor)


def _is_written(
    key: str,
    slot: Slot,
    tensor: torch.Tensor,
    mappings: Mapping[str, memory.Mapping],
    written: Mapping[str, Sequence[memory.Range]],
) -> bool:
    if not stayed(tensor, slot, mappings[key]):
        return True
    return any(
        start < slot.start + slot.nbytes and slot.start < stop for start, stop in written[key]
    )


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        for piece in _samples(tensor.detach()):
            digest.update(piece.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _samples(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    count = max(1, _SAMPLE_BYTES // tensor.element_size())
    if tensor.numel() <= count * _SAMPLES or not tensor.is_contiguous():
        yield tensor.reshape(-1)
        return
    flat = tensor.view(-1)
    step = (flat.numel() - count) // (_SAMPLES - 1)
    for i in range(_SAMPLES):
        yield flat[i * step : i * step + count]


def differing_ranks(fingerprints: Mapping[int, str]) -> list[int]:
    """The ranks whose trained model is lost, because it is not rank 0's.

    Args:
        fingerprints: Rank → digest; empty for a rank that has not changed the module.

    Returns:
        Ranks that trained another model than rank 0 has. Rank 0 alone may train, as long as no
        other rank does.
    """
    first = fingerprints.get(0, "")
    return [rank for rank, found in sorted(fingerprints.items()) if found and found != first]


def came_apart(slots: Slots, current: Mapping[str, torch.Tensor]) -> str | None:
    """Which names share one tensor in the notebook, and hold different values here.

    Args:
        slots: Where the notebook has each tensor: key of the arena, slot.
        current: The tensors as they are here, by name.

    Returns:
        A clause that names them; None if all that were tied still are, or are equal.
    """
    first: dict[tuple[object, ...], str] = {}
    for key, slot in slots:
        place = (key, slot.start, slot.offset, slot.shape, slot.stride, slot.dtype)
        other = first.setdefault(place, slot.name)
        if other != slot.name and not _same(current[other], current[slot.name]):
            return f"{other} and {slot.name} were tied, and now have different values"
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other or shards.is_sharded(one) or shards.is_sharded(other):
        return True
    if one.device == other.device and one.data_ptr() == other.data_ptr():
        return True
    return one.dtype == other.dtype and torch.equal(one.detach().cpu(), other.detach().cpu())


def changes(slots: Slots, current: Mapping[str, torch.Tensor], origins: Origin) -> str:
    """What is not as the notebook has it, although the values can be copied there.

    Args:
        slots: Where the notebook has each tensor.
        current: The tensors as they are here, by name.
        origins: The tensors as they came to this worker.

    Returns:
        A clause; empty if there is nothing to tell.
    """
    dtypes: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    replaced = []
    for _, slot in slots:
        tensor = current[slot.name]
        if shards.is_sharded(tensor):
            continue
        if tensor.dtype != slot.dtype:
            dtypes.setdefault((tensor.dtype, slot.dtype), []).append(slot.name)
        elif _is_another(tensor, origins.get(slot.name)):
            replaced.append(slot.name)
    lines = [
        f"{first_few(names, 2)} came as {_short(new)} and "
        f"{'was' if len(names) == 1 else 'were'} cast to {_short(old)}"
        for (new, old), names in dtypes.items()
    ]
    if replaced:
        lines.append(f"{first_few(replaced, 2)} {'was' if len(replaced) == 1 else 'were'} replaced")
    return "; ".join(lines)


def _is_another(tensor: torch.Tensor, origin: weakref.ref[torch.Tensor] | None) -> bool:
    """Whether a parameter was replaced. Some models make their buffers anew, and devices theirs."""
    if not isinstance(tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    return origin is not None and origin() is not tensor


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
