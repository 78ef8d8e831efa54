"""What ``torch.save`` wrote, as an outline: containers, numbers, and where each tensor lies.

Such a file is a zip archive (torch 1.6 and later; records are stored, not compressed)::

    <name>/data.pkl     the object, pickled; of a tensor only the key of its storage, and its shape
    <name>/data/<key>   bytes of a storage
    <name>/byteorder    little or big

Unpickling here calls nothing of what the pickle names: constructors of torch's tensors become
notes of place and shape, a few containers of the standard library are themselves, everything else
becomes an :class:`Unknown`. So neither torch nor DeepSpeed is needed, a hostile file can run no
code, and of gigabytes only the outline is read. A tensor must lie within its record and a record
within its file, and nothing is allocated merely because a number in the file says so.
"""

from __future__ import annotations

import builtins
import collections
import io
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

from nbaccel.deepspeed.weights.stored import DTYPES, Record, StoredTensor, misplaced
from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.intact import OLD_TORCH_FORMAT

__all__ = ["Unknown", "is_readable", "read_outline"]

_STORAGES = {
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
    "UntypedStorage": "",  # the tensor tells its type
}
# What unpickling raises where a pickle is not what torch.save makes.
_ODD = (
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
_PLAIN = {"bool", "complex", "dict", "float", "frozenset", "int", "list", "set", "str"}


class Unknown:
    """An object of a class that is not looked up; it keeps what it was made of.

    Attributes:
        args: What its constructor was given.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        """State is of no use here."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nor are items."""

    def append(self, item: Any) -> None:
        """Nor are elements."""

    def extend(self, items: Any) -> None:
        """Nor are elements."""


class _Storage(NamedTuple):
    record: Record
    dtype: str


class _Dtype(NamedTuple):
    name: str


class _Outline(pickle._Unpickler):
    """Unpickles to notes.

    In Python: the one in C reserves as much memory as numbers in the pickle say (a memo of 2**32
    entries, a bytearray of any size), before it looks whether anything is there.

    Args:
        file: The pickle.
        archive: Where storages lie.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: step
        for code, step in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, file: IO[bytes], archive: _Archive) -> None:
        super().__init__(file, encoding="utf-8")
        self._archive = archive

    def find_class(self, module: str, name: str) -> Any:
        """What a name of the pickle stands for here."""
        if module == "torch._utils" and name in {"_rebuild_tensor_v2", "_rebuild_tensor_v3"}:
            return self._tensor
        if module == "torch._utils" and name.startswith("_rebuild_parameter"):
            return _first
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _with_attributes
        if module == "torch" and name == "Size":
            return tuple
        if name in _STORAGES and module.partition(".")[0] == "torch":
            return _Dtype(_STORAGES[name])
        if module == "torch" and name in DTYPES:
            return _Dtype(name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("_codecs", "encode"):
            return _encode
        if module in {"builtins", "__builtin__"} and name == "bytearray":
            return _bytes
        if module in {"builtins", "__builtin__"} and name in _PLAIN:  # as pickles of protocol 2 say
            return getattr(builtins, name)
        return Unknown

    def persistent_load(self, pid: Any) -> _Storage:
        """Where a storage lies."""
        _, kind, key, _, _ = pid
        return _Storage(self._archive.record(f"data/{key}"), kind.name)

    def _tensor(self, storage: _Storage, offset: int, shape: Any, stride: Any, *rest: Any) -> Any:
        dtype = next((item.name for item in rest if isinstance(item, _Dtype)), storage.dtype)
        if dtype not in DTYPES:
            return Unknown(storage, shape)
        record = storage.record
        tensor = StoredTensor(
            record.path,
            record.start,
            dtype,
            offset,
            tuple(shape),
            tuple(stride),
            record=record,
        )
        problem = misplaced(tensor, record.num_bytes)
        if problem:
            raise zipfile.BadZipFile(f"a tensor in record {record.name} {problem}")
        return tensor


def _first(first: Any, *_: Any) -> Any:
    return first


def _with_attributes(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor that has attributes of its own: DeepSpeed marks swapped ones with an id."""
    tensor = make(*args)
    if isinstance(tensor, StoredTensor) and isinstance(state, dict):
        return replace(tensor, ds_id=str(state.get("ds_id", "")))
    return tensor


def _bytes(content: Any = b"", *_: Any) -> bytearray:
    """A bytearray of what is there; of a number it would be as many zeros."""
    if not isinstance(content, (bytes, bytearray)):
        raise pickle.UnpicklingError(f"a bytearray is made of {content!r}")
    return bytearray(content)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


class _Archive:
    def __init__(self, path: Path, file: zipfile.ZipFile) -> None:
        self.path = path
        self._zip = file
        self._size = path.stat().st_size
        self._records = {r.filename.partition("/")[2]: r for r in file.infolist()}
        self._has_crc = any(record.CRC for record in self._records.values())

    def outline(self) -> Any:
        for name in self._records:
            self.record(name)  # before anything is read by what it claims
        if "byteorder" in self._records and self._read("byteorder") != b"little":
            raise ConfigError(
                f"{self.path} was written on a machine of the other byte order "
                f"({self._read('byteorder').decode()!r}), so its numbers cannot be copied as they "
                "are. Convert it on a machine like that one."
            )
        return _Outline(io.BytesIO(self._read("data.pkl")), self).load()

    def _read(self, name: str) -> bytes:
        if self._has_crc:
            return self._zip.read(self._records[name])
        record = self.record(name)
        with self.path.open("rb") as file:
            file.seek(record.start)
            return file.read(record.num_bytes)

    def record(self, name: str) -> Record:
        """Where a record's content is: behind a header of its own, of varying size."""
        record = self._records[name]
        if record.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile(f"record {name} is compressed")
        file = self._zip.fp
        if file is None:
            raise zipfile.BadZipFile(f"{self.path} has been closed")
        file.seek(record.header_offset + 26)
        lengths = file.read(4)
        name_length = int.from_bytes(lengths[:2], "little")
        start = record.header_offset + 30 + name_length + int.from_bytes(lengths[2:], "little")
        if start + record.file_size > self._size or record.file_size != record.compress_size:
            raise zipfile.BadZipFile(
                f"record {name} claims {record.file_size:,} bytes, more than the file has"
            )
        crc = record.CRC if self._has_crc else None
        return Record(self.path, name, start, record.file_size, crc)


def is_readable(path: Path) -> bool:
    """Whether a file is in a format that :func:`read_outline` reads."""
    with path.open("rb") as file:
        return file.read(len(OLD_TORCH_FORMAT)) != OLD_TORCH_FORMAT


def read_outline(path: Path) -> Any:
    """Read what ``torch.save`` wrote, but for the numbers themselves.

    Args:
        path: The file.

    Returns:
        The object; each tensor in it is a :class:`StoredTensor`, each object of a class that is
        no plain container an :class:`Unknown`.

    Raises:
        CheckpointDamaged: The file is torn, or no such file.
        ConfigError: It is of torch's old format, or of a machine of the other byte order.
    """
    try:
        with zipfile.ZipFile(path) as file:
            return _Archive(path, file).outline()
    except ConfigError:
        raise
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, *_ODD) as error:
        raise _why_unreadable(path, error) from error


def _why_unreadable(path: Path, error: Exception) -> ConfigError:
    if not is_readable(path):
        return ConfigError(
            f"{path} is in torch's format of before 2020, whose tensors cannot be read one by one "
            '(DeepSpeed writes it where the configuration has "checkpoint_serialization": false). '
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
