"""Checkpoints in DeepSpeed's own form: every process writes its part into one folder.

DeepSpeed asks torch for any pickle, which may run code. Here torch is told to read plain data all
the same, and the few classes of DeepSpeed that its files hold.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbaccel.base import env
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.deepspeed.weights.state_files import is_readable, read_states


def save(
    engine: Any,
    checkpoint_folder: Path,
    *,
    left_out: Collection[str] = (),
    writes_shared: bool = False,
) -> None:
    """Write weights and the optimizer's state; a collective."""
    # Weights that all processes hold (stages 0 to 2), and the tag of the last save.
    writes_before = engine.save_non_zero_checkpoint
    engine.save_non_zero_checkpoint = writes_before or writes_shared
    try:
        engine.save_checkpoint(
            str(checkpoint_folder.parent),
            tag=checkpoint_folder.name,
            exclude_frozen_parameters=bool(left_out),
        )
    finally:
        engine.save_non_zero_checkpoint = writes_before
    if writes_shared:
        (checkpoint_folder.parent / "latest").write_text(checkpoint_folder.name, encoding="utf-8")


def load(engine: Any, checkpoint_folder: Path, *, left_out: Collection[str] = ()) -> None:
    """Read what :func:`save` wrote; a collective."""
    try:
        with _plain_reading():
            loaded_path, _ = engine.load_checkpoint(
                str(checkpoint_folder.parent),
                tag=checkpoint_folder.name,
                load_module_strict=not left_out,
            )
    except pickle.UnpicklingError as error:
        raise CheckpointDamaged(
            f"{checkpoint_folder} was loaded in part: {str(error).partition(chr(10))[0]} "
            f"{_PLAIN_REMEDY}"
        ) from None
    if loaded_path is None:
        raise ConfigError(
            f"The checkpoint {str(checkpoint_folder)!r} has files that DeepSpeed cannot read: it "
            "loaded nothing. It holds "
            f"{', '.join(sorted(tag_path.name for tag_path in checkpoint_folder.iterdir()))}. Load "
            "another one."
        )


_OWN_CLASSES = (
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
)
"""What DeepSpeed puts into its files beside plain data; instances of them only hold numbers."""

_PLAIN_REMEDY = (
    "Only plain data is read, because a pickle of anything else can run any code. If you wrote "
    "these files yourself and nobody could change them, torch.serialization.add_safe_globals "
    "allows a class."
)


@contextlib.contextmanager
def _plain_reading() -> Iterator[None]:
    """Have every `torch.load` read plain data, also those that ask for any pickle."""
    classes = [
        getattr(importlib.import_module(module_name), class_name, None)
        for module_name, class_name in _OWN_CLASSES
    ]
    # Leaving the block takes its classes off the list, those too that the user had put there.
    users_classes = torch.serialization.get_safe_globals()
    own_classes = [found for found in classes if found and found not in users_classes]
    forced = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": None}
    with env.applied(forced), torch.serialization.safe_globals(own_classes):
        yield


def save_plain(
    model_state: Mapping[str, Any], folder: Path, *, left_out: Collection[str] = ()
) -> None:
    """Write the weights of a model that has no engine, or one that cannot write them."""
    folder.mkdir(parents=True, exist_ok=True)
    written_state = {name: value for name, value in model_state.items() if name not in left_out}
    torch.save(written_state, folder / _PLAIN_WEIGHTS_FILE)


def read_plain(folder: Path, device: torch.device) -> dict[str, Any]:
    """Read what :func:`save_plain` wrote."""
    return dict(torch.load(folder / _PLAIN_WEIGHTS_FILE, map_location=device, weights_only=True))


def check_checkpoint(engine: Any, folder: Path, ranks_there: Collection[int] = ()) -> None:
    """Refuse a checkpoint that :func:`load` could not read; no collective, nothing is changed."""
    if engine.load_universal_checkpoint():
        return  # a universal checkpoint has files of another kind, which are not checked here
    model_files = sorted(folder.glob("*mp_rank_00_model_states.pt"))
    if not model_files:
        raise CheckpointDamaged(
            f"{folder} has no file *_model_states.pt: it is not whole. Nothing has been "
            "loaded. Copy what is missing from where it was saved, or load another checkpoint."
        )
    # Each process reads what all share, and its own. Files in torch's format of before 2020 cannot
    # be looked at without reading their numbers.
    own_name = f"zero_pp_rank_{dist.get_rank()}_"
    for path in filter(is_readable, folder.glob("*.pt")):
        if "zero_pp_rank_" in path.name and own_name not in path.name:
            continue
        with _plain_reading():
            other_names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if other_names:
            raise CheckpointDamaged(
                f"{path} holds a {other_names[0]}. Nothing of it was run or loaded. {_PLAIN_REMEDY}"
            )
    first_readable = next(filter(is_readable, model_files), None)
    if first_readable is None:
        return
    model_states = read_states(first_readable).states
    if not isinstance(model_states, Mapping):
        raise CheckpointDamaged(
            f"{first_readable} holds no states of a model. Load another checkpoint."
        )
    _check_ranks(folder, engine, model_files, model_states.get("dp_world_size"), ranks_there)
    _check_shapes(folder, engine, model_states)


def check_plain(model: nn.Module, folder: Path) -> None:
    """Refuse what :func:`read_plain` could not read."""
    if not (folder / _PLAIN_WEIGHTS_FILE).is_file():
        raise CheckpointDamaged(
            f"{folder / _PLAIN_WEIGHTS_FILE} is missing, which has the weights of the "
            f"{type(model).__name__}. Nothing has been loaded. Load another checkpoint, or copy it "
            "again."
        )


_PLAIN_WEIGHTS_FILE = "pytorch_model.bin"
_ZERO_FILE = re.compile(r"(?:\w*_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")


def _check_ranks(
    folder: Path,
    engine: Any,
    model_files: Sequence[Path],
    saved_by: Any,
    ranks_there: Collection[int],
) -> None:
    """Refuse missing or extra ranks, which DeepSpeed reports by internal names or an assertion."""
    # Without `ranks_there` another program saved it: which files are on other nodes is not known.
    if engine.use_node_local_storage() and not ranks_there:
        return
    matches = (_ZERO_FILE.fullmatch(path.name) for path in folder.iterdir())
    saved_ranks = {int(match[1]) for match in matches if match}
    # Only at stage 3 each rank has a file of model states, named after it.
    is_cut = model_files[0].name.startswith("zero_pp_rank_")
    if engine.zero_optimization_stage() == 0 or not (saved_ranks or is_cut):
        return
    # The model's file tells how many ranks saved it: counted by the files that are there, a missing
    # file of the last rank would look like a checkpoint of fewer processes.
    saved_count = saved_by if isinstance(saved_by, int) else max(saved_ranks, default=-1) + 1
    needed = {*(ranks_there or range(saved_count))}
    missing = [f"optimizer's states of rank {rank}" for rank in sorted(needed - saved_ranks)]
    if is_cut:
        present = {int(path.name.split("_")[3]) for path in model_files}
        missing += [f"model's states of rank {rank}" for rank in sorted(needed - present)]
    if missing:
        raise CheckpointDamaged(
            f"{folder} was saved by {saved_count} processes, and the {', '.join(missing)} are "
            "missing: a part of every weight is in them. Nothing has been loaded. Copy them from "
            "where it was saved, or load another checkpoint."
        )
    if saved_count != int(engine.dp_world_size):
        raise ConfigError(
            f"The checkpoint {str(folder)!r} is of {saved_count} processes, and this run has "
            f"{int(engine.dp_world_size)}: DeepSpeed's parts fit only as many as wrote them. Run "
            f"as many, or take the weights alone (nbaccel to-fp32 {folder.parent} OUT), or "
            "convert it with python -m deepspeed.checkpoint.ds_to_universal."
        )


def _check_shapes(folder: Path, engine: Any, states: Mapping[str, Any]) -> None:
    groups = [*(states.get("param_shapes") or ()), states.get("frozen_param_shapes") or {}]
    saved = {name: tuple(shape) for group in groups for name, shape in group.items()}
    here = {
        # At stage 3 the parameters are placeholders, whose own shape says nothing.
        name: tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in engine.module.named_parameters()
    }
    odd = [name for name in saved.keys() & here.keys() if saved[name] != here[name]]
    odd += sorted(saved.keys() - here.keys())
    if odd:
        raise ConfigError(
            f"{folder} is of another model than the {type(engine.module).__name__}: {odd[0]} has "
            f"shape {list(saved[odd[0]])} there, and {list(here.get(odd[0], ())) or 'none'} here "
            f"({len(odd)} of {len(saved)} differ). Nothing has been loaded. Load another one."
        )
