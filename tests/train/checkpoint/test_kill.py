"""A process that is killed while it saves leaves a whole checkpoint behind, always.

Once at every single step on the file system, and often at moments that nobody chose.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from nbaccel.accelerator.training_checkpoints import Checkpoints
from nbaccel.config.handlers import ProjectConfiguration
from tests.isolation import isolated
from tests.process import forked
from tests.train.checkpoint.training import ALONE, Training

pytestmark = pytest.mark.slow

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def checkpoints(
    training: Training, folder: Path, numbered: bool
) -> tuple[Checkpoints, Path | None]:
    """What saves and loads, and where."""
    configuration = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=numbered, total_limit=2
    )
    where = None if numbered else folder / "ckpt"
    return Checkpoints(configuration, ALONE, training.collectives), where


def save(folder: Path, mark: int, *, numbered: bool, training: Training | None = None) -> None:
    """Save a training whose every file carries the mark."""
    training = training or Training()
    for value in training.model.state_dict().values():
        value.fill_(mark)
    training.optimizer.param_groups[0]["lr"] = float(mark)
    training.counter.value = mark
    training.loaders[0].at = mark
    training.loaders[2].at = mark
    saving, where = checkpoints(training, folder, numbered)
    saving.save(where, training.parts, step=mark)


def load(folder: Path, *, numbered: bool) -> int:
    """Load the latest checkpoint; returns its mark, which must be the same in all files."""
    training = Training(seed=1)
    loading, where = checkpoints(training, folder, numbered)
    step = loading.load(where, training.parts)
    values = {v for t in training.model.state_dict().values() for v in t.flatten().tolist()}
    places = {training.loaders[0].at, training.loaders[2].at}
    marks = {step, training.optimizer.param_groups[0]["lr"], training.counter.value}
    marks |= values | places
    assert len(marks) == 1, f"a mixture: {marks}"
    return int(marks.pop())


def save_and_die_at(folder: Path, mark: int, number: int, *, numbered: bool) -> None:
    """Save, and be killed before the file system is touched for the n-th time."""
    left = number

    def count(event: str, args: object) -> None:
        nonlocal left
        if event in TOUCHES:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    training = Training()
    sys.addaudithook(count)
    save(folder, mark, numbered=numbered, training=training)


@isolated(timeout_s=800)
@pytest.mark.parametrize("numbered", [True, False])
def test_killed_at_any_step_it_leaves_the_old_or_the_new_checkpoint(tmp_path, numbered):
    torch.set_num_threads(1)
    save(tmp_path, 1, numbered=numbered)
    if not numbered:
        (tmp_path / "ckpt" / "mine.txt").write_text("a user's")
    mark, number, deaths, states = 1, 0, 0, set()
    while True:
        number += 1
        pid = forked(partial(save_and_die_at, tmp_path, mark + 1, number, numbered=numbered))
        _, status = os.waitpid(pid, 0)
        found = load(tmp_path, numbered=numbered)
        assert found in {mark, mark + 1}, f"killed at step {number}"
        states.add(found - mark)
        mark = found
        if not os.WIFSIGNALED(status):
            break
        deaths += 1
    assert deaths > 20, "it was hardly ever killed"
    assert states == {0, 1}, "it was killed both before and after the step"
    save(tmp_path, 99, numbered=numbered)
    folder = tmp_path / "checkpoints" if numbered else tmp_path
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert not hidden, "leftovers of dead saves stayed"
    if numbered:
        assert len(list(folder.iterdir())) == 2
    else:
        assert (folder / "ckpt" / "mine.txt").read_text() == "a user's"
