"""Weights in safetensors files: the head of a file, and files that appear together in a folder.

The format (https://github.com/huggingface/safetensors): length of the header as 8 bytes, little
end first; the header, JSON, filled up with blanks; all tensors without gaps. The library writes
what is in memory, and here a part of it is at a time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from nbaccel.base import atomic
from nbaccel.base.disk import free_bytes
from nbaccel.base.errors import CheckpointFailed, ConfigError
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
_ALIGNMENT = 16
"""Bytes of the largest element: at multiples of it every tensor can be mapped."""


def dtype_code(dtype: object) -> str | None:
    """The format's name of a type of torch's; None where it has none."""
    name = str(dtype).removeprefix("torch.")
    return next((code for code, known in SAFE_DTYPE_NAMES.items() if known == name), None)


def head_of_file(
    tensors: Iterable[tuple[str, str | None, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, list[int]]:
    """All that comes before the first tensor, and where each tensor begins in the file.

    Tensors are given by name, type, shape and bytes. Those with the largest elements should come
    first, so that each begins at a multiple of its element's size.
    """
    # Hugging Face's libraries look for "format".
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


@contextlib.contextmanager
def publishing(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A place to write files of weights in; they take their names together, at the end.

    Weights of an earlier save in the folder are replaced; other files stay. If something goes
    wrong, the folder is as it was.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file: weights and their index need a folder. Give a folder's name."
        )
    # Earlier weights there do not count as room: they stay until the new ones are complete.
    available_bytes = free_bytes(folder)
    if num_bytes > available_bytes:
        raise ConfigError(
            f"{folder}: {format_bytes(num_bytes)} of weights are to be written, and its disk "
            f"has {format_bytes(available_bytes)} free. Make room, or give a folder on another "
            "disk. (Weights of an earlier save there stay until the new ones are whole.)"
        )
    made_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic.partial_folder(folder, "model") as temporary_folder:
            yield temporary_folder
            atomic.publish_weights(temporary_folder, folder, FILE_PATTERN)
    except BaseException as error:  # an interrupt, too, leaves nothing behind
        for made_folder in made_folders:
            # Only empty ones: another process may have written there meanwhile.
            with contextlib.suppress(OSError):
                made_folder.rmdir()
        if not isinstance(error, OSError):
            raise
        raise CheckpointFailed(
            f"Writing weights to {folder} failed: {error}. What was there before is as it "
            f"was, and what was written is gone; {format_bytes(free_bytes(folder))} are free. "
            "Remove the cause, or give a folder on another disk."
        ) from error
