from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save as write_shards

from nbaccel.cli import main
from tests.programs import run_program


def shard(weights, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_shards({"model": weights}, checkpoint_id=folder, no_dist=True)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint as `save_state` lays it out, with shards of one model."""
    weights = {"a": torch.rand(3, 4), "b": torch.arange(5), "c": torch.rand(2).bfloat16()}
    folder = tmp_path / "state/pytorch_model_fsdp_0"
    shard(weights, folder)
    return tmp_path / "state", weights


def test_shards_become_one_file(saved, tmp_path, capsys):
    state, weights = saved
    assert main(["merge-weights", str(state), str(tmp_path / "out")]) == 0
    merged = load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor.dtype for name, tensor in merged.items()} == {
        name: tensor.dtype for name, tensor in weights.items()
    }
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    merging = pytest.importorskip("accelerate.utils").merge_fsdp_weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merging(str(state / "pytorch_model_fsdp_0"), str(tmp_path / "theirs"))
    assert {name: tensor.tolist() for name, tensor in merged.items()} == {
        name: tensor.tolist()
        for name, tensor in load_file(tmp_path / "theirs/model.safetensors").items()
    }
    assert "model.safetensors: " in capsys.readouterr().out
    assert (state / "pytorch_model_fsdp_0").exists()
    options = ["--unsafe_serialization", "--remove_checkpoint_dir"]
    assert main(["merge-weights", str(state), str(tmp_path / "out"), *options]) == 0
    merged = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True)
    assert all(torch.equal(merged[name], weights[name]) for name in weights)
    assert not (state / "pytorch_model_fsdp_0").exists()
    assert "deleted" in capsys.readouterr().out
    assert main(["merge-weights", str(state), str(tmp_path / "none")]) == 2
    assert "has no shards of one model" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_memory_holds_a_tensor_at_a_time(tmp_path):
    """The whole has 256 MiB; what the process may take of its own is far less."""
    code = (
        "import resource, sys, warnings, torch\n"
        "from nbaccel.cli import main\n"
        "import nbaccel.utils.fsdp_utils, torch.distributed.checkpoint.state_dict_loader\n"
        "taken = dict(line.split(':') for line in open('/proc/self/status'))['VmData']\n"
        "limit = int(taken.split()[0]) * 1024 + 150 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    weights = {f"layer{number}": torch.full((2**22,), float(number)) for number in range(16)}
    folder = tmp_path / "pytorch_model_fsdp_0"
    shard(weights, folder)
    arguments = ["merge-weights", str(folder), str(tmp_path / "out")]
    limited = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_program([sys.executable, "-c", code, *arguments], check=False, env=limited)
    assert done.returncode == 0, done.stderr
    merged = load_file(tmp_path / "out/model.safetensors")
    assert {name: tensor[[0, -1]].tolist() for name, tensor in merged.items()} == {
        f"layer{number}": [float(number)] * 2 for number in range(16)
    }


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room_keeps_what_is_there(tmp_path, small_disk, capsys):
    (small_disk / "model.safetensors").write_bytes(b"old")
    shards = tmp_path / "pytorch_model_fsdp_0"
    shard({"a": torch.zeros(2**19)}, shards)
    assert main(["merge-weights", str(shards), str(small_disk)]) == 2
    assert "2.0 MiB of weights are to be written" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in small_disk.iterdir()] == ["model.safetensors"]
    assert main(["merge-weights", str(shards), str(small_disk / "model.safetensors")]) == 2
    assert "is a file" in " ".join(capsys.readouterr().err.split())
    assert (small_disk / "model.safetensors").read_bytes() == b"old"
