"""``DeepSpeedStrategy``: engines of DeepSpeed hold optimizer, gradients and weights in shards."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import env
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.torch_private import plain_data
from nbaccel.base.training_libraries import attribute
from nbaccel.config.deepspeed_document import BATCH_SIZES
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.given_values import value_at
from nbaccel.deepspeed import engines, library, local_shards
from nbaccel.deepspeed.auto_values import Resolved, TrainingFacts, made_in, resolve_auto
from nbaccel.deepspeed.checking import check_config
from nbaccel.deepspeed.checkpoint_layout import CheckpointFiles, is_readable, read_states
from nbaccel.deepspeed.engines import Drive, is_engines
from nbaccel.deepspeed.environment import Lease, forget_modules
from nbaccel.deepspeed.local_shards import remember, take_back_together
from nbaccel.deepspeed.plugin import Plugins
from nbaccel.deepspeed.zero_config import AUTO, ZERO
from nbaccel.deepspeed.zero_memory import check_disk, check_host_memory, estimate_memory, host_bytes
from nbaccel.memory.estimate import measure
from nbaccel.plan.contracts import training
from nbaccel.plan.contracts.training import Bundle, DummyOptim, DummyScheduler, TrainingRequest
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.launch_plan import Choice

if TYPE_CHECKING:
    from typing_extensions import Self

    from nbaccel.plan.contracts.training import Precision


_ORPHANED_DRIVES: list[Drive] = []
"""Engines whose Accelerator is gone: in a live worker a cell that prepares is run again.

They would stay for ever, by hooks on gradients that torch's C++ side holds, unseen by the garbage
collector.
"""
_PLAIN_WEIGHTS_FILE = "pytorch_model.bin"  # of a model that has no engine, or one that cannot write


class DeepSpeedStrategy(training.Strategy):
    """DeepSpeed's ZeRO."""

    name: ClassVar[str] = "deepspeed"
    owns_precision: ClassVar[bool] = True
    shard_kind: ClassVar[str] = "deepspeed"

    def __init__(self, place: training.Place, plugins: Plugins, asked: TrainingRequest) -> None:
        super().__init__(place)
        self._plugins = plugins
        self._open: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._asked = asked
        # By id of the engine, which its Drive keeps alive.
        self._drives: dict[int, Drive] = {}
        self._lease = Lease(place.device)
        finalizer: Any
        if place.is_alone:
            # A cell that is run again forgets its Accelerator. Without `self`, which it would keep.
            finalizer = weakref.finalize(self, _end_all, self._drives, self._lease)
        else:
            # The engines are only noted: a cell may still look at them after the Accelerator.
            finalizer = weakref.finalize(self, _ORPHANED_DRIVES.extend, self._drives.values())
        # At exit nobody looks at modules; the environment's atexit handler destroys engines.
        finalizer.atexit = False
        self._announced: Any = None  # transformers has a weak reference to it
        if plugins.active.is_zero3_init_enabled():
            self._lease.take()  # DeepSpeed builds in shards with a process group alone
            settings = plugins.active.deepspeed_config
            self._announced = local_shards.announced_config(settings, place.world_size)

    @classmethod
    def build(
        cls, place: training.Place, settings: Any, *, precision: Precision, asked: TrainingRequest
    ) -> Self:
        return cls(place, settings, asked)

    @classmethod
    def said_by(cls, settings: Plugins) -> training.SaidBySettings:
        """See :meth:`Strategy.said_by`; what the plugin in force says."""
        plugin = settings.active
        return training.SaidBySettings(
            mixed_precision=plugin.said.get("mixed_precision"),
            accumulation_steps=plugin.said.get("gradient_accumulation_steps"),
            writes_shards=True,
            reason=f"a DeepSpeedPlugin or zero_stage was given: ZeRO stage {plugin.zero_stage}",
            speaker="the DeepSpeed configuration",
            remedy=', or write "enabled": "auto" there',
        )

    def wrap(self, bundle: Bundle) -> Bundle:
        """See :meth:`Strategy.wrap`; a collective."""
        # A model without an optimizer gets an engine only at stage 3, which shards what it holds.
        if not (bundle.models or bundle.optimizers):
            return bundle
        plugin = self._plugins.active
        config, settings = self._open.get(id(plugin), (None, {}))
        # One that the user has replaced counts; else the one whose "auto" was filled in before.
        if plugin.deepspeed_config is not config:
            settings = plugin.deepspeed_config
        # Before the lease: what is refused has made no process group.
        check_parts(settings, bundle)
        optimizer_of = _optimizers_by_model(bundle)
        self._lease.take()
        drives: list[Drive | None] = []
        try:
            for number, model in enumerate(bundle.models):
                drives.append(self._engine_for(model, optimizer_of.get(number), bundle, settings))
        except BaseException:  # an interrupt, too, leaves no environment without engines
            if not self._drives and self._announced is None:
                self._lease.give_up()
            raise
        drive_of = {id(optimizer): drives[number] for number, optimizer in optimizer_of.items()}
        models = zip(bundle.models, drives, strict=True)
        return replace(
            bundle,
            models=tuple(drive.engine if drive else model for model, drive in models),
            optimizers=tuple(
                engines.EngineOptimizer(drive) if (drive := drive_of[id(optimizer)]) else optimizer
                for optimizer in bundle.optimizers
            ),
            schedulers=tuple(
                _schedule_of(drives, drive_of, scheduler) for scheduler in bundle.schedulers
            ),
        )

    def _engine_for(
        self, model: nn.Module, optimizer: Any, bundle: Bundle, given_settings: dict[str, Any]
    ) -> Drive | None:
        plugin = self._plugins.active
        of_optimizer = (
            one
            for one in bundle.schedulers
            if optimizer is None or getattr(one, "optimizer", optimizer) is optimizer
        )
        scheduler = next(filter(is_engines, of_optimizer), None)
        is_training = optimizer is not None
        # The file's optimizer is meant for a model that was prepared without one.
        if given_settings.get("optimizer") and not bundle.optimizers:
            is_training = any(parameter.requires_grad for parameter in model.parameters())
        # DeepSpeed would make these from the file all the same.
        dropped = () if is_training else ("optimizer", "scheduler")
        settings = {key: one for key, one in given_settings.items() if key not in dropped}
        resolved = self._resolved(settings, model, (optimizer, scheduler, bundle.loaders))
        if not is_training and resolved.config.zero_stage < 3:
            model.to(self.place.device)
            return None
        # The configuration of a model that only infers must not replace that of a trained one.
        if is_training or id(plugin) not in self._open:
            plugin.take_configuration(resolved.config.to_dict())
            self._open[id(plugin)] = (plugin.deepspeed_config, given_settings)
        self.choices += resolved.choices
        self._warn_before(model, resolved, is_training=is_training)
        library.begin_comm(resolved.config)  # first: destroying engines below needs it
        if not self.place.is_alone:
            take_back_together(model, self.place.device)
            # Removed first: one that cannot be destroyed must not be tried again and again.
            while _ORPHANED_DRIVES:
                _ORPHANED_DRIVES.pop().end(is_alone=False)
            forget_modules()
        # Before the engine is made, which casts the module in place.
        states_before = remember(model)
        own_config, folders = local_shards.claim(resolved.config, self.place.rank)
        try:
            engine = engines.make_engine(
                model,
                optimizer,
                scheduler,
                own_config,
                moe_layers=plugin.transformer_moe_cls_names,
                has_several=not self.place.is_alone,
            )
        except BaseException:  # an interrupt, too: without an engine nothing else releases it
            folders.release()
            raise
        norm = given_settings.get("gradient_clipping")
        drive = self._drives[id(engine)] = Drive(
            engine, folders, made_in(model), norm, states_before
        )
        return drive

    def _resolved(
        self, given: dict[str, Any], model: nn.Module, parts: tuple[Any, ...]
    ) -> Resolved:
        """Fill in and check a configuration; the parts are optimizer, schedule and loaders."""
        optimizer, scheduler, loaders = parts
        # Nothing says which loader is the training's. One with a batch sampler may have None.
        sizes = [loader.batch_size for loader in loaders if isinstance(loader.batch_size, int)]
        micro_batch = (min if self._plugins.active.is_train_batch_min else max)(sizes, default=None)
        is_dummy = isinstance(scheduler, DummyScheduler)
        steps = scheduler.total_num_steps if is_dummy else None
        # The schedule's steps in one process: each takes its share of the batches.
        processes = 1 if self._asked.split_batches else self.place.world_size
        # The rate to which the file's schedule warms up where the file leaves it to the optimizer.
        is_open = value_at(given, "scheduler.params.warmup_max_lr") == AUTO
        rate = getattr(optimizer, "defaults", {}).get("lr") if is_open else None
        facts = TrainingFacts(
            world_size=self.place.world_size,
            micro_batch_size=micro_batch,
            accumulation_steps=self._asked.accumulation_steps,
            mixed_precision=self._asked.mixed_precision,
            total_steps=None if steps is None else math.ceil(steps / processes),
            learning_rate=None if rate is None else float(rate),
        )
        # A copy: the given one is the plugin's, which keeps what the user wrote.
        settings = copy.deepcopy(given)
        choices: tuple[Choice, ...] = ()
        if value_at(settings, f"{ZERO}.stage") == 3:
            # Without it DeepSpeed's `save_16bit_model` writes nothing.
            settings[ZERO].setdefault("stage3_gather_16bit_weights_on_model_save", True)
        total_key, micro_key, _ = BATCH_SIZES
        sizes_given = {settings.get(micro_key), settings.get(total_key)} - {AUTO, None}
        if micro_batch is None and not sizes_given:
            settings[micro_key] = 1
            reason = "no loader was prepared before; DeepSpeed only counts samples by it"
            choices = (Choice(micro_key, 1, reason),)
        resolved = resolve_auto(
            settings,
            facts=facts,
            model=model,
            optimizer=optimizer if isinstance(optimizer, DummyOptim) else None,
            scheduler=scheduler if is_dummy else None,
        )
        # The check needs the device alone: all else that a run decides has been filled in by now.
        size, device = self.place.world_size, self.place.device.type
        checked = check_config(resolved.config, world_size=size, device=device)
        return Resolved(checked.config, (*choices, *resolved.choices), checked.warnings)

    def _warn_before(self, model: nn.Module, config: Resolved, *, is_training: bool) -> None:
        """Warn of, or refuse, what is known before an engine is made."""
        for text in config.warnings:
            warnings.warn(text, stacklevel=2)
        local_shards.check_buffers(model, config.config, self.place.world_size)
        machine = inspect_machine()
        # What the processes of this node will need, without activations.
        need = estimate_memory(
            measure(model, trains=is_training),
            config.config,
            num_processes=self.place.local_world_size,
            num_nodes=max(1, self.place.world_size // self.place.local_world_size),
            inventory=machine,
        )
        device = self.place.device.type
        # On every rank of this node, since each has a heap to keep freed blocks in.
        if 2 * host_bytes(need, device) > machine.host_available_bytes:
            engines.return_at_once()
        # One process of each node; the others wait in their first collective, with nothing written.
        if self.place.is_local_main:
            check_disk(need, local_shards.folders_in_use())
            check_host_memory(need, device, machine)

    def unwrap(self, model: nn.Module) -> nn.Module:
        drive = self._drives.get(id(model))
        if drive is None:
            return model
        # The caller looks at weights, or replaces them: the step that is due must be in them.
        drive.step()
        inner_module: nn.Module = drive.engine.module
        return inner_module

    def release(self, models: Iterable[nn.Module] | None = None) -> None:
        """See :meth:`Strategy.release`; where this process is alone, the module is whole again."""
        keys = list(self._drives) if models is None else [id(model) for model in models]
        drives = [self._drives.pop(key) for key in keys if key in self._drives]
        for drive in drives:
            drive.step()  # one that is due would be lost with its engine
        for drive in drives:
            drive.end(is_alone=self.place.is_alone)
        if not self._drives:
            self._announced = None
            self._lease.give_up()

    def backward(self, loss: torch.Tensor, *, sync: bool, **options: Any) -> None:
        drive = engines.drive_of_loss(loss, list(self._drives.values()))
        drive.backward(loss, sync=sync, **options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """See :meth:`Strategy.no_sync`; from stage 2 on gradients are reduced all the same."""
        drive = self._drives.get(id(model))
        return drive.syncing(False) if drive else nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        drive = self._drives.get(id(model))
        return drive.syncing(True) if drive else nullcontext()

    def join(
        self, models: Iterable[nn.Module], **options: Any
    ) -> AbstractContextManager[None] | None:
        """See :meth:`Strategy.join`; None, since an engine reduces gradients with all ranks."""
        return nullcontext() if self.place.is_alone else None

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """See :meth:`Strategy.clip_grad_norm`; the engine clips in its step, taken here."""
        if norm_type != 2.0:
            raise ConfigError(
                f"clip_grad_norm_(norm_type={norm_type}) is not supported with DeepSpeed, which "
                "adds up squares over its shards. Leave norm_type out."
            )
        drive = engines.drive_of_parameters(parameters, list(self._drives.values()))
        return drive.clipped_step(max_norm)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """See :meth:`Strategy.model_state`; in host memory, empty but on process 0."""
        return local_shards.gather_weights(self.unwrap(model), keep=self.place.is_main)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> None:
        if id(model) in self._drives:
            local_shards.scatter_weights(self.unwrap(model), state, **options)
        else:
            model.load_state_dict(state, **options)

    @property
    def keeps_own_disks(self) -> bool:
        return any(drive.engine.use_node_local_storage() for drive in self._drives.values())

    def shard_folder(self, number: int) -> str:
        return f"pytorch_model_{number}" if number else "pytorch_model"

    def save_sharded(self, shards: training.ModelShards) -> None:
        model, folder, left_out = shards.model, shards.folder, shards.left_out
        drive = self._writing_drive(model)
        # The first rank of each folder, where there are several, writes what its ranks share.
        writes_shared = self.place.rank in {ranks[0] for ranks in shards.ranks_by_folder}
        if drive is not None:
            drive.step()
            _save(drive.engine, folder, left_out, writes_shared=writes_shared)
            return
        writes = self.place.is_main or writes_shared
        # A collective where an engine has cut the weights up.
        is_cut = id(model) in self._drives
        inner = self.unwrap(model)
        state = local_shards.gather_weights(inner, keep=writes) if is_cut else model.state_dict()
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            kept = {name: value for name, value in state.items() if name not in left_out}
            torch.save(kept, folder / _PLAIN_WEIGHTS_FILE)

    def _writing_drive(self, model: nn.Module) -> Drive | None:
        """What drives the engine of a model, if that engine can write checkpoints."""
        drive = self._drives.get(id(model))
        # DeepSpeed has no checkpoint engine without an optimizer: process 0 alone would fail.
        is_able = getattr(drive and drive.engine, "checkpoint_engine", None) is not None
        return drive if is_able else None

    def check_sharded(self, shards: training.ModelShards) -> None:
        drive = self._writing_drive(shards.model)
        if drive is not None:
            _check_checkpoint(drive.engine, shards.folder, shards.ranks_there)
        elif not (path := shards.folder / _PLAIN_WEIGHTS_FILE).is_file():
            raise CheckpointDamaged(
                f"{path} is missing, with the weights. Load another checkpoint, or copy it again."
            )

    def load_sharded(self, shards: training.ModelShards) -> None:
        drive = self._writing_drive(shards.model)
        if drive is not None:
            _load(drive.engine, shards.folder, shards.left_out)
        else:
            path = shards.folder / _PLAIN_WEIGHTS_FILE
            weights = torch.load(path, map_location=self.place.device, weights_only=True)
            self.load_model_state(shards.model, weights, strict=not shards.left_out)


def _end_all(engine_drives: dict[int, Drive], lease: Lease) -> None:
    for engine_drive in engine_drives.values():
        engine_drive.end(is_alone=True)
    lease.give_up()


def _optimizers_by_model(bundle: Bundle) -> dict[int, Any]:
    """Each model's optimizer, by the number of the model."""
    found: dict[int, Any] = {}
    for optimizer in bundle.optimizers:
        is_dummy = isinstance(optimizer, DummyOptim)
        # A DummyOptim takes what torch's optimizers take: groups, or parameters themselves.
        groups = optimizer.params if is_dummy else optimizer.param_groups
        parts = (one["params"] if isinstance(one, dict) else [one] for one in groups)
        trained = {id(parameter) for part in parts for parameter in part}
        numbers = [
            number
            for number, model in enumerate(bundle.models)
            if any(id(parameter) in trained for parameter in model.parameters())
        ]
        if len(numbers) != 1 or numbers[0] in found:
            names = ", ".join(type(model).__name__ for model in bundle.models) or "no model"
            raise ConfigError(
                f"{type(optimizer).__name__} trains {len(trained)} parameter(s) of {len(numbers)} "
                f"of the models prepared with it ({names}). A DeepSpeed engine has one of each. "
                "Prepare both in one call, one optimizer for each model."
            )
        found[numbers[0]] = optimizer
    return found


def _schedule_of(
    drives: list[Drive | None], drive_of: dict[int, Drive | None], scheduler: Any
) -> Any:
    """What steps a schedule: the engine; one of torch is stepped by the loop, as always."""
    if not is_engines(scheduler):
        return scheduler
    # Where its optimizer is only in the file, one engine has it.
    drive = drive_of.get(id(scheduler.optimizer)) or next(filter(None, drives))
    return engines.EngineScheduler(drive)


def check_parts(settings: dict[str, Any], bundle: Bundle) -> None:
    """Refuse optimizers and schedules that the file and the code both have, or neither."""
    mistakes = []
    are_dummies = [isinstance(optimizer, DummyOptim) for optimizer in bundle.optimizers]
    own = {key: value_at(settings, f"{key}.type") for key in ("optimizer", "scheduler")}
    if bundle.optimizers and not bundle.models:
        mistakes.append(
            f"prepare got {len(bundle.optimizers)} optimizer(s) and no model: alone they would "
            "train nothing. Prepare them in one call."
        )
    if any(isinstance(one, engines.EngineOptimizer) for one in bundle.optimizers):
        mistakes.append(
            "prepare got the engine of another Accelerator, which cannot be taken apart. Make "
            "model and optimizer anew before: run their cell again."
        )
    if settings.get("optimizer") and not all(are_dummies):
        mistakes.append(
            f"The DeepSpeed configuration has an optimizer ({own['optimizer']}), "
            "and prepare got one of torch. Leave one out, or prepare a DummyOptim."
        )
    if any(are_dummies) and not settings.get("optimizer"):
        mistakes.append(
            f"prepare got {sum(are_dummies)} DummyOptim, and the DeepSpeed configuration has no "
            "optimizer that it could stand for. Add one there, or prepare one of torch."
        )
    for scheduler in bundle.schedulers:
        is_dummy = isinstance(scheduler, DummyScheduler)
        makes_schedule = is_dummy and scheduler.lr_scheduler_callable is not None
        if settings.get("scheduler") and (not is_dummy or makes_schedule):
            mistakes.append(
                f"The DeepSpeed configuration has a schedule ({own['scheduler']}), "
                f"and prepare got {type(scheduler).__name__}. Leave one out, or prepare a "
                "DummyScheduler."
            )
        elif is_dummy and not makes_schedule and not settings.get("scheduler"):
            mistakes.append(
                f"prepare got a DummyScheduler(total_num_steps={scheduler.total_num_steps}), and "
                "the file has no schedule that it could stand for. Add one there, or give "
                "lr_scheduler_callable."
            )
        # The real optimizer is made inside `initialize`, from the file, after this schedule.
        elif any(are_dummies) and not is_dummy:
            mistakes.append(
                f"prepare got a {type(scheduler).__name__} of a DummyOptim: it would set the "
                "learning rate of nothing. Give DummyScheduler(lr_scheduler_callable=...)."
            )
    refuse_mistakes(mistakes)


# Every process writes its part into one folder. DeepSpeed asks torch for any pickle, which may run
# code: here only plain data is read, and the few classes of DeepSpeed that its files hold.


def _save(engine: Any, folder: Path, left_out: Collection[str], *, writes_shared: bool) -> None:
    """Write weights and the optimizer's state; a collective."""
    # Weights that all processes hold (stages 0 to 2), and the tag of the last save.
    writes = engine.save_non_zero_checkpoint or writes_shared
    with attribute(engine, "save_non_zero_checkpoint", writes):
        engine.save_checkpoint(
            str(folder.parent), tag=folder.name, exclude_frozen_parameters=bool(left_out)
        )
    if writes_shared:
        (folder.parent / "latest").write_text(folder.name, encoding="utf-8")


def _load(engine: Any, folder: Path, left_out: Collection[str]) -> None:
    """Read what :func:`_save` wrote; a collective."""
    try:
        with _plain_reading():
            loaded_path, _ = engine.load_checkpoint(
                str(folder.parent), tag=folder.name, load_module_strict=not left_out
            )
    except pickle.UnpicklingError as error:
        raise CheckpointDamaged(
            f"{folder} was loaded in part: {str(error).partition(chr(10))[0]} {_PLAIN_REMEDY}"
        ) from None
    if loaded_path is None:
        raise ConfigError(
            f"The checkpoint {str(folder)!r} holds nothing that DeepSpeed can read: "
            f"{', '.join(sorted(path.name for path in folder.iterdir()))}. Load another one."
        )


_OWN_CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
"""What DeepSpeed puts into its files beside plain data; instances of them only hold numbers."""

_PLAIN_REMEDY = (
    "Only plain data is read, because a pickle of anything else can run any code. If these files "
    "are your own, torch.serialization.add_safe_globals allows a class."
)


@contextmanager
def _plain_reading() -> Iterator[None]:
    """Have every `torch.load` read plain data, also those that ask for any pickle."""
    classes = [
        getattr(importlib.import_module(module_name), class_name, None)
        for module_name, class_names in _OWN_CLASSES.items()
        for class_name in class_names
    ]
    forced = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}
    with env.applied(forced), plain_data(filter(None, classes)):
        yield


def _check_checkpoint(engine: Any, folder: Path, ranks_there: Collection[int]) -> None:
    """Refuse a checkpoint that :func:`_load` could not read; no collective, nothing is changed."""
    if engine.load_universal_checkpoint():
        return  # a universal checkpoint has files of another kind, which are not checked here
    # What all share, and its own. torch's format of before 2020 cannot be looked into.
    own_name = f"zero_pp_rank_{dist.get_rank()}_"
    for path in filter(is_readable, folder.glob("*.pt")):
        if "zero_pp_rank_" in path.name and own_name not in path.name:
            continue
        with _plain_reading():
            other_names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if other_names:
            raise CheckpointDamaged(
                f"{path} holds a {other_names[0]}. Nothing of it was run or loaded. {_PLAIN_REMEDY}"
            )
    model_files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    first_readable = next(filter(is_readable, model_files), None)
    if model_files and first_readable is None:
        return
    states = None if first_readable is None else read_states(first_readable).states
    if not isinstance(states, Mapping):
        raise CheckpointDamaged(
            f"{first_readable or folder} has no states of a model (*_model_states.pt). Nothing has "
            "been loaded. Copy what is missing from where it was saved, or load another checkpoint."
        )
    # Without `ranks_there` another program saved it: which files are on other nodes is not known.
    if ranks_there or not engine.use_node_local_storage():
        _check_ranks(folder, engine, states.get("dp_world_size"), ranks_there)
    _check_shapes(folder, engine, states)


def _check_ranks(folder: Path, engine: Any, saved_by: Any, ranks_there: Collection[int]) -> None:
    """Refuse missing or extra ranks, which DeepSpeed reports by internal names or an assertion."""
    files = CheckpointFiles.of(folder)
    if engine.zero_optimization_stage() == 0 or not (files.optimizer or files.is_of_stage_3):
        return
    # By the model's file: files that are there would hide that the last rank's is missing.
    saved_count = saved_by if isinstance(saved_by, int) else len(files.optimizer)
    files.check_ranks(ranks_there or range(saved_count), saved_count)
    if saved_count != int(engine.dp_world_size):
        raise ConfigError(
            f"The checkpoint {str(folder)!r} is of {saved_count} processes, and this run has "
            f"{int(engine.dp_world_size)}. Run as many, take the weights alone (nbaccel to-fp32 "
            f"{folder.parent} OUT), or convert it by ds_to_universal."
        )


def _check_shapes(folder: Path, engine: Any, states: Mapping[str, Any]) -> None:
    groups = [*(states.get("param_shapes") or ()), states.get("frozen_param_shapes") or {}]
    saved = {name: tuple(shape) for group in groups for name, shape in group.items()}
    here = {
        # At stage 3 the parameters are placeholders, whose own shape says nothing.
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
    }
    odd = [name for name in saved.keys() & here.keys() if saved[name] != here[name]]
    odd += sorted(saved.keys() - here.keys())
    if odd:
        raise ConfigError(
            f"{folder} is of another model than the {type(engine.module).__name__}: {odd[0]} has "
            f"shape {list(saved[odd[0]])} there, and {list(here.get(odd[0], ())) or 'none'} here "
            f"({len(odd)} of {len(saved)} differ). Nothing has been loaded. Load another one."
        )
