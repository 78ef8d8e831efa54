"""``save_state``: writes everything that a run needs to go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from nbaccel.abc.place import Place
from nbaccel.train import rng
from nbaccel.train.checkpoint import layout
from nbaccel.train.checkpoint.files import save
from nbaccel.train.checkpoint.folder import new_checkpoint
from nbaccel.train.checkpoint.parts import Parts
from nbaccel.train.collectives import Collectives

__all__ = ["SaveHook", "save_state"]

SaveHook = Callable[[list[Any], list[Any], str], None]


def save_state(
    folder: str | Path,
    parts: Parts,
    place: Place,
    collectives: Collectives,
    *,
    step: int,
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
    hooks: Iterable[SaveHook] = (),
    series: bool = False,
) -> Path:
    """Save everything that a run needs to go on; a collective.

    The folder appears whole, or, if any process fails or dies, not at all. An existing one of that
    name is replaced in one step; files in it that are not a checkpoint's stay.

    Args:
        folder: The checkpoint to be; that of process 0 counts.
        parts: What to save.
        place: This process.
        collectives: All processes.
        step: The accumulation step at hand.
        safe_serialization: Weights as safetensors instead of a pickle.
        save_on_each_node: Process 0 of every node writes all, for disks that are not shared.
        hooks: Called with the models, their weights and the folder to write into, before weights
            are written; weights that a hook removes from the list are not.
        series: Whether this is one of the numbered checkpoints of a project.

    Returns:
        The folder.

    Raises:
        ConfigError: There can be no such folder, or weights do not fit `safe_serialization`.
        CheckpointFailed: On every process, if any failed; what was there before is as it was.
    """
    with new_checkpoint(Path(folder), place, collectives, series=series) as (partial, target):
        writes = place.is_main or (save_on_each_node and place.is_local_main)
        _Writing(partial, parts, writes).run(list(hooks), place, step, safe_serialization)
    return target


class _Writing:
    """One process's share of a save.

    A strategy's state dicts are collectives, so a process that fails must go on to the end of
    them: it writes no more, and raises what it met first when the others are through, too.
    """

    def __init__(self, folder: Path, parts: Parts, writes: bool) -> None:
        self._folder = folder
        self._parts = parts
        self._sharder = parts.sharder if parts.in_shards else None
        self._writes = writes
        self._errors: list[Exception] = []

    def run(self, hooks: list[SaveHook], place: Place, step: int, safe: bool) -> None:
        self._models(hooks, safe)
        self._optimizers()
        self._loaders(place)
        self._rest()
        if self._parts.amid_group and self._parts.sharder is None:
            waiting = self._folder / layout.gradients(place.rank)
            self._attempt(lambda: save(self._parts.gradients(), waiting))
        states = {"step": step, **rng.capture(place)}
        self._attempt(lambda: save(states, self._folder / layout.random_states(place.rank)))
        if self._errors:
            raise self._errors[0]

    def _models(self, hooks: list[SaveHook], safe: bool) -> None:
        parts, weights = self._parts, []
        for number, model in enumerate(parts.models):
            if self._sharder is None:
                weights.append(parts.strategy.model_state(model))
            else:
                name = layout.sharded_model(self._sharder.shard_kind, number)
                folder = self._folder / name
                self._sharder.save_sharded(model, parts.optimizer_of(model), folder)
        models = list(parts.models)
        for hook in hooks:
            self._attempt(partial(hook, models, weights, str(self._folder)))
        for number, state in enumerate(weights):
            name = layout.numbered(layout.SAFE if safe else layout.UNSAFE, number)
            self._write(state, name, safe)

    def _optimizers(self) -> None:
        for number, (optimizer, model) in enumerate(self._parts.plain_optimizers()):
            name = layout.numbered(layout.OPTIMIZER, number)
            if model is None:
                self._write(optimizer.state_dict(), name)
            elif self._sharder is None:
                self._write(self._parts.strategy.optimizer_state(model, optimizer), name)
            elif optimizer is not self._parts.optimizer_of(model):
                folder = self._folder / layout.SHARDED_OPTIMIZER.format(number)
                self._sharder.save_sharded(model, optimizer, folder)

    def _loaders(self, place: Place) -> None:
        for number, loader in self._parts.stateful_loaders():
            stateful = bool(getattr(loader, "use_stateful_dataloader", False))
            # Each process has workers, random numbers and a part of the data of its own.
            name = layout.loader_file(number, stateful=stateful, rank=place.rank)
            self._attempt(partial(self._save_state_of, loader, name))

    def _rest(self) -> None:
        for number, scheduler in enumerate(self._parts.schedulers):
            self._write_state_of(scheduler, layout.numbered(layout.SCHEDULER, number))
        if self._parts.scaler is not None:
            self._write_state_of(self._parts.scaler, layout.SCALER)
        for number, item in enumerate(self._parts.custom):
            self._write_state_of(item, layout.CUSTOM.format(number))

    def _write_state_of(self, item: Any, name: str) -> None:
        if self._writes:
            self._attempt(partial(self._save_state_of, item, name))

    def _save_state_of(self, item: Any, name: str) -> None:
        save(item.state_dict(), self._folder / name)

    def _write(self, state: Any, name: str, safe: bool = False) -> None:
        if self._writes:
            self._attempt(lambda: save(state, self._folder / name, safe))

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._errors:
            return
        try:
            action()
        except Exception as error:  # raised at the end of `run`, see the class
            self._errors.append(error)
