"""Models that are sharded: every process writes its part, or process 0 writes the whole."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from nbaccel import debug_launcher
from nbaccel.abc.bundle import Bundle
from nbaccel.config.handlers import FullyShardedDataParallelPlugin
from nbaccel.errors import CheckpointDamaged, ConfigError, NbaccelError
from nbaccel.precision.native import Fp32
from nbaccel.strategies.fsdp import FsdpStrategy
from nbaccel.strategies.sharded_checkpoints import read_entries, read_metadata
from nbaccel.train.checkpoint import load_state, save_state
from nbaccel.train.distributed import init_process
from nbaccel.utils import merge_fsdp_weights
from tests import damage
from tests.precision.test_native import made
from tests.train.checkpoint.training import ALONE, Training

KINDS = pytest.mark.parametrize("in_shards", [True, False])


def sharded(seed: int, *, in_shards: bool) -> Training:
    training = Training(init_process(cpu=True), seed)
    strategy = FsdpStrategy(training.place, FullyShardedDataParallelPlugin(), made(Fp32))
    bundle = strategy.wrap(Bundle(models=(training.model,), optimizers=(training.optimizer,)))
    (training.model,) = bundle.models
    (training.optimizer,) = bundle.optimizers
    training.parts = replace(
        training.parts,
        strategy=strategy,
        models=[training.model],
        optimizers=[training.optimizer],
        in_shards=in_shards,
    )
    return training


def whole(training: Training) -> dict[str, Any]:
    """Weights and first moments as process 0 sees them."""
    strategy = training.parts.strategy
    state = strategy.optimizer_state(training.model, training.optimizer)
    weights = {k: v.tolist() for k, v in strategy.model_state(training.model).items()}
    moments = [entry["exp_avg"].tolist() for entry in state.get("state", {}).values()]
    return {"weights": weights, "moments": moments}


def save_sharded(folder: str, in_shards: bool) -> dict[str, Any]:
    training = sharded(0, in_shards=in_shards)
    torch.manual_seed(5)
    training.step(3)
    save_state(folder, training.parts, training.place, training.collectives, step=3)
    return whole(training)


def load_sharded(folder: str) -> dict[str, Any]:
    training = sharded(9, in_shards=True)
    load_state(folder, training.parts, training.place, training.collectives)
    return whole(training)


@pytest.mark.slow
@KINDS
def test_a_sharded_training_comes_back(tmp_path, in_shards):
    folder = tmp_path / "ckpt"
    saved, _ = debug_launcher(save_sharded, args=(str(folder), in_shards))
    assert (folder / "pytorch_model_fsdp_0").is_dir() == in_shards
    assert (folder / "model.safetensors").is_file() != in_shards
    assert (folder / "optimizer.bin").is_file() != in_shards
    loaded, _ = debug_launcher(load_sharded, args=(str(folder),))
    assert loaded == saved
    by_three, *_ = debug_launcher(load_sharded, args=(str(folder),), num_processes=3)
    assert by_three == saved


def two_nodes(training: Training, disks: list[str]) -> str:
    """Two processes, each alone on its node with a disk of its own."""
    training.place = replace(training.place, local_rank=0, local_world_size=1)
    os.chdir(disks[training.place.rank])
    return "ckpt"


def save_on_own_disks(disks: list[str], in_shards: bool) -> dict[str, Any]:
    training = sharded(0, in_shards=in_shards)
    training.step(3)
    save_state(
        two_nodes(training, disks), training.parts, training.place, training.collectives, step=3
    )
    return whole(training)


def load_from_own_disks(disks: list[str]) -> dict[str, Any] | str:
    training = sharded(9, in_shards=True)
    before = whole(training)
    try:
        load_state(two_nodes(training, disks), training.parts, training.place, training.collectives)
    except NbaccelError as error:
        assert whole(training) == before
        return str(error)
    return whole(training)


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return [str(folder) for folder in folders]


@pytest.mark.slow
@KINDS
def test_each_host_keeps_what_its_own_processes_need(disks, in_shards, capfd):
    saved, _ = debug_launcher(save_on_own_disks, args=(disks, in_shards))
    assert ("are in shards" in capfd.readouterr().err) == in_shards
    loaded, _ = debug_launcher(load_from_own_disks, args=(disks,))
    assert loaded == saved
    swapped, _ = debug_launcher(load_from_own_disks, args=(disks[::-1],))
    if not in_shards:
        # Both have all.
        assert swapped == saved
        return
    assert "has only the shards of rank 1 of 2, and this is rank 0 of 2" in str(swapped)
    assert "Nothing has been loaded" in str(swapped)


def test_shards_that_are_elsewhere_are_never_read_as_zeros(disks, tmp_path):
    debug_launcher(save_on_own_disks, args=(disks, True))
    for disk in disks:
        # As if it were whole: what is there has to tell.
        manifest = Path(disk) / "ckpt" / "nbaccel_manifest.json"
        kept = json.loads(manifest.read_text())
        kept["part"]["ranks"] = [0, 1]
        manifest.write_text(json.dumps(kept))
    swapped, _ = debug_launcher(load_from_own_disks, args=(disks[::-1],))
    assert "the other shards are on other hosts' disks" in str(swapped)
    with pytest.raises(ConfigError, match=r"it is one host's part .* without a shared disk"):
        merge_fsdp_weights(Path(disks[1]) / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Runs:
    """Unpickled without care, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def torch_metadata(folder: Path) -> Any:
    return FileSystemReader(folder).read_metadata()


class TwoFaced:
    """Unpickled, a dictionary that has its entries, and tells who asks for them that it is empty.

    Only classes that belong into metadata are named, so nothing of this is refused by its name.
    """

    def __init__(self, entries: dict[Any, Any]) -> None:
        self.entries = entries

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"items": torch.Size}, None, iter(self.entries.items())


def hide_entries(folder: Path) -> None:
    metadata = torch_metadata(folder)
    metadata.storage_data = TwoFaced(metadata.storage_data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    # The attack itself: the check would have been told of nothing.
    found = torch_metadata(folder).storage_data
    assert len(found) > 5
    assert not list(found.items())


def point_outside(folder: Path) -> None:
    metadata = torch_metadata(folder)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(
            info, relative_path=f"../pytorch_model_fsdp_0/{info.relative_path}"
        )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_entry(folder: Path, code: Path) -> None:
    """Put an object that runs code in the place of an optimizer's setting."""
    metadata = torch_metadata(folder)
    index = next(i for i in metadata.storage_data if i.fqn.startswith("optimizer.param_groups"))
    info = metadata.storage_data[index]
    path = folder / info.relative_path
    stream = io.BytesIO()
    torch.save(Runs(code), stream)
    metadata.storage_data[index] = replace(
        info, offset=path.stat().st_size, length=len(stream.getvalue())
    )
    with path.open("ab") as file:
        file.write(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def flip_in_a_tensor(folder: Path) -> None:
    metadata = torch_metadata(folder)
    index = next(i for i in metadata.storage_data if i.fqn == "model.first.weight")
    info = metadata.storage_data[index]
    path = folder / info.relative_path
    content = bytearray(path.read_bytes())
    part = bytes(content[info.offset : info.offset + info.length])
    with zipfile.ZipFile(io.BytesIO(part)) as archive:
        record = next(n for n in archive.namelist() if "/data/0" in n)
        begin = part.index(archive.read(record))
    content[info.offset + begin] ^= 1
    path.write_bytes(content)


SHARD_DAMAGES = {
    "truncated": r"\.distcp has [\d,]+ bytes, and its shards end at byte [\d,]+: it is trunc",
    "missing": r"\.distcp is missing",
    "flipped": r"\.distcp has flipped bits: the checksum of its record archive/data/0",
    "evil entry": r"\.distcp holds posix.mkdir, no plain data, .* code, as optimizer.param_groups",
    "evil metadata": r"\.metadata cannot be read .*posix.mkdir, which may run code",
    "no metadata": r"\.metadata is missing, which says where the shards are",
    "two faces": r"\.metadata cannot be read",
    "outside": r"\.metadata cannot be read .*'\.\./pytorch.* is not in the folder",
    "patched class": r"\.metadata cannot be read",
}
# The class itself is named, and told that all its objects are called "nowhere".
PATCHES_A_CLASS = (
    b"\x80\x02cpathlib\nPurePosixPath\nN}X\x04\x00\x00\x00nameX\x07\x00\x00\x00nowheres\x86b."
)


def damaged_shards(saved: Path, to: Path) -> dict[str, Path]:
    """Copies of a checkpoint, each with a damage; those without a manifest are as others write."""
    name = "pytorch_model_fsdp_0"
    made = {}
    for kind in SHARD_DAMAGES:
        folder = to / kind
        shutil.copytree(saved, folder)
        shard = next(iter(sorted((folder / name).glob("*.distcp"))))
        code = to / f"{kind} was here"
        {
            "truncated": lambda path=shard: damage.truncate(path),
            "missing": lambda path=shard: path.unlink(),
            "flipped": lambda path=folder: flip_in_a_tensor(path / name),
            "evil entry": lambda path=folder, code=code: evil_entry(path / name, code),
            "evil metadata": lambda path=folder, code=code: (path / name / ".metadata").write_bytes(
                pickle.dumps(Runs(code))
            ),
            "no metadata": lambda path=folder: (path / name / ".metadata").unlink(),
            "two faces": lambda path=folder, code=code: (
                evil_entry(path / name, code),
                hide_entries(path / name),
            ),
            "outside": lambda path=folder: point_outside(path / name),
            "patched class": lambda path=folder: (path / name / ".metadata").write_bytes(
                PATCHES_A_CLASS
            ),
        }[kind]()
        (folder / "nbaccel_manifest.json").unlink()
        made[kind] = folder
    return made


def load_damaged(folders: dict[str, str]) -> dict[str, tuple[str, bool]]:
    training = sharded(9, in_shards=True)
    training.step(1)
    before = whole(training)
    told = {}
    for kind, folder in folders.items():
        try:
            load_state(folder, training.parts, training.place, training.collectives)
            text = ""
        except NbaccelError as error:
            text = f"{type(error).__name__}: {error}"
        told[kind] = (text, whole(training) == before)
    return told


def test_damaged_shards_are_named_to_all_before_anything_is_loaded(tmp_path):
    debug_launcher(save_sharded, args=(str(tmp_path / "ckpt"), True))
    folders = {k: str(v) for k, v in damaged_shards(tmp_path / "ckpt", tmp_path / "bad").items()}
    first, second = debug_launcher(load_damaged, args=(folders,))
    for kind, (text, is_as_before) in first.items():
        assert (text, is_as_before) == second[kind]
        assert re.search(SHARD_DAMAGES[kind], text), (kind, text)
        assert is_as_before, kind
    for kind, folder in folders.items():
        if kind != "no metadata":
            with pytest.raises(CheckpointDamaged, match=SHARD_DAMAGES[kind]):
                merge_fsdp_weights(folder, tmp_path / "out", safe_serialization=kind != "two faces")
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "bad").glob("*was here")), "code was run"
    assert Path("/a/name").name == "name", "a class of this process was changed"


def test_an_entry_that_is_changed_after_the_check_runs_nothing(tmp_path):
    debug_launcher(save_sharded, args=(str(tmp_path / "ckpt"), True))
    folder = tmp_path / "ckpt" / "pytorch_model_fsdp_0"
    evil_entry(folder, tmp_path / "was here")
    metadata = read_metadata(folder)
    entry = next(
        key for key in metadata.state_dict_metadata if key.startswith("optimizer.param_groups")
    )
    with pytest.raises(BaseException, match=r"holds posix.mkdir, no plain data, .* as optimizer"):
        read_entries({entry: None}, folder, metadata, alone=True)
    assert not (tmp_path / "was here").exists()


def test_a_whole_one_is_read_without_sharding(tmp_path):
    folder = tmp_path / "ckpt"
    saved, _ = debug_launcher(save_sharded, args=(str(folder), False))
    training = Training(seed=9)
    load_state(folder, training.parts, ALONE, training.collectives)
    weights, moments, *_ = training.state()
    assert weights == saved["weights"]
    assert [entry["exp_avg"] for entry in moments] == saved["moments"]


def test_one_in_shards_is_refused_where_nothing_is_sharded(tmp_path):
    folder = tmp_path / "ckpt"
    debug_launcher(save_sharded, args=(str(folder), True))
    training = Training(seed=9)
    before = training.state()
    with pytest.raises(ConfigError, match=r"1 model in shards"):
        load_state(Path(folder), training.parts, ALONE, training.collectives)
    assert training.state() == before
