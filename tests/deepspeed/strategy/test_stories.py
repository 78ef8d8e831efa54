"""What users do with DeepSpeed beside plain training: one launch of two processes for all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nbaccel import RunConfig, notebook_launcher
from nbaccel.errors import ConfigError
from tests.deepspeed import needs
from tests.deepspeed.strategy import stories
from tests.deepspeed.strategy.runs import net
from tests.deepspeed.strategy.test_training import distance

pytestmark = [
    pytest.mark.slow,
    *needs.ENGINE,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stories")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank has to tell."""
    return list(notebook_launcher(stories.tell, (folder,), num_processes=2, timeout=240))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loaded_checkpoint_goes_on_where_it_was_saved(told, stage):
    expected, after, files = told[0]["checkpoints"][stage]
    assert after == expected
    assert {"pytorch_model", "latest", "random_states_0.pkl", "random_states_1.pkl"} <= {*files}
    assert "zero_to_fp32.py" in files
    assert "optimizer.bin" not in files


def test_a_checkpoint_of_two_processes_is_refused_by_one(told, folder):
    def load() -> None:
        accelerator, _model, _optimizer = stories.start(3, precision="bf16")
        accelerator.load_state(folder / "checkpoints" / "stage 3")

    with pytest.raises(ConfigError, match=r"is of 2 processes, and this run has 1.*to-fp32"):
        notebook_launcher(load, num_processes=1, start_method="template")


def test_a_damaged_shard_is_named_to_all_before_anything_is_loaded(told, folder):
    first, second = (rank["damaged"] for rank in told)
    assert len(first) == 7
    for case, (text, is_as_before) in first.items():
        damage, _, name = case.partition(" ")
        assert (text, is_as_before) == second[case], "both are told the same"
        assert text.startswith("CheckpointDamaged: "), case
        assert is_as_before, case
        if damage == "missing":
            assert "saved by 2 processes, and the optimizer's states of rank 1 are missing" in text
        else:
            assert name in text
        assert ("holds a posix.mkdir. Nothing of it was run" in text) == (damage == "evil")
    assert not list(folder.rglob("*-was-here"))


def test_whole_weights_come_out_of_shards_and_go_into_them(told, folder):
    first, second = (rank["weights_alone"] for rank in told)
    assert first["files"] == ["model.safetensors"]
    assert first["kept"] > 0 == second["kept"]
    assert first[2] == first[3] == second[3] == pytest.approx(0, abs=1e-6)
    for rank in (first, second):
        for stage in (2, 3):
            assert "0.bias has shape (2,) instead of (33,)" in rank[f"{stage} misfit"]
    assert first["2 part"], "names that are not in the state keep their weights"
    assert first["3 part"]
    saved = load_file(folder / "weights_alone" / "weights" / "model.safetensors")
    assert {tuple(value.shape) for value in saved.values()} >= {(33, 64), (33, 33), (10, 33)}


def test_several_models_each_have_an_engine(told):
    found = told[0]["two_models"]
    assert found["first"] == pytest.approx(found["alone"], abs=1e-6)
    assert found["second"][0] != found["second"][-1]
    assert "comes from 2 of 2 engines (Sequential, Sequential)" in found["both"]
    assert {"pytorch_model", "pytorch_model_1", "pytorch_model_2"} <= {*found["files"]}
    assert found["frozen"] == "Linear"


def test_several_models_each_have_the_schedule_of_their_optimizer(told):
    # The second is trained with every other batch; both reach their own rate after four steps.
    first, second = zip(*told[0]["two_schedules"], strict=True)
    assert max(first) == 0.01
    assert max(second) < 0.05
    assert len(set(second)) == 3


def test_a_teacher_in_shards_beside_a_student_in_training(told):
    found = told[0]["teacher"]
    assert found["shapes"] == [(33, 64), (0,)]
    assert found["error"] < 1e-6
    assert found["losses"][-1] < found["losses"][0]


def test_stand_ins_become_what_the_file_describes(told):
    found = told[0]["stand_ins"]
    settled = found["settled"]
    assert settled["optimizer"]["params"] == {"lr": 0.02, "weight_decay": 0.1}
    assert settled["scheduler"]["params"]["total_num_steps"] == 8
    assert settled["scheduler"]["params"]["warmup_max_lr"] == 0.02
    assert (settled["train_batch_size"], settled["train_micro_batch_size_per_gpu"]) == (32, 16)
    assert "optimizer.params.lr" in found["explained"]
    assert "the run's learning rate" in found["explained"]
    assert max(found["rates"]) <= 0.02
    assert found["rates"][-1] == found["group"] < max(found["rates"])
    assert "EngineOptimizer(FusedAdam)" in found["optimizer"]


def test_a_loop_may_leave_the_step_to_deepspeed(told):
    left, called = told[0]["left_to_the_engine"]
    assert left == called


def test_no_sync_by_hand(told):
    found = told[0]["by_hand"]
    for stage in "123":
        assert found[stage] == pytest.approx(found["ddp"], rel=1e-5)


def test_steps_that_no_sync_holds_back_are_told_once(told):
    (said,), is_unchanged = told[0]["held_back"]
    assert "takes no step with DeepSpeed" in said
    assert "accelerator.accumulate(model)" in said
    assert is_unchanged


def test_two_norms_are_told_once(told):
    (said,) = told[0]["two_norms"]
    assert "clip_grad_norm_(max_norm=0.5) overrides gradient_clipping=0.1" in said


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_a_step_without_the_call_is_clipped_as_the_file_says(told, stage):
    assert told[0]["once_clipped"][stage] == pytest.approx([0.125, 0.25, 0.125], rel=1e-3)


def test_generate_keeps_ranks_in_step(told):
    for rank in told:
        found = rank["generation"]
        assert found["shape"] == (0,)
        assert found["got"] == found["expected"]
    lengths = {len(rank["generation"]["got"][0]) for rank in told}
    assert len(lengths) == 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("two optimizers", r"has an optimizer \(AdamW\), and prepare got one of torch"),
        ("no optimizer", r"no optimizer that it could stand for"),
        ("typos", r"optimization.stge .*'stage'.*gradient_cliping .*'gradient_clipping'"),
        ("optimizer alone", r"prepare got 1 optimizer\(s\) and no model"),
        ("schedule", r"no schedule that it could stand for"),
        ("stand-in without DeepSpeed", r"DummyOptim with strategy 'ddp'"),
        ("norm", r"norm_type=1\.0"),
        ("value", r"clip_grad_value_\(1\.0\).*clip_grad_norm_"),
        ("closure", r"closure="),
        ("load", r"load_state_dict got 1 entries"),
        ("late group", r"comes too late"),
        ("backward", r"backward\(gradient=1\)"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(told, case, words):
    import re

    for rank in told:
        text = rank["wrong"][case]
        assert text.startswith("ConfigError")
        assert re.search(words, text, re.DOTALL)


# ---------------------------------------------------------------------- without an Accelerator
def test_weights_of_deepspeeds_own_engines_come_home_even_of_destroyed_ones():
    names = [f"{stage} {fate}" for stage in (1, 2, 3) for fate in ("alive", "dropped", "destroyed")]
    models = {name: net() for name in names}
    notebook_launcher(stories.raw, (models,), num_processes=2, timeout=240)
    first = models["2 alive"].state_dict()
    assert distance(first, net().state_dict()) > 1e-3
    assert {value.dtype for value in first.values()} == {torch.float32}
    # What comes home has more digits than the bfloat16 weights that computed.
    assert distance(first, {k: v.bfloat16().float() for k, v in first.items()}) > 0
    for name in names:
        assert distance(models[name].state_dict(), first) < 1e-6, name


# ------------------------------------------------------------------------- the launch says it
def test_the_launchs_zero_stage_is_taken_up():
    model = net()
    model[4].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = RunConfig(num_processes=2, zero_stage=3, mixed_precision="bf16")
    assert notebook_launcher(stories.launched, (model,), config=config)[0] == ("DEEPSPEED", 3)
    after = model.state_dict()
    assert not torch.equal(after["0.weight"], before["0.weight"])
    # What is frozen was cast with the rest, and has all its digits again.
    assert not torch.equal(before["4.weight"], before["4.weight"].bfloat16().float())
    for name in ("4.weight", "4.bias", "scale"):
        assert torch.equal(after[name], before[name])
