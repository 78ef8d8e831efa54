"""Checkpoints that cannot be converted say why, and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nbaccel
from nbaccel.errors import ConfigError
from tests.deepspeed import needs

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def copied(saved, tmp_path):
    """A checkpoint of its own for each test, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved / "two" / name, tmp_path / "checkpoint"))

    return copy


def refused(folder: Path, words: str, tag: str | None = None) -> None:
    with pytest.raises(ConfigError, match=words):
        nbaccel.load_fp32_state_dict(folder, tag)


def test_a_tags_own_folder_is_taken_too(saved):
    whole = nbaccel.load_fp32_state_dict(saved / "two/3-fp32")
    for given, tag in (("two/3-fp32/step3", None), ("two/3-fp32/step3", "step3")):
        state = nbaccel.load_fp32_state_dict(saved / given, tag)
        assert {name: value.tolist() for name, value in state.items()} == {
            name: value.tolist() for name, value in whole.items()
        }


def test_a_folder_that_is_not_there_lists_its_neighbours(saved):
    refused(saved / "two/3-fp23", r"3-fp23 does not exist.*there are: 0-bf16, 0-fp32, 1-bf16")


def test_a_folder_of_something_else_says_what_is_in_it(tmp_path):
    refused(tmp_path, r"has no file `latest`.*\*_states.pt are: none.*nothing at all")
    (tmp_path / "config.json").touch()
    refused(tmp_path, r"It holds config.json\. Give the folder")


def test_a_checkpoint_without_latest_lists_its_tags(copied):
    folder = copied("2-fp32")
    (folder / "latest").unlink()
    refused(folder, r"no file `latest`.*are: step3\. .*Say which: tag='step3'")
    (folder / "step3").rename(folder / "Best")
    refused(folder, r"are: Best\. .*Say which: tag='Best'")
    (folder / "Best").rename(folder / "step3")
    assert nbaccel.load_fp32_state_dict(folder, "step3")


def test_a_wrong_tag_lists_those_that_are_there(saved):
    refused(saved / "two/1-fp32", r"no checkpoint of the tag 'step4'.*are: step3", "step4")


@pytest.mark.parametrize("name", ["2-fp32", "3-bf16"])
def test_a_missing_rank_is_named(copied, name):
    folder = copied(name)
    (path,) = (folder / "step3").glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    path.unlink()
    refused(folder, r"saved by 2 ranks.*_optim_states.pt of rank 1 are missing.*each node")


def test_missing_model_states_of_a_rank_are_named_with_the_optimizers(copied):
    folder = copied("3-fp32")
    for path in (folder / "step3").glob("zero_pp_rank_0_*"):
        path.unlink()
    words = r"optim_states.pt of rank 0.*model_states.pt of rank 0"
    refused(folder, rf"(?s)2 settings are wrong.*{words}")


def test_files_of_a_further_rank_are_no_part_of_it(copied):
    folder = copied("2-fp32") / "step3"
    name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name.format(1), folder / name.format(2))
    refused(folder, r"by 2 ranks, but files of further ranks.*of rank 2.*delete")


def test_two_kinds_of_files_for_one_rank_are_refused(copied):
    folder = copied("3-bf16") / "step3"
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(folder / f"bf16_{name}", folder / name)
    refused(folder, rf"both bf16_{name} and {name} for rank 1")


def test_files_of_two_saves_are_told_apart(copied, saved):
    folder = copied("2-fp32") / "step3"
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(saved / "two/1-fp32/step3" / name, folder / name)
    refused(folder, r"mixes files of different saves.*rank 0: stage 2 of 2; rank 1: stage 1 of 2")


def test_no_optimizer_states_at_all_is_no_stage_0(copied):
    for name, words in (
        ("3-fp32", r"model states of ZeRO-3, which hold placeholders.*no optimizer states"),
        ("2-fp32", r"saved with ZeRO by 2 ranks, and no .*none of its \*_optim_states.pt is there"),
    ):
        folder = copied(name)
        for path in (folder / "step3").glob("*_optim_states.pt"):
            path.unlink()
        refused(folder, words)
        shutil.rmtree(folder)


def test_no_model_states_is_told(copied):
    folder = copied("2-fp32") / "step3"
    (folder / "mp_rank_00_model_states.pt").unlink()
    refused(folder, r"no file \*_model_states.pt.*names and shapes.*it holds zero_pp_rank_0")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_file_is_named(copied, share):
    path = copied("3-fp32") / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    refused(path.parent, rf"{path.name} cannot be read, at a size of .* bytes.*torn")


def test_a_file_in_the_old_format_says_how_to_renew_it(copied):
    path = copied("3-fp32") / "step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    refused(path.parent, r"torch's format of before 2020.*checkpoint_serialization")
    torch.save(torch.load(path, weights_only=False), path)  # as the message says
    assert nbaccel.load_fp32_state_dict(path.parent)


def test_another_model_than_the_saved_one_is_noticed(copied):
    path = copied("3-fp32") / "step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["param_shapes"][0]["words.weight"] = torch.Size([12, 7])
    torch.save(content, path)
    refused(path.parent, r"shapes of words.weight, .* add up to")


def test_kinds_that_are_not_put_together_from_ranks_say_what_to_do(copied):
    folder = copied("2-fp32") / "step3"
    expert = folder / "layer_0_expert_1_mp_rank_00_model_states.pt"
    expert.touch()
    refused(folder, r"experts in files of their own \(layer_0_expert_1.*ds_to_universal")
    expert.unlink()
    (folder / "mp_rank_01_model_states.pt").touch()
    refused(folder, r"tensor parallelism, over 2 ranks \(mp_rank_01")
    (folder / "mp_rank_01_model_states.pt").unlink()
    universal = folder.rename(folder.with_name("step3_universal"))
    for path in universal.glob("*_optim_states.pt"):
        path.unlink()
    (universal / "zero").mkdir()
    refused(universal, r"universal checkpoint.*tag='step3'")


def test_a_file_is_no_checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.rand(2), "b": torch.rand(1)}, path)
    refused(path, r"is a file, and a checkpoint of ZeRO is a folder")


def test_weights_that_were_swapped_to_a_disk_are_refused(copied):
    """What NVMe leaves in a checkpoint: an empty tensor."""
    path = copied("3-bf16") / "step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    states = torch.load(path, weights_only=False)
    states["optimizer_state_dict"]["fp32_flat_groups"][1].data = torch.Tensor()
    torch.save(states, path)
    refused(path.parent, rf"{path.name} has no fp32 weights from \S+ on.*fp32_state_dict\(engine\)")
