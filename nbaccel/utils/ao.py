"""torchao: what Accelerate has of it, for code that converts models itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from nbaccel.base.public_names import name_own
from nbaccel.precision import torchao
from nbaccel.precision.fp8.linear import MULTIPLE


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Names of the first and the last linear layer; None where there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(
    module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]
) -> bool:
    """Whether a layer of that name is not to be left as it is, and 16 divides its sizes."""
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()
    return fqn not in layers_to_filter and all(size % MULTIPLE == 0 for size in sizes)


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether a layer can be converted and is neither the first nor the last one in `module`."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def has_ao_layers(model: nn.Module) -> bool:
    """Whether a model has linear layers of torchao that compute in 8 bits."""
    torchao.load_torchao()
    return torchao.has_layers(model)


def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Put torchao's layers in the place of a model's linear ones; in place.

    By default of all but the first and the last, where 16 divides their sizes; `module_filter_func`
    is called with a layer and its name, and says otherwise.
    """
    ends = find_first_last_linear_layers(model)
    is_chosen = functools.partial(filter_linear_layers, layers_to_filter=ends)
    torchao.load_torchao().convert_to_float8_training(
        model, module_filter_fn=module_filter_func or is_chosen, config=config
    )


name_own(globals())
