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
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.optim import Optimizer

from nbaccel.errors import ConfigError
from nbaccel.strategies import shards

__all__ = ["load", "save"]

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
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    if not any(key.startswith(_GROUPS) for key in there):
        raise ConfigError(
            f"{folder} has no optimizer in it: it holds {len(there)} entries of a model. Training "
            "would go on with an optimizer that remembers nothing. Load it without one."
        )
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
