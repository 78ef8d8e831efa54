"""ZeRO-Inference: a model larger than memory is used, one prompt per process."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

from nbaccel import Accelerator, DeepSpeedPlugin, deepspeed_environment, notebook_launcher
from nbaccel.deepspeed import local_shards
from nbaccel.deepspeed.converting import fp32_state_dict
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.deepspeed.zero_memory import check_host_memory, estimate_memory
from nbaccel.errors import ConfigError
from nbaccel.memory.estimate import measure
from nbaccel.plan.inventory import Inventory
from tests.deepspeed import needs, operations
from tests.deepspeed.engines import changes, world
from tests.deepspeed.programs import refusal, told_by

pytestmark = [pytest.mark.slow, *needs.ENGINE, pytest.mark.filterwarnings("ignore")]

PLACES = [pytest.param("cpu", id="memory"), pytest.param("nvme", marks=needs.DISK, id="disk")]

REVIEWS = (
    "Is this review positive or negative? Review: the best skillet you will ever buy",
    "Is this review positive or negative? Review: not worth it",
)
# A matrix of these is 4 MiB in bfloat16: DeepSpeed leaves in memory what is less than 1 MiB of one
# process. Eight of them, and three buffers to read them with.
WIDTH, INNER, LAYERS, BUFFERS = 512, 2048, 2, 3


def t5(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Untrained, and yet it does not say the same byte all the time."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=259, d_model=WIDTH, d_kv=16, num_heads=4, d_ff=INNER, num_layers=LAYERS,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.shared.weight.mul_(0.02)
    return model.to(dtype)


def config(place: str, folder: Path | None = None, **more: Any) -> dict[str, Any]:
    section: dict[str, Any] = {"device": place}
    if place == "nvme":
        section |= {"nvme_path": str(folder), "buffer_count": BUFFERS, "buffer_size": WIDTH * INNER}
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": section,
            # Otherwise parameters this small stay whole, and ZeRO-3 would be tested in name only.
            "stage3_param_persistence_threshold": 0,
        },
        "bf16": {"enabled": place == "nvme"},
        **more,
    }


def answer(model: Any, rank: int) -> list[int]:
    """What it says to a rank's own prompt, at a length of the rank's own."""
    prompt = ByT5Tokenizer()(REVIEWS[rank], return_tensors="pt").input_ids
    said = model.generate(
        prompt, max_new_tokens=12 - 5 * rank, do_sample=False, no_repeat_ngram_size=2
    )
    return said[0].tolist()


def accelerator_for(settings: dict[str, Any]) -> Accelerator:
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), cpu=True)


def infer(place: str, folder: Path, model: nn.Module) -> dict[str, Any]:
    """Everything that can be asked of a model that is only used."""
    dtype = torch.bfloat16 if place == "nvme" else torch.float32
    plain, other = t5(0, dtype), t5(1, dtype)
    accelerator = accelerator_for(config(place, folder))
    rank = accelerator.process_index
    engine = accelerator.prepare(model)
    inner = accelerator.unwrap_model(engine)
    found: dict[str, Any] = {
        "expected": [answer(plain, rank), answer(other, rank)],
        "said": [answer(inner, rank)],
        "shape": list(next(engine.parameters()).shape),
        "files": [path.stat().st_size for path in sorted(folder.rglob(f"rank{rank}/*.swp"))],
        "same": same(accelerator.get_state_dict(engine), plain),
        "same in fp32": same(fp32_state_dict(engine), t5(0, dtype).float()),
    }
    accelerator._run.strategy.load_model_state(engine, other.state_dict())
    found["said"].append(answer(inner, rank))
    found["same after loading"] = same(accelerator.get_state_dict(engine), other)
    accelerator.free_memory()
    return found


def same(state: dict[str, Any], model: nn.Module) -> bool | None:
    """Whether the state is the model's; None where there is none."""
    if not state:
        return None
    return all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def infer_all(models: dict[str, nn.Module], folder: Path) -> dict[str, Any]:
    return {place: infer(place, folder, model) for place, model in models.items()}


def raw() -> list[list[int]]:
    """The guide's script with nothing but the environment."""
    import deepspeed

    model = t5()
    expected = answer(model, 0)
    with deepspeed_environment():
        settings = config("cpu", train_micro_batch_size_per_gpu=1)
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        said = answer(engine.module, 0)
    return [expected, said]


def taken_back(place: str, folder: Path) -> dict[str, Any]:
    """In one process, and the notebook's module afterwards."""
    model = t5(dtype=torch.bfloat16 if place == "nvme" else torch.float32)
    found = infer(place, folder, model)
    return {**found, "after": answer(model, 0), "whole": list(next(model.parameters()).shape)}


def refused() -> str:
    """The last thing in a process: its CPU answers DeepSpeed like one without float16 from here."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda _: False
    return refusal(accelerator_for({**config("cpu"), "fp16": {"enabled": True}}).prepare, t5())


def lost(folder: Path) -> str:
    """The files are removed while the weights are in them."""
    accelerator = accelerator_for(config("nvme", folder))
    engine = accelerator.prepare(t5(dtype=torch.bfloat16))
    for path in folder.rglob("*.swp"):
        path.unlink()
    return refusal(accelerator.free_memory) or f"{type(engine).__name__} ended"


def main() -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        before = world()
        told: dict[str, Any] = {"raw": raw(), "cpu": taken_back("cpu", folder)}
        if not operations.not_built(operations.DISK):
            told["nvme"] = taken_back("nvme", folder)
        gc.collect()
        told["left"] = changes(before, world())
        if "nvme" in told:
            told["lost"] = lost(folder)
            told["refused"] = refused()
    print(json.dumps(told))


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
    return told_by("tests.deepspeed.test_inference", timeout_s=800)


@pytest.mark.parametrize("place", PLACES)
def test_each_rank_and_one_process_say_what_the_whole_model_would(launched, place, alone):
    results, _ = launched
    for rank in results:
        assert rank[place]["shape"] == [0]
        assert rank[place]["said"] == rank[place]["expected"]
    first, second = (rank[place]["said"][0] for rank in results)
    assert (len(first), len(second)) == (13, 8)
    assert len({*first}) > 3
    found = alone[place]
    assert found["shape"] == [0]
    assert found["said"] == found["expected"]
    assert found["said"][0] != found["said"][1]


@pytest.mark.parametrize("place", PLACES)
def test_whole_weights_come_out_and_go_in_and_the_module_is_whole_afterwards(
    launched, alone, place
):
    assert BUFFERS < FILES
    results, _ = launched
    assert [rank[place]["same"] for rank in results] == [True, None]
    assert [rank[place]["same in fp32"] for rank in results] == [True, None]
    assert [rank[place]["same after loading"] for rank in results] == [True, None]
    assert alone[place]["same"]
    assert alone[place]["same after loading"]
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
def test_the_large_matrices_are_on_disk_and_what_fails_there_is_told(launched, alone):
    for told, processes in (*((rank, 2) for rank in launched[0]), (alone, 1)):
        assert told["nvme"]["files"] == [2 * WIDTH * INNER // processes] * FILES
    told = alone["refused"]
    assert told.startswith("ConfigError: fp16.enabled cannot be true on this CPU")
    assert "Use bf16" in told
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


if __name__ == "__main__":
    main()
