"""Whether states of a checkpoint fit what they are to be read into; files of weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from nbaccel.base import torch_private
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.train.checkpoint.files import read_torch_file, read_torch_outline

_ShapesByName = Mapping[str, tuple[int, ...]]
_SHOWN_NAMES = 3
# State of torch's optimizers that is as large as the parameter it belongs to.
_PARAMETER_SHAPED_STATE = frozenset(
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


def model_problem(
    model: nn.Module,
    saved: _ShapesByName,
    *,
    strict: bool = True,
    left_out: Collection[str] = (),
) -> str:
    """What keeps weights from being loaded into a model."""
    adapting_prefixes = _adapting_prefixes(model)
    # Parts that load a state in a way of their own cannot be compared by name or shape.
    model_shapes = {
        tensor_name: tensor_shape
        for tensor_name, tensor_shape in _shapes_of(model).items()
        if not tensor_name.startswith(adapting_prefixes)
    }
    saved_shapes = {
        _uncompiled_name(tensor_name): tensor_shape
        for tensor_name, tensor_shape in saved.items()
        if not _uncompiled_name(tensor_name).startswith(adapting_prefixes)
    }
    # None is the shape of a lazy parameter, which takes that of the file.
    reshaped = [
        tensor_name
        for tensor_name in model_shapes
        if tensor_name in saved_shapes
        and model_shapes[tensor_name] is not None
        and model_shapes[tensor_name] != saved_shapes[tensor_name]
    ]
    # BatchNorm starts its counter at 0 where an old file has none, so that is no mismatch.
    missing_names = [
        tensor_name
        for tensor_name in model_shapes
        if tensor_name not in saved_shapes
        and tensor_name not in left_out
        and not tensor_name.endswith("num_batches_tracked")
    ]
    unknown_names = [tensor_name for tensor_name in saved_shapes if tensor_name not in model_shapes]
    problems = []
    if reshaped:
        pairs = (
            f"{tensor_name} {list(saved_shapes[tensor_name])} for "
            f"{list(model_shapes[tensor_name] or ())}"
            for tensor_name in reshaped[:_SHOWN_NAMES]
        )
        problems.append(f"other shapes ({', '.join(pairs)}{_count_more(reshaped)})")
    if strict and missing_names:
        problems.append(f"no {', '.join(missing_names[:_SHOWN_NAMES])}{_count_more(missing_names)}")
    if strict and unknown_names:
        problems.append(
            f"{', '.join(unknown_names[:_SHOWN_NAMES])}{_count_more(unknown_names)}, which the "
            "model does not have"
        )
    if not problems:
        return ""
    return f"is of another model than the {type(model).__name__}: it has {'; '.join(problems)}"


def _count_more(names: list[str]) -> str:
    return f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""


def _uncompiled_name(tensor_name: str) -> str:
    # The model or the saved one may have been compiled, without the other being so.
    return tensor_name.replace(torch_private.COMPILED_PREFIX, "")


def named_as_in(model: nn.Module, saved_weights: Mapping[str, Any]) -> dict[str, Any]:
    """Saved weights under the names of a model that is compiled, or was, unlike the saved one."""
    names = {_uncompiled_name(name): name for name in model.state_dict(keep_vars=True)}
    return {names.get(_uncompiled_name(name), name): it for name, it in saved_weights.items()}


def _shapes_of(model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Shapes by name; None where any fits."""
    shapes_by_name = {
        _uncompiled_name(tensor_name): None if is_lazy(value) else tuple(value.shape)
        for tensor_name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    for tensor_name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "ds_shape"):  # ZeRO-3 has a placeholder there
            shapes_by_name[_uncompiled_name(tensor_name)] = tuple(parameter.ds_shape)
    return shapes_by_name


def _adapting_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Parts of a model that read a state in a way of their own: they may rename or reshape."""
    return tuple(
        _uncompiled_name(f"{module_name}." if module_name else "")
        for module_name, module in model.named_modules()
        if any(map(_is_user_code, torch_private.state_readers(module)))
    )


def _is_user_code(function: Any) -> bool:
    return not str(getattr(function, "__module__", "")).startswith(("torch.", "deepspeed."))


def optimizer_problem(optimizer: Optimizer, saved_state: Any) -> str:
    """What keeps a state from being loaded into an optimizer."""
    hooks = torch_private.has_state_loading_hooks(optimizer)
    if hooks or _is_user_code(type(optimizer).load_state_dict):
        return ""
    if not isinstance(saved_state, Mapping) or not {"state", "param_groups"} <= saved_state.keys():
        return f"holds no state of an optimizer, but {_describe_state(saved_state)}"
    try:
        # A file of something else may have any structure below these two keys.
        saved_counts = [len(param_group["params"]) for param_group in saved_state["param_groups"]]
        saved_shapes = dict(_state_shapes(saved_state["state"]))
    except (LookupError, TypeError, AttributeError) as error:
        return f"holds no state of an optimizer ({type(error).__name__}: {error})"
    expected_counts = [len(param_group["params"]) for param_group in optimizer.param_groups]
    if saved_counts != expected_counts:
        return (
            f"is of another optimizer: it has groups of {saved_counts} parameters, and the "
            f"{type(optimizer).__name__} has groups of {expected_counts}"
        )
    return _shape_problem(optimizer, saved_state, saved_shapes)


def _state_shapes(
    entries: Mapping[Any, Any],
) -> Iterator[tuple[Any, dict[str, tuple[int, ...]]]]:
    for number, state in entries.items():
        yield (
            number,
            {
                name: tuple(value.shape)
                for name, value in state.items()
                if name in _PARAMETER_SHAPED_STATE and isinstance(value, torch.Tensor)
            },
        )


def _shape_problem(
    optimizer: Optimizer, state: Mapping[str, Any], saved_shapes: Mapping[Any, _ShapesByName]
) -> str:
    parameter_numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # The state of other optimizers may have any shape (Adafactor's is factored).
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    for number, parameter in zip(parameter_numbers, parameters, strict=True):
        for name, saved_shape in saved_shapes.get(number, {}).items():
            if saved_shape != tuple(parameter.shape):
                return (
                    f"is of another model: its {name} of parameter {number} has shape "
                    f"{list(saved_shape)}, and the parameter has {list(parameter.shape)}"
                )
    return ""


def state_problem(item: Any, saved_state: Any) -> str:
    """What keeps a state from being loaded into a scheduler, scaler or loader."""
    try:
        state = item.state_dict()
    except Exception:  # the user's own, which need not have a state before it has loaded one
        return ""
    if not isinstance(state, Mapping) or not state:
        return ""
    if isinstance(saved_state, Mapping) and (state.keys() & saved_state.keys()):
        return ""
    return f"holds no state of a {type(item).__name__}, but {_describe_state(saved_state)}"


def _describe_state(saved_state: Any) -> str:
    if isinstance(saved_state, Mapping):
        return f"{', '.join(map(str, list(saved_state)[:6])) or 'nothing'}"
    return f"a {type(saved_state).__name__}"


# ------------------------------------------------------------------------- files of weights


def saved_shapes(path: Path, model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by name in a file of weights; of tied tensors it has one name, and all count."""
    shapes = _safetensors_shapes(path) if path.suffix == ".safetensors" else pickled_shapes(path)
    for tensor_name, tied_name in _tied_names(model).items():
        if tensor_name not in shapes and tied_name in shapes:
            shapes[tensor_name] = shapes[tied_name]
    return shapes


def _safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, "numpy") as file:
            tensor_names = file.keys()
            stored_shapes = {
                # Read from the header; no tensor is loaded.
                tensor_name: tuple(file.get_slice(tensor_name).get_shape())
                for tensor_name in tensor_names
            }
            tied_metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read ({error}). Nothing has been loaded. Load another checkpoint."
        ) from error
    tied_shapes = {
        tensor_name: stored_shapes[tied_name]
        for tensor_name, tied_name in tied_metadata.items()
        if tied_name in stored_shapes
    }
    return {**tied_shapes, **stored_shapes}


def pickled_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name in a file of ``torch.save``, whose values are read later."""
    state_outline = read_torch_outline(path)
    if not isinstance(state_outline, Mapping):
        raise ConfigError(f"{path} holds no weights by name, but a {type(state_outline).__name__}.")
    return {
        str(name): tuple(tensor_outline.shape)
        for name, tensor_outline in state_outline.items()
        if hasattr(tensor_outline, "shape")
    }


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Names of tied tensors, each with another name of the same tensor."""
    names_by_tensor: dict[int, list[str]] = {}
    for list_named in (model.named_parameters, model.named_buffers):
        for tensor_name, tensor in list_named(remove_duplicate=False):
            names_by_tensor.setdefault(id(tensor), []).append(tensor_name)
    return {
        tensor_name: tied_name
        for tied_names in names_by_tensor.values()
        for tensor_name in tied_names
        for tied_name in tied_names
        if tied_name != tensor_name
    }


def read_weights(path: Path, model: nn.Module, device: torch.device) -> dict[str, Any]:
    """Weights by name, including those that were not written because they are tied to others."""
    if path.suffix != ".safetensors":
        return dict(read_torch_file(path, map_location=device))
    with safe_open(path, framework="pt", device=str(device)) as file:
        weights_by_name = {tensor_name: file.get_tensor(tensor_name) for tensor_name in file.keys()}  # noqa: SIM118 - safe_open has no __iter__
        # huggingface_hub notes in the metadata which name a tied tensor was stored under.
        tied_names = {**_tied_names(model), **(file.metadata() or {})}
    for tensor_name, tied_name in tied_names.items():
        if tensor_name not in weights_by_name and tied_name in weights_by_name:
            weights_by_name[tensor_name] = weights_by_name[tied_name]
    return weights_by_name


# ------------------------------------------------------------------------- frozen, left out


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are not trained, those of tied ones all."""
    return frozenset(
        parameter_name
        for parameter_name, is_trained in _trained_by_name(model).items()
        if not is_trained
    )


def _trained_by_name(model: nn.Module) -> dict[str, bool]:
    return {
        _uncompiled_name(parameter_name): parameter.requires_grad
        for parameter_name, parameter in model.named_parameters(remove_duplicate=False)
    }


def without_names(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A state dict without these tensors."""
    return {
        tensor_name: value
        for tensor_name, value in state.items()
        if _uncompiled_name(tensor_name) not in names
    }


def trained_problem(model: nn.Module, names: Collection[str]) -> str:
    """Why a model cannot do without values for parameters that were frozen when it was saved."""
    trained_by_name = _trained_by_name(model)
    trained_names = sorted(name for name in names if trained_by_name.get(name, True))
    if not trained_names:
        return ""
    how_many = f" ({len(trained_names)} such parameters)" if len(trained_names) > 1 else ""
    first_state = "is trained in" if trained_names[0] in trained_by_name else "is not in"
    return (
        "was saved with exclude_frozen_parameters=True and has no values for "
        f"{trained_names[0]}{how_many}, which was frozen then and {first_state} the "
        f"{type(model).__name__} now"
    )
