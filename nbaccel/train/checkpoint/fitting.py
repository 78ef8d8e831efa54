"""Whether what a checkpoint holds fits what it is to be read into, by names and shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

__all__ = ["model_problem", "optimizer_problem", "state_problem"]

_Shapes = Mapping[str, tuple[int, ...]]
_SHOWN = 3
# State of torch's optimizers that is as large as the parameter it belongs to.
_LIKE_PARAMETER = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "sum",
        "acc_delta",
        "prev",
        "step_size",
    ]
)


def model_problem(model: nn.Module, saved: _Shapes, *, strict: bool = True) -> str:
    """What keeps weights from being loaded into a model.

    Args:
        model: The user's own module.
        saved: Shapes of the weights by name, those of tied names included.
        strict: Whether every name must be on both sides.

    Returns:
        The rest of a sentence that begins with the file's name; empty if they fit.
    """
    adapts = _adapting_prefixes(model)
    wanted = {n: s for n, s in _shapes_of(model).items() if not n.startswith(adapts)}
    found = {_plain(n): s for n, s in saved.items() if not _plain(n).startswith(adapts)}
    others = [n for n in wanted if n in found and None is not wanted[n] != found[n]]
    missing = [n for n in wanted if n not in found and not n.endswith("num_batches_tracked")]
    unknown = [n for n in found if n not in wanted]
    told = []
    if others:
        pairs = (f"{n} {list(found[n])} for {list(wanted[n] or ())}" for n in others[:_SHOWN])
        told.append(f"other shapes ({', '.join(pairs)}{_more(others)})")
    if strict and missing:
        told.append(f"no {', '.join(missing[:_SHOWN])}{_more(missing)}")
    if strict and unknown:
        told.append(f"{', '.join(unknown[:_SHOWN])}{_more(unknown)}, which the model has not")
    return f"is of another model than the {type(model).__name__}: it has {'; '.join(told)}" * bool(
        told
    )


def _more(names: list[str]) -> str:
    return f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _shapes_of(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Shapes by name; None where any fits."""
    found = {
        _plain(name): None if is_lazy(value) else tuple(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_shape"):  # ZeRO-3 has a placeholder there
            found[_plain(name)] = tuple(parameter.ds_shape)
    return found


def _adapting_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Parts of a model that read a state in a way of their own: they may rename or reshape."""
    return tuple(
        _plain(f"{name}." if name else "")
        for name, module in model.named_modules()
        if any(map(_is_users, _readers(module)))
    )


def _readers(module: nn.Module) -> Iterator[Any]:
    yield type(module).load_state_dict
    yield type(module)._load_from_state_dict
    yield type(module).set_extra_state
    for hook in module._load_state_dict_pre_hooks.values():
        yield getattr(hook, "hook", hook)


def _is_users(function: Any) -> bool:
    return not str(getattr(function, "__module__", "")).startswith(("torch.", "deepspeed."))


def optimizer_problem(optimizer: Optimizer, saved: Any) -> str:
    """What keeps a state from being loaded into an optimizer.

    Args:
        optimizer: The optimizer.
        saved: The state; its tensors may be on `meta`.

    Returns:
        The rest of a sentence; empty if it fits, or the optimizer has its own way of loading.
    """
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    if _is_users(type(optimizer).load_state_dict) or hooks:
        return ""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        return f"holds no state of an optimizer, but {_kind(saved)}"
    try:
        counts = [len(group["params"]) for group in saved["param_groups"]]
        shapes = dict(_state_shapes(saved["state"]))
    except (LookupError, TypeError, AttributeError) as error:
        return f"holds no state of an optimizer ({type(error).__name__}: {error})"
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if counts != wanted:
        return (
            f"is of another optimizer: it has groups of {counts} parameters, and the "
            f"{type(optimizer).__name__} has groups of {wanted}"
        )
    return _shape_problem(optimizer, saved, shapes)


def _state_shapes(state: Mapping[Any, Any]) -> Iterator[tuple[Any, dict[str, tuple[int, ...]]]]:
    for number, entry in state.items():
        yield (
            number,
            {
                name: tuple(value.shape)
                for name, value in entry.items()
                if name in _LIKE_PARAMETER and isinstance(value, torch.Tensor)
            },
        )


def _shape_problem(
    optimizer: Optimizer, saved: Mapping[str, Any], shapes: Mapping[Any, _Shapes]
) -> str:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""  # whose state may have any shape
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, shape in shapes.get(number, {}).items():
            if shape != tuple(parameter.shape):
                return (
                    f"is of another model: its {name} of parameter {number} has shape "
                    f"{list(shape)}, and the parameter has {list(parameter.shape)}"
                )
    return ""


def state_problem(item: Any, saved: Any) -> str:
    """What keeps a state from being loaded into a scheduler, scaler or loader.

    Args:
        item: Has `state_dict`.
        saved: The state.

    Returns:
        The rest of a sentence; empty unless the two have nothing in common.
    """
    try:
        current = item.state_dict()
    except Exception:  # the user's own, which need not have a state before it has loaded one
        return ""
    if not isinstance(current, Mapping) or not current:
        return ""
    if isinstance(saved, Mapping) and (current.keys() & saved.keys()):
        return ""
    return f"holds no state of a {type(item).__name__}, but {_kind(saved)}"


def _kind(saved: Any) -> str:
    if isinstance(saved, Mapping):
        return f"{', '.join(map(str, list(saved)[:6])) or 'nothing'}"
    return f"a {type(saved).__name__}"
