"""``TransformerEngineFp8``: TransformerEngine's layers under its autocast.

Its linear layers and LayerNorms take the place of torch's, with the very parameters of these, so
optimizers and shared memory need not know. Largest magnitudes are reduced over all processes.

It loads on machines with CUDA alone: all but :func:`build_recipe` has been run with stand-ins only.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base.errors import ConfigError, MissingBackend
from nbaccel.base.log import write_notice
from nbaccel.base.optional_packages import require
from nbaccel.config import Fp8Config
from nbaccel.plan.contracts.training import PrecisionSettings
from nbaccel.precision.fp8_layers import Fp8Precision, LayerSelection, put_layers
from nbaccel.precision.native import WrappedForward

_RECIPE_CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
_RECIPE_SETTINGS = (
    *("margin", "interval", "fp8_format"),
    *("amax_history_len", "amax_compute_algo", "override_linear_precision"),
)


class TransformerEngineFp8(Fp8Precision):
    """Layers of TransformerEngine."""

    def __init__(self, settings: PrecisionSettings) -> None:
        super().__init__(settings)
        self._library = load_transformer_engine()
        recipes = importlib.import_module("transformer_engine.common.recipe")
        self._recipe, ignored = build_recipe(self.fp8, recipes)
        if ignored and settings.is_main:
            told = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
            write_notice(
                f"nbaccel: with this recipe the installed TransformerEngine does not read {told}.\n"
            )

    def convert_model(self, model: nn.Module, selection: LayerSelection) -> nn.Module:
        replace_layers(model, self._library, linear_names=frozenset(selection.chosen))
        return model

    def describe(self) -> str:
        return f"TransformerEngine, {type(self._recipe).__name__}"

    def wrap_forward(self, model: nn.Module) -> None:
        super().wrap_forward(model)
        model.__dict__["forward"] = TransformerEngineForward(
            model.forward, model, self._library, self._recipe, self.fp8.use_autocast_during_eval
        )

    def _restore(self, model: nn.Module) -> None:
        restore_layers(model)


@dataclass(eq=False)
class TransformerEngineForward(WrappedForward):
    """A forward under TransformerEngine's autocast."""

    _model: nn.Module
    _library: Any
    _recipe: Any
    _in_evaluation: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        settings = {"recipe": self._recipe, "amax_reduction_group": group}
        autocast = getattr(self._library, "autocast", None)
        if autocast is None:  # before version 2.8
            settings = {"fp8_recipe": self._recipe, "fp8_group": group}
            autocast = self._library.fp8_autocast
        with autocast(enabled=self._in_evaluation or self._model.training, **settings):
            return self.forward(*args, **kwargs)


def load_transformer_engine() -> Any:
    """The module ``transformer_engine.pytorch``."""
    try:
        return require("transformer_engine.pytorch", extra="te", why="fp8 with the backend 'te'")
    except MissingBackend:
        raise
    except Exception as error:  # any: it raises what CUDA and its compiled part lack
        raise MissingBackend(
            f"transformer_engine is installed and does not load: {error}. It needs CUDA, cuDNN and "
            "its compiled part (pip install --no-build-isolation 'transformer_engine[pytorch]'). "
            'Mend it, or give fp8={"backend": "native"}.',
            name="transformer_engine",
        ) from error


def build_recipe(fp8: Fp8Config, recipes: Any) -> tuple[Any, dict[str, Any]]:
    """A recipe object of what was asked."""
    class_name = _RECIPE_CLASSES[fp8.recipe]
    recipe_class = getattr(recipes, class_name, None)
    if recipe_class is None:
        raise ConfigError(
            f"fp8.recipe={fp8.recipe!r} is TransformerEngine's {class_name}, which the installed "
            "version does not have. Update transformer_engine, or give another recipe."
        )
    known = {item.name for item in fields(recipe_class)}
    defaults = {name: Fp8Config.model_fields[name].default for name in _RECIPE_SETTINGS}
    said = {n: getattr(fp8, n) for n, default in defaults.items() if getattr(fp8, n) != default}
    arguments = {name: value for name, value in said.items() if name in known}
    if "fp8_format" in arguments:
        arguments["fp8_format"] = getattr(recipes.Format, arguments["fp8_format"])
    ignored = {name: value for name, value in said.items() if name not in known}
    return recipe_class(**arguments), ignored


def replace_layers(
    model: nn.Module,
    library: Any,
    linear_names: frozenset[str] | None = None,
    *,
    with_norms: bool = True,
) -> None:
    """Put TransformerEngine's layers in the place of linear layers and LayerNorms; in place."""

    def engine_layer(name: str, layer: nn.Module) -> Any:
        if type(layer) is nn.Linear and (linear_names is None or name in linear_names):
            return library.Linear(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                params_dtype=layer.weight.dtype,
                device="meta",
            )
        # Its LayerNorm has one dimension, and always weight and bias.
        if (
            with_norms
            and type(layer) is nn.LayerNorm
            and len(layer.normalized_shape) == 1
            and len(list(layer.parameters(recurse=False))) == 2
        ):
            return library.LayerNorm(
                layer.normalized_shape[0], eps=layer.eps, dtype=layer.weight.dtype, device="meta"
            )
        return None

    put_layers(model, engine_layer)


def has_layers(model: nn.Module) -> bool:
    """Whether a model has layers of TransformerEngine."""
    return any(_is_engine_layer(module) for module in model.modules())


def _is_engine_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformer_engine.")


def restore_layers(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Put torch's layers back in the place of TransformerEngine's, with the same parameters."""
    put_layers(model, _plain_layer)
    return []


def _plain_layer(_name: str, layer: Any) -> nn.Module | None:
    class_name = type(layer).__name__ if _is_engine_layer(layer) else ""
    with torch.device("meta"):
        if class_name == "Linear":
            bias = dict(layer.named_parameters(recurse=False)).get("bias")
            has_bias = bias is not None and bias.numel() > 0
            return nn.Linear(layer.in_features, layer.out_features, bias=has_bias)
        if class_name == "LayerNorm":
            return nn.LayerNorm(tuple(layer.weight.shape), eps=layer.eps)
    return None
