"""Of a checkpoint that is damaged anywhere nothing is loaded, and the file is named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import debug_launcher
from nbaccel.errors import CheckpointDamaged, ConfigError, NbaccelError
from nbaccel.train import rng
from nbaccel.train.checkpoint import files, load_state, save_state
from nbaccel.train.checkpoint.files import save
from tests.damage import DAMAGES, damaged_copy, flip_a_bit
from tests.train.checkpoint.training import ALONE, Training, arrived

FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "optimizer.bin",
    "scheduler.bin",
    "scaler.pt",
    "sampler.bin",
    "dl_state_dict_2.bin",
    "gradients_0.bin",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
)


def whole_training(seed: int) -> Training:
    training = Training(seed=seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    training.parts = replace(training.parts, scaler=scaler, amid_group=True)
    training.step(seed + 1)
    training.model(torch.randn(3, 4)).sum().backward()
    return training


def everything(training: Training) -> tuple[Any, ...]:
    gradients = [p.grad.tolist() for p in training.model.parameters()]
    scaler = training.parts.scaler
    return (*training.state(), gradients, scaler and scaler.state_dict(), torch.get_rng_state())


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[:-1] == other[:-1] and torch.equal(one[-1], other[-1])


def load(training: Training, folder: Path, **options: Any) -> None:
    load_state(folder, training.parts, training.place, training.collectives, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A checkpoint with every kind of file, its weights as safetensors or as a pickle."""
    found = {}
    with rng.preserve_rng_states():
        for safe in (True, False):
            training = whole_training(0)
            found[safe] = save_state(
                tmp_path_factory.mktemp("saved") / "ckpt",
                training.parts,
                ALONE,
                training.collectives,
                step=3,
                safe_serialization=safe,
            )
    return found


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_is_loaded_of_a_checkpoint_with_a_damaged_file(
    saved, tmp_path, damage, has_manifest
):
    training = whole_training(1)
    before = everything(training)
    for name in FILES:
        folder = damaged_copy(saved[name != FILES[1]], tmp_path / "ckpt", name, damage)
        if not has_manifest:  # as Accelerate writes it
            (folder / files.MANIFEST_FILE).unlink()
            if damage == "flipped" and name == "model.safetensors":
                continue  # there is no checksum
            if damage == "missing" and name.startswith(("sampler", "dl_", "grad", "random")):
                continue  # nothing says that there was one
        with pytest.raises((CheckpointDamaged, ConfigError)) as caught:
            load(training, folder)
        told = str(caught.value)
        kind = name.partition(".")[0].rpartition("_")[0] or name.partition(".")[0]
        assert name in told or (damage == "missing" and "to be loaded" in told), (name, told, kind)
        assert "likely succeed" not in told
        assert "weights_only" not in told or damage == "evil", told
        assert same(everything(training), before), f"{name} was {damage}, and something was loaded"
        assert not list(folder.glob("*-was-here")), f"{name} ran code"


def test_several_damaged_files_are_told_together_and_those_not_to_be_loaded_may_be_damaged(
    saved, tmp_path
):
    folder = damaged_copy(saved[True], tmp_path / "ckpt", "optimizer.bin", "truncated")
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"2 files of the checkpoint") as caught:
        load(whole_training(1), folder)
    assert "model.safetensors has other bytes than were saved" in str(caught.value)
    assert re.search(r"optimizer.bin has [\d,]+ bytes, and [\d,]+ were saved", str(caught.value))
    folder = damaged_copy(saved[True], tmp_path / "other", "optimizer.bin", "truncated")
    training = Training(seed=5)
    (folder / "custom_checkpoint_0.pkl").unlink()
    evaluation = replace(training.parts, optimizers=[], schedulers=[], loaders=[], custom=[])
    load_state(folder, evaluation, ALONE, training.collectives)


def test_a_damaged_manifest_can_be_deleted_and_archives_without_checksums_are_read(saved, tmp_path):
    folder = damaged_copy(saved[True], tmp_path / "ckpt", files.MANIFEST_FILE, "truncated")
    training = whole_training(1)
    with pytest.raises(CheckpointDamaged, match=r"nbaccel_manifest.json is truncated.*delete"):
        load(training, folder)
    (folder / files.MANIFEST_FILE).unlink()
    load(training, folder)
    first, second = whole_training(0), whole_training(1)
    torch.serialization.set_crc32_options(False)
    try:
        folder = save_state(tmp_path / "c", first.parts, ALONE, first.collectives, step=0)
    finally:
        torch.serialization.set_crc32_options(True)
    load(second, folder)
    assert second.state() == first.state()


# ------------------------------------------------------------------------- whole, and of another


def test_a_wider_model_or_an_optimizer_of_another_is_refused(saved, tmp_path):
    wider = Training(seed=5, width=5)
    before = wider.state()
    with pytest.raises(ConfigError, match=r"first.weight \[4, 4\] for \[5, 5\]"):
        load(wider, saved[True])
    assert wider.state() == before
    other = Training(seed=2, width=6)
    other.step()
    training = whole_training(1)
    before = everything(training)
    folder = damaged_copy(saved[True], tmp_path / "ckpt", "optimizer.bin", "missing")
    (folder / files.MANIFEST_FILE).unlink()
    save(other.optimizer.state_dict(), folder / "optimizer.bin")
    with pytest.raises(ConfigError, match=r"optimizer.bin .* exp_avg of parameter 0 has shape"):
        load(training, folder)
    state = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0).state_dict()
    save(state, folder / "optimizer.bin")
    with pytest.raises(ConfigError, match=r"groups of \[1\] parameters, and the AdamW .* \[3\]"):
        load(training, folder)
    assert same(everything(training), before)


@pytest.mark.parametrize("name", ["scheduler.bin", "scaler.pt", "sampler.bin", "optimizer.bin"])
def test_a_file_of_another_kind_is_refused(saved, tmp_path, name):
    training = whole_training(1)
    before = everything(training)
    folder = damaged_copy(saved[True], tmp_path / "ckpt", name, "missing")
    (folder / files.MANIFEST_FILE).unlink()
    save({"weight": torch.ones(3)}, folder / name)
    with pytest.raises(ConfigError, match=rf"{name} holds no state of .*but weight"):
        load(training, folder)
    assert same(everything(training), before)


class Adapts(nn.Linear):
    """Reads its state in a way of its own, as models of libraries do with those of old versions."""

    def _load_from_state_dict(self, state, prefix, *args: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").T
        super()._load_from_state_dict(state, prefix, *args)


def test_models_that_adapt_old_states_do_so_and_objects_may_refuse_theirs(saved, tmp_path):
    training = Training(seed=5)
    training.model.second = Adapts(4, 6)
    (tmp_path / "ckpt").mkdir()
    state = {k: v for k, v in training.model.state_dict().items() if "second.weight" not in k}
    torch.save({**state, "second.kernel": torch.ones(4, 6)}, tmp_path / "ckpt/pytorch_model.bin")
    parts = replace(training.parts, optimizers=[], schedulers=[], loaders=[], custom=[])
    load_state(tmp_path / "ckpt", parts, ALONE, training.collectives)
    assert torch.equal(training.model.second.weight, torch.ones(6, 4))
    first, second = whole_training(0), whole_training(1)
    parts = replace(first.parts, custom=[first.counter, Picky(1)])
    folder = save_state(tmp_path / "c", parts, ALONE, first.collectives, step=0)
    before = everything(second)
    second.parts = replace(second.parts, custom=[second.counter, Picky(2)])
    with pytest.raises(ValueError, match="1 is not 2"):
        load(second, folder)
    assert same(everything(second), before)


class Picky:
    """A registered object that takes no state of another size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["size"] != self.size:
            raise ValueError(f"{state['size']} is not {self.size}")


# ------------------------------------------------------------------------- several processes


def save_two(folder: str) -> None:
    training = arrived()
    training.step(2)
    save_state(folder, training.parts, training.place, training.collectives, step=2)


def load_two(folders: list[str]) -> list[tuple[str, bool]]:
    training = arrived(seed=9)
    training.step(1)
    before = training.state()
    told = []
    for folder in folders:
        try:
            load(training, Path(folder))
            text = ""
        except NbaccelError as error:
            text = f"{type(error).__name__}: {error}"
        told.append((text, training.state() == before))
    return told


def test_a_damaged_file_of_one_process_stops_all_before_they_load(tmp_path):
    names = ("random_states_1.pkl", "sampler_rank1.bin", "model.safetensors", "optimizer.bin")
    debug_launcher(save_two, args=(str(tmp_path / "ckpt"),))
    folders = [
        damaged_copy(tmp_path / "ckpt", tmp_path / f"{damage} {name}", name, damage)
        for name in names
        for damage in ("missing", "truncated", "flipped")
    ]
    first, second = debug_launcher(load_two, args=([str(folder) for folder in folders],))
    for folder, (told, is_as_before), other in zip(folders, first, second, strict=True):
        assert told
        assert (told, is_as_before) == other, "both are told the same"
        assert is_as_before, f"{folder.name}: something was loaded"
        assert folder.name.partition(" ")[2] in told or "to be loaded" in told
