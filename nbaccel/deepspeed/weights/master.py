"""fp32 weights of a checkpoint without ZeRO, where one file holds the model.

Trained in bf16 or fp16, the model's part has rounded weights; those in fp32 are in the optimizer's
part, laid end to end, group by group, without names. Whose they are is found out by rounding:
each parameter takes the next numbers of the group where these round to its own, bit by bit. All
that the optimizer has must find its parameter that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbaccel.deepspeed.weights.reading import Reader
from nbaccel.deepspeed.weights.stored import StoredTensor, Strip, Weight
from nbaccel.errors import ConfigError

__all__ = ["weights_of_stage_0"]

_ROUNDED = frozenset({"bfloat16", "float16"})


def weights_of_stage_0(
    path: Path, model: Mapping[str, Any], *, exclude_frozen_parameters: bool
) -> tuple[dict[str, Weight], dict[str, str]]:
    """The weights of a checkpoint of stage 0.

    Args:
        path: Its file.
        model: The file's outline.
        exclude_frozen_parameters: Leave out what was not trained.

    Returns:
        Weights by name, and names of tied parameters with the name of the one they are.

    Raises:
        ConfigError: The file does not tell what is asked for.
    """
    found, tied = _stored(model)
    buffers = set(model.get("buffer_names") or ())
    parameters = [weight for name, weight in found.items() if name not in buffers]
    trained = _masters(path, model, parameters)
    if exclude_frozen_parameters:
        if not trained:
            raise ConfigError(
                f"{path} was saved without ZeRO and in fp32 (or without an optimizer), and does "
                f"not tell which of its {len(parameters)} parameters were frozen. Leave "
                "exclude_frozen_parameters out, and drop them by their names."
            )
        found = {n: w for n, w in found.items() if n in buffers or n in trained}
    found.update(trained)
    return found, {name: target for name, target in tied.items() if target in found}


def _stored(model: Mapping[str, Any]) -> tuple[dict[str, Weight], dict[str, str]]:
    """The model's tensors as they are; of those that share their place, the first."""
    found: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[int, int, tuple[int, ...]], str] = {}
    for name, value in model["module"].items():
        if not isinstance(value, StoredTensor):
            continue  # a module's extra state is no weight
        same = first.setdefault((value.start, value.offset, value.shape), name)
        if same == name or not value.numel:
            found[name] = Weight.whole(name, value)
        else:
            tied[name] = same
    return found, tied


def _masters(
    path: Path, model: Mapping[str, Any], parameters: Sequence[Weight]
) -> dict[str, Weight]:
    strips = _groups(model.get("optimizer"))
    begins = [0] * len(strips)
    trained: dict[str, Weight] = {}
    with Reader() as reader:
        for weight in parameters:
            (own,) = weight.pieces
            if own.dtype not in _ROUNDED or not own.numel:
                continue
            for number, strip in enumerate(strips):
                pieces = strip.part(begins[number], own.numel)
                if sum(piece.numel for piece in pieces) != own.numel:
                    continue
                if _rounds_to(reader, pieces, own):
                    begins[number] += own.numel
                    trained[weight.name] = Weight.flat(weight.name, weight.shape, pieces)
                    break
    left = sum(strip.numel for strip in strips) - sum(begins)
    if left:
        raise ConfigError(
            f"{path} has {left:,} fp32 weights in its optimizer that round to no parameter of the "
            "model: the two were not in step when it was saved, so whose they are is not certain. "
            "Load the checkpoint into its engine and use fp32_state_dict(engine)."
        )
    return trained


def _groups(optimizer: Any) -> list[Strip]:
    """The optimizer's fp32 weights, by group; none where it trained the model's own."""
    if not isinstance(optimizer, Mapping):
        return []
    flat = optimizer.get("fp32_groups_flat")
    if flat is not None:
        return [Strip([tensor]) for tensor in flat]
    groups = optimizer.get("fp32_groups") or ()
    return [Strip([tensor.part(0, tensor.numel) for tensor in group]) for group in groups]


def _rounds_to(reader: Reader, pieces: tuple[StoredTensor, ...], own: StoredTensor) -> bool:
    """Whether fp32 numbers are, in 16 bit, exactly these; a few MiB of both at a time."""
    master = Weight("", (own.numel,), "float32", pieces)
    begin = 0
    for chunk in reader.chunks(master):
        numbers = np.frombuffer(bytes(chunk), "<f4")
        part = own.part(begin, numbers.size)
        stored = b"".join(map(bytes, reader.chunks(Weight("", part.shape, own.dtype, (part,)))))
        if _rounded(numbers, own.dtype) != stored:
            return False
        begin += numbers.size
    return True


def _rounded(numbers: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "float16":
        return numbers.astype("<f2").tobytes()
    bits = numbers.view("<u4")  # to the nearest, and of two to the even one
    upper: np.ndarray[Any, Any] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return upper.astype("<u2").tobytes()
