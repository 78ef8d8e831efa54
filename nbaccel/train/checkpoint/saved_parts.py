"""The parts of a checkpoint on their way back: each knows its files, checks them and is loaded.

A part that is small is read when it is checked, and kept; of weights, optimizers and registered
models only names and shapes are read before every process has agreed to load.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.plan.contracts.training import Place, ShardedCheckpoints, Strategy
from nbaccel.train import rng
from nbaccel.train.checkpoint.compatibility import (
    model_problem,
    named_as_in,
    optimizer_problem,
    pickled_shapes,
    read_weights,
    saved_shapes,
    state_problem,
)
from nbaccel.train.checkpoint.files import read_torch_file, read_torch_outline
from nbaccel.train.checkpoint.left_out import trained_problem


@dataclass(kw_only=True)
class SavedPart:
    """A file of a checkpoint, and what it is read into."""

    path: Path
    is_common: bool = True
    """Whether all processes read it; others are one process's own."""

    def files(self, recorded: Iterable[str]) -> Iterable[str]:
        """Names of its files below the checkpoint; `recorded` are those of the manifest."""
        return [self.path.name]

    def check(self) -> None:
        """Refuse what does not fit; nothing is changed."""

    def load(self) -> None:
        """Put it back."""

    def refuse(self, problem: str) -> None:
        """Raise a problem, if there is one."""
        if problem:
            raise ConfigError(
                f"{self.path} {problem}. Nothing has been loaded. Prepare and register the same "
                "objects in the same order as when it was saved, or load another checkpoint."
            )


# ------------------------------------------------------------------------- small, and can be undone


@dataclass(kw_only=True)
class SmallState(SavedPart):
    """The state of an object with `state_dict` and `load_state_dict`."""

    target: Any
    read_options: Mapping[str, Any]
    state: Any = None

    def check(self) -> None:
        """Read it."""
        self.state = read_torch_file(self.path, **self.read_options)
        self.refuse(state_problem(self.target, self.state))

    def load(self) -> None:
        """Put it back."""
        self.target.load_state_dict(self.state)

    def undo_step(self) -> Callable[[], Any] | None:
        """What makes the object what it is now; None where its state cannot be copied."""
        with contextlib.suppress(Exception):
            state_before = copy.deepcopy(self.target.state_dict())
            return lambda: self.target.load_state_dict(state_before)
        return None


class PrecisionState(SmallState):
    """Scales and histories of what layers compute in; another model's are left to the precision."""

    def check(self) -> None:
        """Read it."""
        self.state = read_torch_file(self.path)


class LoaderState(SmallState):
    """Where a loader was in its data."""

    def check(self) -> None:
        """Read it; loaders of nbaccel compare it themselves, and torchdata's cannot."""
        self.state = read_torch_file(self.path, **self.read_options)
        compare = getattr(self.target, "check_state_dict", None)
        if compare is not None:
            compare(self.state)
        elif not getattr(self.target, "use_stateful_dataloader", False):
            self.refuse(state_problem(self.target, self.state))

    def undo_step(self) -> Callable[[], Any] | None:
        """None: a loader that refuses its state has not changed."""
        return None


class RegisteredState(SmallState):
    """The state of a registered object: plain data, and classes that its state has now."""

    def check(self) -> None:
        """Read it."""
        options = {n: value for n, value in self.read_options.items() if n == "weights_only"}
        classes = _classes_in(self.target.state_dict())
        self.state = read_torch_file(self.path, allowed=classes, **options)


def _classes_in(state_dict: Any) -> set[type]:
    """Classes of the user's own in a state: instances of them may be read back."""
    classes: set[type] = set()
    pending = [state_dict]
    seen_ids = set()
    while pending:
        value = pending.pop()
        # By id, because values need not be hashable, and a state may contain itself.
        if id(value) in seen_ids:
            continue
        seen_ids.add(id(value))
        value_class = value if isinstance(value, type) else type(value)
        if value_class.__module__ != "builtins":
            classes.add(value_class)
        if isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending += value
        elif value is not value_class and not value_class.__module__.startswith(("torch", "numpy")):
            pending += getattr(value, "__dict__", {}).values()
    return classes


# ------------------------------------------------------------------------- large, read twice


@dataclass(kw_only=True)
class WeightsFile(SavedPart):
    """Weights of a model in one file."""

    model: nn.Module
    strategy: Strategy
    left_out: frozenset[str]
    """Names of frozen parameters that were not saved."""
    device: torch.device
    options: Mapping[str, Any]
    """Of the model's `load_state_dict`."""

    def check(self) -> None:
        """Compare names and shapes."""
        model = self.strategy.unwrap(self.model)
        is_strict = bool(self.options.get("strict", True))
        if is_strict:
            self.refuse(trained_problem(model, self.left_out))
        shapes = saved_shapes(self.path, model)
        self.refuse(model_problem(model, shapes, strict=is_strict, left_out=self.left_out))

    def load(self) -> None:
        """Put them back."""
        model = self.strategy.unwrap(self.model)
        weights = named_as_in(model, read_weights(self.path, model, self.device))
        # Names have been compared: what is missing is frozen and stays as it is.
        partial = {"strict": False} if self.left_out else {}
        self.strategy.load_model_state(self.model, weights, **{**self.options, **partial})


@dataclass(kw_only=True)
class ShardFolder(SavedPart):
    """A folder of which every process reads a part: a model, with an optimizer or without."""

    model: nn.Module
    optimizer: Optimizer | None
    strategy: Strategy
    sharder: ShardedCheckpoints
    left_out: frozenset[str]
    ranks_there: tuple[int, ...]

    def files(self, recorded: Iterable[str]) -> Iterable[str]:
        """Those that exist, and those of the manifest."""
        root = self.path.parent
        paths = (path for path in self.path.rglob("*") if path.is_file())
        inside = [name for name in recorded if name.startswith(f"{self.path.name}/")]
        return [*(path.relative_to(root).as_posix() for path in paths), *inside]

    def check(self) -> None:
        """Compare names and shapes."""
        self.refuse(trained_problem(self.strategy.unwrap(self.model), self.left_out))
        self.sharder.check_sharded(
            self.model,
            self.optimizer,
            self.path,
            left_out=self.left_out,
            ranks_there=self.ranks_there,
        )

    def load(self) -> None:
        """Put this process's part back."""
        self.sharder.load_sharded(self.model, self.optimizer, self.path, left_out=self.left_out)


@dataclass(kw_only=True)
class OptimizerFile(SavedPart):
    """The state of an optimizer in one file."""

    optimizer: Optimizer
    model: nn.Module | None
    strategy: Strategy
    read_options: Mapping[str, Any]

    def check(self) -> None:
        """Compare groups and shapes."""
        outline = read_torch_outline(self.path, **self.read_options)
        self.refuse(optimizer_problem(self.optimizer, outline))

    def load(self) -> None:
        """Put it back."""
        state = read_torch_file(self.path, **self.read_options)
        if self.model is None:
            self.optimizer.load_state_dict(state)
        else:
            self.strategy.load_optimizer_state(self.model, self.optimizer, state)


@dataclass(kw_only=True)
class RegisteredLarge(SavedPart):
    """A registered model or optimizer, of which no second copy is kept."""

    target: nn.Module | Optimizer

    def check(self) -> None:
        """Compare names and shapes."""
        if isinstance(self.target, nn.Module):
            self.refuse(model_problem(self.target, pickled_shapes(self.path)))
        else:
            self.refuse(optimizer_problem(self.target, read_torch_outline(self.path)))

    def load(self) -> None:
        """Put it back."""
        self.target.load_state_dict(read_torch_file(self.path))


@dataclass(kw_only=True)
class WaitingGradients(SavedPart):
    """This process's gradients of some batches, which wait for an optimizer step."""

    put_back: Callable[[Any], None]
    read_options: Mapping[str, Any]
    is_common: bool = False

    def check(self) -> None:
        """Look whether they can be read."""
        read_torch_outline(self.path, **self.read_options)

    def load(self) -> None:
        """Put them back."""
        self.put_back(read_torch_file(self.path, **self.read_options))


@dataclass(kw_only=True)
class RandomStates(SavedPart):
    """Random states of this process, and the accumulation step."""

    place: Place
    is_common: bool = False
    states: Any = None

    def check(self) -> None:
        """Set and undone: only setting a state shows whether a generator accepts it."""
        self.states = read_torch_file(self.path)
        try:
            with rng.preserve_rng_states():
                rng.restore_rng_states(self.place, self.states)
        except Exception as error:  # each generator has its own exceptions for a wrong state
            raise CheckpointDamaged(
                f"{self.path} holds no states of random number generators "
                f"({type(error).__name__}: {error}). Load another checkpoint."
            ) from error

    def load(self) -> None:
        """Continue where they were saved."""
        rng.restore_rng_states(self.place, self.states)
