"""Files of weights: heads of safetensors, files that appear together, and whether one is intact.

The format (https://github.com/huggingface/safetensors): length of the header as 8 bytes, little
end first; the header, JSON, filled up with blanks; all tensors without gaps. What `torch.save`
writes is a zip archive with checksums (CRC-32), which `torch.load` does not check.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash
from safetensors import SafetensorError, safe_open

from nbaccel.base import atomic
from nbaccel.base.atomic import free_bytes
from nbaccel.base.errors import CheckpointFailed, ConfigError, NbaccelError
from nbaccel.base.units import format_bytes

# By the format's own names; not every torch has them all.
SAFE_DTYPE_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "C64": "complex64",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}
FILE_PATTERN = "model{suffix}.safetensors"
_LENGTH_BYTES = 8
_ALIGNMENT = 16  # bytes of the largest element: at multiples of it every tensor can be mapped


def dtype_code(dtype: object) -> str | None:
    """The format's name of a type of torch's; None where it has none."""
    name = str(dtype).removeprefix("torch.")
    return next((code for code, known in SAFE_DTYPE_NAMES.items() if known == name), None)


def head_of_file(
    tensors: Iterable[tuple[str, str | None, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, list[int]]:
    """All that comes before the first tensor, and where each tensor begins in the file."""
    # Tensors: name, type, shape, bytes; largest elements first. Others look for "format".
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begins: list[int] = []
    end = 0
    for name, code, shape, num_bytes in tensors:
        begins.append(end)
        end += num_bytes
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begins[-1], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _ALIGNMENT)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return head, [len(head) + begin for begin in begins]


def check_room(folder: Path, num_bytes: int, remark: str = "") -> None:
    """Refuse a disk that is too small for weights, before any is written."""
    available_bytes = free_bytes(folder)
    if num_bytes > available_bytes:
        raise ConfigError(
            f"{folder}: {format_bytes(num_bytes)} of weights are to be written, and its disk has "
            f"{format_bytes(available_bytes)} free. Make room, or give another folder.{remark}"
        )


@contextlib.contextmanager
def publishing(folder: Path, num_bytes: int, pattern: str = FILE_PATTERN) -> Iterator[Path]:
    """A place to write weights in; at the end they replace earlier ones together, or not at all."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file: weights and their index need a folder. Give a folder's name."
        )
    remark = " (Weights of an earlier save there stay until the new ones are whole.)"
    check_room(folder, num_bytes, remark)
    made_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic.partial_folder(folder, "model") as temporary_folder:
            yield temporary_folder
            atomic.publish_weights(temporary_folder, folder, pattern)
    except BaseException as error:  # an interrupt, too, leaves nothing behind
        for made_folder in made_folders:
            # Only empty ones: another process may have written there meanwhile.
            with contextlib.suppress(OSError):
                made_folder.rmdir()
        # On a full disk torch raises a RuntimeError, and safetensors an error of its own.
        is_of_disk = isinstance(error, (OSError, SafetensorError, RuntimeError))
        if isinstance(error, NbaccelError) or not is_of_disk:
            raise
        raise CheckpointFailed(
            f"Writing weights to {folder} failed: {error}. What was there before is as it "
            f"was, and what was written is gone; {format_bytes(free_bytes(folder))} are free. "
            "Remove the cause, or give a folder on another disk."
        ) from error


# Files before torch 1.6 begin with this number: they have neither records nor checksums.
OLD_TORCH_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_CHUNK_BYTES = 4 * 2**20
_ZIP_START = b"PK\x03\x04"
_ARCHIVES = frozenset({".bin", ".pt", ".pkl"})
_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What was noted of a file when it was saved."""

    num_bytes: int  # its size
    xxh3: str = ""  # checksum of its content; empty where the file has checksums of its own


def is_archive(path: Path) -> bool:
    """Whether a file's name says that `torch.save` wrote it."""
    return path.suffix in _ARCHIVES


def digest(path: Path) -> str:
    """Checksum of a file's content, read in pieces."""
    content_hash = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK_BYTES)
    # Unbuffered: the chunks are larger than Python's buffer.
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            content_hash.update(memoryview(buffer)[:num_read])
    return content_hash.hexdigest()


def file_problem(path: Path, recorded: Recorded | None = None) -> str:
    """What is wrong with a file of a checkpoint."""
    if not path.is_file():
        return "is missing"
    try:
        num_bytes = path.stat().st_size
        if not num_bytes and (recorded is None or recorded.num_bytes):
            return "is empty"
        if recorded is not None and num_bytes != recorded.num_bytes:
            verdict = "it is truncated" if num_bytes < recorded.num_bytes else "it is another file"
            return f"has {num_bytes:,} bytes, and {recorded.num_bytes:,} were saved: {verdict}"
        return _content_problem(path, recorded)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _content_problem(path: Path, recorded: Recorded | None) -> str:
    if recorded is not None and recorded.xxh3 and digest(path) != recorded.xxh3:
        return "has other bytes than were saved (its checksum differs): it was changed or damaged"
    if is_archive(path):
        with path.open("rb") as file:
            return archive_problem(file, path.stat().st_size)
    if path.suffix == ".safetensors":
        try:
            # Opening compares the header with the file's size. As NumPy, which needs no torch.
            with safe_open(path, "numpy"):
                return ""
        except SafetensorError as error:
            return f"is truncated, or no safetensors file ({error})"
    return ""


def archive_problem(file: IO[bytes], num_bytes: int) -> str:
    """What is wrong with an archive that `torch.save` wrote; every record is read once."""
    start = file.read(len(OLD_TORCH_FORMAT))
    file.seek(0)
    # Nothing in it can be checked.
    if start == OLD_TORCH_FORMAT:
        return ""
    if not start.startswith(_ZIP_START):
        return f"is no file that torch.save wrote: it begins with {start[:8]!r}"
    try:
        with zipfile.ZipFile(file) as archive:
            return _records_problem(archive, num_bytes)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        return f"is truncated or damaged, at a size of {num_bytes:,} bytes ({error})"


def _records_problem(archive: zipfile.ZipFile, num_bytes: int) -> str:
    records = archive.infolist()
    for record in records:
        end = record.header_offset + _LOCAL_HEADER_BYTES + record.compress_size
        # torch.save never compresses: another type means damage.
        if record.compress_type != zipfile.ZIP_STORED or end > num_bytes:
            return f"claims more than it holds: record {record.filename} ends beyond the file"
    if not any(record.CRC for record in records):
        # Saved under torch.serialization.set_crc32_options(False), which writes no checksums.
        return ""
    if (damaged := archive.testzip()) is not None:
        return f"has flipped bits: the checksum of its record {damaged} is wrong"
    return ""


class Window(io.RawIOBase):
    """A part of a file, as a file of its own: several archives may lie in one."""

    def __init__(self, file: IO[bytes], begin: int, num_bytes: int) -> None:
        self._file = file
        self._begin = begin
        self._size = num_bytes
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the part."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read on, at most to the part's end."""
        count = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._begin + self._at)
        done = self._file.readinto(memoryview(buffer)[:count])  # type: ignore[attr-defined]
        self._at += done
        return int(done)
