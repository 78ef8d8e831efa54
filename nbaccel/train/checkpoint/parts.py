"""What a checkpoint is made of, and whether a folder has all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.abc.strategy import ShardedCheckpoints, Strategy
from nbaccel.errors import ConfigError
from nbaccel.train.checkpoint.layout import Contents
from nbaccel.units import counted

__all__ = ["Parts", "check_checkpointable", "check_contents"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What is saved together, in the order in which it was prepared.

    Attributes:
        strategy: Knows how the models are wrapped or sharded.
        models: Models, wrapped or not.
        optimizers: Torch optimizers, or objects that have theirs as ``optimizer``.
        schedulers: Objects with `state_dict` and `load_state_dict`.
        loaders: Data loaders; those without `state_dict` are passed over.
        scaler: Of fp16, if there is one.
        custom: Registered objects.
        in_shards: Whether every process is to write its shards, if the strategy can.
        amid_group: Whether gradients of some batches wait for an optimizer step. They are saved,
            too, unless they are sharded: torch keeps those where nobody can reach them.
    """

    strategy: Strategy
    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    scaler: torch.amp.GradScaler | None = None
    custom: Sequence[Any] = ()
    in_shards: bool = False
    amid_group: bool = False

    @property
    def sharder(self) -> ShardedCheckpoints | None:
        """The strategy, if it can read and write shards."""
        return self.strategy if isinstance(self.strategy, ShardedCheckpoints) else None

    def plain_optimizers(self) -> list[tuple[torch.optim.Optimizer, nn.Module | None]]:
        """Torch's own optimizers, each with the model whose parameters it steps."""
        plain = [getattr(wrapped, "optimizer", wrapped) for wrapped in self.optimizers]
        return [(optimizer, self._model_of(optimizer)) for optimizer in plain]

    def _model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        named = getattr(optimizer, "model", None)  # an engine's optimizer says it
        if any(model is named for model in self.models):
            return named
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models:
            if any(id(parameter) in stepped for parameter in model.parameters()):
                return model
        return None

    def gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """This process's gradients by number of the model and name of the parameter."""
        return {
            number: {
                name: parameter.grad
                for name, parameter in self.strategy.unwrap(model).named_parameters()
                if parameter.grad is not None
            }
            for number, model in enumerate(self.models)
        }

    def set_gradients(self, found: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Put back what :meth:`gradients` gave; a parameter that is not in it has none."""
        for number, model in enumerate(self.models):
            for name, parameter in self.strategy.unwrap(model).named_parameters():
                value = found.get(number, {}).get(name)
                parameter.grad = None if value is None else value.to(parameter.device)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The first optimizer that steps a model's parameters; its shards lie with the model's."""
        own = (optimizer for optimizer, its in self.plain_optimizers() if its is model)
        return next(own, None)

    def stateful_loaders(self) -> list[tuple[int, Any]]:
        """Loaders that can say where they are, by their number among all."""
        return [
            (number, loader)
            for number, loader in enumerate(self.loaders)
            if hasattr(loader, "state_dict")
        ]


def check_checkpointable(objects: Sequence[Any]) -> None:
    """Refuse objects that cannot be part of a checkpoint.

    Args:
        objects: What was given to ``register_for_checkpointing``.

    Raises:
        ConfigError: Some lack `state_dict` or `load_state_dict`; it lists them all.
    """
    mistakes = []
    for number, item in enumerate(objects):
        methods = ("state_dict", "load_state_dict")
        missing = [name for name in methods if not callable(getattr(item, name, None))]
        if missing:
            mistakes.append(
                f"register_for_checkpointing: object {number}, a {type(item).__name__}, has no "
                f"{' and no '.join(missing)}, so it could be neither saved nor restored. Give it "
                "both methods, or register an object that has them."
            )
    if mistakes:
        raise ConfigError(*mistakes)


# ------------------------------------------------------------------------- is all there?


def check_contents(folder: Path, parts: Parts, *, with_models: bool = True) -> None:
    """Refuse a folder that does not fit, before anything is loaded from it.

    Kinds of which nothing was prepared may be there: a script that evaluates needs no optimizer.

    Args:
        folder: The checkpoint.
        parts: What is to be loaded.
        with_models: Whether weights count; a load hook may have its own.

    Raises:
        ConfigError: Something is missing or superfluous; it lists what was found and expected.
    """
    found = Contents.of(folder)
    at, mistakes = f"The checkpoint {str(folder)!r}", []
    kinds = [("scheduler", len(parts.schedulers), found.schedulers)]
    own = parts.sharder.shard_kind if parts.sharder is not None else ""
    shards = found.sharded_models.get(own, frozenset())
    others = {kind: numbers for kind, numbers in found.sharded_models.items() if kind != own}
    if others and not (shards or found.models) and (parts.models or parts.optimizers):
        mistakes += [_unreadable(at, kind, numbers) for kind, numbers in others.items()]
    else:
        if not shards:  # else they are in there, and whoever reads them will look
            kinds.insert(0, ("optimizer", len(parts.optimizers), found.optimizers))
        if with_models:
            kinds.insert(0, ("model", len(parts.models), found.models | shards))
    for kind, expected, there in kinds:
        if expected and there != frozenset(range(expected)):
            mistakes.append(_mismatch(at, kind, there, expected))
    if found.custom != frozenset(range(len(parts.custom))):
        mistakes.append(_mismatch(at, "registered object", found.custom, len(parts.custom)))
    if parts.scaler is not None and not found.has_scaler:
        mistakes.append(_mismatch(at, "scaler", frozenset(), 1))
    if mistakes:
        raise ConfigError(*mistakes)


def _mismatch(at: str, kind: str, found: frozenset[int], expected: int) -> str:
    numbers = f" ({', '.join(map(str, sorted(found)))})" if found else ""
    return (
        f"{at} has {counted(len(found), kind)}{numbers}, but {expected} "
        f"{'is' if expected == 1 else 'are'} to be loaded. States would go to the wrong ones, or "
        "be lost. Prepare and register the same objects in the same order as when it was saved."
    )


def _unreadable(at: str, kind: str, found: frozenset[int]) -> str:
    ways = {
        "fsdp": "with FSDP as it was saved, or save it with state_dict_type='FULL_STATE_DICT'",
        "deepspeed": "with DeepSpeed as it was saved, or take its weights: nbaccel to-fp32 DIR OUT",
    }
    return (
        f"{at} has {counted(len(found), 'model')} in shards, one file per process. The strategy of "
        f"this run cannot put them together. Load it {ways[kind]}."
    )
