"""TransformerEngine: what Accelerate has of it, for code that converts models itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from nbaccel.base.public_names import name_own
from nbaccel.config.fp8 import Fp8Handler, TERecipeKwargs
from nbaccel.precision import transformer_engine as engine_layers


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Put TransformerEngine's linear layers and norms in a model, or torch's back; in place."""
    library = engine_layers.load_transformer_engine()
    if to_transformer_engine:
        names = None if _convert_linear else frozenset[str]()
        engine_layers.replace_layers(model, library, linear_names=names, with_norms=_convert_ln)
    else:
        engine_layers.restore_layers(model)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a model has layers of TransformerEngine."""
    return engine_layers.has_layers(model)


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A forward under TransformerEngine's autocast, as a function to be bound to a model."""
    library = engine_layers.load_transformer_engine()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wrapped = engine_layers.TransformerEngineForward(
            model_forward, self, library, fp8_recipe, use_during_eval
        )
        return wrapped(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Fp8Handler | None) -> nn.Module:
    """Let a model's forward run under TransformerEngine's autocast; in place."""
    library = engine_layers.load_transformer_engine()
    settings = (fp8_recipe_handler or TERecipeKwargs()).to_config()
    if settings.recipe == "auto":
        settings = settings.changed(recipe="delayed")
    recipes = importlib.import_module("transformer_engine.common.recipe")
    recipe, _ = engine_layers.build_recipe(settings, recipes)
    model.__dict__["forward"] = engine_layers.TransformerEngineForward(
        model.forward, model, library, recipe, settings.use_autocast_during_eval
    )
    return model


name_own(globals())
