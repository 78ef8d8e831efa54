"""Compares the processes by name: parameters, learning rates, batches seen."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nbaccel.base.units import first_few
from nbaccel.train.collectives import Collectives
from nbaccel.train.loader import PreparedLoader

_MOST_DIFFERENCES = 10

# The integers and weights of a chunk take 8 bytes per element: at most 32 MiB each.
_CHUNK_ELEMENTS = 1 << 22
_INTEGER_BY_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_fingerprint(tensor: torch.Tensor) -> int:
    """A whole number that is equal for tensors with equal bits, and almost never for others."""
    flat_tensor = tensor.detach().contiguous().reshape(-1)
    if flat_tensor.is_complex():
        flat_tensor = torch.view_as_real(flat_tensor).reshape(-1)
    integers = flat_tensor.view(_INTEGER_BY_SIZE[flat_tensor.element_size()])
    weighted_sum = torch.zeros((), dtype=torch.int64, device=flat_tensor.device)
    for first_element in range(0, integers.numel(), _CHUNK_ELEMENTS):
        chunk = integers[first_element : first_element + _CHUNK_ELEMENTS].to(torch.int64)
        # Weighted by position, because a plain sum would not see two elements swapped. int64 wraps.
        weighted_sum += (
            chunk
            * torch.arange(first_element + 1, first_element + 1 + len(chunk), device=chunk.device)
        ).sum()
    return int(weighted_sum)


def find_differences(facts: Mapping[str, Any], collectives: Collectives) -> list[str]:
    """Compare facts over the processes; a collective."""
    facts_by_rank = collectives.answers("check_in_sync", dict(facts))
    message_lines = []
    # A process may lack names that another one has.
    for fact_name in dict.fromkeys(name for rank_facts in facts_by_rank for name in rank_facts):
        values = [rank_facts.get(fact_name, "missing") for rank_facts in facts_by_rank]
        others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if others:
            # Fingerprints of parameters would tell a reader nothing.
            is_printable = all(isinstance(value, (str, float)) for value in values)
            shown_values = f": {', '.join(map(str, values))} by process" if is_printable else ""
            message_lines.append(
                f"{fact_name} differs from process 0's on process {', '.join(others)}{shown_values}"
            )
    return message_lines


def parameter_facts(models: Iterable[nn.Module]) -> dict[str, list[int]]:
    """Fingerprints by name; sharded parameters are left out, since no two processes share them."""
    all_models = list(models)
    return {
        (f"model {index}: " if len(all_models) > 1 else "") + name: [tensor_fingerprint(parameter)]
        for index, model in enumerate(all_models)
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "placements")
    }


def check_in_sync(
    models: Iterable[nn.Module],
    optimizers: Sequence[Any],
    loaders: Sequence[PreparedLoader],
    collectives: Collectives,
) -> bool:
    """Compare what the processes train, and warn on process 0 where they differ; a collective."""
    sync_facts: dict[str, Any] = dict(parameter_facts(models))
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            rate_name = f"learning rate of optimizer {index}, group {group_index}"
            sync_facts[rate_name] = float(group["lr"])
    for index, loader in enumerate(loaders):
        batches = f"{loader.batches_seen} (epoch {loader.iteration})"
        sync_facts[f"batches used of loader {index}"] = batches
    message_lines = find_differences(sync_facts, collectives)
    if message_lines and collectives.place.is_main:
        differences = first_few(message_lines, _MOST_DIFFERENCES, separator="\n  ")
        warnings.warn(
            f"The processes have drifted apart:\n  {differences}\n"
            "They train different models from here on. Look for code that changes weights on one "
            "process only, different seeds before the model was built, or a `break` that only some "
            "take.",
            stacklevel=3,  # past Accelerator.check_in_sync
        )
    return not message_lines
