"""What a killed process leaves, the next one clears away; what is being written stays."""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

import nbaccel
from nbaccel.base import atomic
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


@pytest.mark.slow
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
    from nbaccel.deepspeed.checkpoint_layout import Weight
    from nbaccel.deepspeed.converting import write_files

    class Zeros(Weight):
        def chunks(self):
            for _ in range(20):
                yield torch.zeros(self.numel // 20)

    weights = {f"w{n}": Zeros(f"w{n}", (50_000,), torch.float32) for n in range(4)}
    write_files(weights, {}, folder, "1MB")


WAYS = {
    "save_model": lambda folder: save_model({"w": torch.ones(200_000)}, folder),
    "save": lambda folder: save({"w": torch.ones(200_000)}, folder / "x.pt"),
}
if needs.HAS_DEEPSPEED_ROW:
    WAYS["to-fp32"] = convert


@pytest.mark.slow
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


# ------------------------------------------------------------------------- permissions


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_file_keeps_the_permissions_of_what_it_replaces(tmp_path, mode):
    path = tmp_path / "settings"
    path.write_text("old")
    path.chmod(mode)
    atomic.write_text(path, "new")
    assert (path.read_text(), mode_of(path)) == ("new", mode)
    save({"a": torch.ones(2)}, path)
    assert mode_of(path) == mode
    save({"a": torch.ones(2)}, path, safe_serialization=True)
    assert mode_of(path) == mode


def test_a_link_stays_one(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    atomic.write_text(tmp_path / "link", "new")
    save({"a": torch.ones(2)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(torch.load(tmp_path / "real")["a"], torch.ones(2))


def checkpoint(folder: Path) -> None:
    accelerator = nbaccel.Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(folder)


@pytest.mark.parametrize("mode", [0o700, 0o2770])
def test_a_checkpoint_keeps_the_permissions_of_what_it_replaces(tmp_path, mode):
    folder = tmp_path / "saved"
    checkpoint(folder)
    folder.chmod(mode)
    (folder / "optimizer.bin").chmod(0o600)
    checkpoint(folder)
    assert mode_of(folder) == mode
    assert mode_of(folder / "optimizer.bin") == 0o600
