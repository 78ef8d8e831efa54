"""Checkpoints loaded for FSDP and ZeRO-3: equal to reading them, with a share of the memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nbaccel import notebook_launcher
from nbaccel.bigmodel.checkpoint_loading import load_checkpoint_in_model
from tests.bigmodel import families
from tests.bigmodel.sharded_runs import (
    build,
    load_after,
    measure,
    on_meta,
    receive_plainly,
    train,
    train_empty_transformers_model,
)
from tests.needs import DEEPSPEED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="gloo and shared memory of Linux"),
    pytest.mark.filterwarnings("ignore"),
]

KINDS = ["fsdp", pytest.param("zero", marks=DEEPSPEED)]
SIZES = {"width": 700, "blocks": 8}  # 60 MiB in float32


def launch(function: Any, *args: Any) -> Any:
    return notebook_launcher(function, args, num_processes=2, start_method="template", timeout=240)


def save(model: torch.nn.Module, path: Path) -> str:
    state = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
    save_file(state, path)
    return str(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(build(seed=1), tmp_path_factory.mktemp("ckpt") / "model.safetensors")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    return save(build(seed=1, **SIZES), path)


def assert_close(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (found[name].double() - tensor.double()).abs().max()
        assert float(difference) <= tolerance, name


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_weights_that_every_process_read(checkpoint, kind, precision):
    mapped = launch(train, None, checkpoint, kind, "mapped", precision)
    read = launch(train, None, checkpoint, kind, "read", precision)
    assert mapped[0]["losses"] == mapped[1]["losses"] == read[0]["losses"]
    assert_close(mapped[0]["start"], read[0]["start"])
    assert_close(mapped[0]["end"], read[0]["end"])
    assert mapped[0]["losses"][0] != mapped[0]["losses"][-1]
    saved = build(seed=1).state_dict()
    tolerance = 0.0 if precision == "no" or kind == "fsdp" else 0.01
    assert_close(mapped[0]["start"], saved, tolerance)
    assert mapped[0]["first"] == ((0,) if kind == "zero" else (1,))
    if kind == "fsdp":
        assert not mapped[0]["sent"]
        assert not mapped[1]["sent"]
        assert read[0]["sent"], "weights in plain memory may differ"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_model_of_the_notebook_come_home(checkpoint, kind):
    content = Path(checkpoint).read_bytes()
    model = on_meta()
    load_checkpoint_in_model(model, checkpoint, strict=True)
    for changes in (False, True):
        if changes:
            with torch.no_grad():
                model.embed.weight[2] = 0.25
        expected = {name: t.clone() for name, t in model.state_dict().items()}
        results = launch(train, model, checkpoint, kind, "as it is")
        assert_close(results[0]["start"], expected)
        assert_close(dict(model.state_dict()), results[0]["end"], 1e-7)
        assert not torch.equal(results[0]["start"]["gain"], model.gain)
        assert model.head.weight is model.embed.weight
    assert Path(checkpoint).read_bytes() == content


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_model_is_filled_and_a_mistake_stops_all(checkpoint, tmp_path, kind, broadcast):
    wrong = save(build(seed=1, width=9), tmp_path / "wrong.safetensors")
    results = launch(load_after, checkpoint, kind, broadcast, wrong)
    saved = build(seed=1).state_dict()
    first = results[0]
    assert_close(first["unchanged"], first["before"])
    assert_close(first["loaded"], saved)
    assert results[1]["refused"] == first["refused"]
    assert "embed.weight has shape [11, 7] in the model and [11, 9]" in first["refused"][0]
    assert "is no file" in first["refused"][1]
    assert first["refused"][2:] == [] or "shards" in first["refused"][2]
    model = build(seed=1)
    words = torch.arange(8).view(2, 4)
    loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
    assert first["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert not torch.equal(first["stepped"]["gain"], saved["gain"])
    # One step of AdamW changes no weight by more than its rate.
    for name, tensor in first["stepped"].items():
        assert float((tensor.double() - saved[name].double()).abs().max()) < 0.06, name


def test_models_that_are_not_sharded_are_filled_from_the_first_process(checkpoint):
    results = launch(receive_plainly, checkpoint)
    for state, refused in results:
        assert_close(state, build(seed=1).state_dict())
        assert "to process 1" in refused
        assert "on meta" in refused


@pytest.mark.parametrize(
    ("kind", "precision", "trains", "share"),
    [
        ("fsdp", "no", False, 0.75),
        ("fsdp", "bf16", True, 0.75),
        # An engine that trains needs memory for its optimizer, which is no matter of loading.
        pytest.param("zero", "no", False, 0.9, marks=DEEPSPEED),
        pytest.param("zero", "bf16", False, 0.65, marks=DEEPSPEED),
    ],
)
def test_no_process_ever_holds_the_whole_model(large, kind, precision, trains, share):
    whole = sum(p.nbytes for p in build(**SIZES).parameters())
    for figures in launch(measure, large, kind, SIZES, precision, "mapped", trains):
        assert figures["loaded"] < 0.1 * whole, (figures, whole)
        assert figures["peak"] < share * whole, (figures, whole)


@DEEPSPEED
def test_an_empty_model_of_transformers_is_loaded_although_zero_3_cuts_what_it_builds(tmp_path):
    torch.manual_seed(5)
    model = families.build("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model.save_pretrained(tmp_path)
    words = torch.arange(8)[None]
    expected = model(words, labels=words).loss.item()
    for figures in launch(train_empty_transformers_model, str(tmp_path)):
        assert figures["built empty"]
        assert figures["cut outside"]
        assert figures["loss"] == pytest.approx(expected, abs=1e-5)
