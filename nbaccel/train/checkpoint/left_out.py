"""Frozen parameters that a checkpoint leaves out: which they are, and whether a model has them.

Their names stand in a file of the checkpoint, so that a parameter that is missing for another
reason is still an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nbaccel.base import torch_private
from nbaccel.base.errors import CheckpointDamaged
from nbaccel.train.checkpoint import layout

_Names = frozenset[str]


def frozen_names(model: nn.Module) -> _Names:
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


def _uncompiled_name(tensor_name: str) -> str:
    return tensor_name.replace(torch_private.COMPILED_PREFIX, "")


def without_names(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A state dict without these tensors."""
    return {
        tensor_name: value
        for tensor_name, value in state.items()
        if _uncompiled_name(tensor_name) not in names
    }


def left_out_text(names_by_model: Mapping[int, Collection[str]]) -> str:
    """What the checkpoint's file says."""
    content = {str(number): sorted(names) for number, names in names_by_model.items()}
    return json.dumps({"frozen_parameters_left_out": content}, indent=1) + "\n"


def read_left_out(folder: Path) -> dict[int, _Names]:
    """Names of what a checkpoint has left out, by number of the model; mostly none."""
    path = folder / layout.LEFT_OUT_FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["frozen_parameters_left_out"]
        return {int(number): frozenset(map(str, names)) for number, names in content.items()}
    # JSON of any other shape raises one of these.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(
            f"{path} is truncated or damaged ({type(error).__name__}: {error}): it has the names "
            "of the frozen parameters that were left out. Nothing has been loaded. Load another "
            "checkpoint, or copy the file again from where it was saved."
        ) from error


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
