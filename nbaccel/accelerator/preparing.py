"""``prepare``: models, optimizers, loaders and schedulers made ready, step by visible step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from nbaccel.abc.bundle import Bundle
from nbaccel.abc.standins import DummyOptim, DummyScheduler
from nbaccel.accelerator.facts import Facts
from nbaccel.errors import ConfigError
from nbaccel.strategies.compiling import compile_regions
from nbaccel.strategies.gradient_checkpointing import enable_gradient_checkpointing
from nbaccel.train.loader import PreparedLoader
from nbaccel.train.loading import prepare_data_loader
from nbaccel.train.optimizer import PreparedOptimizer
from nbaccel.train.scheduler import PreparedScheduler

__all__ = ["Preparing"]

_OPTIMIZERS = (torch.optim.Optimizer, DummyOptim)


class Preparing(Facts):
    """How an accelerator makes things ready, and lets go of them."""

    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: list[str]

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, data loaders and schedulers ready to train.

        Args:
            *args: In any order; anything else passes through. What is prepared already stays.
            device_placement: For each of them whether it is moved to the device; None: as the
                accelerator was told.

        Returns:
            The same, ready, in the same order; one alone, or a tuple.

        Raises:
            ConfigError: `device_placement` does not fit the arguments, or one of them cannot be
                prepared.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigError(
                f"device_placement has {len(device_placement)} entries for {len(args)} arguments: "
                "it would be unclear which is meant. Give one for each."
            )
        moves = [
            self.device_placement if wish is None else wish
            for wish in device_placement or [None] * len(args)
        ]
        first = {id(a): i for i, a in reversed([*enumerate(args)])}
        # What is given twice is prepared once; but two loops over one loader are two loaders.
        once = [i for i, a in enumerate(args) if first[id(a)] == i or isinstance(a, DataLoader)]
        ready = self._prepare_together([args[i] for i in once], [moves[i] for i in once])
        by_index = dict(zip(once, ready, strict=True))
        found = [by_index[i if i in by_index else first[id(a)]] for i, a in enumerate(args)]
        return found[0] if len(found) == 1 else tuple(found)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Make one model ready.

        Args:
            model: The model.
            device_placement: Whether it is moved to the device; None: as the accelerator was told.
            evaluation_mode: Only for evaluation: it is not wrapped for training together.

        Returns:
            The model, ready.
        """
        if not evaluation_mode:
            return self.prepare(model, device_placement=[device_placement])  # type: ignore[no-any-return]
        move = self.device_placement if device_placement is None else device_placement
        bundle = self._wrap_forward(self._place_models(Bundle(models=(model,)), [move]))
        return bundle.models[0]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
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
            slice_fn_for_dispatch: How a batch that process 0 read is cut up: called with the batch,
                a slice of rows, and two keywords, `process_index` and `num_processes`.
        """
        if isinstance(data_loader, PreparedLoader):
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            self._place,
            self.gradient_state,
            self.dataloader_config,
            self._collectives,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            slice_fn=slice_fn_for_dispatch,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Make one learning-rate scheduler ready; its optimizer must be prepared before it."""
        for known in self._schedulers:
            if scheduler is known or scheduler is known.scheduler:
                return known
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        original = getattr(scheduler, "optimizer", None)
        mine = [o for o in self._optimizers if any(original is known for known in _inside(o))]
        prepared = PreparedScheduler(
            scheduler,
            mine or list(self._optimizers),
            self.gradient_state,
            steps_per_call=1 if self.split_batches else self.num_processes,
            with_optimizer=self.step_scheduler_with_optimizer,
        )
        self._schedulers.append(prepared)
        return prepared

    # --------------------------------------------------------------------- the steps

    def _prepare_together(self, args: Sequence[Any], moves: Sequence[bool]) -> list[Any]:
        """The arguments, with what can be prepared replaced."""
        found = [self._known(item) for item in args]
        fresh = [i for i, item in enumerate(found) if item is None]
        for i in fresh:
            found[i] = args[i]
        models = [i for i in fresh if isinstance(args[i], nn.Module)]
        optimizers = [i for i in fresh if isinstance(args[i], _OPTIMIZERS)]
        schedulers = [i for i in fresh if _is_scheduler(args[i])]
        for i in fresh:  # first: an engine asks for the size of a batch
            if isinstance(item := args[i], DataLoader):
                found[i] = self.prepare_data_loader(item, device_placement=moves[i])
        bundle = Bundle(
            models=tuple(args[i] for i in models),
            optimizers=tuple(args[i] for i in optimizers),
            schedulers=tuple(args[i] for i in schedulers),
            loaders=tuple(self._dataloaders),
        )
        for step in self._steps([moves[i] for i in models]):
            bundle = step(bundle)
        for numbers, ready in ((models, bundle.models), (optimizers, bundle.optimizers)):
            for i, item in zip(numbers, ready, strict=True):
                found[i] = item
        self._models += bundle.models
        # Last: they look for their optimizers.
        for i, scheduler in zip(schedulers, bundle.schedulers, strict=True):
            found[i] = self.prepare_scheduler(scheduler)
        return found

    def _steps(self, moves: Sequence[bool]) -> tuple[Callable[[Bundle], Bundle], ...]:
        """What is done to a bundle, in order."""
        wrap = (
            self._checkpoint_activations,
            self._wrap,
            self._compile,
            self._wrap_optimizers,
        )
        if self._strategy.owns_precision:
            return wrap
        return (
            lambda bundle: self._place_models(bundle, moves),
            self._precision.convert,
            self._wrap_forward,
            *wrap,
        )

    def _checkpoint_activations(self, bundle: Bundle) -> Bundle:
        if self._request.activation_checkpointing:
            for model in bundle.models:
                enable_gradient_checkpointing(model)
        return bundle

    def _wrap(self, bundle: Bundle) -> Bundle:
        before = len(self._strategy.choices)
        bundle = self._strategy.wrap(bundle)
        if more := self._strategy.choices[before:]:
            self.plan = replace(self.plan, choices=(*self.plan.choices, *more))
        _refuse_standins(bundle, self.plan.strategy)
        return bundle

    def _known(self, item: Any) -> Any:
        """What this has become, if it was prepared before; else None."""
        for model in self._models:
            if item is model or item is self._strategy.unwrap(model):
                return model
        for optimizer in self._optimizers:
            if any(item is known for known in _inside(optimizer)):
                return optimizer
        return item if isinstance(item, PreparedOptimizer) else None

    def _place_models(self, bundle: Bundle, moves: Sequence[bool]) -> Bundle:
        for model, move in zip(bundle.models, moves, strict=True):
            spread = getattr(model, "hf_device_map", None) or {}
            if len(set(spread.values())) > 1 and self.use_distributed:
                raise ConfigError(
                    f"This model is spread over several devices (hf_device_map={spread}), and "
                    f"{self.num_processes} processes would each need all of them. Load it without "
                    "device_map, or train in one process."
                )
            if move and len(set(spread.values())) <= 1:
                model.to(self.device)  # optimizers follow in PreparedOptimizer
        return bundle

    def _wrap_forward(self, bundle: Bundle) -> Bundle:
        for model in bundle.models:
            self._precision.wrap_forward(model)
        return bundle

    def _compile(self, bundle: Bundle) -> Bundle:
        if not self._dynamo.compiles:
            return bundle
        for model in bundle.models:
            # In place: a wrapper around it would hide from the strategy what it wrapped itself.
            if self._dynamo.use_regional_compilation:
                compile_regions(model, **self._dynamo.to_kwargs())
            else:
                model.compile(**self._dynamo.to_kwargs())
        return bundle

    def _wrap_optimizers(self, bundle: Bundle) -> Bundle:
        wrapped = tuple(
            PreparedOptimizer(optimizer, self.gradient_state, self._precision.scaler)
            for optimizer in bundle.optimizers
        )
        self._optimizers += wrapped
        return replace(bundle, optimizers=wrapped)

    # --------------------------------------------------------------------- undoing

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module inside a prepared one.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether its forward goes on computing in the accelerator's precision.
            keep_torch_compile: Whether it stays compiled.

        Returns:
            The module that was given to `prepare`.
        """
        plain = getattr(model, "_orig_mod", model)  # one that the caller compiled
        inner = self._strategy.unwrap(plain)
        if not keep_torch_compile:
            inner = getattr(inner, "_orig_mod", inner)
            inner._compiled_call_impl = None
        if not keep_fp32_wrapper:
            self._precision.unwrap_forward(getattr(inner, "_orig_mod", inner))
        if keep_torch_compile and plain is not model:
            if plain is inner:
                return model
            wrapper: Any = model  # torch has no public way to compile another with the same options
            inner = type(wrapper)(inner, wrapper.dynamo_ctx)
        return inner

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared, so that its memory is free.

        Args:
            *objects: What the caller holds itself.

        Returns:
            As many Nones: ``model, optimizer = accelerator.free_memory(model, optimizer)``.
        """
        self._strategy.release()
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
        self.step = 0
        gc.collect()  # DDP and its model refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * len(objects)

    def clear(self, *objects: Any) -> list[None]:
        """Another name of :meth:`free_memory`."""
        return self.free_memory(*objects)


def _is_scheduler(item: Any) -> bool:
    """Whether it sets learning rates: torch's kind, or one with torch's methods."""
    if isinstance(item, (torch.optim.lr_scheduler.LRScheduler, DummyScheduler)):
        return True
    methods = ("step", "get_last_lr", "state_dict", "load_state_dict")
    is_other = isinstance(item, (nn.Module, *_OPTIMIZERS, PreparedScheduler, type))
    return not is_other and all(callable(getattr(item, name, None)) for name in methods)


def _inside(optimizer: PreparedOptimizer) -> tuple[Any, ...]:
    """The optimizer, what is in it, and what was given for it."""
    inner = optimizer.optimizer
    return (optimizer, inner, *([given] if (given := getattr(inner, "given", None)) else ()))


def _refuse_standins(bundle: Bundle, strategy: str) -> None:
    left = [
        type(item).__name__
        for item in (*bundle.optimizers, *bundle.schedulers)
        if isinstance(item, (DummyOptim, DummyScheduler))
    ]
    if left:
        raise ConfigError(
            f"prepare got {' and '.join(left)} with strategy {strategy!r}: they stand for what a "
            "DeepSpeed configuration describes, and there is none here. Nothing would be trained. "
            "Give optimizers and schedules of torch, or a deepspeed_plugin with a configuration."
        )
