"""Which layers of a model compute in 8 bits, and how they become what they were.

Precisions of 8 bits share this, whichever library computes; all but their layers is bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import write_notice
from nbaccel.base.units import count_noun, first_few
from nbaccel.config import Fp8Config
from nbaccel.plan.contracts import training as contracts
from nbaccel.plan.launch_plan import Choice
from nbaccel.precision.fp8.linear import MULTIPLE, Fp8Linear
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor
from nbaccel.precision.native import Bf16


@dataclass(frozen=True, kw_only=True)
class LayerSelection:
    """The linear layers of a model."""

    # Those that compute in 8 bits, by name.
    chosen: Mapping[str, nn.Linear] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)  # why the others do not, by name

    def describe(self) -> str:
        """How many there are, and which stay as they are, in one clause."""
        total = len(self.chosen) + len(self.left)
        counts = f"{len(self.chosen)} of {count_noun(total, 'linear layer')}"
        if not self.left:
            return counts
        names = [f"{name} ({reason})" for name, reason in self.left.items()]
        return f"{counts}; in bfloat16 stay {first_few(names, 6, separator='; ')}"


def select_layers(model: nn.Module, *, skip_first_and_last: bool) -> LayerSelection:
    """Choose the linear layers that can compute in 8 bits."""
    linear = [(n, it) for n, it in model.named_modules() if type(it) in (nn.Linear, Fp8Linear)]
    layers = {name or type(model).__name__: layer for name, layer in linear}
    ends = (*layers,)[:1] + (*layers,)[-1:] if skip_first_and_last else ()
    left: dict[str, str] = {}
    for name, layer in layers.items():
        sizes = {"inputs": layer.in_features, "outputs": layer.out_features}
        odd = next((what for what, size in sizes.items() if size % MULTIPLE), None)
        if odd is not None:  # a GPU cannot multiply it in 8 bits
            left[name] = f"{sizes[odd]} {odd} are not divisible by {MULTIPLE}"
        elif name in ends:
            left[name] = "the first layer" if name == ends[0] else "the last layer"
    chosen = {name: layer for name, layer in layers.items() if name not in left}
    return LayerSelection(chosen=chosen, left=left)


def unshared_weights(model: nn.Module, selection: LayerSelection) -> Iterator[torch.Tensor]:
    """The weights that MS-AMP's levels keep in short formats, each once for each of its layers."""
    layers = {id(layer) for layer in selection.chosen.values()}
    shared = {
        id(parameter)
        for module in model.modules()
        if id(module) not in layers
        for parameter in module.parameters(recurse=False)
    }
    for layer in selection.chosen.values():
        if layer.weight.requires_grad and id(layer.weight) not in shared:
            yield layer.weight


def follow_parameters(optimizer: Any, replacement_of: Callable[[Any], Any]) -> None:
    """Let an optimizer hold the parameters that took the place of its own, with their state."""
    for group in getattr(optimizer, "param_groups", ()):
        for index, parameter in enumerate(group["params"]):
            replacement = replacement_of(parameter)
            if replacement is None:
                continue
            group["params"][index] = replacement
            if parameter in optimizer.state:
                optimizer.state[replacement] = optimizer.state.pop(parameter)


def require_layers(selections: Iterable[tuple[nn.Module, LayerSelection]]) -> None:
    """Refuse models of which no layer would compute in 8 bits."""
    all_selections = list(selections)
    if not all_selections or any(selection.chosen for _, selection in all_selections):
        return
    model, selection = all_selections[0]
    names = [f"{name} ({reason})" for name, reason in selection.left.items()]
    told = first_few(names, 6, separator="; ") if names else "it has no torch.nn.Linear"
    raise ConfigError(
        f'mixed_precision="fp8": no layer of {type(model).__name__} would compute in 8 bits: '
        f"{told}. It would train in bfloat16. Use sizes that 16 divides, give "
        'fp8={"skip_first_and_last": False}, or mixed_precision="bf16".'
    )


def put_layers(model: nn.Module, new_layer: Callable[[str, nn.Module], nn.Module | None]) -> None:
    """Put other layers, made from names and layers, in their place, with the same parameters."""
    for parent_name, parent in list(model.named_modules()):
        for name, layer in list(parent.named_children()):
            replacement = new_layer(f"{parent_name}.{name}" if parent_name else name, layer)
            if replacement is not None:
                for parameter_name, parameter in layer.named_parameters(recurse=False):
                    # TransformerEngine's layers without a bias have an empty one.
                    if getattr(replacement, parameter_name, None) is not None:
                        setattr(replacement, parameter_name, parameter)
                setattr(parent, name, replacement.train(layer.training))


def restore_layers(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Make all converted layers `nn.Linear` again, with float32 weights; tied ones stay tied."""
    plain_weights: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for layer in model.modules():
        if not isinstance(layer, Fp8Linear):
            continue
        weight = layer.weight
        if isinstance(weight, ScaledTensor):
            if id(weight) not in plain_weights:
                plain = nn.Parameter(weight.dequantize(), requires_grad=weight.requires_grad)
                plain_weights[id(weight)] = (cast("nn.Parameter", weight), plain)
            layer.weight = plain_weights[id(weight)][1]
        layer.__class__ = nn.Linear  # type: ignore[assignment]
        del layer.__dict__["fp8_recipe"]
    return list(plain_weights.values())


class Fp8Precision(Bf16):
    """A precision whose linear layers compute in 8 bits."""

    name: ClassVar[str] = "fp8"
    converts_layers: ClassVar[bool] = True
    skips_ends_by_default: ClassVar[bool] = False  # whether first and last layer stay as they are
    needs_layers = True  # whether a model is refused of which no layer would compute in 8 bits

    def __init__(self, settings: contracts.PrecisionSettings) -> None:
        super().__init__(settings)
        self.settings = settings
        self.fp8 = settings.fp8 or Fp8Config()
        # Optimizers hold the parameters that models had before; some are prepared later.
        self._became = WeakTensorKeyDictionary()

    def convert(self, bundle: contracts.Bundle) -> contracts.Bundle:
        selections = [(model, self.select(model)) for model in bundle.models]
        if self.needs_layers:
            require_layers(selections)
        models = []
        for model, selection in selections:
            models.append(self.convert_model(model, selection))
            name = type(model).__name__
            what = self.describe()
            described = selection.describe()
            self.choices += (Choice(f"fp8 layers of {name}", what, described),)
            # Layers that were asked for and stay out are worth a line; the rest is in the plan.
            if self.settings.is_main and selection.left:
                write_notice(f"nbaccel: {name} in fp8 by {what}: {described}.\n")
        return replace(bundle, models=tuple(models))

    def select(self, model: nn.Module) -> LayerSelection:
        """The layers that are to compute in 8 bits."""
        said = self.fp8.skip_first_and_last
        skips = self.skips_ends_by_default if said is None else said
        return select_layers(model, skip_first_and_last=skips)

    def convert_model(self, model: nn.Module, selection: LayerSelection) -> nn.Module:
        """Let these layers compute in 8 bits."""
        raise NotImplementedError

    def describe(self) -> str:
        """What computes, and how it scales."""
        raise NotImplementedError

    def unwrap_forward(self, model: nn.Module) -> None:
        """See :meth:`Precision.unwrap_forward`; its layers are plain again, too."""
        super().unwrap_forward(model)
        self._restore(model)

    def _restore(self, model: nn.Module) -> None:
        restore_layers(model)
