"""``load_state``: puts back what ``save_state`` wrote, if all of it is there and as it was written.

    each process                                                everybody hears of it
    ------------                                                ---------------------
    sizes and checksums of files (shared out in a node)    ◄─►  damaged? nothing is loaded
    states read, names and shapes compared                 ◄─►  damaged or unfit? nothing is loaded
    load hooks; schedulers, registered objects, loaders    ◄─►  refused? put back as they were
    weights, optimizers, random numbers                    ◄─►  all through

A refusal is the same exception on all processes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from nbaccel.abc.place import Place
from nbaccel.config.mistakes import shown
from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.intact import Recorded
from nbaccel.log import get_logger
from nbaccel.train import rng
from nbaccel.train.checkpoint import layout, manifest
from nbaccel.train.checkpoint.files import read
from nbaccel.train.checkpoint.folder import all_fine, standing
from nbaccel.train.checkpoint.parts import Parts, check_contents
from nbaccel.train.checkpoint.sources import Sources, find_sources
from nbaccel.train.checkpoint.trial import Trial, Verdict, twins
from nbaccel.train.collectives import Collectives

__all__ = ["LoadHook", "load_state"]

LoadHook = Callable[[list[Any], str], None]
_log = get_logger(__name__)


def load_state(
    folder: str | Path,
    parts: Parts,
    place: Place,
    collectives: Collectives,
    *,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    hooks: Iterable[LoadHook] = (),
    **options: Any,
) -> int | None:
    """Put back what :func:`~nbaccel.train.checkpoint.save_state` wrote; a collective.

    Nothing in the files is run: states hold plain data, and those of registered objects also
    instances of classes that the object's own state has at the time. ``weights_only=False`` in
    `load_kwargs` lifts that, and lets a file run any code; so do DeepSpeed's own files
    (``pytorch_model/``), which DeepSpeed reads, always. Load such only if you trust who wrote it.

    Args:
        folder: The checkpoint.
        parts: What to load into.
        place: This process.
        collectives: All processes.
        map_location: ``cpu`` or ``on_device``: where states are read to before they go where they
            belong; None takes the CPU.
        load_kwargs: Of ``torch.load``, for optimizers, schedulers and loaders; `weights_only` also
            for registered objects.
        hooks: Called with the models and the folder first; models that a hook removes from the
            list are not loaded.
        **options: Of the models' ``load_state_dict``, such as ``strict=False``.

    Returns:
        The accumulation step that was saved; None where the file has none.

    Raises:
        CheckpointDamaged: Files are truncated, changed or missing; nothing is loaded then. It is
            the same on all processes.
        ConfigError: No such folder, or it does not fit; nothing is loaded then.
        TypeError: Another `map_location`.
        CheckpointFailed: Another process failed.
    """
    device = _device(map_location, place)
    what = f"load_state({str(folder)!r})"
    hooks = list(hooks)
    reading = {"map_location": device, **(load_kwargs or {})}
    strict = bool(options.get("strict", True))
    with all_fine(collectives, what):
        found = standing(Path(folder))
        check_contents(found, parts, with_models=not hooks)
        recorded, verdict = _recorded(found)
        sources = find_sources(found, parts, place, recorded)
        verdict.damaged += sources.damaged(place)
    _judge_together(collectives, what, verdict)
    trial = Trial(sources, parts, reading)
    with all_fine(collectives, what):
        verdict = trial.run(place, strict=strict, with_models=not hooks)
    _judge_together(collectives, what, verdict)
    loading = _Loading(sources, parts, trial, reading)
    with loading.undone_on_failure():
        with all_fine(collectives, what):
            models = loading.models_left_by(hooks, strict)
            loading.small()
    with all_fine(collectives, what):
        loading.models(models, device, options)
        loading.optimizers()
        loading.large_objects()
        loading.gradients()
        loading.generators(place)
    return trial.step


def _recorded(folder: Path) -> tuple[Mapping[str, Recorded], Verdict]:
    try:
        return manifest.read(folder), Verdict()
    except CheckpointDamaged as error:
        return {}, Verdict(damaged=list(error.mistakes))


def _judge_together(collectives: Collectives, what: str, mine: Verdict) -> None:
    """Raise what any process found, the same on all.

    Raises:
        CheckpointDamaged: Files are damaged.
        ConfigError: They do not fit.
    """
    found = collectives.answers(f"{what}: all files read", [mine.damaged, mine.unfit])
    Verdict(
        damaged=list(dict.fromkeys(text for damaged, _ in found for text in damaged)),
        unfit=list(dict.fromkeys(text for _, unfit in found for text in unfit)),
    ).check()


def _device(map_location: str | None, place: Place) -> torch.device:
    if map_location not in {None, "cpu", "on_device"}:
        raise TypeError(
            f"load_state(map_location={shown(map_location)}) must be 'cpu' or 'on_device'. "
            "States go where their model is in any case. Leave it out."
        )
    return place.device if map_location == "on_device" else torch.device("cpu")


class _Loading:
    """One process's share of a load, once everything has been read and found to fit."""

    def __init__(
        self, sources: Sources, parts: Parts, trial: Trial, reading: Mapping[str, Any]
    ) -> None:
        self._sources = sources
        self._parts = parts
        self._trial = trial
        self._reading = dict(reading)
        self._undo: list[Callable[[], Any]] = []

    def models_left_by(self, hooks: Sequence[LoadHook], strict: bool) -> list[nn.Module]:
        """Let hooks load what they want; the models that are left fit their files."""
        models = list(self._parts.models)
        for hook in hooks:
            hook(models, str(self._sources.folder))
        for number in range(len(models) if hooks else 0):
            if number in self._sources.weights:
                path = self._sources.weights[number]
                self._trial.check_weights(path, models[number], strict)
            elif number not in self._sources.sharded_models:
                raise ConfigError(_no_weights(self._sources.folder, number))
        return models

    # --------------------------------------------------------------------- can be undone

    @contextlib.contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """A block after which, if anybody fails, small states are as they were."""
        try:
            yield
        except BaseException:  # an interrupt, too
            for put_back in reversed(self._undo):
                # What refuses its own state has been changed, and there is nothing to be done.
                with contextlib.suppress(Exception):
                    put_back()
            raise

    def small(self) -> None:
        """Schedulers, scaler, registered objects and loaders: any may refuse its state."""
        parts, trial = self._parts, self._trial
        for number, state in trial.schedulers.items():
            self._load(parts.schedulers[number], state)
        if parts.scaler is not None:
            self._load(parts.scaler, trial.scaler)
        for number, state in trial.custom.items():
            self._load(parts.custom[number], state)
        self._loaders()

    def _load(self, item: Any, state: Any) -> None:
        with contextlib.suppress(Exception):  # a state that cannot be copied cannot be put back
            before = copy.deepcopy(item.state_dict())
            self._undo.append(lambda: item.load_state_dict(before))
        item.load_state_dict(state)

    def _loaders(self) -> None:
        for number, loader in self._parts.stateful_loaders():
            if number in self._trial.loaders:
                loader.load_state_dict(self._trial.loaders[number])
            else:
                _log.warning(
                    "%s has no state of loader %d: it begins at its first epoch",
                    self._sources.folder,
                    number,
                )

    # --------------------------------------------------------------------- cannot be undone

    def models(
        self, models: Sequence[nn.Module], device: torch.device, options: Mapping[str, Any]
    ) -> None:
        """Weights, by number of those that hooks have left."""
        sources, strategy = self._sources, self._parts.strategy
        for number, model in enumerate(models):
            shards = sources.sharded_models.get(number)
            if shards is not None and self._parts.sharder is not None:
                own = self._parts.optimizer_of(model)
                self._parts.sharder.load_sharded(model, own, shards.folder)
            else:
                path = sources.weights[number]
                state = _weights(path, strategy.unwrap(model), device)
                strategy.load_model_state(model, state, **options)

    def optimizers(self) -> None:
        """Optimizers' states."""
        strategy, sharder = self._parts.strategy, self._parts.sharder
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shards = self._sources.sharded_optimizers.get(number)
            path = self._sources.optimizers.get(number)
            if shards is not None and sharder is not None:
                sharder.load_sharded(shards.model, optimizer, shards.folder)
            elif path is not None and model is None:
                optimizer.load_state_dict(read(path, **self._reading))
            elif path is not None and model is not None:
                strategy.load_optimizer_state(model, optimizer, read(path, **self._reading))

    def large_objects(self) -> None:
        """Registered models and optimizers, of which no second copy is kept."""
        for number, item in enumerate(self._parts.custom):
            if number not in self._trial.custom:
                item.load_state_dict(read(self._sources.custom[number]))

    def gradients(self) -> None:
        """Gradients that wait for an optimizer step."""
        if self._sources.gradients is not None:
            self._parts.set_gradients(read(self._sources.gradients, **self._reading))

    def generators(self, place: Place) -> None:
        """Random numbers go on as they would have."""
        if self._trial.generators is not None:
            rng.restore(place, self._trial.generators)
        else:
            name = layout.random_states(place.rank)
            _log.warning("%s has no %s: random numbers begin anew", self._sources.folder, name)


def _no_weights(folder: Path, number: int) -> str:
    safe, unsafe = (layout.numbered(name, number) for name in (layout.SAFE, layout.UNSAFE))
    return (
        f"The checkpoint {str(folder)!r} has neither {safe} nor {unsafe}, but model {number} is to "
        "be loaded, and no load hook took it. Prepare the models that were saved, or register the "
        "hook that loads this one."
    )


def _weights(path: Path, model: nn.Module, device: torch.device) -> dict[str, Any]:
    if path.suffix != ".safetensors":
        return dict(read(path, map_location=device))
    return _read_safetensors(path, model, device)


def _read_safetensors(path: Path, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Weights by name, those included that were left out because they are tied to others."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        names = {**twins(model), **(file.metadata() or {})}
    for name, twin in names.items():
        if name not in state and twin in state:
            state[name] = state[twin]
    return state
