"""Checkpoints in DeepSpeed's own form: every process writes its part into one folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.errors import ConfigError

__all__ = ["load", "load_plain", "save", "save_plain"]


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
        folder: Where.

    Raises:
        ConfigError: Another number of processes wrote it, or it is not whole.
    """
    _check_ranks(folder, engine)
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


_PLAIN = "pytorch_model.bin"
_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


def _check_ranks(folder: Path, engine: Any) -> None:
    """DeepSpeed says it in the words of its own parts, and at stage 3 by an assertion."""
    matches = (_ZERO_FILE.fullmatch(path.name) for path in folder.iterdir())
    ranks = {int(match[1]) for match in matches if match}
    world = int(engine.dp_world_size)
    whole = bool(engine._config.checkpoint_config.get("load_universal", False))
    stage = int(engine.zero_optimization_stage())
    if whole or not ranks or ranks == set(range(world)) or stage == 0:
        return
    missing = set(range(max(ranks) + 1)) - ranks
    if missing:
        raise ConfigError(
            f"The checkpoint {str(folder)!r} lacks the parts of rank {sorted(missing)}: a part of "
            "every weight would be missing. Save with every process, or load another one."
        )
    raise ConfigError(
        f"The checkpoint {str(folder)!r} is of {len(ranks)} processes, and this run has {world}: "
        "DeepSpeed's parts fit only as many as wrote them. Run as many, or take the weights alone "
        f"(nbaccel to-fp32 {folder.parent} OUT), or convert it with "
        "python -m deepspeed.checkpoint.ds_to_universal."
    )
