"""What ``torch.save`` wrote, as an outline: containers, numbers, and where each tensor is.

Weights are converted without torch and without DeepSpeed: beside the bytes themselves a conversion
needs only a table of types.

Such a file is a zip archive (torch 1.6 and later; records are stored, not compressed)::

    <name>/data.pkl     the object, pickled; of a tensor only the key of its storage, and its shape
    <name>/data/<key>   bytes of a storage
    <name>/byteorder    little or big

Unpickling here calls nothing of what the pickle names: constructors of torch's tensors become
notes of place and shape, a few containers of the standard library are made, everything else
becomes an :class:`Unknown`. So neither torch nor DeepSpeed is needed, a hostile file can run no
code, and of gigabytes only the outline is read. A tensor must lie within its record and a record
within its file, and nothing is allocated merely because a number in the file says so.
"""

from __future__ import annotations

import builtins
import collections
import io
import math
import pickle
import zipfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.intact import OLD_TORCH_FORMAT

__all__ = [
    "DTYPES",
    "ArchiveRecord",
    "StoredTensor",
    "Strip",
    "Unknown",
    "Weight",
    "is_readable",
    "misplaced",
    "num_elements",
    "read_outline",
]


DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
"""torch's name of a type → (its code in safetensors, bytes per element)."""

# A buffer may repeat its elements (`expand`); a file of a few bytes must not make gigabytes.
_REPEATED = 16
_REPEATED_BYTES = 64 * 2**20
_FLOATING_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})


def num_elements(shape: Sequence[int]) -> int:
    """How many elements a tensor of a shape has; one for ``()``."""
    return math.prod(shape)


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """Bytes in an archive.

    Attributes:
        path: The archive.
        name: Its name there.
        start: Its first byte in the file.
        num_bytes: How many it has.
        crc: Their CRC-32; None where the archive was saved without.
    """

    path: Path
    name: str
    start: int
    num_bytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, within the record that holds its storage.

    Attributes:
        path: The file.
        start: Byte at which its storage begins.
        dtype: torch's name, without ``torch.``.
        offset: Element of the storage that is its first.
        shape: Its shape.
        stride: Elements of the storage between neighbours, by dimension.
        ds_id: Its id in DeepSpeed's swapper; empty for most.
        record: The record that it lies in; None where it has a file to itself.
    """

    path: Path
    start: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ds_id: str = ""
    record: ArchiveRecord | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return num_elements(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def first_byte(self) -> int:
        """Where its first element is in the file."""
        return self.start + self.offset * self.itemsize

    @property
    def extent(self) -> int:
        """Elements of the storage from its first to its last; equal to `numel` without gaps."""
        if not self.numel:
            return 0
        return 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )

    @property
    def span(self) -> StoredTensor:
        """All elements of the storage from its first to its last, as one dimension."""
        return replace(self, shape=(self.extent,), stride=(1,))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other, in their order."""
        expected_stride = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            # The stride of a dimension of size 1 is never used, and torch writes any number there.
            if size != 1 and step != expected_stride:
                return not self.numel
            expected_stride *= size
        return True

    def part(self, first_element: int, element_count: int) -> StoredTensor:
        """Some of its elements, as a tensor of one dimension."""
        if not self.is_contiguous:
            raise ValueError(f"a tensor of shape {self.shape} has the strides {self.stride}")
        return replace(
            self, offset=self.offset + first_element, shape=(element_count,), stride=(1,)
        )


def misplaced(tensor: StoredTensor, num_bytes: int) -> str:
    """Why a tensor cannot lie in a record of some size; empty if it can."""
    layout_numbers = (tensor.offset, *tensor.shape, *tensor.stride)
    if len(tensor.shape) != len(tensor.stride) or not all(
        type(layout_number) is int for layout_number in layout_numbers
    ):
        return f"has the shape {tensor.shape} and the strides {tensor.stride}, which fit no tensor"
    if min(layout_numbers) < 0:
        return (
            "has a negative number in its offset, shape or strides "
            f"({tensor.offset}, {tensor.shape}, {tensor.stride})"
        )
    elements = num_bytes // tensor.itemsize
    # A stride of 0 repeats elements, so that a shape of any size fits into a record.
    most_bytes = max(_REPEATED_BYTES, _REPEATED * num_bytes) // tensor.itemsize
    if tensor.numel and (tensor.offset + tensor.extent > elements or tensor.numel > most_bytes):
        return (
            f"of shape {tensor.shape}, strides {tensor.stride} and offset {tensor.offset} needs "
            f"more than the {elements:,} elements that its record holds"
        )
    return ""


class Strip:
    """Tensors of one dimension, seen as one: they may lie in many files."""

    def __init__(self, tensors: Sequence[StoredTensor]) -> None:
        self._tensors = tuple(tensors)
        self._bounds = (0, *accumulate(tensor.numel for tensor in self._tensors))

    @property
    def numel(self) -> int:
        """Elements of all."""
        return self._bounds[-1]

    def part(self, first_element: int, element_count: int) -> tuple[StoredTensor, ...]:
        """Where some consecutive elements lie."""
        # By bisection: a group of a large model may have thousands of tensors.
        end_element = first_element + element_count
        parts = []
        tensor_number = bisect_right(self._bounds, first_element) - 1
        while first_element < min(end_element, self.numel):
            tensor, lower_bound, upper_bound = (
                self._tensors[tensor_number],
                *self._bounds[tensor_number : tensor_number + 2],
            )
            first_of_next = min(end_element, upper_bound)
            if first_element < first_of_next:
                parts.append(
                    tensor.part(first_element - lower_bound, first_of_next - first_element)
                )
            first_element = first_of_next
            tensor_number = tensor_number + 1
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be read: its name, its shape, and the pieces that it is put together from.

    Attributes:
        name: As in the model's state dict.
        shape: Its shape.
        dtype: Type of its elements when it has been read: torch's name.
        pieces: Its elements in their order; empty where they are not in files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredTensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of it when it has been read."""
        return num_elements(self.shape) * DTYPES[self.dtype][1]

    @classmethod
    def whole(cls, weight_name: str, tensor: StoredTensor) -> Weight:
        """A tensor as it is in its file; as fp32 if it is of floating point."""
        dtype = "float32" if tensor.dtype in _FLOATING_DTYPES else tensor.dtype
        return cls(weight_name, tensor.shape, dtype, (tensor,))

    @classmethod
    def flat(
        cls, weight_name: str, shape: tuple[int, ...], stored_pieces: tuple[StoredTensor, ...]
    ) -> Weight:
        """A parameter whose elements are put together from pieces, as fp32."""
        element_count = sum(stored_piece.numel for stored_piece in stored_pieces)
        if element_count != num_elements(shape):
            raise ConfigError(
                f"{weight_name} has shape {list(shape)}, which is {num_elements(shape):,} "
                f"elements, and the checkpoint has {element_count:,} of it: its files are not of "
                "one save, or not complete. Convert another checkpoint (tag=...)."
            )
        return cls(weight_name, shape, "float32", stored_pieces)


_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "",  # the type is with the tensor
}
# Raised by unpickling where a pickle is not one that torch.save makes.
_PICKLE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_PLAIN_CLASSES = {"bool", "complex", "dict", "float", "frozenset", "int", "list", "set", "str"}


class Unknown:
    """An object of a class that is not looked up; it keeps its constructor's arguments.

    Attributes:
        args: The constructor's arguments.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """Ignored, since state is not needed."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignored, as state is."""

    def append(self, item: Any) -> None:
        """Ignored, as state is."""

    def extend(self, items: Any) -> None:
        """Ignored, as state is."""


class _StorageRecord(NamedTuple):
    record: ArchiveRecord
    dtype: str


class _DtypeName(NamedTuple):
    name: str


class _OutlineUnpickler(pickle._Unpickler):  # noqa: SLF001 - it has no public name
    """Unpickles to notes.

    Python's implementation is used: the one in C reserves as much memory as numbers in the pickle
    say (a memo of 2**32 entries, a bytearray of any size) before it reads further.
    """

    # Without the opcode that makes a bytearray of a size that the file names.
    dispatch: ClassVar[dict[int, Any]] = {
        code: step
        for code, step in pickle._Unpickler.dispatch.items()  # noqa: SLF001 - as above
        if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, file: IO[bytes], torch_archive: _TorchArchive) -> None:
        super().__init__(file, encoding="utf-8")
        self._archive = torch_archive

    def find_class(self, module_name: str, global_name: str) -> Any:
        """The function or class that stands for a name of the pickle; nothing is imported."""
        if module_name == "torch._utils" and global_name in {
            "_rebuild_tensor_v2",
            "_rebuild_tensor_v3",
        }:
            return self._tensor
        if module_name == "torch._utils" and global_name.startswith("_rebuild_parameter"):
            return _first_argument
        if (module_name, global_name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _with_attributes
        if module_name == "torch" and global_name == "Size":
            return tuple
        if global_name in _STORAGE_DTYPES and module_name.partition(".")[0] == "torch":
            return _DtypeName(_STORAGE_DTYPES[global_name])
        if module_name == "torch" and global_name in DTYPES:
            return _DtypeName(global_name)
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module_name, global_name) == ("_codecs", "encode"):
            return _encode_text
        if module_name in {"builtins", "__builtin__"} and global_name == "bytearray":
            return _content_bytes
        # torch.save uses protocol 2, in which `builtins` has its name of Python 2.
        if module_name in {"builtins", "__builtin__"} and global_name in _PLAIN_CLASSES:
            return getattr(builtins, global_name)
        return Unknown

    def persistent_load(self, persistent_id: Any) -> _StorageRecord:
        """The record of a storage."""
        _, object_kind, key, _, _ = persistent_id
        return _StorageRecord(self._archive.record(f"data/{key}"), object_kind.name)

    def _tensor(
        self,
        tensor_storage: _StorageRecord,
        offset: int,
        shape: Any,
        tensor_stride: Any,
        *rest: Any,
    ) -> Any:
        # An untyped storage has no type: `_rebuild_tensor_v3` names it among its last arguments.
        dtype = next(
            (rest_item.name for rest_item in rest if isinstance(rest_item, _DtypeName)),
            tensor_storage.dtype,
        )
        if dtype not in DTYPES:
            return Unknown(tensor_storage, shape)
        record = tensor_storage.record
        tensor = StoredTensor(
            record.path,
            record.start,
            dtype,
            offset,
            tuple(shape),
            tuple(tensor_stride),
            record=record,
        )
        text = misplaced(tensor, record.num_bytes)
        if text:
            raise zipfile.BadZipFile(f"a tensor in record {record.name} {text}")
        return tensor


def _first_argument(first_item: Any, *_: Any) -> Any:
    return first_item


def _with_attributes(make_object: Any, object_kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes: DeepSpeed marks swapped ones with an id."""
    tensor = make_object(*args)
    if isinstance(tensor, StoredTensor) and isinstance(state, dict):
        return replace(tensor, ds_id=str(state.get("ds_id", "")))
    return tensor


def _content_bytes(content: Any = b"", *_: Any) -> bytearray:
    """A bytearray of given bytes; from a number Python would make one of as many zeros."""
    if not isinstance(content, (bytes, bytearray)):
        raise pickle.UnpicklingError(f"a bytearray is made of {content!r}")
    return bytearray(content)


def _encode_text(text: str, encoding: str = "latin1") -> bytes:
    # Protocol 2 writes bytes as text of this encoding; a file must not choose another codec.
    return text.encode("latin1")


class _TorchArchive:
    def __init__(self, archive_path: Path, zip_file: zipfile.ZipFile) -> None:
        self.path = archive_path
        self._zip = zip_file
        self._size = archive_path.stat().st_size
        self._records = {
            zip_record.filename.partition("/")[2]: zip_record for zip_record in zip_file.infolist()
        }
        # torch can save without checksums, and writes zeros then.
        self._has_crc = any(archive_record.CRC for archive_record in self._records.values())

    def outline(self) -> Any:
        # Before anything is read by sizes that the file claims.
        for record_name in self._records:
            self.record(record_name)
        if "byteorder" in self._records and self._read("byteorder") != b"little":
            raise ConfigError(
                f"{self.path} was written on a machine of the other byte order "
                f"({self._read('byteorder').decode()!r}), so its numbers cannot be copied as they "
                "are. Convert it on a machine like that one."
            )
        return _OutlineUnpickler(io.BytesIO(self._read("data.pkl")), self).load()

    def _read(self, record_name: str) -> bytes:
        # `zipfile` compares checksums, and would refuse every record of an archive without them.
        if self._has_crc:
            return self._zip.read(self._records[record_name])
        record = self.record(record_name)
        with self.path.open("rb") as file:
            file.seek(record.start)
            return file.read(record.num_bytes)

    def record(self, record_name: str) -> ArchiveRecord:
        """Where a record's content is: after the record's header, whose size varies."""
        record = self._records[record_name]
        if record.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"record {record_name} is compressed")
        file = self._zip.fp
        if file is None:
            raise zipfile.BadZipFile(f"{self.path} has been closed")
        # The lengths are read from the record's own header, since its extra field, by which torch
        # aligns the content, may differ from that in the archive's directory.
        file.seek(record.header_offset + 26)
        length_bytes = file.read(4)
        length = int.from_bytes(length_bytes[:2], "little")
        start = record.header_offset + 30 + length + int.from_bytes(length_bytes[2:], "little")
        if start + record.file_size > self._size or record.file_size != record.compress_size:
            raise zipfile.BadZipFile(
                f"record {record_name} claims {record.file_size:,} bytes, more than the file has"
            )
        record_crc = record.CRC if self._has_crc else None
        return ArchiveRecord(self.path, record_name, start, record.file_size, record_crc)


def is_readable(archive_path: Path) -> bool:
    """Whether a file is in a format that :func:`read_outline` reads."""
    with archive_path.open("rb") as file:
        return file.read(len(OLD_TORCH_FORMAT)) != OLD_TORCH_FORMAT


def read_outline(archive_path: Path) -> Any:
    """Read what ``torch.save`` wrote, without the numbers of its tensors."""
    try:
        with zipfile.ZipFile(archive_path) as file:
            return _TorchArchive(archive_path, file).outline()
    except ConfigError:
        raise  # it is a `ValueError`, too
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, *_PICKLE_ERRORS) as error:
        raise _archive_problem(archive_path, error) from error


def _archive_problem(path: Path, error: Exception) -> ConfigError:
    if not is_readable(path):
        return ConfigError(
            f"{path} is in torch's format of before 2020, whose tensors cannot be read one "
            'by one (DeepSpeed writes it where the configuration has "checkpoint_serialization": '
            "false). "
            "Write it anew, with torch.save(torch.load(path, weights_only=False), path), for "
            "every .pt file of the folder; then convert. (That runs whatever code is in the file: "
            "only do it with your own.)"
        )
    return CheckpointDamaged(
        f"{path} cannot be read, at a size of {path.stat().st_size:,} bytes "
        f"({type(error).__name__}: {error}): it is torn. A process was killed while it wrote it, "
        "the disk was full, or a copy is not complete. Copy it again, or convert an earlier "
        "checkpoint (tag=...)."
    )
