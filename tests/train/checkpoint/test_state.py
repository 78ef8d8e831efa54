"""What was saved comes back, here or elsewhere; a folder that does not fit is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nbaccel import debug_launcher
from nbaccel.accelerator.training_checkpoints import Checkpoints, add_hook
from nbaccel.config.handlers import ProjectConfiguration
from nbaccel.errors import CheckpointDamaged, ConfigError
from nbaccel.train import rng
from nbaccel.train.checkpoint import files, load_state, save_state
from tests.train.checkpoint.training import ALONE, Training, arrived


class Halving:
    def __init__(self) -> None:
        self.factor = 0.5


def save(training, folder, step=0, **options):
    return save_state(
        folder, training.parts, training.place, training.collectives, step=step, **options
    )


def load(training, folder, **options):
    return load_state(folder, training.parts, training.place, training.collectives, **options)


# ------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("safe", [True, False])
def test_a_training_goes_on_as_if_it_had_not_been_interrupted(tmp_path, safe):
    first = Training()
    first.step(3)
    folder = save(first, tmp_path / "ckpt", step=3, safe_serialization=safe)
    saved = first.state()
    unbroken = [*first.step(3), random.random(), np.random.rand()]

    second = Training(seed=1)
    assert load(second, folder) == 3
    assert second.state() == saved
    assert second.model.second.weight is second.model.first.weight
    assert [*second.step(3), random.random(), np.random.rand()] == unbroken


def test_the_files_are_named_as_accelerate_names_them(tmp_path):
    training = Training()
    training.step()
    scaler = torch.amp.GradScaler("cpu")
    parts = replace(
        training.parts,
        scaler=scaler,
        models=[training.model, Training().model],
        optimizers=[training.optimizer, Training().optimizer],
    )
    save_state(tmp_path / "ckpt", parts, ALONE, training.collectives, step=1)
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == [
        "custom_checkpoint_0.pkl",
        "dl_state_dict_2.bin",
        "model.safetensors",
        "model_1.safetensors",
        "nbaccel_manifest.json",
        "optimizer.bin",
        "optimizer_1.bin",
        "random_states_0.pkl",
        "sampler.bin",
        "scaler.pt",
        "scheduler.bin",
    ]


def test_options_reach_torch(tmp_path):
    first, second, wider = Training(), Training(seed=1), Training()
    first.step()
    folder = save(first, tmp_path / "ckpt")
    with pytest.raises(TypeError, match=r"map_location='cuda:0'"):
        load(second, folder, map_location="cuda:0")
    load(second, folder, map_location="on_device")
    assert second.state() == first.state()
    wider.model.third = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"model.safetensors .* no third.weight, third.bias"):
        load(wider, folder)
    load(wider, folder, strict=False)


def test_a_schedule_of_a_users_own_class_is_read_when_it_is_trusted(tmp_path):
    training = Training()
    training.scheduler.own = Halving()
    folder = save(training, tmp_path / "ckpt")
    with pytest.raises(CheckpointDamaged, match=r"scheduler.bin holds a tests.*Halving"):
        load(Training(), folder)
    second = Training()
    load(second, folder, load_kwargs={"weights_only": False})
    assert second.scheduler.own.factor == training.scheduler.own.factor


# ------------------------------------------------------------------------- what does not fit


def test_a_folder_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path):
    first = Training()
    first.step()
    folder = save(first, tmp_path / "ckpt")
    second = Training(seed=1)
    before = second.state()
    second.parts = replace(
        second.parts,
        models=[second.model, second.model],
        optimizers=[second.optimizer, second.optimizer],
        custom=[],
        scaler=torch.amp.GradScaler("cpu"),
    )
    with pytest.raises(ConfigError) as caught:
        load(second, folder)
    models, optimizers, custom, scaler = caught.value.mistakes
    assert "has 1 model (0), but 2 are to be loaded" in models
    assert "has 1 optimizer (0), but 2 are to be loaded" in optimizers
    assert "has 1 registered object (0), but 0 are to be loaded" in custom
    assert "has 0 scalers, but 1 is to be loaded" in scaler
    assert second.state() == before


def test_a_folder_that_is_not_there_is_named_with_those_that_are(tmp_path):
    save(Training(), tmp_path / "step_10")
    with pytest.raises(ConfigError, match=r"step_11'\): that folder does not exist.*step_10"):
        load(Training(), tmp_path / "step_11")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"is a file"):
        load(Training(), tmp_path / "file")


def test_random_states_of_a_process_that_was_not_there_begin_anew(tmp_path, caplog):
    folder = save(Training(), tmp_path / "ckpt", step=2)
    second = Training(replace(ALONE, rank=0))
    (folder / "random_states_0.pkl").rename(folder / "random_states_1.pkl")
    (folder / files.MANIFEST_FILE).unlink()  # else it is known that there was one, and it is missed
    assert load(second, folder) is None
    assert "random numbers begin anew" in caplog.text


# ------------------------------------------------------------------------- hooks


def hooked(training, folder):
    return Checkpoints(ProjectConfiguration(project_dir=folder), ALONE, training.collectives)


def test_hooks_see_models_weights_and_folder_and_can_take_over(tmp_path):
    first, second = Training(), Training(seed=1)
    first.step()
    saving, loading = hooked(first, tmp_path), hooked(second, tmp_path)

    def write(models, weights, folder):
        assert models == [first.model]
        torch.save(weights.pop(), Path(folder) / "own.pt")

    def put_back(models, folder):
        models.pop().load_state_dict(torch.load(Path(folder) / "own.pt"))

    add_hook(saving.save_hooks, write)
    add_hook(loading.load_hooks, put_back)
    folder = saving.save(tmp_path / "ckpt", first.parts, step=0)
    assert (folder / "own.pt").exists()
    assert not (folder / "model.safetensors").exists()
    loading.load(folder, second.parts)
    assert second.state() == first.state()


def test_a_model_that_no_hook_took_is_missed(tmp_path):
    training = Training()
    saving = hooked(training, tmp_path)
    handle = add_hook(saving.save_hooks, lambda models, weights, folder: weights.clear())
    folder = saving.save(tmp_path / "ckpt", training.parts, step=0)
    add_hook(saving.load_hooks, lambda models, folder: None)
    with pytest.raises(ConfigError, match=r"no weights of model 0,.* no load hook took it"):
        saving.load(folder, training.parts)
    handle.remove()
    saving.load(saving.save(folder, training.parts, step=0), training.parts)


# ------------------------------------------------------------------------- several processes


def save_together(folder: str) -> tuple[str, list[float], int]:
    training = arrived(seed=0)
    rng.set_seed(30, device_specific=True)
    training.step(2)
    for parameter in training.model.parameters():  # as after DDP: the same weights everywhere
        torch.distributed.broadcast(parameter.data, 0)
    # Only the name that process 0 gives counts.
    mine = folder if training.place.is_main else f"{folder}-another"
    made = save(training, mine, step=7)
    return str(made), torch.rand(2).tolist(), training.loaders[2].at


def load_together(folder: str) -> tuple[object, ...]:
    training = arrived(seed=9)
    step = load(training, folder)
    return step, torch.rand(2).tolist(), training.loaders[2].at, training.state()[0]


def test_processes_save_together_and_each_gets_its_own_back(tmp_path):
    folder = tmp_path / "ckpt"
    saved = debug_launcher(save_together, args=(str(folder),))
    assert {made for made, *_ in saved} == {str(folder)}
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert {f"random_states_{rank}.pkl" for rank in (0, 1)} < {p.name for p in folder.iterdir()}

    loaded = debug_launcher(load_together, args=(str(folder),))
    for (_, numbers, at), (step, numbers_again, at_again, _) in zip(saved, loaded, strict=True):
        assert (step, numbers_again, at_again) == (7, numbers, at)
    assert saved[0][1] != saved[1][1], "the processes' random numbers differ"
    assert loaded[0][3] == loaded[1][3]
