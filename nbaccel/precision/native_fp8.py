"""FP8 by nbaccel's own linear layers: ``NativeFp8``, and with MS-AMP's levels ``MsAmpFp8``.

With the first, parameters stay the user's own objects in float32; nothing but the three products of
each linear layer is computed in 8 bits, with current or delayed scaling. The second shortens
weights, gradients and moments, too:

    level  weight        gradient  first, second moment   bytes per parameter with AdamW
    O1     FP16, scaled  E4M3      float32, float32       2 + 1 + 4 + 4 = 11
    O2     FP16, scaled  E4M3      E4M3, FP16             2 + 1 + 1 + 2 = 6

FP8-LM (arXiv 2310.18313) describes them. They hold for the weights of linear layers; at O2 all
moments are short. The package `msamp` is not used: it cannot be installed beside a current torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nbaccel.base.errors import ConfigError
from nbaccel.plan.contracts.training import Bundle, PrecisionSettings
from nbaccel.precision import fp8_layers
from nbaccel.precision.fp8.gradient_exchange import ScaledGradients
from nbaccel.precision.fp8.linear import AmaxHistory, Fp8Linear, LayerRecipe, convert_layer
from nbaccel.precision.fp8.scaled_adam import ScaledAdam
from nbaccel.precision.fp8.scaled_tensor import E4M3, E5M2, FP16, ScaledTensor, accumulation_format


class NativeFp8(fp8_layers.Fp8Precision):
    """Linear layers of nbaccel's own."""

    skips_ends_by_default = True

    def __init__(self, settings: PrecisionSettings) -> None:
        super().__init__(settings)
        self._histories: WeakKeyDictionary[nn.Module, AmaxHistory] = WeakKeyDictionary()
        self._is_delayed = self.fp8.recipe == "delayed"
        self._weight_gradients = accumulation_format(settings.accumulation_steps)

    def convert(self, bundle: Bundle) -> Bundle:
        bundle = super().convert(bundle)
        if self._is_delayed:
            for optimizer in bundle.optimizers:
                self._follow_steps(optimizer)
        return bundle

    def _restore(self, model: nn.Module) -> None:
        super()._restore(model)
        self._histories.pop(model, None)

    def state_dict(self, models: Iterable[nn.Module]) -> dict[str, Any]:
        """See :meth:`Precision.state_dict`: histories and scales by number of the model."""
        known = [(n, model) for n, model in enumerate(models) if model in self._histories]
        return {str(number): self._histories[model].state_dict() for number, model in known}

    def load_state_dict(self, models: Iterable[nn.Module], state: Mapping[str, Any]) -> None:
        for number, model in enumerate(models):
            if model in self._histories and str(number) in state:
                self._histories[model].load_state_dict(state[str(number)])

    def describe(self) -> str:
        emulated = ", emulated" if self.settings.emulates_fp8 else ""
        return f"nbaccel's layers, {self.fp8.recipe} scaling{emulated}"

    def convert_model(self, model: nn.Module, selection: fp8_layers.LayerSelection) -> nn.Module:
        gradient_format = E5M2 if self.fp8.fp8_format == "HYBRID" else E4M3
        history = None
        if self._is_delayed and selection.chosen:
            history = self._histories[model] = AmaxHistory(
                [*selection.chosen],
                (E4M3, E4M3, gradient_format),
                length=self.fp8.amax_history_len,
                margin=self.fp8.margin,
                interval=self.fp8.interval,
                takes_latest=self.fp8.amax_compute_algo == "most_recent",
                device=next(iter(selection.chosen.values())).weight.device,
            )
        for index, layer in enumerate(selection.chosen.values()):
            recipe = LayerRecipe(
                emulate=self.settings.emulates_fp8,
                gradient_format=gradient_format,
                margin=self.fp8.margin,
                exact_passes=self.fp8.override_linear_precision,
                in_evaluation=self.fp8.use_autocast_during_eval,
                weight_gradients=self._weight_gradients,
                history=history,
                layer_index=index,
            )
            convert_layer(layer, recipe)
        return model

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
            if any(isinstance(m, Fp8Linear) and id(m.weight) in parameters for m in model.modules())
        ] or list(self._histories.values())

        def before_step(*_: Any) -> None:
            for history in followed:
                history.update()

        optimizer.register_step_pre_hook(before_step)


class MsAmpFp8(NativeFp8):
    """Weights, gradients and moments in 8 and 16 bits."""

    skips_ends_by_default = False

    def __init__(self, settings: PrecisionSettings) -> None:
        super().__init__(settings)
        self._averaging: WeakKeyDictionary[nn.Module, ScaledGradients] = WeakKeyDictionary()

    def convert(self, bundle: Bundle) -> Bundle:
        bundle = super().convert(bundle)
        return replace(bundle, optimizers=tuple(map(self._scaled_optimizer, bundle.optimizers)))

    def own_gradients(self, model: nn.Module) -> list[str]:
        return [name for name, weight in _scaled_weights(model) if weight.requires_grad]

    def average_gradients(self, model: nn.Module, is_synced: Callable[[], bool]) -> None:
        if model in self._averaging:
            self._averaging[model].detach()
        weights = [weight for _, weight in _scaled_weights(model) if weight.requires_grad]
        self._averaging[model] = ScaledGradients(weights, self._weight_gradients, is_synced)

    def describe(self) -> str:
        return f"MS-AMP's {self.fp8.opt_level}, {super().describe()}"

    def convert_model(self, model: nn.Module, selection: fp8_layers.LayerSelection) -> nn.Module:
        super().convert_model(model, selection)
        short_weights = {
            id(weight): weight for weight in fp8_layers.unshared_weights(model, selection)
        }
        for layer in selection.chosen.values():
            weight = layer.weight
            if id(weight) not in short_weights:
                continue
            if weight not in self._became:
                self._became[weight] = nn.Parameter(ScaledTensor.of(weight, FP16))
            layer.weight = self._became[weight]
        return model

    def _scaled_optimizer(self, optimizer: Any) -> Any:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"fp8 with MS-AMP's levels got {type(optimizer).__name__}, which stands for an "
                "optimizer of DeepSpeed: it would not know these weights. Give torch.optim.AdamW."
            )
        fp8_layers.follow_parameters(optimizer, self._became.get)
        return optimizer if self.fp8.opt_level == "O1" else ScaledAdam(optimizer)


def _scaled_weights(model: nn.Module) -> Iterator[tuple[str, ScaledTensor]]:
    named = model.named_parameters()
    return ((name, weight) for name, weight in named if isinstance(weight, ScaledTensor))
