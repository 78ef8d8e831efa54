"""Everything that a load will need, read and compared before anything is changed.

What is small is read now and kept; of weights, optimizers and gradients only names and shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from torch.optim import Optimizer

from nbaccel.abc.place import Place
from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.train import rng
from nbaccel.train.checkpoint.files import outline, read
from nbaccel.train.checkpoint.fitting import model_problem, optimizer_problem, state_problem
from nbaccel.train.checkpoint.parts import Parts
from nbaccel.train.checkpoint.sources import Sources

__all__ = ["Trial", "Verdict", "twins"]


@dataclass(slots=True)
class Verdict:
    """What is wrong with a checkpoint.

    Attributes:
        damaged: Files that are not as they were saved.
        unfit: Files that do not fit what is to be loaded.
    """

    damaged: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise what was found, if anything was.

        Raises:
            CheckpointDamaged: Files are damaged.
            ConfigError: They do not fit.
        """
        if self.damaged:
            raise CheckpointDamaged(*self.damaged)
        if self.unfit:
            raise ConfigError(*self.unfit)


class Trial:
    """Reads for one process; afterwards it has what is small.

    Args:
        sources: The files.
        parts: What they are to be loaded into.
        options: Of ``torch.load``, for optimizers, schedulers and loaders.

    Attributes:
        schedulers: States by number.
        scaler: Its state, if there is one.
        custom: States of registered objects by number; models and optimizers among them are read
            when they are loaded.
        loaders: States by number.
        generators: Random states of this process; None where it has none.
        step: The accumulation step; None where no file has it.
        verdict: What is wrong.
    """

    def __init__(self, sources: Sources, parts: Parts, options: Mapping[str, Any]) -> None:
        self._sources = sources
        self._parts = parts
        self._options = dict(options)
        self.schedulers: dict[int, Any] = {}
        self.scaler: Any = None
        self.custom: dict[int, Any] = {}
        self.loaders: dict[int, Any] = {}
        self.generators: Any = None
        self.step: int | None = None
        self.verdict = Verdict()

    def run(self, place: Place, *, strict: bool, with_models: bool) -> Verdict:
        """Read everything.

        Args:
            place: This process.
            strict: Whether a model and its file must have the same names.
            with_models: Whether weights must fit; with load hooks, only they know which are read.

        Returns:
            What is wrong.
        """
        if with_models:
            for number, path in self._sources.weights.items():
                self._attempt(partial(self.check_weights, path, self._parts.models[number], strict))
        for number, path in self._sources.optimizers.items():
            self._attempt(partial(self._check_optimizer, path, number))
        for shards in self._shards():
            self._attempt(shards)
        for small in (self._read_schedulers, self._read_loaders, self._read_custom):
            self._attempt(small)
        if self._sources.gradients is not None:
            self._attempt(partial(outline, self._sources.gradients, **self._options))
        self._attempt(partial(self._read_generators, place))
        return self.verdict

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except CheckpointDamaged as error:
            self.verdict.damaged += error.mistakes
        except ConfigError as error:
            self.verdict.unfit += error.mistakes

    # --------------------------------------------------------------------- names and shapes

    def check_weights(self, path: Path, model: nn.Module, strict: bool) -> None:
        """Compare a file of weights with a model.

        Raises:
            CheckpointDamaged: It cannot be read.
            ConfigError: It does not fit.
        """
        model = self._parts.strategy.unwrap(model)
        shapes = _safe_shapes(path) if path.suffix == ".safetensors" else _shapes(path)
        for name, twin in twins(model).items():
            if name not in shapes and twin in shapes:
                shapes[name] = shapes[twin]
        _refuse(path, model_problem(model, shapes, strict=strict))

    def _check_optimizer(self, path: Path, number: int) -> None:
        optimizer, _ = self._parts.plain_optimizers()[number]
        _refuse(path, optimizer_problem(optimizer, outline(path, **self._options)))

    def _shards(self) -> Iterator[Callable[[], None]]:
        sharder = self._parts.sharder
        if sharder is not None:
            sources = self._sources
            for one in (*sources.sharded_models.values(), *sources.sharded_optimizers.values()):
                yield partial(sharder.check_sharded, one.model, one.optimizer, one.folder)

    # --------------------------------------------------------------------- what is small

    def _read_schedulers(self) -> None:
        for number, path in enumerate(self._sources.schedulers):
            self.schedulers[number] = self._state(path, self._parts.schedulers[number])
        if self._sources.scaler is not None:
            self.scaler = read(self._sources.scaler)
            _refuse(self._sources.scaler, state_problem(self._parts.scaler, self.scaler))

    def _read_loaders(self) -> None:
        loaders = dict(self._parts.stateful_loaders())
        for number, path in self._sources.loaders.items():
            state = self.loaders[number] = read(path, **self._options)
            check = getattr(loaders[number], "check_state_dict", None)
            if check is not None:
                check(state)
            elif not getattr(loaders[number], "use_stateful_dataloader", False):
                _refuse(path, state_problem(loaders[number], state))

    def _read_custom(self) -> None:
        for number, (path, item) in enumerate(
            zip(self._sources.custom, self._parts.custom, strict=True)
        ):
            if isinstance(item, nn.Module):
                _refuse(path, model_problem(item, _shapes(path)))
            elif isinstance(item, Optimizer):
                _refuse(path, optimizer_problem(item, outline(path)))
            else:
                self.custom[number] = read_custom(path, item, self._options)

    def _state(self, path: Path, item: Any) -> Any:
        state = read(path, **self._options)
        _refuse(path, state_problem(item, state))
        return state

    def _read_generators(self, place: Place) -> None:
        sources = self._sources
        first = {} if sources.first_generators is None else read(sources.first_generators)
        own = None if sources.generators is None else read(sources.generators)
        try:
            self.step = (first if own is None else own).get("step")
            if own is not None:
                with rng.preserved():
                    rng.restore(place, own)
        except Exception as error:  # generators refuse what is not theirs in many ways
            raise CheckpointDamaged(
                f"{sources.generators} holds no states of random number generators "
                f"({type(error).__name__}: {error}). Load another checkpoint."
            ) from error
        self.generators = own


def read_custom(path: Path, item: Any, options: Mapping[str, Any]) -> Any:
    """The state of a registered object: plain data, and classes that its state has now.

    Args:
        path: The file.
        item: The object.
        options: Of ``torch.load``; ``weights_only=False`` allows any pickle.

    Returns:
        The state.

    Raises:
        CheckpointDamaged: It cannot be read, or holds something else.
    """
    chosen = {k: v for k, v in options.items() if k == "weights_only"}
    return read(path, allowed=_classes_in(item.state_dict()), **chosen)


def _classes_in(state: Any) -> set[type]:
    """Classes of the user's own in a state: instances of them may be read back."""
    found: set[type] = set()
    waiting, seen = [state], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__ != "builtins":
            found.add(kind)
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += value
        elif not isinstance(value, type) and not kind.__module__.startswith(("torch", "numpy")):
            waiting += getattr(value, "__dict__", {}).values()
    return found


def _refuse(path: Path, problem: str) -> None:
    if problem:
        raise ConfigError(
            f"{path} {problem}. Nothing has been loaded. Prepare and register the same objects in "
            "the same order as when it was saved, or load another checkpoint."
        )


def _safe_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, "numpy") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read ({error}). Nothing has been loaded. Load another checkpoint."
        ) from error
    told = {name: shapes[twin] for name, twin in metadata.items() if twin in shapes}
    return {**told, **shapes}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    state = outline(path)
    if not isinstance(state, Mapping):
        raise ConfigError(f"{path} holds no weights by name, but a {type(state).__name__}.")
    return {str(n): tuple(v.shape) for n, v in state.items() if hasattr(v, "shape")}


def twins(model: nn.Module) -> dict[str, str]:
    """Names of tied tensors, each with another name of the same tensor."""
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {name: twin for tied in names.values() for name in tied for twin in tied if twin != name}
