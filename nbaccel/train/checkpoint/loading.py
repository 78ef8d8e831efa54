"""``load_state``: puts back what ``save_state`` wrote, if all of it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from nbaccel.abc.place import Place
from nbaccel.config.mistakes import shown
from nbaccel.errors import ConfigError
from nbaccel.log import get_logger
from nbaccel.train import rng
from nbaccel.train.checkpoint import layout
from nbaccel.train.checkpoint.files import read
from nbaccel.train.checkpoint.folder import all_fine, standing
from nbaccel.train.checkpoint.parts import Parts, check_contents
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

    The states of registered objects may be pickles of anything, so load only what you trust.

    Args:
        folder: The checkpoint.
        parts: What to load into.
        place: This process.
        collectives: All processes.
        map_location: ``cpu`` or ``on_device``: where states are read to before they go where they
            belong; None takes the CPU.
        load_kwargs: Of ``torch.load``, for optimizers, schedulers and loaders.
        hooks: Called with the models and the folder first; models that a hook removes from the
            list are not loaded.
        **options: Of the models' ``load_state_dict``, such as ``strict=False``.

    Returns:
        The accumulation step that was saved; None where the file has none.

    Raises:
        ConfigError: No such folder, or it does not fit; nothing is loaded then.
        TypeError: Another `map_location`.
        CheckpointFailed: Another process failed.
    """
    device = _device(map_location, place)
    what = f"load_state({str(folder)!r})"
    hooks = list(hooks)
    with all_fine(collectives, what):
        found = standing(Path(folder))
        check_contents(found, parts, with_models=not hooks)
    with all_fine(collectives, what):
        loading = _Loading(found, parts, device, dict(load_kwargs or {}))
        loading.models(hooks, options)
        loading.optimizers()
        loading.loaders(place)
        loading.rest()
        loading.gradients(place)
        return loading.generators(place)


def _device(map_location: str | None, place: Place) -> torch.device:
    if map_location not in {None, "cpu", "on_device"}:
        raise TypeError(
            f"load_state(map_location={shown(map_location)}) must be 'cpu' or 'on_device'. "
            "States go where their model is in any case. Leave it out."
        )
    return place.device if map_location == "on_device" else torch.device("cpu")


class _Loading:
    """One process's share of a load."""

    def __init__(
        self, folder: Path, parts: Parts, device: torch.device, load_kwargs: dict[str, Any]
    ) -> None:
        self._folder = folder
        self._parts = parts
        self._device = device
        self._load_kwargs = load_kwargs

    def models(self, hooks: list[LoadHook], options: dict[str, Any]) -> None:
        models = list(self._parts.models)
        for hook in hooks:
            hook(models, str(self._folder))
        for number, model in enumerate(models):
            sharder = self._parts.sharder
            kind = sharder.shard_kind if sharder is not None else ""
            shards = self._folder / layout.sharded_model(kind, number)
            if shards.is_dir() and sharder is not None:
                sharder.load_sharded(model, self._parts.optimizer_of(model), shards)
            else:
                state = self._weights(number, model)
                self._parts.strategy.load_model_state(model, state, **options)

    def _weights(self, number: int, model: nn.Module) -> dict[str, Any]:
        safe = self._folder / layout.numbered(layout.SAFE, number)
        unsafe = self._folder / layout.numbered(layout.UNSAFE, number)
        if safe.exists():
            return _read_safetensors(safe, self._parts.strategy.unwrap(model), self._device)
        if unsafe.exists():
            return dict(read(unsafe, map_location=self._device))
        raise ConfigError(
            f"The checkpoint {str(self._folder)!r} has neither {safe.name} nor {unsafe.name}, but "
            f"model {number} is to be loaded, and no load hook took it. Prepare the models that "
            "were saved, or register the hook that loads this one."
        )

    def optimizers(self) -> None:
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            shards = self._folder / layout.SHARDED_OPTIMIZER.format(number)
            path = self._folder / layout.numbered(layout.OPTIMIZER, number)
            if model is not None and self._parts.sharder is not None and shards.is_dir():
                self._parts.sharder.load_sharded(model, optimizer, shards)
            elif model is None:
                optimizer.load_state_dict(self._read(path.name))
            elif path.exists():
                state = self._read(path.name)
                self._parts.strategy.load_optimizer_state(model, optimizer, state)

    def loaders(self, place: Place) -> None:
        for number, loader in self._parts.stateful_loaders():
            stateful = bool(getattr(loader, "use_stateful_dataloader", False))
            own = layout.loader_file(number, stateful=stateful, rank=place.rank)
            common = layout.loader_file(number, stateful=stateful)
            there = [name for name in (own, common) if (self._folder / name).exists()]
            if there:
                loader.load_state_dict(self._read(there[0]))
            else:
                _log.warning(
                    "%s has no %s: loader %d begins at its first epoch",
                    self._folder,
                    common,
                    number,
                )

    def rest(self) -> None:
        for number, scheduler in enumerate(self._parts.schedulers):
            scheduler.load_state_dict(self._read(layout.numbered(layout.SCHEDULER, number)))
        if self._parts.scaler is not None:
            self._parts.scaler.load_state_dict(read(self._folder / layout.SCALER))
        for number, item in enumerate(self._parts.custom):
            # What a user's object has for a state is the user's choice.
            path = self._folder / layout.CUSTOM.format(number)
            item.load_state_dict(read(path, weights_only=False))

    def gradients(self, place: Place) -> None:
        name = layout.gradients(place.rank)
        if (self._folder / name).exists() and self._parts.sharder is None:
            self._parts.set_gradients(self._read(name))

    def generators(self, place: Place) -> int | None:
        own = self._folder / layout.random_states(place.rank)
        first = self._folder / layout.random_states(0)
        if own.exists():
            states = read(own)
            rng.restore(place, states)
        else:
            _log.warning("%s has no %s: random numbers begin anew", self._folder, own.name)
            states = read(first) if first.exists() else {}
        step: int | None = states.get("step")
        return step

    def _read(self, name: str) -> Any:
        return read(self._folder / name, **{"map_location": self._device, **self._load_kwargs})


def _read_safetensors(path: Path, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Weights by name, those included that were left out because they are tied to others."""
    with safe_open(path, framework="pt", device=str(device)) as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
        twins = {**_twins(model), **(file.metadata() or {})}
    for name, twin in twins.items():
        if name not in state and twin in state:
            state[name] = state[twin]
    return state


def _twins(model: nn.Module) -> dict[str, str]:
    """Names of tied tensors, each with another name of the same tensor."""
    names: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return {name: twin for tied in names.values() for name in tied for twin in tied if twin != name}
