"""``Preparer``: makes models, optimizers, loaders and schedulers ready, as a list of steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from nbaccel.accelerator.accelerator_base import RunDescription
from nbaccel.accelerator.prepared_run import TrainingRun
from nbaccel.base import torch_private
from nbaccel.base.errors import ConfigError
from nbaccel.base.units import first_few
from nbaccel.data_loader import share_data_loader, skip_first_batches
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.plan import registry
from nbaccel.plan.contracts.training import Bundle, DummyOptim, DummyScheduler
from nbaccel.scheduler import AcceleratedScheduler
from nbaccel.strategies.model_blocks import compile_regions, enable_gradient_checkpointing
from nbaccel.train.gradient import GradientState
from nbaccel.train.loader import PreparedLoader

_MARK = "_is_accelerate_prepared"
_OPTIMIZER_TYPES = (torch.optim.Optimizer, DummyOptim)


class Preparer(RunDescription):
    """Makes models, optimizers, loaders and schedulers ready for a run, and releases them."""

    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: list[str]

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.gradient_state = GradientState(run.request.accumulation)
        self.step = 0
        # What `prepare` returned, in its order. Libraries for Accelerate read these lists.
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, data loaders and schedulers ready to train.

        Args:
            *args: In any order; anything else passes through. What is prepared already stays.
            device_placement: Whether each of them is moved to the device; None: the accelerator's.

        Returns:
            The same, ready, in the same order; one alone, or a tuple.

        Raises:
            ConfigError: `device_placement` does not fit the arguments, or one cannot be prepared.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigError(
                f"device_placement has {len(device_placement)} entries for {len(args)} arguments: "
                "it would be unclear which is meant. Give one for each."
            )
        self._check_process()
        default = self.device_placement
        given = device_placement or [None] * len(args)
        placements = [default if placement is None else placement for placement in given]
        ready: dict[int, Any] = {}
        new: dict[int, Any] = {}
        first_place = {id(given_item): place for place, given_item in reversed([*enumerate(args)])}
        for place, given_item in enumerate(args):
            # What is given twice is prepared once; but two loops over one loader are two loaders.
            if first_place[id(given_item)] == place or isinstance(given_item, DataLoader):
                ready[place] = self._prepared_before(given_item)
                if ready[place] is None:
                    new[place] = given_item
        ready.update(self._prepare_new(new, placements))
        items = [ready.get(n, ready[first_place[id(item)]]) for n, item in enumerate(args)]
        return items[0] if len(items) == 1 else tuple(items)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Make one model ready.

        Args:
            model: The model.
            device_placement: Whether it is moved to the device; None: as the accelerator was told.
            evaluation_mode: Only for evaluation: it is not wrapped for training together.
        """
        if not evaluation_mode:
            return self.prepare(model, device_placement=[device_placement])  # type: ignore[no-any-return]
        to_device = self.device_placement if device_placement is None else device_placement
        self._place_models([model], [to_device])
        self._run.precision.wrap_forward(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Make one optimizer ready; its model is prepared elsewhere."""
        return self.prepare(optimizer, device_placement=[device_placement])  # type: ignore[no-any-return]

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> PreparedLoader:
        """Share one data loader out over the processes.

        Args:
            data_loader: The loader.
            device_placement: Whether batches are moved to the device.
            slice_fn_for_dispatch: How a batch of process 0 is divided: called with the batch,
                a slice of rows, and two keywords, `process_index` and `num_processes`.
        """
        to_device = self.device_placement if device_placement is None else device_placement
        if isinstance(data_loader, PreparedLoader) and data_loader.is_for(self._run.place):
            is_known = any(known is data_loader for known in self._dataloaders)
            if not (is_known or self._is_own(data_loader)):
                # Saved with this accelerator, too; where a loop stands is known to all of them.
                self._dataloaders.append(data_loader)
            return data_loader
        prepared_loader = share_data_loader(
            data_loader,
            self._run.place,
            self.gradient_state,
            self._run.request.data,
            self._run.collectives,
            put_on_device=to_device,
            rng_types=self.rng_types,
            slice_fn=slice_fn_for_dispatch,
        )
        _mark(prepared_loader)
        self._dataloaders.append(prepared_loader)
        return prepared_loader

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Make one learning-rate scheduler ready; its optimizer must be prepared before it."""
        # Two wrappers around one scheduler would advance it twice per step.
        for earlier in self._schedulers:
            if scheduler is earlier or scheduler is earlier.scheduler:
                return earlier
        if isinstance(scheduler, AcceleratedScheduler):
            if self._is_own(scheduler):
                return scheduler
            scheduler = scheduler.scheduler
        torch_private.watch_steps_again(scheduler)
        optimizer = getattr(scheduler, "optimizer", None)
        optimizers = [
            prepared_optimizer
            for prepared_optimizer in self._optimizers
            if any(optimizer is part for part in _optimizer_parts(prepared_optimizer))
        ]
        prepared_scheduler = AcceleratedScheduler(
            scheduler,
            # One of another class need not say which optimizer it sets: then it waits for all.
            optimizers or list(self._optimizers),
            self.step_scheduler_with_optimizer,
            self._run.request.data.split_batches,
            gradient_state=self.gradient_state,
            num_processes=self._run.place.world_size,
        )
        _mark(prepared_scheduler)
        self._schedulers.append(prepared_scheduler)
        return prepared_scheduler

    def skip_first_batches(self, dataloader: Any, num_batches: int | None = None) -> Any:
        """A new loader without the first batches, to continue from a saved state.

        Args:
            dataloader: A prepared loader, or a plain one; it is not changed.
            num_batches: How many to leave out; None for as many as the loaded state had used.
        """
        return skip_first_batches(dataloader, num_batches)

    def _prepare_new(self, new: dict[int, Any], placements: Sequence[bool]) -> dict[int, Any]:
        new = {place: _as_given(item) for place, item in new.items()}
        ready = dict(new)
        for place, item in new.items():  # first, because an engine needs the size of a batch
            if isinstance(item, DataLoader):
                ready[place] = self.prepare_data_loader(item, placements[place])
        models = {n: item for n, item in new.items() if isinstance(item, nn.Module)}
        optimizers = {n: item for n, item in new.items() if isinstance(item, _OPTIMIZER_TYPES)}
        schedulers = {n: item for n, item in new.items() if _is_scheduler(item)}
        bundle = Bundle(
            models=tuple(models.values()),
            optimizers=tuple(optimizers.values()),
            schedulers=tuple(schedulers.values()),
            # All so far: the one that an engine reads the batch size of may be an earlier one.
            loaders=tuple(self._dataloaders),
        )
        for place, model in models.items():
            if placements[place] and not getattr(model, "hf_device_map", None):
                _refuse_empty(model)
        _refuse_offloaded(bundle)
        bundle = self._make_ready(bundle, [placements[place] for place in models])
        for places, ready_objects in ((models, bundle.models), (optimizers, bundle.optimizers)):
            for place, ready_object in zip(places, ready_objects, strict=True):
                _mark(ready_object)
                ready[place] = ready_object
        self._models.extend(bundle.models)
        # Last, because each looks for its optimizer among the prepared ones.
        for place, scheduler in zip(schedulers, bundle.schedulers, strict=True):
            ready[place] = self.prepare_scheduler(scheduler)
        return ready

    def _make_ready(self, bundle: Bundle, placements: Sequence[bool]) -> Bundle:
        strategy, precision = self._run.strategy, self._run.precision
        # An engine places and casts models; which layers compute in 8 bits it does not know.
        by_engine = strategy.owns_precision
        if strategy.before_placement is not None and not by_engine:
            strategy.before_placement(bundle.models)
        _restore_layers(bundle)
        if not by_engine:  # before a strategy replaces parameters
            self._place_models(bundle.models, placements)
        bundle = precision.convert(bundle)
        for model in bundle.models:
            if not by_engine:  # before DDP wraps the model, so that it calls the new forward
                precision.wrap_forward(model)
            if self._run.request.activation_checkpointing:
                enable_gradient_checkpointing(model)
        bundle = strategy.wrap(bundle)
        items = (*bundle.optimizers, *bundle.schedulers)
        stand_ins = [item for item in items if isinstance(item, (DummyOptim, DummyScheduler))]
        if stand_ins:
            raise ConfigError(
                f"prepare got {' and '.join(type(item).__name__ for item in stand_ins)} with "
                f"strategy {self._run.initial_plan.strategy!r}: they stand for what a DeepSpeed "
                "configuration describes, and there is none here. Nothing would be trained. Give "
                "optimizers and schedules of torch, or a deepspeed_plugin with a configuration."
            )
        dynamo = self._run.dynamo
        for model in bundle.models if dynamo.compiles else ():
            # In place: a wrapper around it would hide from the strategy what it wrapped itself.
            compile_all = compile_regions if dynamo.use_regional_compilation else nn.Module.compile
            compile_all(model, **dynamo.to_kwargs())
        optimizers = tuple(
            AcceleratedOptimizer(
                optimizer,
                scaler=precision.scaler,
                gradient_state=self.gradient_state,
                mark_step=registry.device(self._run.place.device_name).mark_step,
            )
            for optimizer in bundle.optimizers
        )
        self._optimizers.extend(optimizers)
        return replace(bundle, optimizers=optimizers)

    def _prepared_before(self, item: Any) -> Any:
        for model in self._models:
            if item is model or item is self._run.strategy.unwrap(model):
                return model
        for optimizer in self._optimizers:
            if any(item is optimizer_part for optimizer_part in _optimizer_parts(optimizer)):
                return optimizer
        return item if isinstance(item, AcceleratedOptimizer) and self._is_own(item) else None

    def _is_anothers(self, model: nn.Module) -> bool:
        """Whether another accelerator prepared a model, and this one did not."""
        return getattr(model, _MARK, False) and self._prepared_before(model) is None

    def _is_own(self, prepared: Any) -> bool:
        """Whether this accelerator prepared it; a cell that is run again gives another one's."""
        return vars(prepared.gradient_state) is vars(self.gradient_state)

    def _place_models(self, models: Sequence[nn.Module], placements: Sequence[bool]) -> None:
        for model, to_device in zip(models, placements, strict=True):
            device_map = getattr(model, "hf_device_map", None) or {}
            has_several = len(set(device_map.values())) > 1
            if has_several and not self._run.place.is_alone:
                raise ConfigError(
                    f"This model is spread over several devices (hf_device_map={device_map}), and "
                    f"{self._run.place.world_size} processes would each need all of them. Load it "
                    "without device_map, or train in one process."
                )
            flags = ("is_loaded_in_8bit", "is_loaded_in_4bit")
            loaded_in = [name for name in flags if getattr(model, name, False)]
            host = {str(device) for device in device_map.values()} & {"cpu", "disk"}
            if loaded_in and host:
                raise ConfigError(
                    f"This model was loaded in few bits ({loaded_in[0]}) and is partly or wholly "
                    f"on {' and '.join(sorted(host))} (hf_device_map={dict(device_map)}): CPU or "
                    "disk offload cannot train. Load it with device_map={'': accelerator.device}."
                )
            # Of a model that a device map has spread, each module is moved by its own hook.
            is_spread = has_several or any(it.is_meta for it in model.parameters())
            if to_device and not is_spread:
                device = registry.device(self._run.place.device_name)
                device.place_module(model, self._run.place.device)  # AcceleratedOptimizer follows

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module inside a prepared one, as it was given to `prepare`.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether its forward goes on computing in the accelerator's precision.
            keep_torch_compile: Whether it stays compiled.
        """
        uncompiled = torch_private.uncompiled(model)  # one that the caller compiled
        inner_model = self._run.strategy.unwrap(uncompiled)
        # Which the caller wrapped.
        while isinstance(inner_model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner_model = inner_model.module
        if not keep_torch_compile:
            inner_model = torch_private.uncompiled(inner_model)
            torch_private.forget_compiled_call(inner_model)
        if not keep_fp32_wrapper:
            self._run.precision.unwrap_forward(torch_private.uncompiled(inner_model))
        if keep_torch_compile and uncompiled is not model:
            if uncompiled is inner_model:
                return model
            # torch has no public way to compile another module with the same options.
            wrapper: Any = model
            inner_model = type(wrapper)(inner_model, wrapper.dynamo_ctx)
        return inner_model

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared, so that its memory is free.

        Args:
            *objects: Further references of the caller.

        Returns:
            As many Nones: ``model, optimizer = accelerator.free_memory(model, optimizer)``.
        """
        self._run.strategy.release()
        for prepared in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            prepared.clear()
        # DDP and its model refer to each other; only freed tensors' memory leaves the cache.
        gc.collect()
        registry.device(self._run.place.device_name).empty_cache()
        self.step = 0
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """Another name of :meth:`free_memory`."""
        return self.free_memory(*objects)


def _mark(prepared: Any) -> None:
    """Say that it is prepared as Accelerate does, for programs that ask."""
    vars(prepared)[_MARK] = True


def _refuse_empty(model: nn.Module) -> None:
    # huggingface/accelerate#2556: torch's "Cannot copy out of meta tensor" names no remedy.
    empty_names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty_names:
        raise ConfigError(
            f"{len(empty_names)} weights of {type(model).__name__} ({first_few(empty_names, 2)}) "
            "are on meta: they have no values to train or to compute with. Load them first: "
            "load_checkpoint_in_model(model, path) maps the files, and with FSDP or ZeRO-3 each "
            "process then reads its own part only."
        )


def _refuse_offloaded(bundle: Bundle) -> None:
    """Refuse optimizers of weights that a device map keeps out of memory between forwards."""
    offloaded = {
        id(parameter): f"{name} of {type(model).__name__}"
        for model in bundle.models
        if getattr(model, "hf_device_map", None)
        for name, parameter in model.named_parameters()
        if parameter.is_meta
    }
    trained = [
        offloaded[id(parameter)]
        for optimizer in bundle.optimizers
        for group in getattr(optimizer, "param_groups", ())
        for parameter in group["params"]
        if id(parameter) in offloaded
    ]
    if trained:
        raise ConfigError(
            f"{len(trained)} weights of the optimizer ({first_few(trained, 2)}) are kept in host "
            "memory or on disk and only brought in for a forward: it would step tensors without "
            "values. Give max_memory with more room or another device_map; or load it without, and "
            "give Accelerator a fsdp_plugin, or a deepspeed_plugin with stage 3 and offloading."
        )


def _restore_layers(bundle: Bundle) -> None:
    """Give models the layers back that an earlier Accelerator replaced; optimizers follow."""
    for layers in registry.layer_restorers():
        for model in bundle.models:
            replaced = {id(old): new for old, new in layers(model)}
            for optimizer in bundle.optimizers if replaced else ():
                # Only when an FP8 library has been used: importing it earlier costs every start.
                conversion = registry.load_object("nbaccel.precision.fp8_layers")
                get = replaced.get
                conversion.follow_parameters(optimizer, lambda p, get=get: get(id(p)))


def _is_scheduler(given_object: Any) -> bool:
    """Whether it sets learning rates: torch's kind, or one with torch's methods."""
    if isinstance(given_object, (torch.optim.lr_scheduler.LRScheduler, DummyScheduler)):
        return True
    methods = ("step", "get_last_lr", "state_dict", "load_state_dict")
    is_other = isinstance(given_object, (nn.Module, *_OPTIMIZER_TYPES, type))
    return not is_other and all(callable(getattr(given_object, name, None)) for name in methods)


def _as_given(item: Any) -> Any:
    """What another accelerator has prepared, as that one got it: its settings may differ."""
    if isinstance(item, AcceleratedOptimizer):
        return _optimizer_parts(item)[-1]
    is_its_model = isinstance(item, nn.parallel.DistributedDataParallel) and hasattr(item, _MARK)
    return item.module if is_its_model else item


def _optimizer_parts(optimizer: AcceleratedOptimizer) -> tuple[Any, ...]:
    """The optimizer, what is in it, and what was given for it."""
    inner_optimizer = optimizer.optimizer
    given_optimizer = getattr(inner_optimizer, "given", None)
    return (optimizer, inner_optimizer, *([given_optimizer] if given_optimizer else ()))
