"""fp32 weights of a checkpoint without ZeRO, where one file holds the model.

Trained in bf16 or fp16 by DeepSpeed's own optimizer wrapper, its optimizer's part has the weights
in fp32, laid end to end and without names. Their order is that of the optimizer's groups, which
the file does not tell; it is taken to be the model's where all numbers of elements agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nbaccel.deepspeed.weights.stored import StoredTensor, Strip, Weight

__all__ = ["weights_of_stage_0"]


def weights_of_stage_0(model: Mapping[str, Any]) -> tuple[dict[str, Weight], dict[str, str]]:
    """The weights of a checkpoint of stage 0.

    Args:
        model: Outline of its file.

    Returns:
        Weights by name, and names of tied parameters with the name of the one they are.
    """
    found: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    places: dict[tuple[int, int, tuple[int, ...]], str] = {}
    for name, value in model["module"].items():
        if not isinstance(value, StoredTensor):
            continue  # a module's extra state is no weight
        same = places.setdefault((value.start, value.offset, value.shape), name)
        if same == name or not value.numel:
            found[name] = Weight.whole(name, value)
        else:
            tied[name] = same
    buffers = set(model.get("buffer_names") or ())
    parameters = [weight for name, weight in found.items() if name not in buffers]
    found.update(_masters(model, parameters))
    return found, tied


def _masters(model: Mapping[str, Any], parameters: Sequence[Weight]) -> dict[str, Weight]:
    optimizer = model.get("optimizer")
    flat = optimizer.get("fp32_groups_flat") if isinstance(optimizer, Mapping) else None
    if not flat or len(flat) != 1:
        return {}
    strip = Strip(flat)
    if strip.numel != sum(weight.pieces[0].numel for weight in parameters):
        return {}
    masters, begin = {}, 0
    for weight in parameters:
        numel = weight.pieces[0].numel
        masters[weight.name] = Weight.flat(weight.name, weight.shape, strip.part(begin, numel))
        begin += numel
    return masters
