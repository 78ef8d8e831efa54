"""``TorchaoFp8``: torchao's linear layers, whose scales are found anew in each step.

torchao puts layers of its own in the place of linear ones, and keeps the very parameters, so
optimizers and shared memory need not know. Under FSDP it lets weights travel in 8 bits, too; their
scales are then computed for all of them at once after each step.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nbaccel.base.optional_packages import require
from nbaccel.config.fp8 import AORecipeKwargs
from nbaccel.plan.contracts.training import Bundle, PrecisionSettings
from nbaccel.precision.fp8_layers import Fp8Precision, LayerSelection, follow_parameters, put_layers

_RECIPES = {"current": "tensorwise", "rowwise": "rowwise"}


class TorchaoFp8(Fp8Precision):
    """Linear layers of torchao."""

    skips_ends_by_default = True

    def __init__(self, settings: PrecisionSettings) -> None:
        super().__init__(settings)
        # What was given with torchao's own objects.
        given = (item for item in settings.handlers if isinstance(item, AORecipeKwargs))
        self._handler = next(given, AORecipeKwargs())
        self._filter = self._handler.module_filter_func
        self.needs_layers = self._filter is None
        # torchao has it for one scale per tensor; without FSDP nothing is gathered.
        is_wanted = settings.is_sharded and self.fp8.enable_fsdp_float8_all_gather
        self._gathers_in_fp8 = is_wanted and self.fp8.recipe == "current"

    @cached_property
    def _configuration(self) -> Any:
        return self._handler.config or replace(
            load_torchao().Float8LinearConfig.from_recipe_name(_RECIPES[self.fp8.recipe]),
            emulate=self.settings.emulates_fp8,
            pad_inner_dim=self.fp8.pad_inner_dim,
            enable_fsdp_float8_all_gather=self._gathers_in_fp8,
        )

    def convert(self, bundle: Bundle) -> Bundle:
        float8 = load_torchao()
        bundle = super().convert(bundle)

        def after_step(*_: Any) -> None:
            for model in bundle.models:
                float8.precompute_float8_dynamic_scale_for_fsdp(model)

        for optimizer in bundle.optimizers:
            follow_parameters(optimizer, self._became.get)
            if self._configuration.enable_fsdp_float8_all_gather and isinstance(
                optimizer, torch.optim.Optimizer
            ):
                optimizer.register_step_post_hook(after_step)
        return bundle

    def convert_model(self, model: nn.Module, selection: LayerSelection) -> nn.Module:
        ids = {id(layer) for layer in selection.chosen.values()}
        parameters_before = dict(model.named_parameters())
        with _quiet():
            converted: nn.Module = load_torchao().convert_to_float8_training(
                model,
                module_filter_fn=self._filter or (lambda module, _: id(module) in ids),
                config=self._configuration,
            )
        # torchao wraps a weight that is to be gathered in 8 bits.
        for name, parameter in converted.named_parameters():
            if parameter is not parameters_before[name]:
                self._became[parameters_before[name]] = parameter
        return converted

    def select(self, model: nn.Module) -> LayerSelection:
        if self._filter is None:
            return super().select(model)
        layers = {n: layer for n, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        chosen = {name: layer for name, layer in layers.items() if self._filter(layer, name)}
        left = {name: "module_filter_func" for name in layers if name not in chosen}
        return LayerSelection(chosen=chosen, left=left)

    def _restore(self, model: nn.Module) -> None:
        restore_layers(model)

    def describe(self) -> str:
        emulated = ", emulated" if self.settings.emulates_fp8 else ""
        gathered = ", weights gathered in fp8" if self._gathers_in_fp8 else ""
        return f"torchao, {self.fp8.recipe} scaling{gathered}{emulated}"


def load_torchao() -> Any:
    """The module ``torchao.float8``, imported without what it prints about its CUDA extensions."""
    with _quiet():
        return require("torchao.float8", extra="fp8", why="fp8 with the backend 'ao'")


@contextmanager
def _quiet() -> Iterator[None]:
    # torchao tells on import which of its extensions, made for GPUs, cannot be loaded.
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def has_layers(model: nn.Module) -> bool:
    """Whether a model has layers of torchao."""
    return any(isinstance(module, _layer_classes()) for module in model.modules())


def restore_layers(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Put `nn.Linear` back in the place of torchao's layers, with the same parameters."""

    def plain_layer(_name: str, layer: Any) -> nn.Module | None:
        if not isinstance(layer, _layer_classes()):
            return None
        with torch.device("meta"):
            return nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)

    put_layers(model, plain_layer)
    return []


def _layer_classes() -> tuple[Any, ...]:
    # Not imported: without it in this process there are no layers of it.
    module: Any = sys.modules.get("torchao.float8.float8_linear")
    return () if module is None else (module.Float8Linear,)
