"""Numbered checkpoints: named, counted on after a restart, and limited."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbaccel import debug_launcher
from nbaccel.accelerator.training_checkpoints import Checkpoints
from nbaccel.config.handlers import ProjectConfiguration
from nbaccel.errors import ConfigError
from nbaccel.train.checkpoint import check_checkpointable
from tests.train.checkpoint.training import Training, arrived


class Run:
    """One run of a training script in a project."""

    def __init__(self, project: Path | str | None, training: Training | None = None, **options):
        self.training = training or Training()
        options = {"automatic_checkpoint_naming": True, **options}
        self.configuration = ProjectConfiguration(project_dir=project, **options)
        self.checkpoints = Checkpoints(
            self.configuration, self.training.place, self.training.collectives
        )

    def save(self, folder=None, step=0) -> Path:
        return self.checkpoints.save(folder, self.training.parts, step=step)

    def load(self, folder=None) -> int | None:
        return self.checkpoints.load(folder, self.training.parts)


def numbers(project: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (project / "checkpoints").iterdir())


def test_the_oldest_by_number_go_beyond_the_limit_when_the_new_one_is_there(tmp_path):
    run = Run(tmp_path, total_limit=2, iteration=8)
    for _ in range(4):
        run.save()
    assert numbers(tmp_path) == [10, 11]
    run.checkpoints.save_hooks[0] = lambda *_: {}["no"]
    with pytest.raises(RuntimeError, match=r"KeyError"):
        run.save()
    assert numbers(tmp_path) == [10, 11]
    assert run.configuration.iteration == 12


def test_after_a_restart_numbers_go_on_behind_the_highest_not_the_last_in_the_alphabet(tmp_path):
    for step in range(2):
        Run(tmp_path).save(step=step)
    assert numbers(tmp_path) == [0, 1]
    resumed = Run(tmp_path)
    assert resumed.load() == 1
    assert resumed.configuration.iteration == 2
    assert resumed.save().name == "checkpoint_2"
    resumed.configuration.iteration = 9
    resumed.save(step=9)
    resumed.save(step=10)
    (tmp_path / "checkpoints" / "checkpoint_best").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_99").touch()
    assert Run(tmp_path).load() == 10


def test_numbers_need_a_project_and_without_them_a_folder_is_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint_<number> in .*checkpoints"):
        Run(tmp_path).load()
    for action in (Run(None).save, Run(None).load):
        with pytest.raises(ConfigError, match=r"project_dir=None"):
            action()
    run = Run(tmp_path, automatic_checkpoint_naming=False)
    with pytest.raises(ConfigError, match=r"output_dir=None"):
        run.save()
    with pytest.raises(ConfigError, match=r"input_dir=None"):
        run.load()
    assert run.save(tmp_path / "mine", step=6) == tmp_path / "mine"
    assert run.configuration.iteration == 1
    assert run.load(str(tmp_path / "mine")) == 6


def save_three(project: str) -> list[str]:
    run = Run(project, arrived(), total_limit=2)
    names = [run.save(step=step).name for step in range(3)]
    return [*names, str(run.load()), str(run.configuration.iteration)]


def test_processes_agree_on_numbers(tmp_path):
    found = debug_launcher(save_three, args=(str(tmp_path),))
    assert found == [["checkpoint_0", "checkpoint_1", "checkpoint_2", "2", "3"]] * 2
    assert numbers(tmp_path) == [1, 2]


def test_objects_that_cannot_be_saved_are_listed():
    class OnlySaves:
        def state_dict(self):
            return {}

    check_checkpointable([Training().counter, Training().scheduler])
    with pytest.raises(ConfigError) as caught:
        check_checkpointable([Training().counter, OnlySaves(), 3])
    only_saves, number = caught.value.mistakes
    assert "object 1, a OnlySaves, has no load_state_dict" in only_saves
    assert "object 2, a int, has no state_dict and no load_state_dict" in number
