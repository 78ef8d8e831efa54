"""Submodules of a model: sharded on their own, compiled one by one, computed again in the backward.

Blocks are compiled in place: a wrapper would hide them from the strategy. An estimate for a stored
model asks here, too, so importing this imports no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nbaccel.base.errors import ConfigError
from nbaccel.config.handlers import FullyShardedDataParallelPlugin

if TYPE_CHECKING:
    from torch import nn

_ENOUGH_PARAMETERS = 100_000_000  # as torch's own size-based policy


def choose_modules(
    model: nn.Module,
    settings: FullyShardedDataParallelPlugin,
    ignored: frozenset[nn.Parameter] = frozenset(),
) -> list[nn.Module]:
    """The submodules that get a group of their own, innermost first, without the model itself."""
    chosen_ids = _choose(model, settings)
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    names = {id(module): name for name, module in model.named_modules()}
    return [
        module
        # `modules` yields a parent before its children; `fully_shard` needs the opposite order.
        for module in reversed(list(model.modules()))
        if id(module) in chosen_ids
        and module is not model
        # Sharding it on its own would untie it from what lies outside.
        and not _ties_outwards(names[id(module)], groups.values())
        and any(parameter not in ignored for parameter in module.parameters())
    ]


def ignored_parameters(
    model: nn.Module, settings: FullyShardedDataParallelPlugin
) -> frozenset[nn.Parameter]:
    """The parameters of the modules that are left alone."""
    from torch import nn

    wanted = settings.ignored_modules
    if wanted is None:
        return frozenset()
    if isinstance(wanted, nn.Module):
        wanted = [wanted]
    elif isinstance(wanted, str):
        pattern = re.compile(wanted)
        wanted = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not wanted:
            names = [repr(name) for name, _ in model.named_modules() if name]
            raise ConfigError(
                f"ignored_modules={settings.ignored_modules!r} matches no module of "
                f"{type(model).__name__}. All of it would be sharded. The expression must match "
                f"whole names, such as {', '.join(names[:3]) or 'none'}."
            )
    return frozenset(p for module in wanted for p in module.parameters())


def _choose(model: nn.Module, settings: FullyShardedDataParallelPlugin) -> set[int]:
    policy = settings.auto_wrap_policy
    if callable(policy):
        return {id(module) for module in model.modules() if policy(module)}
    named = settings.transformer_cls_names_to_wrap
    classes = [named] if isinstance(named, str) else named or own_block_classes(model)
    if policy is None:
        # What transformers names by default need not be there; what the user names must.
        return _of_classes(model, classes, strict=bool(named))
    policy_name = policy.lower()
    if policy_name == "size_based_wrap":
        large_modules: set[int] = set()
        _by_size(model, settings.min_num_params or _ENOUGH_PARAMETERS, large_modules)
        return large_modules
    if policy_name == "no_wrap":
        return set()
    if not classes:
        raise ConfigError(
            f"auto_wrap_policy={policy!r} needs the class names of the blocks: "
            f"{type(model).__name__} names none in `_no_split_modules`. Give "
            "transformer_cls_names_to_wrap=['YourBlock'], or auto_wrap_policy='size_based_wrap'."
        )
    return _of_classes(model, classes, strict=True)


def own_block_classes(model: nn.Module) -> Sequence[str]:
    """The blocks that models of transformers name; most name some they do not have."""
    named: Iterable[str] = getattr(model, "_no_split_modules", None) or ()
    return sorted({type(module).__name__ for module in model.modules()}.intersection(named))


def _of_classes(model: nn.Module, classes: Sequence[str], *, strict: bool) -> set[int]:
    present_classes = {type(module).__name__ for module in model.modules()}
    missing_classes = [name for name in classes if name not in present_classes]
    if strict and missing_classes:
        raise ConfigError(
            f"transformer_cls_names_to_wrap={list(classes)!r}: {type(model).__name__} has no "
            f"module of class {', '.join(missing_classes)}. Nothing of it could be sharded on its "
            f"own. It has {', '.join(sorted(present_classes))}."
        )
    return {id(module) for module in model.modules() if type(module).__name__ in classes}


def _by_size(module: nn.Module, least_size: int, large: set[int]) -> int:
    """Collect large modules, innermost first; returns what is left to outer ones."""
    from torch import nn

    size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    remaining_size = size + sum(_by_size(child, least_size, large) for child in module.children())
    # Containers have no forward, so the hooks that gather parameters would never run.
    if remaining_size < least_size or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return remaining_size
    large.add(id(module))
    return 0


def _ties_outwards(name: str, tied: Iterable[Sequence[str]]) -> bool:
    return any(
        0 < sum(owner.startswith(f"{name}.") for owner in owners) < len(owners) for owners in tied
    )


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
    from torch import nn

    child_classes = {type(child) for child in module.children()}
    return isinstance(module, nn.ModuleList) and len(child_classes) == 1


# transformers 5 renamed it; models written for older versions have the other name.
_ENABLING_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def can_checkpoint_gradients(model: Any) -> bool:
    """Whether a model has a switch for gradient checkpointing, as those of transformers have."""
    # transformers gives the method to every model, and for some it raises.
    return _enabling_method(model) is not None and getattr(
        model, "supports_gradient_checkpointing", True
    )


def checkpoints_gradients(model: Any) -> bool:
    """Whether it is on already."""
    for flag_name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(type(model), flag_name) or flag_name in vars(model):
            return bool(getattr(model, flag_name, False))
    return False


def enable_gradient_checkpointing(model: Any) -> None:
    """Turn it on."""
    enable_method = _enabling_method(model)
    if enable_method is None:
        raise ConfigError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(): no switch that all "
            "modules share. Give it that method, or call torch.utils.checkpoint in its forward()."
        )
    enable_method()


def _enabling_method(model: Any) -> Any:
    methods = (getattr(model, name, None) for name in _ENABLING_METHODS)
    return next((method for method in methods if callable(method)), None)
