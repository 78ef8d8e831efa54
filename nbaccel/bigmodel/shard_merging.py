"""Weights that every process wrote a shard of, made one file.

The shards are read straight into the pages of the new file, so that memory holds one tensor at a
time, and the system writes the rest out where it needs room.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from nbaccel.base import atomic
from nbaccel.base.disk import free_bytes
from nbaccel.base.errors import CheckpointFailed, ConfigError
from nbaccel.base.units import format_bytes
from nbaccel.bigmodel.checkpoint_files import SAFE_DTYPE_NAMES, SAFE_FILE

_LENGTH_BYTES = 8
_ALIGNMENT = 16
"""Bytes of the largest element: at multiples of it every tensor can be mapped."""


def write_merged_file(
    tensors: Mapping[str, Any],
    read_into: Callable[[dict[str, Any]], None],
    output_folder: Path,
    *,
    key_prefix: str,
) -> None:
    """Write ``model.safetensors`` out of shards; it appears whole, or not at all."""
    header, offsets, total_bytes = _layout_of(tensors, key_prefix)
    if output_folder.exists() and not output_folder.is_dir():
        raise ConfigError(
            f"{output_folder} is a file: weights need a folder. Give a folder's name."
        )
    if total_bytes > free_bytes(output_folder):
        raise ConfigError(
            f"{output_folder}: {format_bytes(total_bytes)} of weights are to be written, and its "
            f"disk has {format_bytes(free_bytes(output_folder))} free. Make room, or give a folder "
            "on another disk."
        )
    is_made_here = not output_folder.exists()
    output_folder.mkdir(parents=True, exist_ok=True)
    try:
        with atomic.partial_folder(output_folder, "model") as workshop:
            storage = _mapped_file(workshop / SAFE_FILE, header, total_bytes)
            views = {
                key: _view_of(storage, stored, offsets[key]) for key, stored in tensors.items()
            }
            read_into(views)
            atomic.publish_weights(workshop, output_folder, "model{suffix}.safetensors")
    except BaseException as error:  # an interrupt, too, leaves nothing behind
        if is_made_here:
            # Only an empty one: another process may have written there meanwhile.
            with contextlib.suppress(OSError):
                output_folder.rmdir()
        if not isinstance(error, OSError):
            raise
        raise CheckpointFailed(
            f"Writing weights to {output_folder} failed: {error}. What was there before is as it "
            "was. Remove the cause, or give a folder on another disk."
        ) from error


def _layout_of(tensors: Mapping[str, Any], prefix: str) -> tuple[bytes, dict[str, int], int]:
    """The file's head, where each tensor begins in the file, and its whole size."""
    # The largest elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].properties.dtype.itemsize)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for key, stored in ordered:
        begins[key] = end
        end += stored.size.numel() * stored.properties.dtype.itemsize
        entries[key.removeprefix(prefix)] = {
            "dtype": _dtype_name(key, stored.properties.dtype),
            "shape": list(stored.size),
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(entries).encode()
    # The format allows blanks behind the header.
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return head, {key: len(head) + begin for key, begin in begins.items()}, len(head) + end


def _dtype_name(key: str, dtype: torch.dtype) -> str:
    plain_name = str(dtype).removeprefix("torch.")
    for safe_name, torch_name in SAFE_DTYPE_NAMES.items():
        if torch_name == plain_name:
            return safe_name
    raise ConfigError(
        f"{key} has the format {dtype}, which safetensors does not have: it could not be written. "
        "Merge with --unsafe_serialization (safe_serialization=False)."
    )


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
