"""ZeRO-Inference: a model larger than memory is used, one prompt per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import notebook_launcher
from nbaccel.deepspeed.strategy import local_shards
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.deepspeed.zero_memory import check_host_memory, estimate_memory
from nbaccel.errors import ConfigError
from nbaccel.memory.estimate import measure
from nbaccel.plan.inventory import Inventory
from tests.deepspeed import needs, operations
from tests.deepspeed.inference import BUFFERS, INNER, LAYERS, WIDTH, config, infer_all, t5
from tests.deepspeed.programs import told_by

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]

PLACES = [
    pytest.param("cpu", id="memory"),
    pytest.param("nvme", marks=needs.DISK, id="disk"),
]
FILES = 4 * LAYERS
ON_DISK = needs.DISK[-1]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, Any]]:
    """What each of two processes tells, and the models as they came home."""
    models = {"cpu": t5()}
    if not operations.not_built(operations.DISK):
        models["nvme"] = t5(dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("parameters")
    results = notebook_launcher(infer_all, (models, folder), num_processes=2, timeout=240)
    return list(results), models


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process tells, in which no launcher was."""
    return told_by("tests.deepspeed.inference", timeout_s=800)


@pytest.mark.parametrize("place", PLACES)
def test_each_rank_says_what_the_whole_model_would(launched, place):
    results, _ = launched
    for rank in results:
        assert rank[place]["shape"] == [0]
        assert rank[place]["said"] == rank[place]["expected"]
    first, second = (rank[place]["said"][0] for rank in results)
    assert (len(first), len(second)) == (13, 8)
    assert len({*first}) > 3


@pytest.mark.parametrize("place", PLACES)
def test_one_process_says_what_the_whole_model_would(alone, place):
    found = alone[place]
    assert found["shape"] == [0]
    assert found["said"] == found["expected"]
    assert found["said"][0] != found["said"][1]


@pytest.mark.parametrize("place", PLACES)
def test_whole_weights_come_out_and_go_in_though_there_are_few_buffers(launched, alone, place):
    assert BUFFERS < FILES
    results, _ = launched
    assert [rank[place]["same"] for rank in results] == [True, None]
    assert [rank[place]["same in fp32"] for rank in results] == [True, None]
    assert [rank[place]["same after loading"] for rank in results] == [True, None]
    assert alone[place]["same"]
    assert alone[place]["same after loading"]


@pytest.mark.parametrize("processes", [1, 2])
@ON_DISK
def test_the_large_matrices_are_on_disk(launched, alone, processes):
    for told in launched[0] if processes == 2 else [alone]:
        assert told["nvme"]["files"] == [2 * WIDTH * INNER // processes] * FILES


@pytest.mark.parametrize("place", PLACES)
def test_the_module_is_whole_afterwards(launched, alone, place):
    assert alone[place]["whole"] == [259, WIDTH]
    assert alone[place]["after"] == alone[place]["expected"][1]
    _, models = launched
    for name, value in t5(1, next(models[place].parameters()).dtype).state_dict().items():
        assert torch.equal(models[place].state_dict()[name], value), name


def test_the_guides_script_runs_in_a_cell(alone):
    expected, said = alone["raw"]
    assert said == expected
    assert alone["left"] == {}


# ------------------------------------------------------------------------ said before it fails
@ON_DISK
def test_float16_is_refused_before_an_engine_is_made(alone):
    told = alone["refused"]
    assert told.startswith("ConfigError: fp16.enabled cannot be true on this CPU")
    assert "Use bf16" in told


@ON_DISK
def test_files_that_are_gone_are_named(alone):
    assert alone["lost"].startswith("ConfigError: ")
    assert "_param.tensor.swp is gone" in alone["lost"]
    assert "until accelerator.free_memory()" in alone["lost"]


def test_parts_of_more_processes_fit_into_smaller_buffers(tmp_path: Path):
    settings, model = config("nvme", tmp_path), torch.nn.Linear(WIDTH, INNER)
    section = settings["zero_optimization"]["offload_param"]
    section["buffer_size"] = WIDTH * INNER // 4
    local_shards.check_buffers(model, ZeroConfig.from_dict(settings), 4)
    with pytest.raises(ConfigError, match=r"reads 524288 numbers of weight"):
        local_shards.check_buffers(model, ZeroConfig.from_dict(settings), 2)
    section["device"] = "cpu"
    local_shards.check_buffers(model, ZeroConfig.from_dict(settings), 2)


def test_a_model_that_is_only_used_needs_no_memory_for_training():
    """18 bytes for each parameter would refuse what fits with 4."""
    model = torch.nn.Linear(1 << 15, 1 << 15, device="meta")  # 4 GiB of float32
    machine = Inventory(cpu_cores=2, host_available_bytes=9 << 30, host_total_bytes=9 << 30)
    used = ZeroConfig.from_dict(config("cpu"))
    need = estimate_memory(measure(model, trains=False), used, inventory=machine)
    check_host_memory(need, "cpu", machine)
    need = estimate_memory(model, used, inventory=machine)
    with pytest.raises(ConfigError, match="would kill it at the start"):
        check_host_memory(need, "cpu", machine)
