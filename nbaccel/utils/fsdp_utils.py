"""Weights of models that torch's FSDP sharded; Accelerate's FSDP internals are not here."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nbaccel.base import env, weight_files
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.public_names import name_own
from nbaccel.bigmodel.checkpoint_files import SAFE_FILE
from nbaccel.state import PartialState
from nbaccel.train import checkpoint

_PREFIX = "model."
_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """The parameters of modules, or of those whose whole names match a regular expression."""
    if isinstance(modules, str):
        named = model.named_modules()
        modules = [module.to(device) for name, module in named if re.fullmatch(modules, name)]
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
        checkpoint_dir: A checkpoint's ``pytorch_model_fsdp_0``, or a checkpoint with one of them.
        output_path: Folder of the file: ``model.safetensors``.
        safe_serialization: safetensors; otherwise ``pytorch_model.bin``, a pickle.
        remove_checkpoint_dir: Whether the shards are deleted then.

    Raises:
        ConfigError: There are no shards of a model.
        CheckpointDamaged: Files are missing, damaged or hold code.
    """
    state = PartialState()
    if state.is_main_process:
        folder = Path(checkpoint_dir)
        if not (folder / ".metadata").exists():
            inside = sorted(path.parent for path in folder.glob("pytorch_model_fsdp_*/.metadata"))
            if len(inside) != 1:
                raise ConfigError(
                    f"merge_fsdp_weights(checkpoint_dir={str(folder)!r}) has no shards of one "
                    f"model: found were {[path.name for path in inside] or 'none'}. Give the "
                    "folder pytorch_model_fsdp_0 of a checkpoint that save_state wrote with "
                    "state_dict_type='SHARDED_STATE_DICT'."
                )
            (folder,) = inside
        stored_tensors, read_into = _stored_tensors(folder)
        if safe_serialization:
            _write_merged_file(stored_tensors, read_into, Path(output_path))
        else:
            weights: dict[str, Any] = {
                name: torch.empty(kept.size, dtype=kept.properties.dtype)
                for name, kept in stored_tensors.items()
            }
            read_into(weights)
            whole = {name.removeprefix(_PREFIX): value for name, value in weights.items()}
            checkpoint.save_model(
                whole, output_path, max_shard_size="1000TB", safe_serialization=False
            )
        if remove_checkpoint_dir:
            shutil.rmtree(folder)
    state.wait_for_everyone()


def _stored_tensors(folder: Path) -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """Metadata of a model's tensors, after a look at the files that hold them, and their reader."""
    # Not at the top: these import torch's elastic launcher.
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
    # Of one host's part of a checkpoint, what is missing would be any bytes in the file.
    for name, kept in tensors.items():
        num_stored = sum(math.prod(chunk.sizes) for chunk in kept.chunks)
        if num_stored < math.prod(kept.size):
            raise ConfigError(
                f"merge_fsdp_weights(checkpoint_dir={str(folder)!r}) has {num_stored} of the "
                f"{math.prod(kept.size)} elements of {name.removeprefix(_PREFIX)}: it is one "
                "host's part saved without a shared disk. Load it with the processes that saved "
                "it, and write whole weights by accelerator.save_model."
            )
    return tensors, partial(read_entries, folder=folder, metadata=metadata, alone=True)


def _write_merged_file(
    tensors: Mapping[str, Any], read_into: Callable[[dict[str, Any]], None], output_folder: Path
) -> None:
    """Write ``model.safetensors`` out of shards; it appears whole, or not at all."""
    # The largest elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].properties.dtype.itemsize)
    sizes = [stored.size.numel() * stored.properties.dtype.itemsize for _, stored in ordered]
    head, begins = weight_files.head_of_file(
        (key.removeprefix(_PREFIX), _dtype_code(key, stored), stored.size, num_bytes)
        for (key, stored), num_bytes in zip(ordered, sizes, strict=True)
    )
    total_bytes = len(head) + sum(sizes)
    with weight_files.publishing(output_folder, total_bytes) as workshop:
        path = workshop / SAFE_FILE
        with path.open("wb") as file:
            # All its blocks at once, or a full disk kills the process later; macOS has none.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, total_bytes)
            else:
                file.truncate(total_bytes)
            file.write(head)
        storage: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=total_bytes)
        views: dict[str, Any] = {}
        for (key, stored), begin in zip(ordered, begins, strict=True):
            dtype = stored.properties.dtype
            strides = torch.empty(stored.size, device="meta").stride()
            first_element = begin // dtype.itemsize
            views[key] = torch.empty(0, dtype=dtype)
            views[key].set_(storage, first_element, stored.size, strides)
        read_into(views)


def _dtype_code(key: str, stored: Any) -> str:
    code = weight_files.dtype_code(stored.properties.dtype)
    if code is None:
        raise ConfigError(
            f"{key} has the format {stored.properties.dtype}, which safetensors does not have: it "
            "could not be written. Merge with --unsafe_serialization (safe_serialization=False)."
        )
    return code


name_own(globals())
