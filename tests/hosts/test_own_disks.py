"""Two hosts without a shared disk: what each keeps of a model in shards, and who can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hosts import netns
from tests.hosts.running_script import Notebook

pytestmark = [pytest.mark.slow, netns.needs_hosts]

TENSORS = ["0.bias", "0.weight", "2.bias", "2.weight", "whole"]


class Resumed:
    """What three launches told: one that saved, one that went on, one on the second host alone."""

    def __init__(self, folder: Path, *kinds: str) -> None:
        disk = folder / "disk"
        disk.mkdir()
        with netns.make_hosts(folder, own_disk=disk) as hosts:
            notebook = Notebook(
                hosts, folder, "resume", str(disk), ",".join(kinds), script="own_disks.py"
            )
            told = notebook.told(seconds=300)
        self.saved, self.loaded, self.fewer = told["saved"], told["loaded"], told["fewer"]
        self.warnings = [line for line in notebook.errors if "does not share" in line]
        assert list(disk.iterdir()) == [], "a host wrote to a disk that is not its own"

    def check_goes_on(self, kind: str) -> None:
        """The same hosts go on exactly as if they had not stopped."""
        for before, after in zip(self.saved, self.loaded, strict=True):
            assert before[kind].get("losses"), before[kind]
            assert after[kind].get("losses") == before[kind]["losses"], after[kind]
            assert after[kind]["whole"] == [1.0, 1.0, 1.0]
        # Gathered whole on process 0.
        assert [rank[kind]["gathered"] for rank in self.loaded] == [TENSORS, [], [], []]

    def check_refused_on_one_host(self, kind: str) -> None:
        for refused in (rank[kind] for rank in self.fewer):
            assert refused.get("kind") == "ConfigError", refused
            assert "only the shards of rank 2-3 of 4" in refused["text"]
            assert "the other shards were written on alpha" in refused["text"]
            assert "2 on alpha, 2 on beta" in refused["text"]

    def check_serves_its_hosts_alone(self, kind: str) -> None:
        self.check_goes_on(kind)
        self.check_refused_on_one_host(kind)

    def names_in_file(self, kind: str) -> list[Any]:
        """Tensors in the file of `save_model`, on each host."""
        return [self.saved[rank][kind]["names"] for rank in (0, 2)]


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    return Resumed(tmp_path_factory.mktemp("fsdp"), "sharded", "full", "ddp")


def test_shards_of_fsdp_serve_the_hosts_that_wrote_them(fsdp: Resumed) -> None:
    fsdp.check_serves_its_hosts_alone("sharded")
    assert fsdp.names_in_file("sharded") == [TENSORS, []]
    warning = fsdp.warnings[0]
    assert "beta does not share" in warning
    assert "with 4 processes on the same hosts" in warning
    assert "FULL_STATE_DICT" in warning


def test_a_full_state_dict_serves_any_of_the_hosts(fsdp: Resumed) -> None:
    fsdp.check_goes_on("full")
    alone = [rank["full"] for rank in fsdp.fewer]
    # The first step sees the weights of the checkpoint; later ones average over fewer.
    assert [rank.get("losses", [rank])[0] for rank in alone] == [
        rank["full"]["losses"][0] for rank in fsdp.saved[:2]
    ]
    # With `save_on_each_node`, each host has the file, and not an empty one.
    assert fsdp.names_in_file("full") == [TENSORS, TENSORS]
    assert len(fsdp.warnings) == 2
    assert "shards" not in fsdp.warnings[1]


def test_a_whole_checkpoint_is_on_each_host(fsdp: Resumed) -> None:
    for before, after in zip(fsdp.saved, fsdp.loaded, strict=True):
        # A new DDP model adds gradients up in other buckets for a step.
        assert after["ddp"]["losses"] == pytest.approx(before["ddp"]["losses"], rel=1e-5)
    assert all("model.safetensors" in rank["ddp"]["files"] for rank in fsdp.saved)


def test_zero_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="it is not installed")
    resumed = Resumed(tmp_path, "zero1", "zero3")
    for kind in ("zero1", "zero3"):
        resumed.check_serves_its_hosts_alone(kind)
        assert resumed.names_in_file(kind) == [TENSORS, []]
    assert len(resumed.warnings) == 1
    assert '"use_node_local_storage": true' in resumed.warnings[0]


def test_node_local_storage_is_not_warned_of(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="it is not installed")
    resumed = Resumed(tmp_path, "zero2-local", "zero3-local")
    for kind in ("zero2-local", "zero3-local"):
        resumed.check_serves_its_hosts_alone(kind)
    assert resumed.names_in_file("zero3-local") == [TENSORS, TENSORS]
    assert resumed.warnings == []
