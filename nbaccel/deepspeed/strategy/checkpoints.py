"""Checkpoints in DeepSpeed's own form: every process writes its part into one folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.deepspeed.weights.archive import is_readable, read_outline
from nbaccel.errors import CheckpointDamaged, ConfigError

__all__ = ["check", "check_plain", "load", "load_plain", "save", "save_plain"]


def save(engine: Any, folder: Path) -> None:
    """Write weights and the optimizer's state; a collective.

    Args:
        engine: The engine.
        folder: Where; its name is DeepSpeed's tag, and beside it lies ``latest``.
    """
    engine.save_checkpoint(str(folder.parent), tag=folder.name)


def load(engine: Any, folder: Path) -> None:
    """Read what :func:`save` wrote; a collective.

    Args:
        engine: The engine, of as many processes as wrote.
        folder: Where; :func:`check` has found nothing wrong with it.

    Raises:
        ConfigError: DeepSpeed found nothing that it can read.
    """
    loaded, _ = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if loaded is None:
        raise ConfigError(
            f"The checkpoint {str(folder)!r} has files that DeepSpeed cannot read: it loaded "
            f"nothing. It holds {', '.join(sorted(p.name for p in folder.iterdir()))}. Load "
            "another one."
        )


def save_plain(model: nn.Module, folder: Path) -> None:
    """Write the weights of a model that has no engine, because it is not trained.

    Args:
        model: The model.
        folder: Where.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / _PLAIN)


def load_plain(model: nn.Module, folder: Path) -> None:
    """Read what :func:`save_plain` wrote.

    Args:
        model: The model.
        folder: Where.
    """
    device = next(model.parameters()).device
    model.load_state_dict(torch.load(folder / _PLAIN, map_location=device, weights_only=True))


def check(engine: Any, folder: Path) -> None:
    """Refuse a checkpoint that :func:`load` could not read; no collective, nothing is changed.

    Args:
        engine: The engine.
        folder: Where :func:`save` wrote; each file in it is an archive without damage.

    Raises:
        CheckpointDamaged: Files are missing, or hold something else.
        ConfigError: Another number of processes wrote it, or it is of another model.
    """
    if engine._config.checkpoint_config.get("load_universal", False):
        return  # which is put together from files of another kind
    files = _model_files(folder)
    if not files:
        raise CheckpointDamaged(
            f"{folder} has no file *_model_states.pt: it is not whole. Nothing has been loaded. "
            "Copy what is missing from where it was saved, or load another checkpoint."
        )
    first = next((path for path in files if is_readable(path)), None)
    if first is None:
        return  # in torch's format of before 2020, which tells nothing without its numbers
    states = read_outline(first)
    if not isinstance(states, Mapping):
        raise CheckpointDamaged(f"{first} holds no states of a model. Load another checkpoint.")
    _check_ranks(folder, engine, files, states.get("dp_world_size"))
    _check_shapes(folder, engine, states)


def check_plain(model: nn.Module, folder: Path) -> None:
    """Refuse what :func:`load_plain` could not read.

    Raises:
        CheckpointDamaged: The file is missing.
    """
    if not (folder / _PLAIN).is_file():
        raise CheckpointDamaged(
            f"{folder / _PLAIN} is missing, which has the weights of the {type(model).__name__}. "
            "Nothing has been loaded. Load another checkpoint, or copy it again."
        )


_PLAIN = "pytorch_model.bin"
_ZERO_FILE = re.compile(r"(?:\w*_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


def _model_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*mp_rank_00_model_states.pt"))


def _check_ranks(folder: Path, engine: Any, models: Sequence[Path], saved_by: Any) -> None:
    """DeepSpeed says it in the words of its own parts, and at stage 3 by an assertion."""
    matches = (_ZERO_FILE.fullmatch(path.name) for path in folder.iterdir())
    ranks = {int(match[1]) for match in matches if match}
    world = int(engine.dp_world_size)
    stage = int(engine.zero_optimization_stage())
    count = saved_by if isinstance(saved_by, int) else max(ranks, default=-1) + 1
    missing = [f"optimizer's states of rank {rank}" for rank in sorted({*range(count)} - ranks)]
    if models[0].name.startswith("zero_pp_rank_"):
        there = {int(path.name.split("_")[3]) for path in models}
        missing += [f"model's states of rank {rank}" for rank in sorted({*range(count)} - there)]
    if engine._config.checkpoint_config.get("use_node_local_storage", False):
        return  # then the other nodes' files are not here
    if stage == 0 or not (ranks or models[0].name.startswith("zero_pp_rank_")):
        return
    if missing:
        raise CheckpointDamaged(
            f"{folder} was saved by {count} processes, and the {', '.join(missing)} are missing: a "
            "part of every weight is in them. Nothing has been loaded. Copy them from where it was "
            "saved, or load another checkpoint."
        )
    if count != world:
        raise ConfigError(
            f"The checkpoint {str(folder)!r} is of {count} processes, and this run has {world}: "
            "DeepSpeed's parts fit only as many as wrote them. Run as many, or take the weights "
            f"alone (nbaccel to-fp32 {folder.parent} OUT), or convert it with "
            "python -m deepspeed.checkpoint.ds_to_universal."
        )


def _check_shapes(folder: Path, engine: Any, states: Mapping[str, Any]) -> None:
    groups = [*(states.get("param_shapes") or ()), states.get("frozen_param_shapes") or {}]
    saved = {n: tuple(shape) for group in groups for n, shape in group.items()}
    wanted = {
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
    }
    odd = [name for name in saved.keys() & wanted.keys() if saved[name] != wanted[name]]
    odd += sorted(name for name in saved if name not in wanted)
    if odd:
        raise ConfigError(
            f"{folder} is of another model than the {type(engine.module).__name__}: {odd[0]} has "
            f"shape {list(saved[odd[0]])} there, and {list(wanted.get(odd[0], ())) or 'none'} here "
            f"({len(odd)} of {len(saved)} differ). Nothing has been loaded. Load another one."
        )
