"""What is read of checkpoints' headers, and that no damaged or crafted file gets any further."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nbaccel.bigmodel.checkpoint_files import WeightFiles, read_checkpoint
from nbaccel.errors import CheckpointDamaged, ConfigError
from tests.damage import make_evil

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def every_kind() -> dict[str, torch.Tensor]:
    """One tensor of each format, of each odd shape."""
    tensors = {
        str(dtype).removeprefix("torch."): torch.randn(3, 5).to(dtype)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, *FP8)
    }
    tensors |= {
        str(dtype).removeprefix("torch."): torch.arange(7).to(dtype)
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    }
    return tensors | {
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "layers.0.weight": torch.randn(17, 3),
    }


def read_all(path: Path) -> dict[str, torch.Tensor]:
    files = WeightFiles()
    return {name: files.view(stored) for name, stored in read_checkpoint(path).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def refused(path: Path, *said: str) -> None:
    """Read a checkpoint that cannot be used; anything but a named error that says this fails."""
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    text = str(caught.value)
    assert len(text) > 60, "it says what is wrong and what to do"
    assert all(part in text for part in said), text


@contextmanager
def may_be_refused(path: Path) -> Iterator[None]:
    """Let a refusal pass that names the file, and nothing else."""
    try:
        yield
    except CheckpointDamaged as error:
        if str(path) not in str(error):
            raise


def write_safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def entry(first_byte: int, end_byte: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first_byte, end_byte]}


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / name


# ------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_every_format_and_shape_is_read_bit_by_bit(tmp_path, name, is_old):
    tensors = every_kind()
    if is_old:  # torch itself cannot read these from its old format
        tensors = {name: t for name, t in tensors.items() if t.dtype not in FP8}
    if name.endswith("bin"):
        torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=not is_old)
    else:
        save_file(tensors, tmp_path / name)
    for checkpoint in (tmp_path, tmp_path / name, str(tmp_path)):
        assert_equal(read_all(checkpoint), tensors)
    content = read_checkpoint(tmp_path)
    assert {n: s.num_bytes for n, s in content.items()} == {n: t.nbytes for n, t in tensors.items()}
    assert {s.is_mapped for s in content.values()} == {not (is_old and "bin" in name)}


@pytest.mark.parametrize("extension", ["safetensors", "bin"])
def test_a_checkpoint_in_several_files_is_read_from_its_folder_or_index(tmp_path, extension):
    tensors = every_kind()
    names = sorted(tensors)
    weight_map = {}
    for number in range(3):
        part = {name: tensors[name] for name in names[number::3]}
        file_name = f"model-{number}.{extension}"
        (save_file if extension == "safetensors" else torch.save)(part, tmp_path / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = write_index(tmp_path, weight_map)
    assert_equal(read_all(tmp_path), tensors)
    assert_equal(read_all(index), tensors)
    index.write_text(json.dumps(weight_map))
    assert_equal(read_all(index), tensors)


def test_a_link_to_a_file_elsewhere_is_followed_as_in_the_cache_of_a_hub(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "blobs" / "d34db33f")
    (tmp_path / "snapshot" / "model-1.safetensors").symlink_to("../blobs/d34db33f")
    write_index(tmp_path / "snapshot", {"w": "model-1.safetensors"})
    assert_equal(read_all(tmp_path / "snapshot"), {"w": torch.ones(3)})


@pytest.mark.parametrize("shift", range(8))
def test_tensors_at_odd_bytes_are_read(tmp_path, shift):
    values = torch.randn(4), torch.randn(2, dtype=torch.float64)
    data = b"\1" * shift + raw(values[0]) + raw(values[1])
    header = {
        "one": entry(shift, shift + 16, [4]),
        "two": entry(shift + 16, shift + 32, [2], "F64"),
    }
    if shift:
        header["odd"] = entry(0, shift, [shift], "U8")
    for spaces in range(2):
        text = json.dumps(header).encode() + b" " * spaces
        path = write_safetensors(tmp_path / "model.safetensors", text, data)
        found = read_all(path)
        assert torch.equal(found["one"], values[0])
        assert torch.equal(found["two"], values[1])


def test_torch_files_with_names_that_share_memory_or_no_tensors_are_read(tmp_path):
    base = torch.arange(6.0)
    state = {"one": base, "same": base, "part": base[2:4], "turned": base.view(2, 3).t()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = read_all(tmp_path)
    assert_equal(found, state)
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 4
    found["one"].fill_(-1)
    assert torch.equal(found["same"], base)
    assert torch.equal(found["turned"], base.view(2, 3).t())
    assert all(t.is_contiguous() for t in found.values())
    state = OrderedDict(weight=torch.ones(2), _extra_state=None, epoch=3, note="text")
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert list(read_checkpoint(tmp_path)) == ["weight"]
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "pytorch_model.bin")
    assert list(read_checkpoint(tmp_path)) == ["weight", "bias"]


def test_of_several_kinds_the_first_is_accelerates_and_of_indexes_the_user_chooses(tmp_path):
    save_file({"safe": torch.ones(1)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"x": "nowhere"})
    assert list(read_checkpoint(tmp_path)) == ["safe"]
    torch.save({"pickled": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert list(read_checkpoint(tmp_path)) == ["pickled"]
    (tmp_path / "indexes").mkdir()
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        write_index(tmp_path / "indexes", {"w": "a.safetensors"}, name)
    refused(tmp_path / "indexes", "2 indexes", "pytorch_model.bin.index.json")


def test_a_file_without_the_memory_files_of_linux_is_mapped_by_torch(tmp_path, monkeypatch):
    monkeypatch.setattr("nbaccel.bigmodel.checkpoint_files._HAS_MEMORY_FILES", False)
    tensors = every_kind()
    save_file(tensors, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    found = read_all(tmp_path)
    assert_equal(found, tensors)
    found["layers.0.weight"].fill_(7)
    assert (tmp_path / "model.safetensors").read_bytes() == before


# ------------------------------------------------------------------------------ safetensors


SMALL = {"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.int8)}
KINDS: dict[str, Callable[[Path], Any]] = {
    "model.safetensors": lambda path: save_file(SMALL, path, {"format": "pt"}),
    "pytorch_model.bin": lambda path: torch.save(SMALL, path),
    "old.bin": lambda path: torch.save(SMALL, path, _use_new_zipfile_serialization=False),
}


def small_file(path: Path) -> bytes:
    KINDS[path.name](path)
    return path.read_bytes()


@pytest.mark.parametrize("name", KINDS)
def test_a_file_cut_off_at_any_byte_is_refused(tmp_path, name):
    path = tmp_path / name
    whole = small_file(path)
    for num_bytes in range(0, len(whole), 1 if len(whole) < 700 else 3):
        path.write_bytes(whole[:num_bytes])
        refused(path, str(path))
    if path.suffix == ".safetensors":
        path.write_bytes(whole + b"\0")
        refused(path, str(path))


@pytest.mark.parametrize("name", KINDS)
def test_a_file_with_any_byte_changed_is_refused_or_read(tmp_path, name):
    path = tmp_path / name
    whole = small_file(path)
    for position in range(0, len(whole), 1 if len(whole) < 700 else 3):
        for flip in (0x01, 0x80):
            changed = bytearray(whole)
            changed[position] ^= flip
            path.write_bytes(changed)
            with may_be_refused(path):
                for tensor in read_all(path).values():
                    raw(tensor)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ({"w": entry(0, 16, [4])}, b"\0" * 8),
        ({"w": entry(0, 16, [5])}, b"\0" * 16),
        ({"w": entry(-4, 12, [4])}, b"\0" * 16),
        ({"w": entry(0, 16, [4]), "v": entry(0, 16, [4])}, b"\0" * 16),
        ({"w": entry(0, 16, [4]), "v": entry(8, 24, [4])}, b"\0" * 24),
        ({"w": entry(0, 16, [2**62, 2**62])}, b"\0" * 16),
        ({"w": entry(0, 16, [-4])}, b"\0" * 16),
        ({"w": entry(0, 16, [4], "F999")}, b"\0" * 16),
        ({"w": {"dtype": 3, "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 16),
        ({"w": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}, b"\0" * 16),
        ({"w": entry(0, 16, [4]), "__metadata__": {"format": 3}}, b"\0" * 16),
        ({"w": entry(0, 16, [4]), "__metadata__": {"format": "tf"}}, b"\0" * 16),
        ({"w": entry(0, 16, [4]), "__metadata__": {"format": "flax"}}, b"\0" * 16),
        ([], b""),
        (b"[" * 100_000, b""),
        (b'{"w":' * 50_000, b""),
    ],
)
def test_a_crafted_header_is_refused(tmp_path, header, data):
    path = write_safetensors(tmp_path / "model.safetensors", header, data)
    refused(path, str(path))


def test_a_name_that_comes_twice_or_a_damaged_file_is_named(tmp_path):
    one, two = (json.dumps(entry(8 * n, 8 * n + 8, [2])) for n in range(2))
    path = write_safetensors(
        tmp_path / "model.safetensors", f'{{"w":{one},"w":{two}}}'.encode(), b"\0" * 16
    )
    refused(path, str(path))
    weight_map = {}
    for number in range(3):
        save_file({f"w{number}": torch.ones(40)}, tmp_path / f"{number}.safetensors")
        weight_map[f"w{number}"] = f"{number}.safetensors"
    index = write_index(tmp_path, weight_map)
    os.truncate(tmp_path / "0.safetensors", 100)
    (tmp_path / "2.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointDamaged) as caught:
        read_checkpoint(index)
    assert len(caught.value.mistakes) == 2
    assert "0.safetensors" in caught.value.mistakes[0]
    assert "2.safetensors" in caught.value.mistakes[1]


# ------------------------------------------------------------------------------ files of torch


def archive_with(path: Path, change: Callable[[str, bytes], bytes], compression: int) -> None:
    """Write a file of torch anew, with other records."""
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(1000.0)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, change(record.filename, old.read(record)))


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_whose_records_are_short_or_compressed_is_refused(tmp_path, compression):
    path = tmp_path / "pytorch_model.bin"

    def change(name: str, content: bytes) -> bytes:
        is_cut = "/data/" in name and compression == zipfile.ZIP_STORED
        return content[:100] if is_cut else content

    archive_with(path, change, compression)
    refused(path, str(path))


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-here",)


@pytest.mark.parametrize("is_new", [True, False])
def test_code_in_a_pickle_is_named_and_not_run(tmp_path, monkeypatch, is_new):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"w": Runs()}, path, _use_new_zipfile_serialization=is_new)
    refused(path, "can run any code", "system", str(path))
    path.write_bytes(pickle.dumps({"w": Runs()}))
    refused(path, str(path))
    make_evil(path)
    refused(path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"model": {"w": torch.ones(1)}, "epoch": 1}, "mappings inside"),
        ({"state_dict": nn.Linear(1, 1).state_dict()}, "mappings inside"),
        (torch.ones(3), "Tensor, no state dict"),
        ([torch.ones(3)], "list, no state dict"),
        (None, "NoneType, no state dict"),
        ({"w": torch.ones(2, 2).to_sparse()}, "layout torch.sparse_coo"),
        ({"w": torch.ones(2, device="meta")}, "on meta"),
    ],
)
def test_a_torch_file_of_something_else_is_refused(tmp_path, saved, said):
    path = tmp_path / "pytorch_model.bin"
    torch.save(saved, path)
    refused(path, said, str(path))


# ------------------------------------------------------------------------------ folders, indexes


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda path: path.write_text(POINTER), "git lfs pull"), (Path.touch, ""), (Path.mkdir, "")],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_an_empty_file_and_a_folder_are_refused(tmp_path, name, make, said):
    make(tmp_path / name)
    for path in (tmp_path, tmp_path / name):
        refused(path, name, said)


@pytest.mark.parametrize("name", ["nowhere", "x" * 300, "a\0b", "", "user/model-7b"])
def test_a_path_that_leads_nowhere_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refused(Path(name))


OUTSIDE = ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", ""]
GONE = ["gone.safetensors", "x" * 300, "a\0b", "\ud800"]


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        *(({"w": name}, ["index.json", "outside"]) for name in OUTSIDE),
        *(({"w": "a.safetensors", "v": name}, ["lacks 1 of the 2 files"]) for name in GONE),
        (
            {"w": "b.safetensors", "u": "b.safetensors", "t": "a.safetensors"},
            ["2 tensors", "w in b.safetensors", "t in a.safetensors"],
        ),
    ],
)
def test_an_index_may_not_name_what_is_elsewhere_or_nowhere(tmp_path, weight_map, said):
    (tmp_path / "ckpt").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    save_file({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "ckpt" / "a.safetensors")
    save_file({"u": torch.ones(1)}, tmp_path / "ckpt" / "b.safetensors")
    write_index(tmp_path / "ckpt", weight_map)
    refused(tmp_path / "ckpt", *said)


NO_INDEX = [
    *("[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": {"w": 3}}', "\xff\xfe", "[" * 100_000),
    '{"weight_map": {"w": ["a.safetensors"]}}',
]


@pytest.mark.parametrize("content", NO_INDEX)
def test_an_index_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content, encoding="latin-1")
    refused(tmp_path, path.name)
    refused(path, path.name)
