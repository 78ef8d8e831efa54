"""Weights of models that torch's FSDP sharded; Accelerate's FSDP internals are not here."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.base import env
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.unsupported_names import FSDP_INTERNALS, missing_name_of
from nbaccel.bigmodel.shard_merging import write_merged_file
from nbaccel.state import PartialState
from nbaccel.train import checkpoint

__all__ = [
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "ensure_weights_retied",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler",
    "get_parameters_from_modules",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
]

_PREFIX = "model."
_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"

ensure_weights_retied = missing_name_of("ensure_weights_retied", FSDP_INTERNALS, __name__)
fsdp2_apply_ac = missing_name_of("fsdp2_apply_ac", FSDP_INTERNALS, __name__)
fsdp2_canonicalize_names = missing_name_of("fsdp2_canonicalize_names", FSDP_INTERNALS, __name__)
fsdp2_load_full_state_dict = missing_name_of("fsdp2_load_full_state_dict", FSDP_INTERNALS, __name__)
fsdp2_prepare_model = missing_name_of("fsdp2_prepare_model", FSDP_INTERNALS, __name__)
fsdp2_switch_optimizer_parameters = missing_name_of(
    "fsdp2_switch_optimizer_parameters", FSDP_INTERNALS, __name__
)
get_fsdp2_grad_scaler = missing_name_of("get_fsdp2_grad_scaler", FSDP_INTERNALS, __name__)
load_fsdp_model = missing_name_of("load_fsdp_model", FSDP_INTERNALS, __name__)
load_fsdp_optimizer = missing_name_of("load_fsdp_optimizer", FSDP_INTERNALS, __name__)
save_fsdp_model = missing_name_of("save_fsdp_model", FSDP_INTERNALS, __name__)
save_fsdp_optimizer = missing_name_of("save_fsdp_optimizer", FSDP_INTERNALS, __name__)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """The parameters of some modules, such as those that FSDP leaves alone.

    Args:
        modules: They, or a regular expression for their whole names; None for none.
        model: Where names are looked for.
        device: Where modules go that were found by name.
    """
    if isinstance(modules, str):
        modules = [
            module.to(device)
            for name, module in model.named_modules()
            if re.fullmatch(modules, name)
        ]
    return {parameter for module in modules or () for parameter in module.parameters()}


def enable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load weights on process 0 alone, where it reads the variable for it."""
    env.update({_EFFICIENT_LOADING: "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Let transformers load weights on every process."""
    env.update({_EFFICIENT_LOADING: "False"})


def merge_fsdp_weights(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Make one file of weights that every process wrote a shard of; process 0 does it.

    Args:
        checkpoint_dir: The model's folder in a checkpoint, ``pytorch_model_fsdp_0``, or the
            checkpoint, where it has only one.
        output_path: Folder of the file: ``model.safetensors``.
        safe_serialization: safetensors; otherwise ``pytorch_model.bin``, a pickle.
        remove_checkpoint_dir: Whether the shards are deleted then.

    Raises:
        ConfigError: There are no shards of a model.
        CheckpointDamaged: Files are missing, damaged or hold code.
    """
    state = PartialState()
    if state.is_main_process:
        folder = _shards_in(Path(checkpoint_dir))
        stored_tensors, read_into = _stored_tensors(folder)
        if safe_serialization:
            write_merged_file(stored_tensors, read_into, Path(output_path), key_prefix=_PREFIX)
        else:
            checkpoint.save_model(
                _whole(stored_tensors, read_into), output_path, max_shard_size="1000TB",
                safe_serialization=False,
            )  # fmt: skip
        if remove_checkpoint_dir:
            shutil.rmtree(folder)
    state.wait_for_everyone()


def _shards_in(folder: Path) -> Path:
    if (folder / ".metadata").exists():
        return folder
    inside = sorted(path.parent for path in folder.glob("pytorch_model_fsdp_*/.metadata"))
    if len(inside) == 1:
        return inside[0]
    raise ConfigError(
        f"merge_fsdp_weights(checkpoint_dir={str(folder)!r}) has no shards of one model: "
        f"found were {[path.name for path in inside] or 'none'}. Give the folder "
        "pytorch_model_fsdp_0 of a checkpoint that save_state wrote with "
        "state_dict_type='SHARDED_STATE_DICT'."
    )


def _stored_tensors(folder: Path) -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """Metadata of a model's tensors, after a look at the files that hold them, and their reader."""
    # Not at the top: these import torch's elastic launcher, and `nbaccel.utils` is often imported
    # for `set_seed` alone.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from nbaccel.strategies.sharded_checkpoints import read_entries, read_metadata, shard_problems

    metadata = read_metadata(folder)
    if problems := shard_problems(folder, metadata, 0, 1):
        raise CheckpointDamaged(*problems)
    tensors = {
        name: kept
        for name, kept in metadata.state_dict_metadata.items()
        if isinstance(kept, TensorStorageMetadata) and name.startswith(_PREFIX)
    }
    if not tensors:
        raise ConfigError(
            f"merge_fsdp_weights(checkpoint_dir={str(folder)!r}) has no weights of a model, but "
            f"{len(metadata.state_dict_metadata)} other entries. Give the model's folder."
        )
    _refuse_missing_shards(tensors, folder)
    return tensors, partial(read_entries, folder=folder, metadata=metadata, alone=True)


def _refuse_missing_shards(tensors: dict[str, Any], folder: Path) -> None:
    """Refuse one host's part of a checkpoint: what is missing would be any bytes in the file."""
    for name, kept in tensors.items():
        num_stored = sum(math.prod(chunk.sizes) for chunk in kept.chunks)
        if num_stored < math.prod(kept.size):
            raise ConfigError(
                f"merge_fsdp_weights(checkpoint_dir={str(folder)!r}) has {num_stored} of the "
                f"{math.prod(kept.size)} elements of {name.removeprefix(_PREFIX)}: it is one "
                "host's part of a checkpoint that was saved without a shared disk. Load it with "
                "the processes that saved it, and write whole weights by accelerator.save_model."
            )


def _whole(
    tensors: dict[str, Any], read_into: Callable[[dict[str, Any]], None]
) -> dict[str, torch.Tensor]:
    weights: dict[str, Any] = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype) for name, kept in tensors.items()
    }
    read_into(weights)
    return {name.removeprefix(_PREFIX): value for name, value in weights.items()}
