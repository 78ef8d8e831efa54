"""What a killed process leaves, the next one clears away; what is being written stays."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from nbaccel import atomic
from nbaccel.train.checkpoint import save, save_model
from tests import needs
from tests.isolation import isolated
from tests.process import forked


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_in(folder: Path, name: str) -> None:
    """A process that dies while it writes."""

    def write() -> None:
        with atomic.partial_folder(folder, name) as made:
            (made / "half").write_bytes(b"x" * 100)
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(write), 0)


@isolated(timeout_s=60)
def test_a_dead_processs_folder_is_cleared_by_the_next_save_of_that_name(tmp_path):
    for name in ("model", "model", "other"):
        killed_in(tmp_path, name)
    left = names(tmp_path)
    assert len(left) == 4, "a folder and a lock of either name: the second death cleared the first"
    with atomic.partial_folder(tmp_path, "model"):
        assert len([n for n in names(tmp_path) if n.startswith(".model.")]) == 2, "ours, its lock"
    assert not [name for name in names(tmp_path) if name.startswith(".model.")]
    assert [name for name in names(tmp_path) if name.startswith(".other.")], "not that of others"


@isolated(timeout_s=60)
def test_what_another_process_is_writing_stays(tmp_path):
    ready, go = os.pipe(), os.pipe()

    def write() -> None:
        with atomic.partial_folder(tmp_path, "model") as folder:
            (folder / "half").write_text("mine")
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            (folder / "half").rename(tmp_path / "whole")

    pid = forked(write)
    os.read(ready[0], 1)
    for _ in range(3):
        with atomic.partial_folder(tmp_path, "model"):
            pass
    save_model({"w": torch.ones(2)}, tmp_path)
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    assert (tmp_path / "whole").read_text() == "mine"
    assert names(tmp_path) == ["model.safetensors", "whole"]


def convert(folder: Path) -> None:
    """The way of to-fp32, with weights from nowhere."""
    from nbaccel.deepspeed.weights.converting import plan, publishing, write_shard
    from nbaccel.deepspeed.weights.torch_archive import Weight

    weights = {f"w{n}": Weight(f"w{n}", (50_000,), "float32") for n in range(4)}
    shards = plan(weights, {}, "1MB")

    def source(weight):
        for _ in range(20):
            yield memoryview(bytes(weight.nbytes // 20))

    with publishing(folder, shards) as workshop:
        for shard in shards:
            for _ in write_shard(shard, workshop, source):
                pass


WAYS = {
    "save_model": lambda folder: save_model({"w": torch.ones(200_000)}, folder),
    "save": lambda folder: save({"w": torch.ones(200_000)}, folder / "x.pt"),
}
if needs.HAS_DEEPSPEED_ROW:
    WAYS["to-fp32"] = convert


@isolated(timeout_s=110)
@pytest.mark.parametrize("way", WAYS)
def test_saves_killed_at_any_moment_leave_nothing_that_the_next_one_does_not_clear(tmp_path, way):
    torch.set_num_threads(1)
    moments, leftovers, kills = random.Random(1), 0, 0

    def forever() -> None:
        while True:
            WAYS[way](tmp_path)

    # A busy machine may let the child save nothing before it is killed: then again.
    while kills < 8 or (leftovers <= 2 and kills < 200):
        kills += 1
        pid = forked(forever)
        time.sleep(moments.uniform(0.02, 0.2))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        leftovers += bool(list(tmp_path.glob(".*")))
    assert leftovers > 2, f"of {kills} kills hardly one came while it saved"
    WAYS[way](tmp_path)
    assert not list(tmp_path.rglob(".*")), names(tmp_path)
