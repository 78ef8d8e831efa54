"""Have the processes drifted apart? Compared by name: parameters, learning rates, batches seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from nbaccel.train.collectives import Collectives

__all__ = ["differences", "fingerprint"]

_CHUNK = 1 << 22  # elements
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> int:
    """A whole number that is equal where all bits of two tensors are equal, and hardly elsewhere.

    Args:
        tensor: Of any shape and dtype; it is read once, on its device.

    Returns:
        The sum of its bits read as integers, weighted by position, modulo 2**64.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), _CHUNK):  # the integers take eight bytes each
        part = bits[start : start + _CHUNK].to(torch.int64)
        total += (part * torch.arange(start + 1, start + 1 + len(part), device=part.device)).sum()
    return int(total)


def differences(facts: Mapping[str, Any], collectives: Collectives) -> list[str]:
    """Compare facts over the processes; a collective.

    Args:
        facts: Name → JSON value on this process.
        collectives: How to hear of the others'.

    Returns:
        A line for every name whose value is not the same everywhere, the same on all processes.
    """
    everybody = collectives.answers("check_in_sync", dict(facts))
    names = list(dict.fromkeys(name for one in everybody for name in one))
    lines = []
    for name in names:
        values = [one.get(name, "missing") for one in everybody]
        if any(value != values[0] for value in values):
            odd = [str(rank) for rank, value in enumerate(values) if value != values[0]]
            plain = all(isinstance(value, (str, float)) for value in values)
            shown = f": {', '.join(map(str, values))} by process" if plain else ""
            lines.append(f"{name} differs from process 0's on process {', '.join(odd)}{shown}")
    return lines


def parameter_facts(models: Iterable[nn.Module]) -> dict[str, list[int]]:
    """Fingerprints by name; sharded parameters are left out, since no two processes share them."""
    several = list(models)
    return {
        (f"model {i}: " if len(several) > 1 else "") + name: [fingerprint(parameter)]
        for i, model in enumerate(several)
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "placements")
    }
