"""Models compiled block by block, in place: a wrapper would hide them from the strategy."""

from __future__ import annotations

from typing import Any

from torch import nn


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile repeated blocks one by one, which takes much less time than the whole model.

    The blocks are compiled in place; the model is the same object, and nothing has to be unwrapped.

    Args:
        module: The model.
        **compile_kwargs: Arguments of ``torch.compile``.

    Returns:
        The model.
    """
    # Blocks of one class share their code, so torch compiles the first and reuses it.
    if _is_uniform_module_list(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif any(_is_uniform_module_list(inner) for inner in module.modules()):
        for child in module.children():
            compile_regions(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)
    return module


def _is_uniform_module_list(module: nn.Module) -> bool:
    child_classes = {type(child) for child in module.children()}
    return isinstance(module, nn.ModuleList) and len(child_classes) == 1
