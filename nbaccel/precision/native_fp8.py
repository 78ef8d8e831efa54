"""``NativeFp8``: nbaccel's own linear layers, with current or delayed scaling.

Parameters stay the user's own objects in float32; nothing but the three products of each linear
layer is computed in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.plan.contracts.training import Bundle, PrecisionSettings
from nbaccel.precision.fp8.formats import E4M3, E5M2, NumberFormat, accumulation_format
from nbaccel.precision.fp8.linear import AmaxHistory, Fp8Linear, LayerRecipe, convert_layer
from nbaccel.precision.fp8_layers import (
    Fp8Precision,
    LayerSelection,
    require_layers,
    select_layers,
)


class NativeFp8(Fp8Precision):
    """Linear layers of nbaccel's own."""

    skips_ends_by_default = True

    def __init__(self, settings: PrecisionSettings) -> None:
        super().__init__(settings)
        self._histories: WeakKeyDictionary[nn.Module, AmaxHistory] = WeakKeyDictionary()
        self._is_delayed = self.fp8.recipe == "delayed"

    def convert(self, bundle: Bundle) -> Bundle:
        selections = [(model, self._select(model)) for model in bundle.models]
        require_layers(selections)
        for model, selection in selections:
            self._convert_model(model, selection)
            self.tell(model, selection, self._description())
        if self._is_delayed:
            for optimizer in bundle.optimizers:
                self._follow_steps(optimizer)
        return bundle

    def _restore(self, model: nn.Module) -> None:
        super()._restore(model)
        self._histories.pop(model, None)

    def state_dict(self, models: Iterable[nn.Module]) -> dict[str, Any]:
        """See :meth:`Precision.state_dict`: histories and scales by number of the model."""
        return {
            str(number): self._histories[model].state_dict()
            for number, model in enumerate(models)
            if model in self._histories
        }

    def load_state_dict(self, models: Iterable[nn.Module], state: Mapping[str, Any]) -> None:
        for number, model in enumerate(models):
            if model in self._histories and str(number) in state:
                self._histories[model].load_state_dict(state[str(number)])

    def _select(self, model: nn.Module) -> LayerSelection:
        return select_layers(model, skip_first_and_last=self.skips_ends(self.skips_ends_by_default))

    def _description(self) -> str:
        emulated = ", emulated" if self.settings.emulates_fp8 else ""
        return f"nbaccel's layers, {self.fp8.recipe} scaling{emulated}"

    def _convert_model(self, model: nn.Module, selection: LayerSelection) -> None:
        gradient_format = E5M2 if self.fp8.fp8_format == "HYBRID" else E4M3
        history = None
        if self._is_delayed and selection.chosen:
            history = self._new_history(selection, gradient_format)
            self._histories[model] = history
        for index, layer in enumerate(selection.chosen.values()):
            recipe = LayerRecipe(
                emulate=self.settings.emulates_fp8,
                gradient_format=gradient_format,
                margin=self.fp8.margin,
                exact_passes=self.fp8.override_linear_precision,
                in_evaluation=self.fp8.use_autocast_during_eval,
                weight_gradients=self._weight_gradients(),
                history=history,
                layer_index=index,
            )
            convert_layer(layer, recipe)

    def _weight_gradients(self) -> NumberFormat:
        return accumulation_format(self.settings.accumulation_steps)

    def _new_history(self, selection: LayerSelection, gradient_format: NumberFormat) -> AmaxHistory:
        first_layer = next(iter(selection.chosen.values()))
        return AmaxHistory(
            [*selection.chosen],
            (E4M3, E4M3, gradient_format),
            length=self.fp8.amax_history_len,
            margin=self.fp8.margin,
            interval=self.fp8.interval,
            takes_latest=self.fp8.amax_compute_algo == "most_recent",
            device=first_layer.weight.device,
        )

    def _follow_steps(self, optimizer: Any) -> None:
        """Let scales follow from the magnitudes of a step, once for each step of an optimizer."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"fp8 with delayed scaling takes scales anew after each step of an optimizer, and "
                f"{type(optimizer).__name__} has no steps that can be seen. Give "
                'fp8={"recipe": "current"}, or an optimizer of torch.'
            )
        # Asked now: a strategy that shards puts other parameters in models and optimizers.
        parameters = {id(item) for group in optimizer.param_groups for item in group["params"]}
        followed = [
            history
            for model, history in self._histories.items()
            if _steps_layers_of(model, parameters)
        ] or list(self._histories.values())

        def before_step(*_: Any) -> None:
            for history in followed:
                history.update()

        optimizer.register_step_pre_hook(before_step)


def _steps_layers_of(model: nn.Module, parameter_ids: set[int]) -> bool:
    return any(
        id(layer.weight) in parameter_ids
        for layer in model.modules()
        if isinstance(layer, Fp8Linear)
    )
