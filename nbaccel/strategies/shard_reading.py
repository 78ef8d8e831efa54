"""Files of torch.distributed.checkpoint (DCP), read without running anything that is in them.

torch unpickles two things without a check: ``.metadata``, and every entry that is no tensor. Here
the first is read to notes of what it names, which call nothing, and of the notes plain objects are
made, of exactly the types that DCP has; torch's reader gets these objects, and never the file. The
others are read as plain data. So what has been checked is what is read.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as read_into

from nbaccel.base.errors import CheckpointDamaged

SHARDS_REMEDY = "Nothing has been loaded. Load another checkpoint, or copy it again."

_METADATA_FILE = ".metadata"
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_DESCRIPTIONS = {
    *(
        (_METADATA_MODULE, class_name)
        for class_name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *(
        (module_name, class_name)
        # Python 3.13 pickles paths under a module of its own.
        for module_name in ("pathlib", "pathlib._local")
        for class_name in ("PosixPath", "WindowsPath", "PurePosixPath")
    ),
}
_CONTAINERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPlace:
    """Where an entry lies, with the names by which torch's reader asks for it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...]


class _Note:
    """What a pickle says of an object; nothing is built, looked up or called."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _NoteUnpickler(pickle.Unpickler):
    """Reads the classes that describe a checkpoint as notes, and no other classes.

    A pickle can change the classes that it names, so each unpickling has its own.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._note_classes: dict[str, type[_Note]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a class."""
        # A dtype is pickled as its name in torch.
        if module == "torch" and type(found := vars(torch).get(name)) is torch.dtype:
            return found
        if (module, name) in _CONTAINERS:
            return _CONTAINERS[module, name]
        if (module, name) not in _DESCRIPTIONS:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which may run code")
        if name not in self._note_classes:
            self._note_classes[name] = type(name, (_Note,), {})
        return self._note_classes[name]

    def load_metadata(self) -> Metadata:
        """The metadata."""
        fields = self._fields(self.load(), "Metadata")
        return Metadata(
            state_dict_metadata={
                _exact(key, str): self._entry(entry_note)
                for key, entry_note in _exact(fields["state_dict_metadata"], dict).items()
            },
            storage_data={
                self._index(index_note): self._place(place_note)
                for index_note, place_note in _exact(fields["storage_data"], dict).items()
            },
        )

    def _fields(self, note: Any, *class_names: str) -> dict[str, Any]:
        if type(note) not in [self._note_classes.get(class_name) for class_name in class_names]:
            raise pickle.UnpicklingError(f"a {type(note).__name__} is where a {class_names[0]} is")
        # A class without fields has no state.
        fields: dict[str, Any] = _exact(vars(note).get("state") or {}, dict)
        return fields

    def _entry(self, note: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        fields = self._fields(note, "TensorStorageMetadata", "BytesStorageMetadata")
        if type(note) is self._note_classes.get("BytesStorageMetadata"):
            return BytesStorageMetadata()
        properties = fields["properties"]
        if type(properties) is not self._note_classes.get("TensorProperties"):
            raise pickle.UnpicklingError(f"a {type(properties).__name__} has a tensor's format")
        dtype = _exact(vars(properties)["state"], tuple)[0]
        return TensorStorageMetadata(
            # The other properties are out of use in torch, and are not read.
            properties=TensorProperties(dtype=_exact(dtype, torch.dtype)),
            size=_size(fields["size"]),
            chunks=[self._chunk(chunk_note) for chunk_note in _exact(fields["chunks"], list)],
        )

    def _chunk(self, note: Any) -> ChunkStorageMetadata:
        fields = self._fields(note, "ChunkStorageMetadata")
        return ChunkStorageMetadata(offsets=_size(fields["offsets"]), sizes=_size(fields["sizes"]))

    def _index(self, note: Any) -> MetadataIndex:
        fields = self._fields(note, "MetadataIndex")
        offset = fields.get("offset")
        number = fields.get("index")
        return MetadataIndex(
            fqn=_exact(fields["fqn"], str),
            offset=None if offset is None else _size(offset),
            index=None if number is None else _exact(number, int),
        )

    def _place(self, note: Any) -> _StoredPlace:
        fields = self._fields(note, "_StorageInfo")
        descriptors = fields.get("transform_descriptors") or ()
        name = _exact(fields["relative_path"], str)
        # A crafted file could otherwise make this process open files anywhere.
        if Path(name).name != name:
            raise pickle.UnpicklingError(f"{name!r} is not in the folder, as shards are")
        return _StoredPlace(
            relative_path=name,
            offset=_exact(fields["offset"], int),
            length=_exact(fields["length"], int),
            transform_descriptors=tuple(_exact(descriptor, str) for descriptor in descriptors),
        )


def _exact(value: Any, value_class: type) -> Any:
    # No subclass: it could answer a check otherwise than its reader.
    if type(value) is not value_class:
        raise pickle.UnpicklingError(
            f"a {type(value).__name__} is where a {value_class.__name__} is"
        )
    return value


def _size(numbers: Any) -> torch.Size:
    return torch.Size([_exact(number, int) for number in _exact(numbers, tuple)])


def read_metadata(folder: Path) -> Metadata:
    """Read a checkpoint's metadata without running code."""
    metadata_path = folder / _METADATA_FILE
    if not metadata_path.is_file():
        raise CheckpointDamaged(
            f"{metadata_path} is missing, which says where the shards are. The save was "
            f"interrupted, or not all was copied (its name begins with a dot). {SHARDS_REMEDY}"
        )
    try:
        return _NoteUnpickler(metadata_path.read_bytes()).load_metadata()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointDamaged(
            f"{metadata_path} cannot be read ({type(error).__name__}: {error}): it is truncated, "
            f"damaged or of something else. {SHARDS_REMEDY}"
        ) from error


def plain_object(stream: Any) -> Any:
    """Read an entry that is no tensor, as plain data."""
    try:
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
        """See :class:`StorageReader`."""
        return self._metadata


class _PlainPlanner(DefaultLoadPlanner):
    """torch's planner, which reads objects as plain data."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See :class:`LoadPlanner`."""
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
