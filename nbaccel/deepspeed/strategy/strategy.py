"""``DeepSpeedStrategy``: engines of DeepSpeed hold optimizer, gradients and weights in shards."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from nbaccel.abc.bundle import Bundle
from nbaccel.abc.place import Place
from nbaccel.abc.shards import Remembered
from nbaccel.abc.standins import DummyOptim
from nbaccel.abc.strategy import Strategy
from nbaccel.deepspeed import swap_space
from nbaccel.deepspeed.facts import made_in
from nbaccel.deepspeed.strategy import (
    checkpoints,
    gathering,
    heap,
    lease,
    on_disk,
    orphans,
    swapping,
    troubles,
    zero_init,
)
from nbaccel.deepspeed.strategy.drive import Drive
from nbaccel.deepspeed.strategy.engines import begin_comm, is_engines, make_engine
from nbaccel.deepspeed.strategy.finding import drive_of_loss, drive_of_parameters
from nbaccel.deepspeed.strategy.plugin import DeepSpeedPlugin, Plugins
from nbaccel.deepspeed.strategy.proxies import EngineOptimizer, EngineScheduler
from nbaccel.deepspeed.strategy.settling import Settled, check_parts, settle, stage_of
from nbaccel.deepspeed.strategy.taking_back import remember, take_back_together
from nbaccel.errors import ConfigError
from nbaccel.plan.training import Asked

__all__ = ["DeepSpeedStrategy"]


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's ZeRO.

    Args:
        place: This process among the others.
        plugins: What to shard, and where to keep it.
        asked: What else the Accelerator was asked.
    """

    name: ClassVar[str] = "deepspeed"
    owns_precision: ClassVar[bool] = True
    shard_kind: ClassVar[str] = "deepspeed"

    def __init__(self, place: Place, plugins: Plugins, asked: Asked) -> None:
        super().__init__(place)
        self._plugins = plugins
        self._open: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._asked = asked
        self._drives: dict[int, Drive] = {}
        self._before: dict[int, Remembered] = {}
        self._lease = lease.Lease(place.device)
        if place.is_alone:
            # A cell that is run again forgets its Accelerator; the notebook's modules stay.
            end = weakref.finalize(self, _end_all, self._drives, self._before, self._lease)
            end.atexit = False
        else:
            leave = weakref.finalize(self, orphans.add, self._drives)
            leave.atexit = False
        self._announced: Any = None
        plugin = plugins.active
        if plugin.is_zero3_init_enabled():
            self._lease.take()  # DeepSpeed builds in shards with a process group alone
            # Kept: transformers has a weak reference to it.
            self._announced = zero_init.announced(plugin.deepspeed_config, place.world_size)

    # ---------------------------------------------------------------- preparing

    def wrap(self, bundle: Bundle) -> Bundle:
        """See :meth:`Strategy.wrap`; a collective.

        A model without an optimizer gets an engine only at stage 3, which shards what it holds.

        Raises:
            ConfigError: The configuration is wrong, or does not fit what was prepared.
        """
        if not (bundle.models or bundle.optimizers):
            return bundle
        plugin = self._plugins.active
        given = self._as_given(plugin)
        check_parts(given, bundle.models, bundle.optimizers, bundle.schedulers)
        optimizers = _owners(bundle)
        self._lease.take()
        models, drives = [], []
        try:
            for number, model in enumerate(bundle.models):
                made = self._engine_for(model, optimizers.get(number), bundle, plugin, given)
                models.append(made.engine if made else model)
                drives.append(made)
        except BaseException:  # an interrupt, too, leaves no environment without engines
            if not self._drives and self._announced is None:
                self._lease.give_up()
            raise
        by_optimizer = {id(o): drives[n] for n, o in optimizers.items()}
        return replace(
            bundle,
            models=tuple(models),
            optimizers=tuple(_proxy(by_optimizer[id(o)], o) for o in bundle.optimizers),
            schedulers=tuple(_schedule(drives, by_optimizer, s) for s in bundle.schedulers),
        )

    def _as_given(self, plugin: DeepSpeedPlugin) -> dict[str, Any]:
        """Its configuration with the "auto" values that an earlier `prepare` has filled in."""
        settled, given = self._open.get(id(plugin), (None, {}))
        return given if plugin.deepspeed_config is settled else plugin.deepspeed_config

    def _engine_for(
        self,
        model: nn.Module,
        optimizer: Any,
        bundle: Bundle,
        plugin: DeepSpeedPlugin,
        given: dict[str, Any],
    ) -> Drive | None:
        schedulers = [s for s in bundle.schedulers if _is_of(s, optimizer) and is_engines(s)]
        scheduler = schedulers[0] if schedulers else None
        trains = optimizer is not None or _is_trained_by_file(model, given, bundle)
        config = given if trains else {k: v for k, v in given.items() if k not in _TRAINING}
        settled = settle(
            config,
            plugin,
            self._asked,
            self.place,
            model,
            optimizer,
            scheduler,
            bundle.loaders,
        )
        if not trains and stage_of(settled.settings) < 3:
            model.to(self.place.device)
            return None
        if trains or id(plugin) not in self._open:
            plugin.deepspeed_config = settled.settings
            self._open[id(plugin)] = (settled.settings, given)
        self.choices += settled.choices
        self._tell_before(model, optimizer, settled, trains=trains)
        begin_comm(settled.settings)
        if not self.place.is_alone:
            take_back_together(model, self.place.device)
            orphans.end()
        before, made_as = remember(model), made_in(model)
        settings, claimed = swapping.claim(settled.settings, self.place.rank)
        try:
            engine = make_engine(
                model,
                optimizer,
                scheduler,
                settings,
                moe_layers=plugin.transformer_moe_cls_names,
                several=not self.place.is_alone,
            )
        except BaseException:  # an interrupt, too: nobody would ever release it
            claimed.release()
            raise
        clipping = given.get("gradient_clipping")
        own_clipping = float(clipping) if isinstance(clipping, (int, float)) else None
        drive = Drive(engine, claimed, troubles.Troubles(engine, made_as), own_clipping)
        self._drives[id(engine)] = drive
        self._before[id(engine)] = before
        return drive

    def _tell_before(
        self, model: nn.Module, optimizer: Any, settled: Settled, *, trains: bool
    ) -> None:
        """What is better known before an engine is made; some of it ends the attempt."""
        for text in settled.warnings:
            warnings.warn(text, stacklevel=2)
        on_disk.check_buffers(model, settled.settings, self.place.world_size)
        local = self.place.local_world_size
        nodes = max(1, self.place.world_size // local)
        memory = troubles.host_memory(
            model,
            settled.settings,
            trains=trains,
            device=self.place.device.type,
            local_world_size=local,
            num_nodes=nodes,
        )
        if memory.is_short:
            heap.return_at_once()
        if not self.place.is_local_main:
            return
        # The others wait in their first collective, and have written nothing yet.
        swap_space.check_room(
            model,
            settled.settings,
            trains=trains,
            local_world_size=local,
            num_nodes=nodes,
            in_use=swapping.folders_in_use(),
        )
        memory.check()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """See :meth:`Strategy.unwrap`."""
        drive = self._drives.get(id(model))
        if drive is None:
            return model
        drive.step()
        inner: nn.Module = drive.engine.module
        return inner

    def release(self, models: Iterable[nn.Module] | None = None) -> None:
        """See :meth:`Strategy.release`.

        Where this process is alone, the user's own module gets its weights back, whole, and can be
        trained again in any way.
        """
        chosen = list(self._drives) if models is None else [id(model) for model in models]
        drives = {key: self._drives.pop(key) for key in chosen if key in self._drives}
        for drive in drives.values():
            drive.step()
        _end(drives, self._before, alone=self.place.is_alone)
        if not self._drives:
            self._announced = None
            self._lease.give_up()

    # ---------------------------------------------------------------- training

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        """See :meth:`Strategy.backward`; the engine's.

        Raises:
            ConfigError: The loss comes from no engine that can train, or from several.
            TrainingDiverged: The step before could not go on.
        """
        drive = drive_of_loss(loss, list(self._drives.values()))
        drive.backward(loss, sync=sync, **options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :meth:`Strategy.no_sync`; from stage 2 on gradients are reduced all the same."""
        drive = self._drives.get(id(model))
        return drive.syncing(False) if drive else nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :meth:`Strategy.sync_in_backward`."""
        drive = self._drives.get(id(model))
        return drive.syncing(True) if drive else nullcontext()

    def join(
        self, models: Iterable[nn.Module], **options: Any
    ) -> AbstractContextManager[None] | None:
        """See :meth:`Strategy.join`; None: an engine reduces with everyone."""
        return nullcontext() if self.place.is_alone else None

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """See :meth:`Strategy.clip_grad_norm`; the engine clips in its step, which is taken here.

        Raises:
            ConfigError: Another norm than the Euclidean one.
        """
        if norm_type != 2.0:
            raise ConfigError(
                f"clip_grad_norm_(norm_type={norm_type}) cannot be had with DeepSpeed, which adds "
                "up squares over its shards. Leave norm_type out."
            )
        drive = drive_of_parameters(parameters, list(self._drives.values()))
        return drive.clipped_step(max_norm)

    # ---------------------------------------------------------------- keeping

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """See :meth:`Strategy.model_state`; in host memory, empty but on process 0."""
        return gathering.gather(self.unwrap(model), keep=self.place.is_main)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> None:
        """See :meth:`Strategy.load_model_state`.

        Args:
            model: The model.
            state: The state; that of process 0 counts, others may pass an empty one.
            **options: `strict`.
        """
        if id(model) in self._drives:
            gathering.scatter(self.unwrap(model), state, **options)
        else:
            model.load_state_dict(state, **options)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Refused: it lies in shards, in DeepSpeed's own form, and is saved with the model's.

        Raises:
            ConfigError: Always.
        """
        raise _shards_only(type(optimizer).__name__)

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Refused, for the same reason.

        Raises:
            ConfigError: Always.
        """
        raise _shards_only(type(optimizer).__name__)

    def save_sharded(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | Path
    ) -> None:
        """See :meth:`ShardedCheckpoints.save_sharded`; files of DeepSpeed."""
        drive = self._drives.get(id(model))
        if drive is not None:
            drive.step()
            checkpoints.save(drive.engine, Path(folder))
        elif self.place.is_main:
            checkpoints.save_plain(model, Path(folder))

    def check_sharded(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | Path
    ) -> None:
        """See :meth:`ShardedCheckpoints.check_sharded`.

        Raises:
            CheckpointDamaged: Files are missing, or hold something else.
            ConfigError: Another number of processes wrote it, or it is of another model.
        """
        drive = self._drives.get(id(model))
        if drive is not None:
            checkpoints.check(drive.engine, Path(folder))
        else:
            checkpoints.check_plain(model, Path(folder))

    def load_sharded(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: str | Path
    ) -> None:
        """See :meth:`ShardedCheckpoints.load_sharded`; as many processes as wrote."""
        drive = self._drives.get(id(model))
        if drive is not None:
            checkpoints.load(drive.engine, Path(folder))
        else:
            checkpoints.load_plain(model, Path(folder))


def _end(drives: dict[int, Drive], before: dict[int, Remembered], *, alone: bool) -> None:
    for key, drive in drives.items():
        was = before.pop(key)
        drive.end(was if alone else None)


def _end_all(drives: dict[int, Drive], before: dict[int, Remembered], held: lease.Lease) -> None:
    _end(drives, before, alone=True)
    held.give_up()


_TRAINING = ("optimizer", "scheduler")


def _is_trained_by_file(model: nn.Module, given: dict[str, Any], bundle: Bundle) -> bool:
    """Whether the file's optimizer is meant for a model that was prepared without one."""
    has_one = bool(given.get("optimizer")) and not bundle.optimizers
    return has_one and any(parameter.requires_grad for parameter in model.parameters())


def _shards_only(kind: str) -> ConfigError:
    return ConfigError(
        f"The state of {kind} cannot be read or written whole: DeepSpeed has it in shards of its "
        "own form, together with the weights. Use accelerator.save_state and load_state with as "
        "many processes."
    )


def _owners(bundle: Bundle) -> dict[int, Any]:
    """Each model's optimizer, by the number of the model."""
    found: dict[int, Any] = {}
    for optimizer in bundle.optimizers:
        trained = {id(parameter) for parameter in _parameters(optimizer)}
        its = [
            number
            for number, model in enumerate(bundle.models)
            if any(id(parameter) in trained for parameter in model.parameters())
        ]
        if len(its) != 1 or its[0] in found:
            names = ", ".join(type(model).__name__ for model in bundle.models) or "no model"
            raise ConfigError(
                f"{type(optimizer).__name__} trains {len(trained)} parameter(s) of {len(its)} of "
                f"the models prepared with it ({names}). DeepSpeed's engine has one model and one "
                "optimizer, made over its parameters. Prepare both in one call, one optimizer for "
                "each model."
            )
        found[its[0]] = optimizer
    return found


def _parameters(optimizer: Any) -> Iterable[torch.Tensor]:
    given = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    for item in given:
        yield from item["params"] if isinstance(item, dict) else [item]


def _is_of(scheduler: Any, optimizer: Any) -> bool:
    return optimizer is None or getattr(scheduler, "optimizer", optimizer) is optimizer


def _proxy(drive: Drive | None, optimizer: Any) -> Any:
    return EngineOptimizer(drive, optimizer) if drive is not None else optimizer


def _schedule(
    drives: list[Drive | None], by_optimizer: dict[int, Drive | None], scheduler: Any
) -> Any:
    """What steps a schedule: the engine, or, for one of torch, the loop as ever."""
    if not is_engines(scheduler):
        return scheduler
    drive = by_optimizer.get(id(scheduler.optimizer))
    if drive is None:  # of an optimizer that only the file names: one engine has it
        drive = next(found for found in drives if found is not None)
    return EngineScheduler(drive, scheduler)
