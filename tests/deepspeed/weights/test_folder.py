# ruff: noqa: E501 - tables of cases read best with one case a line
"""Checkpoints that cannot be converted say why, and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nbaccel
from nbaccel.errors import ConfigError
from tests.deepspeed import needs

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]

RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def copied(saved, tmp_path):
    """A checkpoint of its own for each test, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved / "two" / name, tmp_path / "checkpoint"))

    return copy


def refused(folder: Path, words: str, tag: str | None = None) -> None:
    with pytest.raises(ConfigError, match=words):
        nbaccel.load_fp32_state_dict(folder, tag)


def test_a_tags_own_folder_is_taken_too_and_neighbours_are_listed(saved):
    whole = nbaccel.load_fp32_state_dict(saved / "two/3-fp32")
    for tag in (None, "step3"):
        state = nbaccel.load_fp32_state_dict(saved / "two/3-fp32/step3", tag)
        assert {name: value.tolist() for name, value in state.items()} == {
            name: value.tolist() for name, value in whole.items()
        }
    refused(saved / "two/3-fp23", r"3-fp23 does not exist.*there are: 0-bf16, 0-fp32, 1-bf16")
    refused(saved / "two/1-fp32", r"no checkpoint 'step4'.*are: step3", "step4")


def test_what_is_no_checkpoint_says_what_it_is(tmp_path):
    refused(tmp_path, r"has no file `latest`.*\*_states.pt are: none.*nothing at all")
    (tmp_path / "config.json").touch()
    refused(tmp_path, r"It holds config.json\. Give the folder")
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.rand(2), "b": torch.rand(1)}, path)
    refused(path, r"is a file, and a checkpoint of ZeRO is a folder")


def test_a_checkpoint_without_latest_lists_its_tags(copied):
    folder = copied("2-fp32")
    (folder / "latest").unlink()
    refused(folder, r"no file `latest`.*are: step3\. .*folders: tag='step3'")
    (folder / "step3").rename(folder / "Best")
    refused(folder, r"are: Best\. .*folders: tag='Best'")
    (folder / "Best").rename(folder / "step3")
    assert nbaccel.load_fp32_state_dict(folder, "step3")


def without(pattern: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return remove


def torn(share: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / RANK_1
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return cut


def edited(folder: Path, name: str, edit: Callable[[dict], None]) -> None:
    content = torch.load(folder / name, weights_only=False)
    edit(content)
    torch.save(content, folder / name)


def of_another_model(folder: Path) -> None:
    shapes = {"words.weight": torch.Size([12, 7])}
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    edited(folder, name, lambda content: content["param_shapes"][0].update(shapes))


def swapped_to_a_disk(folder: Path) -> None:
    """What NVMe leaves in a checkpoint: an empty tensor."""

    def empty(states: dict) -> None:
        states["optimizer_state_dict"]["fp32_flat_groups"][1].data = torch.Tensor()

    edited(folder, f"bf16_{RANK_1}", empty)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("2-fp32", without(f"*{RANK_1}"), r"by 2 ranks.*_optim_states.pt of rank 1 are missing.*each node"),
        ("3-bf16", without(f"*{RANK_1}"), r"by 2 ranks.*_optim_states.pt of rank 1 are missing.*each node"),
        ("3-fp32", without("zero_pp_rank_0_*"), r"(?s)2 files of the checkpoint.*optim_states.pt of rank 0.*model_states.pt of rank 0"),
        ("2-fp32", lambda folder: shutil.copy(folder / RANK_1, folder / RANK_1.replace("1", "2", 1)), r"mixes files of different saves.*Delete those.*of rank 2"),
        ("3-bf16", lambda folder: shutil.copy(folder / f"bf16_{RANK_1}", folder / RANK_1), rf"both bf16_{RANK_1} and {RANK_1} for rank 1"),
        ("2-fp32", lambda folder: shutil.copy(folder.parents[1] / "other" / RANK_1, folder / RANK_1), r"mixes files of different saves.*rank 0: stage 2 of 2; rank 1: stage 1 of 2"),
        ("3-fp32", without("*_optim_states.pt"), r"saved with ZeRO by 2 ranks, and has no optimizer states"),
        ("2-fp32", without("*_optim_states.pt"), r"saved with ZeRO by 2 ranks, and has no .*none of its \*_optim_states.pt is there"),
        ("2-fp32", without("mp_rank_00_model_states.pt"), r"no file \*_model_states.pt.*names and shapes.*it holds zero_pp_rank_0"),
        ("3-fp32", torn(0.0), rf"{RANK_1} cannot be read, at a size of .* bytes.*torn"),
        ("3-fp32", torn(0.5), rf"{RANK_1} cannot be read, at a size of .* bytes.*torn"),
        ("3-fp32", torn(0.99), rf"{RANK_1} cannot be read, at a size of .* bytes.*torn"),
        ("3-fp32", of_another_model, r"shapes of words.weight, .* add up to"),
        ("3-bf16", swapped_to_a_disk, rf"bf16_{RANK_1} has no fp32 weights from \S+ on.*fp32_state_dict\(engine\)"),
        ("2-fp32", lambda folder: (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(), r"experts in files of their own \(layer_0_expert_1.*ds_to_universal"),
        ("2-fp32", lambda folder: (folder / "mp_rank_01_model_states.pt").touch(), r"tensor parallelism, over 2 ranks \(mp_rank_01"),
    ],
)  # fmt: skip
def test_what_cannot_be_put_together_says_why(copied, saved, tmp_path, name, damage, words):
    shutil.copytree(saved / "two/1-fp32/step3", tmp_path / "other")
    folder = copied(name)
    damage(folder / "step3")
    refused(folder, words)


def test_a_universal_checkpoint_says_which_tag_to_take(copied):
    folder = copied("2-fp32") / "step3"
    universal = folder.rename(folder.with_name("step3_universal"))
    without("*_optim_states.pt")(universal)
    (universal / "zero").mkdir()
    refused(universal, r"universal checkpoint.*tag='step3'")


def test_a_file_in_the_old_format_is_refused(copied):
    path = copied("3-fp32") / "step3" / RANK_1
    content = torch.load(path, weights_only=False)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    refused(path.parent, r"cannot be read.*format of before 2020.*torch.save writes it anew")
