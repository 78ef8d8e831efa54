"""Checkpoints of which every process writes and reads its own part, checked before unpickling.

The files are those of torch.distributed.checkpoint (DCP), so its tools read them, and they can be
read by another number of processes. ``.metadata`` is a pickle that torch would load whatever it
names; `shard_reading` reads it otherwise. A ``.distcp`` file is a sequence of archives: tensors,
and objects that torch would unpickle without a check, too. Each is read as an archive with its
checksums, and objects as plain data.

Weights lie under ``model``, by name; the optimizer's state lies under ``optimizer``, by the number
that its `state_dict` gives each parameter.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections import ChainMap, Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbaccel.base.errors import CheckpointDamaged, ConfigError, PlatformUnsupported
from nbaccel.base.intact import Window, archive_problem
from nbaccel.plan.contracts.place import Place
from nbaccel.strategies import optimizer_shards
from nbaccel.strategies.shard_reading import (
    SHARDS_REMEDY,
    plain_object,
    read_entries,
    read_metadata,
)


def shard_problems(folder: Path, metadata: Metadata, first_file: int, file_step: int) -> list[str]:
    """The problems of files of shards."""
    stored_entries = sorted(
        (
            info.relative_path,
            info.offset,
            info.length,
            index.fqn,
        )
        for index, info in metadata.storage_data.items()
        # An extension of the user's has compressed the others, so they are no archives.
        if not info.transform_descriptors
    )
    files_with_entries = [
        (file_name, list(file_entries))
        for file_name, file_entries in itertools.groupby(stored_entries, key=lambda entry: entry[0])
    ]
    plain_names = {
        entry_name
        for entry_name, entry_metadata in metadata.state_dict_metadata.items()
        if isinstance(entry_metadata, BytesStorageMetadata)
    }
    return [
        f"{folder / entry_name} {text}. {SHARDS_REMEDY}"
        for entry_name, own_entries in files_with_entries[first_file::file_step]
        if (text := next(_problems_of_file(folder, entry_name, own_entries, plain_names), ""))
    ]


def _problems_of_file(
    folder: Path, file_name: str, entries: list[tuple[str, int, int, str]], plain_names: set[str]
) -> Iterator[str]:
    path = folder / file_name
    if not path.is_file():
        yield "is missing"
    else:
        size = path.stat().st_size
        last_byte = max(offset + length for _, offset, length, _ in entries)
        if size < last_byte:
            ends = f"its shards end at byte {last_byte:,}"
            yield f"has {size:,} bytes, and {ends}: it is truncated"
            return
        with path.open("rb") as file:
            for _, offset, length, entry_name in entries:
                yield from _entry_problem(
                    file, offset, length, entry_name if entry_name in plain_names else ""
                )


def _entry_problem(file: IO[bytes], offset: int, length: int, name: str) -> Iterator[str]:
    entry_window = io.BufferedReader(Window(file, offset, length))
    text = archive_problem(entry_window, length)
    if text:
        yield f"{text} (at byte {offset:,})"
    elif name:
        entry_window.seek(0)
        # Only tried, so that all processes know it before anything is loaded.
        try:
            plain_object(entry_window)
        except ValueError as error:
            yield f"holds {error} as {name}"


_MODEL_PREFIX = "model."
_STATE_PREFIX = "optimizer.state."
_GROUPS_PREFIX = "optimizer.param_groups."


def save_shards(
    model: nn.Module,
    optimizer: Optimizer | None,
    folder: Path,
    *,
    left_out: Collection[str] = (),
    ranks_by_folder: Sequence[Sequence[int]] = (),
) -> None:
    """Write a checkpoint; a collective."""
    saved_content: dict[str, Any] = {"model": _model_slots(model, left_out)}
    if optimizer is not None:
        optimizer_state = optimizer.state_dict()
        saved_content.update(
            _flatten_entries(_GROUPS_PREFIX, dict(enumerate(optimizer_state["param_groups"])))
        )
        saved_content.update(_flatten_entries(_STATE_PREFIX, optimizer_state["state"]))
    if not ranks_by_folder:
        write_shards(saved_content, checkpoint_id=folder)
        return
    _refuse_old_groups()
    # Made by all processes in the same order, also by those that are not in them.
    all_groups = [dist.new_group(list(ranks), backend="gloo") for ranks in ranks_by_folder]
    own_groups = [
        process_group
        for process_group, ranks in zip(all_groups, ranks_by_folder, strict=True)
        if dist.get_rank() in ranks
    ]
    try:
        write_shards(
            saved_content,
            checkpoint_id=folder,
            process_group=own_groups[0],
            planner=_PartPlanner(),
        )
    finally:
        dist.destroy_process_group(own_groups[0])


def _refuse_old_groups() -> None:
    # Up to 2.6, DCP works only in groups with process 0. The method is as old as its correction.
    if not hasattr(torch.cpu.Stream, "record_event"):
        raise PlatformUnsupported(
            "save_state in shards on hosts that do not share a disk needs torch 2.7 or newer: this "
            f"is {torch.__version__}. Update torch, give a folder that all hosts see, or "
            "state_dict_type='FULL_STATE_DICT'."
        )


class _PartPlanner(DefaultSavePlanner):
    """Plans what the processes of one host write: its metadata has their shards only.

    torch's own planner refuses tensors of which shards are missing.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See :class:`SavePlanner`; what several processes hold is written by the first."""
        planned: set[Any] = set()
        plans = []
        for process_plan in all_plans:
            new_items = [item for item in process_plan.items if item.index not in planned]
            planned.update(item.index for item in new_items)
            plans.append(dataclasses.replace(process_plan, items=new_items))
        self.global_plan, metadata = create_default_global_save_plan(plans)
        mappings = dict(ChainMap(*(plan.planner_data for plan in self.global_plan)))
        self.metadata = dataclasses.replace(metadata, planner_data=mappings)
        return self.global_plan, self.metadata


def _model_slots(model: nn.Module, left_out: Collection[str]) -> dict[str, Any]:
    """The model's tensors, sharded as they are, without some of them."""
    # torch's function gives names without the prefixes of wrappers.
    return {
        name: value for name, value in get_model_state_dict(model).items() if name not in left_out
    }


def load_shards(
    model: nn.Module, optimizer: Optimizer | None, folder: Path, *, left_out: Collection[str] = ()
) -> None:
    """Read a checkpoint; a collective."""
    metadata = read_metadata(folder)
    content: dict[str, Any] = {"model": _model_slots(model, left_out)}
    if optimizer is not None:
        # DCP reads only into tensors that it is given, and an optimizer that has not stepped has
        # none.
        content.update(_optimizer_slots(optimizer, folder, metadata))
    read_entries(content, folder, metadata)
    set_model_state_dict(model, content.pop("model"), options=StateDictOptions(strict=not left_out))
    if optimizer is not None:
        param_groups = _nest_entries(_GROUPS_PREFIX, content)
        optimizer.load_state_dict(
            {
                "param_groups": [
                    param_groups[group_number] for group_number in sorted(param_groups)
                ],
                "state": _nest_entries(_STATE_PREFIX, content),
            }
        )


def check_shards(
    model: nn.Module,
    optimizer: Optimizer | None,
    folder: Path,
    place: Place,
    *,
    left_out: Collection[str] = (),
    is_part: bool = False,
) -> None:
    """Refuse a checkpoint that :func:`load_shards` could not read; no collective."""
    metadata = read_metadata(folder)
    file_problems = shard_problems(folder, metadata, place.local_rank, place.local_world_size)
    if file_problems:
        raise CheckpointDamaged(*file_problems)
    stored_metadata = metadata.state_dict_metadata
    saved_shapes = {
        entry_key.removeprefix(_MODEL_PREFIX): tuple(entry_metadata.size)
        for entry_key, entry_metadata in stored_metadata.items()
        if entry_key.startswith(_MODEL_PREFIX) and isinstance(entry_metadata, TensorStorageMetadata)
    }
    model_tensors = _model_slots(model, left_out)
    expected_shapes = {
        tensor_name: tuple(tensor_value.shape)
        for tensor_name, tensor_value in model_tensors.items()
        if isinstance(tensor_value, torch.Tensor)
    }
    other_names = [
        tensor_name
        for tensor_name, tensor_shape in expected_shapes.items()
        if saved_shapes.get(tensor_name) != tensor_shape
    ]
    if other_names:
        raise ConfigError(
            f"{folder} is of another model than the {type(model).__name__}: {other_names[0]} has "
            f"shape {list(saved_shapes.get(other_names[0], ())) or 'of none'} there, and "
            f"{list(expected_shapes[other_names[0]])} here ({len(other_names)} of "
            f"{len(expected_shapes)} differ). Nothing has been loaded. Load another one."
        )
    if is_part:
        _check_own_shards(model_tensors, folder, metadata)
    if optimizer is not None:
        _check_optimizer(optimizer, folder, stored_metadata)


def _check_own_shards(model_tensors: Mapping[str, Any], folder: Path, metadata: Metadata) -> None:
    """Refuse a host's part that lacks what this process is to read; DCP would leave it as it is."""
    slots = {
        f"{_MODEL_PREFIX}{name}": value
        for name, value in model_tensors.items()
        if isinstance(value, torch.Tensor)
    }
    num_found: Counter[str] = Counter()
    for item in create_default_local_load_plan(slots, metadata).items:
        num_found[item.dest_index.fqn] += math.prod(item.lengths)
    for key, tensor in slots.items():
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if num_found[key] != shard.numel():
            raise ConfigError(
                f"{folder} has {num_found[key]} of the {shard.numel()} elements of "
                f"{key.removeprefix(_MODEL_PREFIX)} that process {dist.get_rank()} holds: "
                "the other shards are on other hosts' disks. Nothing has been loaded. Shard the "
                "model over the same processes as when it was saved, or load another checkpoint."
            )


def _check_optimizer(optimizer: Optimizer, folder: Path, metadata: Mapping[str, Any]) -> None:
    _check_has_optimizer(folder, metadata)
    parameters = optimizer_shards.numbered_parameters(optimizer)
    numbers = {
        int(key.removeprefix(_STATE_PREFIX).partition(".")[0])
        for key in metadata
        if key.startswith(_STATE_PREFIX)
    }
    # Parameters that have not stepped have no state, so the numbers need not be complete.
    if max(numbers, default=-1) >= len(parameters):
        raise ConfigError(
            f"{folder} has the state of an optimizer of at least {max(numbers) + 1} "
            f"parameters, and this one has {len(parameters)}. Nothing has been loaded. Build the "
            "optimizer as when it was saved."
        )


def _check_has_optimizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    if not any(key.startswith(_GROUPS_PREFIX) for key in metadata):
        raise ConfigError(
            f"{folder} has no optimizer in it: it holds {len(metadata)} entries of a "
            "model. Training would continue with a new optimizer. Load it "
            "without one."
        )


def _flatten_entries(prefix: str, entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{prefix}{number}.{name}": value
        for number, entry in entries.items()
        for name, value in entry.items()
    }


def _nest_entries(prefix: str, content: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    entries: dict[int, dict[str, Any]] = {}
    for key, value in content.items():
        if key.startswith(prefix):
            number, _, name = key.removeprefix(prefix).partition(".")
            entries.setdefault(int(number), {})[name] = value
    return entries


def _optimizer_slots(optimizer: Optimizer, folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Where to read an optimizer's state into: empty tensors, sharded like its parameters."""
    stored_metadata = metadata.state_dict_metadata
    _check_has_optimizer(folder, stored_metadata)
    parameters = optimizer_shards.numbered_parameters(optimizer)
    read_slots: dict[str, Any] = {}
    for key, entry_metadata in stored_metadata.items():
        if key.startswith(_GROUPS_PREFIX):
            read_slots[key] = _zeros_like_stored(entry_metadata)
        elif key.startswith(_STATE_PREFIX):
            number = int(key.removeprefix(_STATE_PREFIX).partition(".")[0])
            empty_tensor = _zeros_like_stored(entry_metadata)
            # 0-d state, such as Adam's step, is the same on every process and stays whole.
            if empty_tensor is not None and empty_tensor.dim():
                empty_tensor = optimizer_shards.place_like(empty_tensor, parameters[number])
            read_slots[key] = empty_tensor
    return read_slots


def _zeros_like_stored(entry_metadata: Any) -> torch.Tensor | None:
    if isinstance(entry_metadata, TensorStorageMetadata):
        return torch.zeros(entry_metadata.size, dtype=entry_metadata.properties.dtype)
    return None  # not a tensor: what is read replaces it
