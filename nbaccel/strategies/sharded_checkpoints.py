"""Checkpoints of which every process writes and reads its own part, checked before unpickling.

The files are those of torch.distributed.checkpoint (DCP), so its tools read them, and they can be
read by another number of processes. Weights lie under ``model``, by name; the optimizer's state
lies under ``optimizer``, by the number that its `state_dict` gives each parameter.

torch unpickles two things without a check: ``.metadata``, and every entry that is no tensor. Here
the first is read to notes of what it names, which call nothing, and of the notes plain objects are
made, of exactly the types that DCP has; torch's reader gets these objects, and never the file. A
``.distcp`` file is a sequence of archives: each is read with its checksums, and objects as plain
data. So what has been checked is what is read.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import pickle
import re
import warnings
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner, state_dict as model_states
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as read_into
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nbaccel.base.errors import CheckpointDamaged, ConfigError, PlatformUnsupported
from nbaccel.base.torch_private import plain_data
from nbaccel.base.weight_files import Window, archive_problem
from nbaccel.plan.contracts.training import ModelShards, Place
from nbaccel.strategies import optimizer_shards

SHARDS_REMEDY = "Nothing has been loaded. Load another checkpoint, or copy it again."

_METADATA_FILE = ".metadata"


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPlace:
    """Where an entry lies, with the names by which torch's reader asks for it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


_SIZE = (torch.Size,)
_NONE = (type(None),)
_FIELDS: dict[str, tuple[Any, dict[str, tuple[type, ...]]]] = {
    "Metadata": (Metadata, {"state_dict_metadata": (dict,), "storage_data": (dict,)}),
    "MetadataIndex": (
        MetadataIndex,
        {"fqn": (str,), "offset": _SIZE + _NONE, "index": (int, *_NONE)},
    ),
    "TensorStorageMetadata": (
        TensorStorageMetadata,
        {"properties": (TensorProperties,), "size": _SIZE, "chunks": (list,)},
    ),
    "ChunkStorageMetadata": (ChunkStorageMetadata, {"offsets": _SIZE, "sizes": _SIZE}),
    "BytesStorageMetadata": (BytesStorageMetadata, {}),
    "TensorProperties": (TensorProperties, {"dtype": (torch.dtype,)}),
    "_StorageInfo": (
        _StoredPlace,
        {
            **dict.fromkeys(("offset", "length"), (int,)),
            "relative_path": (str,),
            "transform_descriptors": (list, tuple, *_NONE),
        },
    ),
}
"""Name of a class → what is made of a note of it, and of which types the fields must be."""


class _Note:
    """What a pickle says of an object; nothing is built, looked up or called."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NoteUnpickler(pickle.Unpickler):
    """Reads objects of whatever class as notes."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a class or a function."""
        # Classes of C, which a pickle cannot change. A dtype is pickled as its name in torch.
        found = vars(torch).get(name) if module == "torch" else None
        if type(found) is torch.dtype or found is torch.Size:
            return found
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return type(name, (_Note,), {"__module__": module})


def _described(value: Any) -> Any:
    """Torch's own object of a note, and of all notes in it."""
    if type(value) in (list, tuple):
        return type(value)(map(_described, value))
    if type(value) is dict:
        return {_described(key): _described(item) for key, item in value.items()}
    if not isinstance(value, _Note):
        return value
    name = type(value).__name__
    if name not in _FIELDS:
        raise pickle.UnpicklingError(
            f"it holds {type(value).__module__}.{name}, which may run code"
        )
    state = vars(value).get("state") or {}
    if isinstance(state, tuple):  # of a tensor's properties, of which only the first is in use
        state = {"dtype": state[0]}
    made_class, kinds = _FIELDS[name]
    fields = {field: _described(state.get(field)) for field in kinds}
    for field, content in fields.items():
        # No subclass: it could answer a check otherwise than its reader.
        if type(content) not in kinds[field]:
            raise pickle.UnpicklingError(f"the {field} of a {name} is a {type(content).__name__}")
    # A crafted file could otherwise make this process open files anywhere.
    file_name = fields.get("relative_path", "")
    if Path(file_name).name != file_name:
        raise pickle.UnpicklingError(f"{file_name!r} is not in the folder, as shards are")
    return made_class(**fields)


def read_metadata(folder: Path) -> Metadata:
    """Read a checkpoint's metadata without running code."""
    metadata_path = folder / _METADATA_FILE
    if not metadata_path.is_file():
        raise CheckpointDamaged(
            f"{metadata_path} is missing, which says where the shards are. The save was "
            f"interrupted, or not all was copied (its name begins with a dot). {SHARDS_REMEDY}"
        )
    try:
        notes = _NoteUnpickler(io.BytesIO(metadata_path.read_bytes())).load()
        metadata: Metadata = _described(notes)
        for index, place in metadata.storage_data.items():
            if (type(index), type(place)) != (MetadataIndex, _StoredPlace):
                raise pickle.UnpicklingError(f"{index!r} has the place {place!r}")
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointDamaged(
            f"{metadata_path} cannot be read ({type(error).__name__}: {error}): it is truncated, "
            f"damaged or of something else. {SHARDS_REMEDY}"
        ) from error
    return metadata


def plain_object(stream: Any) -> Any:
    """Read an entry that is no tensor, as plain data."""
    try:
        with plain_data():
            return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch has one exception for everything that it refuses; only the text names the class.
        named = re.search(r"GLOBAL (\S+)", str(error))
        found = named[1] if named else "a damaged pickle"
        raise ValueError(f"{found}, no plain data, which may run code,") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"what cannot be read ({type(error).__name__})") from error


class _CheckedReader(FileSystemReader):
    """torch's reader, which is given the metadata instead of unpickling it."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _PlainPlanner(default_planner.DefaultLoadPlanner):
    """torch's planner, which reads objects as plain data."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain_stream = io.BytesIO()
        try:
            torch.save(plain_object(value), plain_stream)
        except ValueError as error:
            name = read_item.storage_index.fqn
            raise CheckpointDamaged(f"{self._folder} holds {error} as {name}") from error
        plain_stream.seek(0)
        # torch's own method puts the object in its place, and unpickles what was just written.
        super().load_bytes(read_item, plain_stream)


def read_entries(
    content: dict[str, Any], folder: Path, metadata: Metadata, *, alone: bool = False
) -> None:
    """Read entries of a checkpoint; a collective, unless one process reads alone."""
    with warnings.catch_warnings():
        if alone:
            # torch warns that a single process reads, which is the purpose here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        read_into(
            content,
            storage_reader=_CheckedReader(folder, metadata),
            planner=_PlainPlanner(folder),
            no_dist=alone,
        )


def shard_problems(folder: Path, metadata: Metadata, first_file: int, file_step: int) -> list[str]:
    """The problems of files of shards."""
    stored_entries = sorted(
        (info.relative_path, info.offset, info.length, index.fqn)
        for index, info in metadata.storage_data.items()
        # An extension of the user's has compressed the others, so they are no archives.
        if not info.transform_descriptors
    )
    by_file = itertools.groupby(stored_entries, key=lambda entry: entry[0])
    files_with_entries = [(file_name, list(file_entries)) for file_name, file_entries in by_file]
    entries = metadata.state_dict_metadata.items()
    plain_names = {name for name, entry in entries if isinstance(entry, BytesStorageMetadata)}
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
        return
    size = path.stat().st_size
    last_byte = max(offset + length for _, offset, length, _ in entries)
    if size < last_byte:
        yield f"has {size:,} bytes, and its shards end at byte {last_byte:,}: it is truncated"
        return
    with path.open("rb") as file:
        for _, offset, length, entry_name in entries:
            entry_window = io.BufferedReader(Window(file, offset, length))
            if text := archive_problem(entry_window, length):
                yield f"{text} (at byte {offset:,})"
            elif entry_name in plain_names:
                entry_window.seek(0)
                # Only tried, so that all processes know it before anything is loaded.
                try:
                    plain_object(entry_window)
                except ValueError as error:
                    yield f"holds {error} as {entry_name}"


_MODEL_PREFIX = "model."
_STATE_PREFIX = "optimizer.state."
_GROUPS_PREFIX = "optimizer.param_groups."


class OwnPartCheckpoints:
    """Checkpoints of a strategy whose models have sharded tensors of torch's (DTensors)."""

    shard_kind: ClassVar[str] = "fsdp"
    keeps_own_disks: ClassVar[bool] = False
    place: Place

    def shard_folder(self, number: int) -> str:
        """See :meth:`ShardedCheckpoints.shard_folder`; Accelerate's name for it."""
        return f"pytorch_model_fsdp_{number}"

    def save_sharded(self, shards: ModelShards) -> None:
        """See :meth:`ShardedCheckpoints.save_sharded`; files of torch.distributed.checkpoint."""
        saved_content: dict[str, Any] = {"model": _model_slots(shards)}
        folder, ranks_by_folder = shards.folder, shards.ranks_by_folder
        if shards.optimizer is not None:
            optimizer_state = shards.optimizer.state_dict()
            numbered = dict(enumerate(optimizer_state["param_groups"]))
            # Each entry has a name of its own in the files, such as ``optimizer.state.0.exp_avg``.
            state = optimizer_state["state"]
            saved_content["optimizer"] = {"param_groups": numbered, "state": state}
        if not ranks_by_folder:
            write_shards(saved_content, checkpoint_id=folder)
            return
        # Up to 2.6, DCP works only in groups with process 0. The method is as old as the mending.
        if not hasattr(torch.cpu.Stream, "record_event"):
            raise PlatformUnsupported(
                "save_state in shards on hosts that do not share a disk needs torch 2.7 or newer: "
                f"this is {torch.__version__}. Update torch, give a folder that all hosts see, or "
                "state_dict_type='FULL_STATE_DICT'."
            )
        # Made by all processes in the same order, also by those that are not in them.
        groups = [(dist.new_group(list(ranks), backend="gloo"), ranks) for ranks in ranks_by_folder]
        own_group = next(group for group, ranks in groups if dist.get_rank() in ranks)
        try:
            write_shards(
                saved_content, checkpoint_id=folder, process_group=own_group, planner=_PartPlanner()
            )
        finally:
            dist.destroy_process_group(own_group)

    def check_sharded(self, shards: ModelShards) -> None:
        """See :meth:`ShardedCheckpoints.check_sharded`; nothing in the files is run."""
        model, folder, place = shards.model, shards.folder, self.place
        metadata = read_metadata(folder)
        file_problems = shard_problems(folder, metadata, place.local_rank, place.local_world_size)
        if file_problems:
            raise CheckpointDamaged(*file_problems)
        stored_metadata = metadata.state_dict_metadata
        saved_shapes = {
            entry_key.removeprefix(_MODEL_PREFIX): tuple(entry_metadata.size)
            for entry_key, entry_metadata in stored_metadata.items()
            if entry_key.startswith(_MODEL_PREFIX)
            and isinstance(entry_metadata, TensorStorageMetadata)
        }
        model_tensors = _model_slots(shards)
        tensors = {n: it for n, it in model_tensors.items() if isinstance(it, torch.Tensor)}
        expected_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = expected_shapes.items()
        other_names = [name for name, shape in expected if saved_shapes.get(name) != shape]
        if other_names:
            raise ConfigError(
                f"{folder} is of another model than the {type(model).__name__}: {other_names[0]} "
                f"has shape {list(saved_shapes.get(other_names[0], ())) or 'of none'} there, and "
                f"{list(expected_shapes[other_names[0]])} here ({len(other_names)} of "
                f"{len(expected_shapes)} differ). Nothing has been loaded. Load another one."
            )
        if shards.ranks_there:
            _check_own_shards(model_tensors, folder, metadata)
        if shards.optimizer is not None:
            _check_optimizer(shards.optimizer, folder, stored_metadata)

    def load_sharded(self, shards: ModelShards) -> None:
        folder, optimizer = shards.folder, shards.optimizer
        metadata = read_metadata(folder)
        content: dict[str, Any] = {"model": _model_slots(shards)}
        if optimizer is not None:
            # DCP reads only into given tensors; an optimizer that has not stepped has none.
            content.update(_optimizer_slots(optimizer, folder, metadata))
        read_entries(content, folder, metadata)
        options = model_states.StateDictOptions(strict=not shards.left_out)
        model_states.set_model_state_dict(shards.model, content.pop("model"), options=options)
        if optimizer is not None:
            param_groups = _nest_entries(_GROUPS_PREFIX, content)
            optimizer.load_state_dict(
                {
                    "param_groups": [param_groups[number] for number in sorted(param_groups)],
                    "state": _nest_entries(_STATE_PREFIX, content),
                }
            )


class _PartPlanner(default_planner.DefaultSavePlanner):
    """Plans what one host's processes write; torch's own refuses where shards are missing."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        planned: set[Any] = set()  # what several processes hold is written by the first
        plans = []
        for process_plan in all_plans:
            new_items = [item for item in process_plan.items if item.index not in planned]
            planned.update(item.index for item in new_items)
            plans.append(dataclasses.replace(process_plan, items=new_items))
        self.global_plan, metadata = default_planner.create_default_global_save_plan(plans)
        mappings = dict(ChainMap(*(plan.planner_data for plan in self.global_plan)))
        self.metadata = dataclasses.replace(metadata, planner_data=mappings)
        return self.global_plan, self.metadata


def _model_slots(shards: ModelShards) -> dict[str, Any]:
    # torch's function gives names without the prefixes of wrappers.
    state = model_states.get_model_state_dict(shards.model)
    return {name: value for name, value in state.items() if name not in shards.left_out}


def _check_own_shards(model_tensors: Mapping[str, Any], folder: Path, metadata: Metadata) -> None:
    """Refuse a host's part that lacks what this process is to read; DCP would leave it as it is."""
    slots = {
        f"{_MODEL_PREFIX}{name}": value
        for name, value in model_tensors.items()
        if isinstance(value, torch.Tensor)
    }
    num_found: Counter[str] = Counter()
    for item in default_planner.create_default_local_load_plan(slots, metadata).items:
        num_found[item.dest_index.fqn] += math.prod(item.lengths)
    for key, tensor in slots.items():
        shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if num_found[key] != shard.numel():
            raise ConfigError(
                f"{folder} has {num_found[key]} of the {shard.numel()} elements of "
                f"{key.removeprefix(_MODEL_PREFIX)} that process {dist.get_rank()} holds: the "
                "other shards are on other hosts' disks. Nothing has been loaded. Shard the model "
                "over the same processes as when it was saved, or load another checkpoint."
            )


def _check_optimizer(optimizer: Optimizer, folder: Path, metadata: Mapping[str, Any]) -> None:
    _check_has_optimizer(folder, metadata)
    parameters = optimizer_shards.numbered_parameters(optimizer)
    keys = (key.removeprefix(_STATE_PREFIX) for key in metadata if key.startswith(_STATE_PREFIX))
    numbers = {int(key.partition(".")[0]) for key in keys}
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
            f"{folder} has no optimizer in it: it holds {len(metadata)} entries of a model. "
            "Training would continue with a new optimizer. Load it without one."
        )


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
