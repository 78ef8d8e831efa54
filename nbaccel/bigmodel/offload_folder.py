"""Weights in a folder: one file of plain numbers each, and an index of their formats and shapes.

The layout is Accelerate's: ``<name>.dat`` and ``index.json``. Nothing here decides which weights
belong there; files are trusted for their numbers only, never for where they are or how large.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nbaccel.base import atomic
from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.weight_files import check_room
from nbaccel.bigmodel.prefetching import tell_weights
from nbaccel.bigmodel.tensor_placing import set_module_tensor_to_device, usable_device

INDEX_NAME = "index.json"
_HIDDEN_NAME = "weights"
_8_BIT_STATISTICS = "SCB"
_MOST_NUMBERS = 2**59


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Write one tensor to a folder.

    Args:
        weight: The tensor, on any device.
        weight_name: What it is called.
        offload_folder: The folder, which exists.
        index: Where its format and shape are noted.

    Returns:
        `index`.

    Raises:
        ConfigError: The name leads out of the folder, there are no values, or too little room.
        OSError: It cannot be written; a file of that name is as it was.
    """
    _write_weights(Path(offload_folder), {weight_name: weight})
    if index is not None:
        index[weight_name] = _weight_info(weight)
    return index


def offload_state_dict(
    save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]
) -> None:
    """Write tensors to a folder, which is made if need be, and add them to its index.

    Args:
        save_dir: The folder.
        state_dict: The tensors by name.

    Raises:
        ConfigError: A name would lead out of the folder, a tensor has no values to write, or the
            disk has too little room; nothing has been written then.
        OSError: One cannot be written; the files that are there are whole.
    """
    folder = Path(save_dir)
    _write_weights(folder, state_dict)
    save_offload_index({name: _weight_info(weight) for name, weight in state_dict.items()}, folder)


def _write_weights(folder: Path, weights: Mapping[str, Any]) -> None:
    for weight_name, weight in weights.items():
        _file_name(weight_name)
        is_plain = isinstance(weight, torch.Tensor) and weight.layout is torch.strided
        if not is_plain or weight.is_meta or weight.is_quantized:
            found = type(weight).__name__
            if isinstance(weight, torch.Tensor):
                found = f"a tensor on {weight.device} of layout {weight.layout} and {weight.dtype}"
            raise ConfigError(
                f"{weight_name!r} is {found}: it has no plain numbers that could be written to a "
                "file. Load its values first, or leave it in memory."
            )
    paths = [folder / _file_name(weight_name) for weight_name in weights]
    # Files of an earlier run make room as they are replaced, one after the other.
    replaced_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    check_room(folder, sum(weight.nbytes for weight in weights.values()) - replaced_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic.partial_folder(folder, _HIDDEN_NAME) as hidden_folder:
        for weight_name, weight in weights.items():
            values = weight.detach().cpu().resolve_conj().resolve_neg().contiguous()
            # As bytes: numpy lacks some of torch's formats.
            content = values.reshape(-1).view(torch.uint8).numpy()
            hidden_file = hidden_folder / _file_name(weight_name)
            with hidden_file.open("wb") as file:
                file.write(content.data)
            # Not synced to the disk, which takes long for large models: after a power failure a
            # file may be short, which is noticed by its size when it is read.
            hidden_file.replace(folder / hidden_file.name)


def save_offload_index(
    index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Add entries to a folder's index; without any, nothing is written.

    Args:
        index: Formats and shapes by name.
        offload_folder: The folder.

    Raises:
        CheckpointDamaged: The index that is there cannot be read.
        OSError: It cannot be written; the one that is there is as it was.
    """
    if index:
        path = Path(offload_folder, INDEX_NAME)
        entries = load_offload_index(offload_folder) if path.is_file() else {}
        atomic.write_text(path, json.dumps({**entries, **index}, indent=2))


def _file_name(weight_name: Any) -> str:
    is_plain = isinstance(weight_name, str) and weight_name and "\0" not in weight_name
    if not is_plain or {"/", "\\"} & set(weight_name):
        raise ConfigError(
            f"{weight_name!r} cannot be the name of a weight: its file would lie outside of the "
            "folder of offloaded weights, where it could overwrite something else. Rename it to "
            "letters, digits and dots, or use an index of your own making only."
        )
    return f"{weight_name}.dat"


def _weight_info(weight: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}


def load_offload_index(offload_folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder's index."""
    index_path = Path(offload_folder, INDEX_NAME)
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(index_path, f"cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(index, dict):
        raise _damaged(index_path, f"holds a {type(index).__name__}, not weights by their names")
    return index


def _damaged(path: Path, problem: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{path} {problem}. Offload the model again, to a new folder, or copy the whole folder."
    )


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> torch.Tensor:
    """A weight as a tensor over its file: read when it is used, and the file is never changed.

    Args:
        weight_file: The file.
        weight_info: Its entry of the index: ``dtype`` and ``shape``.

    Returns:
        The tensor, in host memory. What is written to it stays in this process's memory.

    Raises:
        CheckpointDamaged: The entry makes no sense, or the file has not the size that it tells.
    """
    path = Path(weight_file)
    dtype = _stored_dtype(path, weight_info)
    shape = _stored_shape(path, weight_info)
    expected_bytes = math.prod(shape) * dtype.itemsize
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        found = f"{type(error).__name__}: {error.strerror}"
        raise _damaged(path, f"cannot be read ({found}), but is in the index") from None
    if found_bytes != expected_bytes:
        expected = f"by the index ({dtype}, shape {list(shape)}) it must have {expected_bytes}"
        raise _damaged(path, f"has {found_bytes} bytes; {expected}")
    if expected_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    # Copy on write: pages that are only read are the file's own, and cost no memory of the process.
    mapped = np.memmap(path, dtype=np.uint8, mode="c", shape=(expected_bytes,))
    return torch.from_numpy(mapped).view(dtype).reshape(shape)


def _stored_dtype(path: Path, weight_info: Any) -> torch.dtype:
    name = weight_info.get("dtype") if isinstance(weight_info, Mapping) else None
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    # Numbers that need a scale beside them are not stored like this.
    is_plain = isinstance(dtype, torch.dtype) and not str(name).startswith(("q", "bits"))
    if not isinstance(dtype, torch.dtype) or not is_plain:
        raise _damaged(path, f"has the entry {weight_info!r}, whose dtype is no format of torch")
    return dtype


def _stored_shape(path: Path, weight_info: Mapping[str, Any]) -> tuple[int, ...]:
    shape = weight_info.get("shape")
    sizes = shape if isinstance(shape, (list, tuple)) else (shape,)
    # A truth value counts as a number for Python. An empty tensor's other sizes have no file to
    # be compared with, and torch multiplies them.
    is_usable = shape is sizes and all(type(size) is int and size >= 0 for size in sizes)
    if not is_usable or math.prod(size or 1 for size in sizes) >= _MOST_NUMBERS:
        raise _damaged(path, f"has the shape {shape!r} in the index, which no tensor can have")
    return tuple(sizes)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Give a model the weights of a folder, in host memory; without an index nothing is done."""
    statistics = [name for name in index or {} if _8_BIT_STATISTICS in name.split(".")]
    if statistics:
        raise ConfigError(
            f"{statistics[0]!r} belongs to 8-bit weights of bitsandbytes, which nbaccel does not "
            "load from a folder. Offload the model without quantization."
        )
    weights = dict(OffloadedWeightsLoader(save_folder=offload_folder, index=index or {}))
    for name, weight in weights.items():
        set_module_tensor_to_device(model, name, "cpu", value=weight)


class PrefixedDataset(Mapping[str, Any]):
    """The part of a map whose keys begin with a prefix, such as ``layers.0.``, without it."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        # Not by reading, as Mapping does.
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def prefetch(self, names: Sequence[str]) -> None:
        """Pass names on to a map that reads ahead; see `tell_weights`."""
        tell_weights(self.dataset, "prefetch", [f"{self.prefix}{name}" for name in names])

    def release(self, names: Sequence[str]) -> None:
        """Pass names on to a map that reads ahead; see `tell_weights`."""
        tell_weights(self.dataset, "release", [f"{self.prefix}{name}" for name in names])


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name: from memory first, else from a folder or from files of safetensors.

    Args:
        state_dict: Weights in memory.
        save_folder: A folder that `offload_state_dict` wrote.
        index: What is known of the weights that are not in memory: ``dtype`` and ``shape`` of
            those in `save_folder`; ``safetensors_file``, and if they differ ``weight_name`` and
            ``dtype``, of others. None: the index of the folder.
        device: Where weights from safetensors go; None: host memory.

    Raises:
        ConfigError: Nothing is given.
        CheckpointDamaged: The folder's index cannot be read.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError(
                f"state_dict={state_dict}, save_folder={save_folder} and index={index}: there is "
                "nothing to load weights from. Give one of them."
            )
        if index is None and save_folder is not None:
            index = load_offload_index(save_folder)
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        weight_info = self.index[key]
        if isinstance(weight_info, Mapping) and weight_info.get("safetensors_file") is not None:
            path = Path(weight_info["safetensors_file"])
            dtype = _stored_dtype(path, weight_info) if "dtype" in weight_info else None
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    tensor: torch.Tensor = file.get_tensor(weight_info.get("weight_name", key))
            except (OSError, SafetensorError) as error:
                found = f"({type(error).__name__}: {error})"
                raise _damaged(path, f"cannot give the weight {key!r} {found}") from None
            return tensor.to(usable_device("cpu" if self.device is None else self.device), dtype)
        if self.save_folder is None:
            raise ConfigError(
                f"{key!r} is in the index ({weight_info!r}) without a safetensors_file, so its "
                "file must lie in a folder. Pass save_folder."
            )
        return load_offloaded_weight(Path(self.save_folder, _file_name(key)), weight_info)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The entries of a state dict that belong to some submodules.

    Args:
        state_dict: The whole.
        submodule_names: Names of submodules, or of single tensors.

    Returns:
        The entries, with their whole names.
    """
    return {
        key: tensor
        for name in submodule_names
        for key, tensor in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }
