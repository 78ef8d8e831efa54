"""Weights that every process wrote a shard of, made one file.

The shards are read straight into the pages of the new file, so that memory holds one tensor at a
time, and the system writes the rest out where it needs room.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nbaccel.base import weight_files
from nbaccel.base.errors import ConfigError
from nbaccel.bigmodel.checkpoint_files import SAFE_FILE


def write_merged_file(
    tensors: Mapping[str, Any],
    read_into: Callable[[dict[str, Any]], None],
    output_folder: Path,
    *,
    key_prefix: str,
) -> None:
    """Write ``model.safetensors`` out of shards; it appears whole, or not at all."""
    # The largest elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].properties.dtype.itemsize)
    sizes = [stored.size.numel() * stored.properties.dtype.itemsize for _, stored in ordered]
    head, begins = weight_files.head_of_file(
        (key.removeprefix(key_prefix), _dtype_code(key, stored), stored.size, num_bytes)
        for (key, stored), num_bytes in zip(ordered, sizes, strict=True)
    )
    total_bytes = len(head) + sum(sizes)
    with weight_files.publishing(output_folder, total_bytes) as workshop:
        storage = _mapped_file(workshop / SAFE_FILE, head, total_bytes)
        read_into(
            {
                key: _view_of(storage, stored, begin)
                for (key, stored), begin in zip(ordered, begins, strict=True)
            }
        )


def _dtype_code(key: str, stored: Any) -> str:
    code = weight_files.dtype_code(stored.properties.dtype)
    if code is None:
        raise ConfigError(
            f"{key} has the format {stored.properties.dtype}, which safetensors does not have: it "
            "could not be written. Merge with --unsafe_serialization (safe_serialization=False)."
        )
    return code


def _mapped_file(path: Path, head: bytes, total_bytes: int) -> Any:
    """The bytes of a new file as a storage of torch: what is written there is in the file."""
    with path.open("wb") as file:
        # All its blocks at once: on a full disk a write to a page would kill the process. macOS
        # has no such call.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, total_bytes)
        else:
            file.truncate(total_bytes)
        file.write(head)
    return torch.UntypedStorage.from_file(str(path), shared=True, nbytes=total_bytes)


def _view_of(storage: torch.UntypedStorage, stored: Any, first_byte: int) -> torch.Tensor:
    dtype = stored.properties.dtype
    strides = torch.empty(stored.size, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(
        storage, first_byte // dtype.itemsize, stored.size, strides
    )
