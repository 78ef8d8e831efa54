"""A checkpoint that lies about itself is refused; nothing of this process is written anywhere."""

from __future__ import annotations

import pickle
import resource
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import nbaccel
from nbaccel.errors import CheckpointDamaged, ConfigError
from tests.damage import flip_a_bit
from tests.isolation import isolated

FILE = "mp_rank_00_model_states.pt"


class Crafted:
    """A tensor as a pickle can claim it: any offset, shape and strides."""

    def __init__(self, offset: Any, shape: Any, stride: Any, numel: int = 64) -> None:
        self.storage = torch.arange(float(numel))._typed_storage()
        self.claims = (offset, shape, stride)

    def __reduce__(self) -> Any:
        make = torch._utils._rebuild_tensor_v2
        return make, (self.storage, *self.claims, False, OrderedDict())


def checkpoint(folder: Path, **module: Any) -> Path:
    """A checkpoint of stage 0, which one file holds."""
    made = folder / "ckpt" / "step1"
    made.mkdir(parents=True)
    state = {"module": {"fine": torch.ones(8), **module}, "buffer_names": [], "optimizer": None}
    torch.save(state, made / FILE)
    return made


def rewritten(path: Path, content: bytes, name: str = "data.pkl") -> None:
    """Put another record in its place; the archive's checksums fit it."""
    with zipfile.ZipFile(path) as archive:
        records = {record: archive.read(record) for record in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for record, old in records.items():
            archive.writestr(record, content if record.endswith(f"/{name}") else old)


CLAIMS = {
    "reads the heap": (0, (2000, 2, 16), (-16, 2, 1)),
    "crashes": (0, (3000, 3, 3001), (-16, 1, 16)),
    "negative stride": (0, (8,), (-1,)),
    "negative offset": (-1000, (8,), (1,)),
    "negative shape": (0, (-2, -4), (4, 1)),
    "beyond its record": (60, (8,), (1,)),
    "far beyond it": (0, (8,), (2**40,)),
    "expanded": (0, (2**20, 2**20), (0, 0)),
    "strides missing": (0, (8, 8), (1,)),
    "no numbers": (0, (8.5,), ("x",)),
    "no number at all": ("x", (8,), (1,)),
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_tensor_that_is_not_in_its_record_is_refused(tmp_path, kind):
    folder = checkpoint(tmp_path, odd=Crafted(*CLAIMS[kind]))
    with pytest.raises(CheckpointDamaged, match=f"{folder}.*(cannot be read|has files without)"):
        nbaccel.zero_to_fp32(folder, tmp_path / "out")
    with pytest.raises(CheckpointDamaged):
        nbaccel.load_fp32_state_dict(folder)
    assert not (tmp_path / "out").exists()


def test_an_expanded_buffer_of_usual_size_is_read(tmp_path):
    mask = torch.tensor([[True, False, True]]).expand(12, 3)
    state = nbaccel.load_fp32_state_dict(checkpoint(tmp_path, mask=mask))
    assert torch.equal(state["mask"], mask)


BOMBS = {
    "bytearray8": b"\x80\x05\x96" + (6 * 10**9).to_bytes(8, "little") + b"x.",
    "bytes of a size": b"\x80\x04\x8e" + (6 * 10**9).to_bytes(8, "little") + b"x.",
    "memo": b"\x80\x02}r" + (2**31 - 1).to_bytes(4, "little") + b".",
    "frame": b"\x80\x04\x95" + (6 * 10**9).to_bytes(8, "little") + b"}.",
    "deep": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "no pickle": b"hello",
    "empty": b"",
    "a number": pickle.dumps(7, protocol=2),
    "a list": pickle.dumps([1], protocol=2),
    "odd module": pickle.dumps({"module": {"a": [1]}, "param_shapes": 3}, protocol=2),
}


@isolated(timeout_s=60)
def test_a_pickle_that_claims_gigabytes_takes_none(tmp_path):
    folder = checkpoint(tmp_path)
    kept = (folder / FILE).read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, content in BOMBS.items():
        (folder / FILE).write_bytes(kept)
        rewritten(folder / FILE, content)
        with pytest.raises(ConfigError) as caught:
            nbaccel.zero_to_fp32(folder, tmp_path / "out")
        assert str(folder) in str(caught.value), name
        assert not (tmp_path / "out").exists(), name
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300 * 1024, f"{grown // 1024} MiB were taken"


def test_a_record_that_claims_more_than_the_file_has_is_refused(tmp_path):
    path = checkpoint(tmp_path) / FILE
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo(next(n for n in archive.namelist() if "/data/" in n)).file_size
    old, new = size.to_bytes(4, "little") * 2, (2**31).to_bytes(4, "little") * 2
    content = path.read_bytes()
    begin = content.rindex(old)  # both sizes, in the archive's table
    path.write_bytes(content[:begin] + new + content[begin + 8 :])
    with pytest.raises(CheckpointDamaged, match=rf"{FILE} cannot be read"):
        nbaccel.load_fp32_state_dict(path.parent)


def test_a_flipped_bit_is_found_by_the_archives_checksum(tmp_path):
    path = checkpoint(tmp_path, big=torch.randn(5000)) / FILE
    flip_a_bit(path)
    with pytest.raises(CheckpointDamaged, match=rf"{FILE} has flipped bits: .* with big"):
        nbaccel.zero_to_fp32(path.parent, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointDamaged, match=r"has flipped bits"):
        nbaccel.load_fp32_state_dict(path.parent)


def test_an_archive_without_checksums_is_converted(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        folder = checkpoint(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(nbaccel.load_fp32_state_dict(folder)["fine"], torch.ones(8))


@pytest.mark.parametrize(
    "tag", ["../other/step1", "/etc", "..", ".", "", "a\0b", "x" * 5000, "step1\nstep2"]
)
def test_latest_names_a_folder_beside_it_and_leads_nowhere_else(tmp_path, tag):
    folder = checkpoint(tmp_path)
    (tmp_path / "other").mkdir()
    folder.rename(tmp_path / "other" / "step1")
    root = tmp_path / "ckpt"
    (root / "latest").write_text(tag)
    with pytest.raises(CheckpointDamaged, match=r"latest holds .*name of a folder beside it"):
        nbaccel.load_fp32_state_dict(root)
