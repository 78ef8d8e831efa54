"""Which of several engines a loss, or a parameter, belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from nbaccel.deepspeed.strategy.drive import Drive
from nbaccel.errors import ConfigError

__all__ = ["drive_of_loss", "drive_of_parameters"]


def drive_of_loss(loss: torch.Tensor, drives: Sequence[Drive]) -> Drive:
    """The engine whose model made a loss.

    Args:
        loss: A 0-d tensor with a graph.
        drives: All engines.

    Raises:
        ConfigError: None of them can train, or the loss comes from several.
    """
    able = [drive for drive in drives if drive.can_train]
    if not able:
        raise ConfigError(
            f"backward(loss={float(loss.detach())}) has no engine to go through: {len(drives)} "
            "prepared model(s), none with an optimizer. Prepare the model and its optimizer in "
            "one call."
        )
    if len(able) == 1:
        return able[0]
    ran = [drive for drive in able if drive.ran]
    found = _in_graph(loss, ran) if len(ran) > 1 else ran
    if len(found) == 1:
        return found[0]
    names = ", ".join(type(drive.engine.module).__name__ for drive in found or able)
    raise ConfigError(
        f"backward(loss={float(loss.detach())}) comes from {len(found)} of {len(able)} engines "
        f"({names}). Each engine reduces its own gradients, in a backward pass of its own. Call "
        "backward once for each model, with the others' outputs detached, or put the models in "
        "one module."
    )


def _in_graph(loss: torch.Tensor, drives: Sequence[Drive]) -> list[Drive]:
    """Those with parameters in the loss's graph."""
    owners = {id(p): drive for drive in drives for p in drive.engine.module.parameters()}
    found: list[Drive] = []
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        drive = owners.get(id(getattr(node, "variable", None)))
        if drive is not None and drive not in found:
            found.append(drive)
        waiting += [before for before, _ in node.next_functions]
    return found


def drive_of_parameters(parameters: Iterable[torch.Tensor], drives: Sequence[Drive]) -> Drive:
    """The engine of parameters.

    Args:
        parameters: Of a prepared model.
        drives: All engines.

    Raises:
        ConfigError: They are of no engine, or of several.
    """
    wanted = {id(parameter) for parameter in parameters}
    found = [
        drive
        for drive in drives
        if drive.can_train and any(id(p) in wanted for p in drive.engine.module.parameters())
    ]
    if len(found) != 1:
        raise ConfigError(
            f"clip_grad_norm_ got {len(wanted)} parameter(s) of {len(found)} engines. DeepSpeed "
            "clips what one engine has reduced. Give the parameters of one prepared model."
        )
    return found[0]
