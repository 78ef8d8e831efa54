"""Checkpoints of which every process writes and reads its own part.

They are those of torch.distributed.checkpoint (DCP), so its tools read them, and they can be read
by another number of processes. Weights lie under ``model``, by name; the optimizer's state lies
under ``optimizer``, by the number that its `state_dict` gives each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.optim import Optimizer

from nbaccel.abc.place import Place
from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.strategies import shards
from nbaccel.strategies.shard_files import read_metadata, shard_problems

__all__ = ["check", "load", "save"]

_MODEL = "model."
_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."


def save(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Write a checkpoint; a collective.

    Args:
        model: A sharded model.
        optimizer: The optimizer of its parameters, if it is to be kept, too.
        folder: A folder that all processes see; made if it is not there.
    """
    content: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state = optimizer.state_dict()
        content.update(_flat(_GROUPS, dict(enumerate(state["param_groups"]))))
        content.update(_flat(_STATE, state["state"]))
    write_shards(content, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Read a checkpoint; a collective.

    Args:
        model: A sharded model, as the one that was saved.
        optimizer: The optimizer of its parameters, if its state is wanted, too.
        folder: Where :func:`save` wrote.

    Raises:
        ConfigError: An optimizer is given and the checkpoint has no state of one.
    """
    content: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        content.update(_slots(optimizer, folder))
    read_shards(content, checkpoint_id=folder)
    set_model_state_dict(model, content.pop("model"))
    if optimizer is not None:
        groups = _nested(_GROUPS, content)
        optimizer.load_state_dict(
            {
                "param_groups": [groups[number] for number in sorted(groups)],
                "state": _nested(_STATE, content),
            }
        )


def check(model: nn.Module, optimizer: Optimizer | None, folder: Path, place: Place) -> None:
    """Refuse a checkpoint that :func:`load` could not read; no collective, nothing is changed.

    Args:
        model: The model that it is to be read into.
        optimizer: The optimizer, if its state is wanted, too.
        folder: Where :func:`save` wrote.
        place: This process: files are shared out over those of a node.

    Raises:
        CheckpointDamaged: Files are missing, damaged or hold code.
        ConfigError: It is of another model, or has no optimizer.
    """
    metadata = read_metadata(folder)
    problems = shard_problems(folder, metadata, place.local_rank, place.local_world_size)
    if problems:
        raise CheckpointDamaged(*problems)
    there = metadata.state_dict_metadata
    saved = {
        key.removeprefix(_MODEL): tuple(kept.size)
        for key, kept in there.items()
        if key.startswith(_MODEL) and isinstance(kept, TensorStorageMetadata)
    }
    state = get_model_state_dict(model).items()
    wanted = {name: tuple(v.shape) for name, v in state if isinstance(v, torch.Tensor)}
    odd = [name for name, shape in wanted.items() if saved.get(name) != shape]
    if odd:
        raise ConfigError(
            f"{folder} is of another model than the {type(model).__name__}: {odd[0]} has shape "
            f"{list(saved.get(odd[0], ())) or 'of none'} there, and {list(wanted[odd[0]])} here "
            f"({len(odd)} of {len(wanted)} differ). Nothing has been loaded. Load another one."
        )
    if optimizer is not None:
        _check_optimizer(optimizer, folder, there)


def _check_optimizer(optimizer: Optimizer, folder: Path, there: Mapping[str, Any]) -> None:
    _check_has_optimizer(folder, there)
    parameters = shards.numbered_parameters(optimizer)
    numbers = {int(k.removeprefix(_STATE).partition(".")[0]) for k in there if k.startswith(_STATE)}
    if max(numbers, default=-1) >= len(parameters):
        raise ConfigError(
            f"{folder} has the state of an optimizer of at least {max(numbers) + 1} parameters, "
            f"and this one has {len(parameters)}. Nothing has been loaded. Build the optimizer as "
            "when it was saved."
        )


def _check_has_optimizer(folder: Path, there: Mapping[str, Any]) -> None:
    if not any(key.startswith(_GROUPS) for key in there):
        raise ConfigError(
            f"{folder} has no optimizer in it: it holds {len(there)} entries of a model. Training "
            "would go on with an optimizer that remembers nothing. Load it without one."
        )


def _flat(prefix: str, entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{prefix}{number}.{name}": value
        for number, entry in entries.items()
        for name, value in entry.items()
    }


def _nested(prefix: str, content: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    entries: dict[int, dict[str, Any]] = {}
    for key, value in content.items():
        if key.startswith(prefix):
            number, _, name = key.removeprefix(prefix).partition(".")
            entries.setdefault(int(number), {})[name] = value
    return entries


def _slots(optimizer: Optimizer, folder: Path) -> dict[str, Any]:
    """Where to read an optimizer's state into: empty tensors, sharded like its parameters."""
    there = read_metadata(folder).state_dict_metadata
    _check_has_optimizer(folder, there)
    parameters = shards.numbered_parameters(optimizer)
    slots: dict[str, Any] = {}
    for key, kept in there.items():
        if key.startswith(_GROUPS):
            slots[key] = _blank(kept)
        elif key.startswith(_STATE):
            number = int(key.removeprefix(_STATE).partition(".")[0])
            blank = _blank(kept)
            if blank is not None and blank.dim():
                blank = shards.place_like(blank, parameters[number])
            slots[key] = blank
    return slots


def _blank(kept: Any) -> torch.Tensor | None:
    if isinstance(kept, TensorStorageMetadata):
        return torch.zeros(kept.size, dtype=kept.properties.dtype)
    return None  # not a tensor: what is read replaces it
