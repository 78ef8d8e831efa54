"""Accelerate's guide to training on TPUs: its code cells, literally, but for the package's name.

The model that it downloads is a tiny random one of the same kind, in a folder of the same name.
What a test wants to know is returned by a line that is put below a cell.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.isolation import ROOT
from tests.programs import run_program

# ---------------------------------------------------------------- the guide's cells
CELL_1 = """
def training_function():
    # Initialize accelerator
    accelerator = Accelerator()
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    train_dataloader, eval_dataloader = create_dataloaders(
        train_batch_size=hyperparameters["train_batch_size"], eval_batch_size=hyperparameters["eval_batch_size"]
    )

    # Instantiate optimizer
    optimizer = AdamW(params=model.parameters(), lr=hyperparameters["learning_rate"])

    # Prepare everything
    # There is no specific order to remember, we just need to unpack the objects in the same order we gave them to the
    # prepare method.
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    num_epochs = hyperparameters["num_epochs"]
    # Now we train the model
    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)

            optimizer.step()
            optimizer.zero_grad()
"""  # noqa: E501 - a line of the guide's
CELL_2 = """
from accelerate import notebook_launcher

notebook_launcher(training_function)
"""
CELL_4 = """
# In another Jupyter cell
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
"""
# The guide gives the next two as differences: the model goes from the function into an argument.
_MADE_INSIDE = CELL_4.splitlines()[-1]
CELL_5 = CELL_1.replace("training_function()", "training_function(model)").replace(
    f"    {_MADE_INSIDE}\n", ""
)
CELL_6 = CELL_2.replace("(training_function)", "(training_function, (model,))")
CELL_7 = 'accelerator = Accelerator(mixed_precision="bf16")'
CELL_8 = 'accelerator = Accelerator(mixed_precision="bf16", downcast_bf16=True)'

# ---------------------------------------------------------------- around them
_BEFORE = '''
import nbaccel.plan.registry

nbaccel.plan.registry.prepare_notebook()  # as %load_ext nbaccel does, before torch

import functools, json, os, sys
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification

import nbaccel
from nbaccel import Accelerator, RunConfig

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
hyperparameters = dict(
    train_batch_size=4, eval_batch_size=4, learning_rate=1e-3, num_epochs=2, sequence_length=8
)
if os.environ.get("PJRT_DEVICE") == "CPU":  # without chips, a dry run has to be asked for
    config = RunConfig(device="tpu", num_processes=2)
    nbaccel.notebook_launcher = functools.partial(nbaccel.notebook_launcher, config=config)

generator = torch.Generator().manual_seed(0)
words = torch.randint(5, 64, (16, hyperparameters["sequence_length"]), generator=generator)
samples = [
    {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2}
    for row in words
]


def create_dataloaders(train_batch_size, eval_batch_size):
    return (
        DataLoader(samples, batch_size=train_batch_size),
        DataLoader(samples, batch_size=eval_batch_size),
    )


def AdamW(params, lr):
    """torch's; and notes where the weights lie before they are moved."""
    params = list(params)
    address = params[0].data_ptr()
    for line in open("/proc/self/maps"):
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            os.environ["WEIGHTS_LIE_IN"] = line.split(maxsplit=4)[4].strip()
    return torch.optim.AdamW(params, lr=lr)


def seen(accelerator, model, loss):
    """What a test wants to know of a process."""
    short = torch.tensor(1 + 2**-10).to(accelerator.device).cpu().item()
    return {
        "device": next(model.parameters()).device.type,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "loss": accelerator.gather(loss.detach().float().reshape(1)).mean().item(),
        "lies_in": os.environ["WEIGHTS_LIE_IN"],
        "downcast": os.environ.get("XLA_DOWNCAST_BF16", ""),
        "float32_is_bfloat16": short == 1.0,
        "first_weight": next(model.parameters()).detach().float().cpu().flatten()[:4].tolist(),
    }


'''
_SEEN = "    return seen(accelerator, model, loss)\n"
_FOUND = """
found["{name}"] = {{"ranks": list(results)}}
if "model" in globals():
    found["{name}"]["weights"] = next(model.parameters()).detach().flatten()[:4].tolist()
"""
_ON_CPU = """
nbaccel.notebook_launcher = functools.partial(
    nbaccel.launchers.notebook_launcher, config=RunConfig(device="cpu", num_processes=2)
)
"""


def _of_nbaccel(cell: str) -> str:
    """The cell, with what the launcher returns kept."""
    text = cell.replace("from accelerate", "from nbaccel")
    return text.replace("\nnotebook_launcher(", "\nresults = notebook_launcher(")


INSIDE = CELL_1 + _SEEN + _of_nbaccel(CELL_2)
OUTSIDE = CELL_4 + CELL_5 + _SEEN + _of_nbaccel(CELL_6)


def _with_accelerator(line: str) -> str:
    return OUTSIDE.replace("accelerator = Accelerator()", line)


# ---------------------------------------------------------------- running them
_DEVICE_TYPES = {"torch_tpu": "tpu", "torch_xla": "xla"}
pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="transformers is not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model in it, under the name by which the guide downloads it."""
    folder = tmp_path_factory.mktemp("guide")
    code = """
import json, pathlib
import torch
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
config = BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=16, max_position_embeddings=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
)
BertForSequenceClassification(config).save_pretrained("bert-base-cased")
# torch_tpu's fused attention is a program for TPUs alone: the plugin for processors has none.
path = pathlib.Path("bert-base-cased/config.json")
path.write_text(json.dumps({**json.loads(path.read_text()), "attn_implementation": "eager"}))
"""
    _run_python(code, folder, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    return folder


def _run_python(code: str, folder: Path, variables: dict[str, str]) -> tuple[str, str]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        # What is compiled runs a few times, so compiling well would be most of the test.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        **variables,
    }
    # In a file: what is launched from `python -c` has no source for a traceback.
    script = folder / "cells.py"
    script.write_text(code, encoding="utf-8")
    words = [sys.executable, str(script)]
    done = run_program(words, check=False, cwd=folder, env=environ, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout, done.stderr


def _run(folder: Path, driver: str, **cells: str) -> tuple[dict[str, Any], str]:
    """Run cells, one after another in one process as in a notebook.

    Returns:
        What was found below each name, and all that was printed.
    """
    code = [_BEFORE, "found = {}\n"]
    for name, cell in cells.items():
        code += [cell, _FOUND.format(name=name)]
    code.append('print("FOUND " + json.dumps(found))\n')
    variables = {"PJRT_DEVICE": "CPU"} if driver == "torch_xla" else {}
    printed, errors = _run_python("".join(code), folder, variables)
    (line,) = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND ")), printed + errors


@pytest.fixture(scope="module")
def found(folder: Path, driver: str) -> dict[str, Any]:
    """What came of the cells up to 7, and of the same training in two processes on the CPU."""
    return _run(
        folder,
        driver,
        inside=INSIDE,
        outside=OUTSIDE,
        bf16=_with_accelerator(CELL_7),
        on_cpu=_ON_CPU + OUTSIDE,
    )[0]


def test_cells_1_and_2_train_a_model_that_is_made_inside(
    found: dict[str, Any], driver: str
) -> None:
    ranks = found["inside"]["ranks"]
    assert [rank["device"] for rank in ranks] == [_DEVICE_TYPES[driver]] * 2
    for rank, expected in zip(ranks, found["on_cpu"]["ranks"], strict=True):
        assert rank["processes"] == 2
        assert rank["loss"] == pytest.approx(expected["loss"], abs=1e-4)
        assert rank["first_weight"] == pytest.approx(expected["first_weight"], abs=1e-4)
        # What the guide warns of: each process has one of its own.
        assert "memfd:nbaccel" not in rank["lies_in"]


def test_cells_4_to_6_share_one_model_and_train_it(found: dict[str, Any], driver: str) -> None:
    outside = found["outside"]
    assert [rank["device"] for rank in outside["ranks"]] == [_DEVICE_TYPES[driver]] * 2
    # One file of shared memory: the same inode in all processes.
    (lies_in,) = {rank["lies_in"] for rank in outside["ranks"]}
    assert "memfd:nbaccel" in lies_in
    # The notebook's model is the trained one, as the CPU would have trained it.
    assert outside["weights"] == pytest.approx(outside["ranks"][0]["first_weight"], abs=1e-7)
    assert outside["weights"] == pytest.approx(found["on_cpu"]["weights"], abs=1e-4)


def test_cell_7_computes_in_bfloat16(found: dict[str, Any]) -> None:
    for rank, exact in zip(found["bf16"]["ranks"], found["outside"]["ranks"], strict=True):
        assert rank["precision"] == "bf16"
        assert rank["loss"] == pytest.approx(exact["loss"], abs=0.05)
        assert rank["loss"] != exact["loss"]
        assert not rank["float32_is_bfloat16"], "what is not computed stays float32"


def test_cell_8_makes_float_bfloat16_where_the_driver_can(
    found: dict[str, Any], folder: Path, driver: str
) -> None:
    downcast, printed = _run(folder, driver, downcast=_with_accelerator(CELL_8))
    ranks = downcast["downcast"]["ranks"]
    for rank, exact in zip(ranks, found["outside"]["ranks"], strict=True):
        assert rank["precision"] == "bf16"
        assert rank["loss"] == pytest.approx(exact["loss"], abs=0.05)
        assert rank["float32_is_bfloat16"] == (driver == "torch_xla")
    if driver == "torch_xla":
        assert {rank["downcast"] for rank in ranks} == {"1"}
    else:
        assert "downcast_bf16" in printed, "it has no effect with torch_tpu, which is said"
