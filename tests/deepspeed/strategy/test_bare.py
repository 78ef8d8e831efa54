"""A notebook that nobody launched: cells that train with DeepSpeed, one after another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from nbaccel.deepspeed.strategy.engines import PATIENCE
from tests.deepspeed import needs
from tests.deepspeed.programs import told_by
from tests.deepspeed.strategy.bare import ORDER

pytestmark = [
    pytest.mark.slow,
    *needs.ENGINE,
]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What a process of its own tells: DeepSpeed is imported for good."""
    return told_by("tests.deepspeed.strategy.bare", timeout_s=800)


@pytest.mark.parametrize("number", range(len(ORDER)))
def test_a_module_is_whole_after_each_cell_whatever_the_stage(told, number):
    cell = told["cells"][number]
    assert cell["inside"] == ([0] if ORDER[number] == 3 else [33, 64])
    assert cell["outside"] == [33, 64]
    assert cell["dtypes"] == ["torch.float32"]
    assert cell["tied"]
    assert set(cell["left on it"]) == {0}
    assert cell["attributes"] == []


def test_each_cell_goes_on_with_the_weights_of_the_one_before(told):
    cells = told["cells"]
    for before, after in itertools.pairwise(cells):
        # The same first batch, in bfloat16 by the engine and in float32 by the module.
        assert after["losses"][0] == pytest.approx(before["after"], abs=2e-3)
        assert after["after"] < before["after"]


def test_two_accelerators_share_the_environment(told):
    assert told["at_once"][-1] < told["at_once"][0]


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_launch_of_one_process_leaves_float32_weights(told, stage):
    found = told["inline"][stage]
    assert found["rounded"] == pytest.approx(found["trained"], abs=1e-9)
    assert found["weights"] != pytest.approx(found["trained"], abs=1e-5)
    assert found["weights"] == pytest.approx(told["inline"]["2"]["weights"], abs=1e-6)


def test_transformers_builds_in_shards_unless_told_not_to(told):
    shards, whole, given_back, _, losses = told["built"]
    assert (shards, whole, given_back) == ([0], [32, 16], [32, 16])
    assert losses[-1] < losses[0]


def test_nothing_is_left_of_it(told):
    assert told["left"] == {}


# ------------------------------------------------------------------------------- troubles
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nan in fp16", ["made in bfloat16", '"bf16": {"enabled": true} in place of "fp16"']),
        ("nan, not of bf16", ["65504", '"bf16": {"enabled": true}', "optimizer.params.lr"]),
        ("overflow", ["fp16.min_loss_scale", "nothing is trained", '"bf16": {"enabled": true}']),
        ("fixed scale", [f"stayed there for {PATIENCE} steps", "made in bfloat16"]),
    ],
)
def test_a_run_that_gets_nowhere_ends_and_names_the_key(told, case, words):
    found = told["troubles"][case]
    assert found["steps"] < PATIENCE
    assert found["said"][0].startswith("TrainingDiverged: ")
    for word in words:
        assert word in found["said"][0]


def test_a_loss_that_is_no_number_is_told_once_in_float32(told):
    (said,) = told["troubles"]["nan in fp32"]["said"]
    assert "optimizer.params.lr" in said
    assert "gradient_clipping" in said


def test_a_loss_scale_that_finds_its_place_is_no_trouble(told):
    found = told["troubles"]["recovers"]
    assert found["said"] == []
    assert 0 < found["skipped"] < found["steps"] == 40
