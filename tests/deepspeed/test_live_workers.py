"""DeepSpeed's ZeRO in live workers: real engines over many cells, and the notebook's own weights.

One pool serves most tests; each makes its own model and engine in it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

from nbaccel import Pool, WorkerFailed
from tests.deepspeed import needs

pytestmark = needs.ENGINE

PREPARE = """
from nbaccel import Accelerator, DeepSpeedPlugin
import os, torch, torch.nn.functional as F
accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine, optimizer = accelerator.prepare(model, optimizer)
"""
TRAIN = """
torch.manual_seed(accelerator.process_index)
for _ in range(2):
    loss = F.cross_entropy(engine(torch.randn(8, 64)), torch.randint(0, 10, (8,)))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
COPIES = """
from deepspeed.utils import safe_get_full_fp32_param
copies = [safe_get_full_fp32_param(p) for p in model.parameters()]
"""
PLUGIN = """
from nbaccel import Accelerator, DeepSpeedPlugin
import torch, torch.nn.functional as F
zero = {"stage": stage, "offload_optimizer": {"device": offload}}
plugin = DeepSpeedPlugin(hf_ds_config={
    "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0,
})
accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
engine, optimizer = accelerator.prepare(model, optimizer)
"""
STEP = """
output = engine(inputs)
accelerator.backward(F.cross_entropy(output, labels))
optimizer.step()
optimizer.zero_grad()
output = output.detach()
"""


def net() -> nn.Module:
    """ZeRO-3 leaves all but one weight whole, and halves that one into unequal parts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 333), nn.ReLU(), nn.Linear(333, 333), nn.Linear(333, 10))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Whether every weight is another one."""
    return all(not torch.equal(t, before[name]) for name, t in model.state_dict().items())


def in_bf16(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor, tensor.bfloat16().float())


def fill(model: nn.Module) -> None:
    """Write other weights in the notebook, in two ways."""
    torch.manual_seed(7)
    model.load_state_dict({name: 0.03 * torch.randn_like(t) for name, t in state_of(model).items()})
    with torch.no_grad():
        model[3].bias.zero_()  # type: ignore[operator]


NAMES: dict[str, Any] = {}


@pytest.fixture(scope="module")
def shared() -> Iterator[Pool]:
    with Pool(2, namespace=NAMES, zero_stage=3, mixed_precision="bf16") as found:
        NAMES["model"] = net()
        found.run(PREPARE)  # its ports are there from the start
        yield found


@pytest.fixture
def pool(shared: Pool) -> Iterator[Pool]:
    """With a model of the notebook's."""
    torch.manual_seed(1)
    inputs, labels = torch.randn(8, 64), torch.randint(0, 10, (8,))
    NAMES.update(model=net(), inputs=inputs, labels=labels, F=F, precision="no", offload="none")
    yield shared
    NAMES.clear()


def assert_copies_are(pool: Pool, tensors: Any) -> None:
    """Those in float32 that engines keep."""
    pool.run(COPIES)
    for copies in pool.pull("copies")["copies"]:
        assert all(map(torch.equal, copies, tensors))


# ------------------------------------------------------------------------- cells that train


@pytest.mark.slow
def test_weights_come_home_after_each_cell_from_everyone_s_part(pool: Pool) -> None:
    model = NAMES["model"]
    assert "bf16, ZeRO-3" in pool.plan.headline()
    assert "bf16, ZeRO-3" in str(pool.status())
    pool.run(PREPARE + "found = accelerator.distributed_type.value, next(model.parameters()).dtype")
    assert pool.pull("found") == {"found": [("DEEPSPEED", torch.bfloat16)] * 2}
    for _ in range(2):
        before = state_of(model)
        pool.run(TRAIN)
        assert_copies_are(pool, list(model.parameters()))
        assert moved(model, before)
        assert not any(in_bf16(parameter) for parameter in model.parameters()), "it is rounded"
    pool.run(
        "from nbaccel.deepspeed.local_shards import local_pieces\n"
        "parts = [sum(v.numel() for _, v in local_pieces(p)) for p in model.parameters()]"
    )
    first, second = pool.pull("parts")["parts"]
    assert (first[2], second[2]) == (55445, 55444)
    whole = [parameter.numel() for parameter in model.parameters()]
    assert [a + b for a, b in zip(first, second, strict=True)] == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "precision", "offload"),
    [(1, "no", "none"), (1, "bf16", "cpu"), (2, "bf16", "none"), (2, "no", "cpu"),
     (3, "bf16", "cpu"), (3, "no", "none")],
)  # fmt: skip
def test_an_engine_goes_on_with_what_the_notebook_writes(
    pool: Pool, stage: int, precision: str, offload: str
) -> None:
    model, inputs, labels = (NAMES[name] for name in ("model", "inputs", "labels"))
    NAMES.update(stage=stage, precision=precision, offload=offload)
    before = state_of(model)
    pool.run(PLUGIN)
    pool.run(STEP)
    assert moved(model, before)

    fill(model)
    assert_copies_are(pool, list(model.parameters()))

    low = copy.deepcopy(model).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    expected = low(inputs.to(next(low.parameters()).dtype)).float()
    F.cross_entropy(expected, labels).backward()
    before = state_of(model)
    pool.run(STEP)
    for output in pool.pull("output")["output"]:
        torch.testing.assert_close(output, expected.detach(), rtol=1e-5, atol=1e-6)
    for parameter, (name, was) in zip(low.parameters(), before.items(), strict=True):
        assert parameter.grad is not None
        step = model.state_dict()[name] - was
        torch.testing.assert_close(step, -0.5 * parameter.grad.float(), rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------------- engines that end


def test_a_cell_that_prepares_can_be_run_again_and_its_engine_be_destroyed(pool: Pool) -> None:
    count = (
        "import gc\ngc.collect()\nfrom deepspeed.runtime.engine import DeepSpeedEngine\n"
        "engines = sum(type(found) is DeepSpeedEngine for found in gc.get_objects())\n"
        "hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())"
    )
    model, found = NAMES["model"], []
    for _ in range(3):
        pool.run(PREPARE)
        before = state_of(model)
        pool.run(TRAIN)
        assert moved(model, before)
        pool.run(count)
        found.append(pool.pull("engines", "hooks"))
    assert found[1:] == found[:-1], "the engine before is gone"
    trained = state_of(model)
    pool.run("accelerator.free_memory()\ndel engine, optimizer, accelerator")
    assert all(map(torch.equal, trained.values(), model.state_dict().values()))
    fill(model)
    # DeepSpeed makes its float32 copies from the weights it has cast.
    cast = [tensor.bfloat16().float() for tensor in state_of(model).values()]
    pool.run(PREPARE)
    assert_copies_are(pool, cast)


@pytest.mark.parametrize("stages", [(3, 2), (1, 3), (2, 1)])
def test_another_stage_takes_the_trained_weights_over(pool: Pool, stages: tuple[int, int]) -> None:
    NAMES["stage"] = stages[0]
    pool.run(PLUGIN + STEP)
    expected = NAMES["model"](NAMES["inputs"]).detach()
    NAMES["stage"] = stages[1]
    pool.run(PLUGIN + STEP)
    for output in pool.pull("output")["output"]:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------- failures


@pytest.mark.slow
def test_after_a_cell_that_failed_in_a_collective_training_can_begin_again() -> None:
    model = net()
    with Pool(2, namespace={"model": model}, zero_stage=3, mixed_precision="bf16") as pool:
        pool.run(PREPARE + TRAIN)
        trained = state_of(model)
        pids = pool.call(os.getpid)
        with pytest.raises(ValueError, match="no data"):
            pool.run("if accelerator.process_index == 1: raise ValueError('no data')" + TRAIN)
        assert all(map(torch.equal, trained.values(), model.state_dict().values()))
        with pytest.raises(WorkerFailed, match="run the cells again that make them"):
            pool.run(TRAIN)
        for _ in range(2):
            before = state_of(model)
            pool.run(PREPARE)
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(tensor, before[name], rtol=2**-8, atol=0.0)
            pool.run(TRAIN)
            assert moved(model, before)
            pool.run("torch.distributed.destroy_process_group()")
        assert pool.call(os.getpid) == pids, "all in the same workers"


def test_an_error_in_a_cell_leaves_the_engine_as_it_was(pool: Pool) -> None:
    pool.run(PREPARE + TRAIN)
    with pytest.raises(ZeroDivisionError):
        pool.run("engine(torch.randn(8, 64)).sum()\n1 / 0")
    before = state_of(NAMES["model"])
    pool.run(TRAIN)
    assert moved(NAMES["model"], before)


# ------------------------------------------------------------------------- pulling


@pytest.mark.parametrize("stage", [2, 3])
def test_what_an_engine_holds_is_pulled_without_it(
    pool: Pool, stage: int, capfd: pytest.CaptureFixture[str]
) -> None:
    NAMES.update(stage=stage, precision="bf16")
    pool.run(PLUGIN + STEP)
    for name in ("model", "engine"):
        for rank, found in enumerate(pool.pull(name)[name]):
            assert type(found) is nn.Sequential
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in found.modules())
            attributes = [vars(m).keys() for m in net().modules()]
            assert [vars(m).keys() for m in found.modules()] == attributes
            whole = [tuple(p.shape) for p in NAMES["model"].parameters()]
            if stage == 3:
                whole[2] = (55445 - rank,)
            assert [tuple(p.shape) for p in found.parameters()] == whole
    said = capfd.readouterr().err
    assert ("has only a piece of 1 sharded tensor(s) in model" in said) is (stage == 3)
    for name in ("optimizer", "accelerator"):
        with pytest.raises(TypeError, match=r"holds a DeepSpeedEngine .* cannot leave its process"):
            pool.pull(name)


# ------------------------------------------------------------------------- precision, ends


@pytest.mark.slow
def test_the_precision_asked_for_is_seen_and_missed_and_workers_end() -> None:
    names: dict[str, Any] = {"model": net()}
    with Pool(2, namespace=names, zero_stage=2, mixed_precision="bf16") as pool:
        before = state_of(names["model"])
        pool.run(PREPARE + TRAIN + "found = str(next(model.parameters()).dtype)")
        assert pool.pull("found") == {"found": ["torch.bfloat16"] * 2}
        assert moved(names["model"], before)
        first = pool.call(os.getpid)

        pool.restart()
        assert not any(map(psutil.pid_exists, first))
        before = state_of(names["model"])
        raw = (
            "import deepspeed, torch\n"
            "raw, *_ = deepspeed.initialize(model=model, config={\n"
            "    'train_micro_batch_size_per_gpu': 8, 'zero_optimization': {'stage': 2},\n"
            "    'optimizer': {'type': 'AdamW', 'params': {'lr': 0.01}}})\n"
            "raw.backward(raw(torch.randn(8, 64)).sum())\nraw.step()"
        )
        with pytest.raises(WorkerFailed, match=r"mixed_precision='bf16' was asked for.*fp32"):
            pool.run(raw)
        assert not moved(names["model"], before)
        second = pool.call(os.getpid)
    assert not any(map(psutil.pid_exists, second))
