from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from nbaccel import Accelerator, dispatch_model
from nbaccel.data_loader import DataLoaderShard
from nbaccel.errors import ConfigError
from nbaccel.optimizer import AcceleratedOptimizer
from nbaccel.scheduler import AcceleratedScheduler
from nbaccel.utils import convert_outputs_to_fp32, extract_model_from_parallel
from tests.accelerator.loops import line, numbers, rows, sgd, together, told, weight


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda n: 1 / (n + 1))


def test_things_come_back_ready_in_the_order_given() -> None:
    accelerator = Accelerator(cpu=True)
    model = line()
    optimizer = sgd(model)
    found = accelerator.prepare(schedule(optimizer), numbers(), optimizer, "text", model)
    kinds = [type(item) for item in found]
    assert kinds == [AcceleratedScheduler, DataLoaderShard, AcceleratedOptimizer, str, nn.Linear]
    assert isinstance(found, tuple)
    assert isinstance(found[1], DataLoader)
    assert isinstance(found[2], torch.optim.Optimizer)
    assert found[0].optimizers == (found[2],)  # though it came before its optimizer
    assert found[4] is model
    one, other = sgd(model), sgd(model)
    first, second = accelerator.prepare(one, other)
    assert accelerator.prepare(schedule(other)).optimizers == (second,)
    assert accelerator.prepare_scheduler(schedule(one)).optimizers == (first,)


def test_models_and_batches_move_only_where_they_are_to() -> None:
    accelerator = Accelerator(cpu=True)
    with torch.device("meta"):
        away = nn.Linear(2, 2)
    assert accelerator.prepare(away, device_placement=[False]).weight.is_meta
    assert Accelerator(cpu=True, device_placement=False).prepare(away).weight.is_meta
    with pytest.raises(ConfigError, match=r"2 weights of Linear .* load_checkpoint_in_model"):
        Accelerator(cpu=True).prepare(away)
    with pytest.raises(ConfigError, match="1 entries for 2 arguments"):
        accelerator.prepare(line(), numbers(), device_placement=[True])
    loader = accelerator.prepare_data_loader(numbers(4, 2), device_placement=False)
    assert loader.device is None
    assert accelerator.prepare_data_loader(loader) is loader
    assert [rows(batch) for batch in loader] == [[0, 1], [2, 3]]


def test_a_model_for_evaluation_or_without_gradients_is_not_wrapped() -> None:
    def body(accelerator: Accelerator) -> Any:
        frozen = line().requires_grad_(False)
        evaluated = line()
        return (
            accelerator.prepare(frozen) is frozen,
            accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated,
            type(accelerator.prepare_model(line())).__name__,
        )

    assert together(body) == [(True, True, "DistributedDataParallel")] * 2


def test_a_model_spread_over_devices_cannot_be_trained_by_several_processes() -> None:
    def body(accelerator: Accelerator) -> Any:
        model: Any = line()
        model.hf_device_map = {"a": 0, "b": "cpu"}
        return told(lambda: accelerator.prepare(model))

    for message in together(body):
        assert message.startswith("ConfigError")
        assert "{'a': 0, 'b': 'cpu'}" in message
    assert together(body, 1) == ["nothing was raised"]


def test_weights_in_memory_train_beside_frozen_ones_on_disk(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False))
    before = model[0].weight.detach().clone()
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_unwrapping_gives_the_users_own_module_which_pickles() -> None:
    def body(accelerator: Accelerator) -> Any:
        hooked = nn.Linear(1, 1)
        hooked.forward = lambda batch: batch + 1  # as offloading hooks stand on an instance
        extract_model_from_parallel(accelerator.prepare(hooked), keep_fp32_wrapper=False)
        assert hooked(torch.ones(1)) == 2
        mine = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        mine._original_forward, mine.forward = mine.forward, convert_outputs_to_fp32(mine.forward)
        assert type(extract_model_from_parallel(mine, False).forward).__name__ == "method"
        model = accelerator.prepare(mine)
        casting = type(mine.forward).__name__
        names = sorted(accelerator.get_state_dict(model))
        plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        sent = pickle.loads(pickle.dumps(plain))
        out = sent.eval()(torch.ones(1, 2))
        with torch.no_grad():
            same = torch.equal(out, plain.eval()(torch.ones(1, 2)))
        return (
            accelerator.unwrap_model(model) is mine,
            plain is mine,
            casting,
            type(mine.forward).__name__,
            any(name.startswith("module.") for name in names),
            same,
        )

    found = together(body, mixed_precision="bf16")
    assert found == [(True, True, "AutocastForward", "method", False, True)] * 2


def test_compiled_models_train_save_and_unwrap_like_others(tmp_path: Any) -> None:
    def body(accelerator: Accelerator) -> Any:
        mine = line()
        model, optimizer, loader = accelerator.prepare(mine, sgd(mine), numbers(4, 1))
        before = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[0]).sum())
                before.append(float(mine.weight.grad))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(tmp_path / "state")
        mine.weight.data.zero_()
        accelerator.load_state(tmp_path / "state")
        return (
            before,
            weight(model),
            sorted(accelerator.get_state_dict(model)),
            accelerator.unwrap_model(model) is mine,
            accelerator.prepare(mine) is model,
            accelerator.check_in_sync(),
        )

    first, second = together(body, dynamo_backend="eager", gradient_accumulation_steps=2)
    # Divided by two; not shared after the first batch; then the mean over the processes of both.
    assert (first[0], second[0]) == ([0.0, 1.5], [0.5, 1.5])
    assert first[1:] == second[1:]
    assert first[1] == pytest.approx(0.85)
    assert first[2:] == (["weight"], True, True, True)


def test_a_model_that_the_user_compiled_keeps_its_names() -> None:
    def body(accelerator: Accelerator) -> Any:
        mine = line()
        model = accelerator.prepare(torch.compile(mine, backend="eager"))
        after = torch.compile(accelerator.prepare(line()), backend="eager")
        return (
            *(sorted(accelerator.get_state_dict(one)) for one in (model, after)),
            accelerator.unwrap_model(model, keep_torch_compile=False) is mine,
            type(accelerator.unwrap_model(after, keep_torch_compile=False)).__name__,
            type(accelerator.unwrap_model(after)).__name__,
        )

    expected = (["weight"], ["weight"], True, "Linear", "OptimizedModule")
    for n in (1, 2):
        assert together(body, n) == [expected] * n


@pytest.mark.parametrize("compiled", ["saved", "loaded", "a part of the saved"])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_a_checkpoint_fits_whether_its_model_was_compiled_or_not(
    compiled: str, safe: bool, tmp_path: Any
) -> None:
    def prepared(kind: str) -> tuple[Accelerator, torch.nn.Module]:
        model: Any = torch.nn.Sequential(line(), line())
        if kind == "a part of the saved":
            model[0] = torch.compile(model[0], backend="eager")
        accelerator = Accelerator(cpu=True)
        inner = torch.compile(model, backend="eager") if compiled == kind else model
        return accelerator, accelerator.prepare(inner)

    accelerator, model = prepared(compiled if compiled != "loaded" else "")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 2.0)
    accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    accelerator, model = prepared(compiled if compiled == "loaded" else "")
    accelerator.load_state(tmp_path / "state")
    assert [float(one.detach().mean()) for one in model.parameters()] == [2.0, 3.0]


def test_a_deep_copy_is_the_accelerator_itself_and_a_pickled_one_is_equal() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    accelerator.prepare(line(), numbers())
    assert copy.deepcopy({"it": accelerator})["it"] is accelerator
    sent = pickle.loads(pickle.dumps(accelerator))
    assert (sent.mixed_precision, sent.gradient_accumulation_steps) == ("bf16", 3)


def test_what_is_given_twice_or_again_is_prepared_once() -> None:
    def body(accelerator: Accelerator) -> Any:
        model = line()
        optimizer = sgd(model)
        scheduler = schedule(optimizer)
        first, same, stepper = accelerator.prepare(model, model, optimizer)
        again = accelerator.prepare(optimizer)
        plan = accelerator.prepare(scheduler)
        one, two = accelerator.prepare(*[numbers()] * 2)
        other = Accelerator(cpu=True, mixed_precision="bf16").prepare(first)
        return (
            type(other.module.forward).__name__,
            first is same,
            stepper is again,
            accelerator.prepare(scheduler) is plan,
            plan.optimizers == (stepper,),
            one is two,
            [len(x) for x in (accelerator._models, accelerator._optimizers)],
        )

    assert together(body) == [("AutocastForward", True, True, True, True, False, [1, 1])] * 2


def test_a_cell_that_runs_again_prepares_what_an_earlier_one_has_prepared(tmp_path: Path) -> None:
    model = line()
    optimizer = sgd(model, 1.0)
    parts = (model, optimizer, schedule(optimizer), numbers(3, 1))
    for num_steps in (1, 2):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_steps)
        model, optimizer, scheduler, loader = parts = accelerator.prepare(*parts)
    rates = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            for act in (optimizer.step, scheduler.step, optimizer.zero_grad):
                act()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 1 / 2, 1 / 3]
    assert (accelerator._optimizers, accelerator._dataloaders) == ([optimizer], [loader])
    another = Accelerator(cpu=True, gradient_accumulation_steps=3)
    with pytest.warns(UserWarning, match=r"accumulate got a model of another.*steps=3"):
        another.accumulate(model)
    with pytest.warns(UserWarning, match=r"saves random states alone: .* has prepared nothing"):
        another.save_state(tmp_path / "state")


def test_a_model_in_few_bits_that_is_offloaded_cannot_be_trained() -> None:
    model: Any = line()
    model.is_loaded_in_8bit = True
    model.hf_device_map = {"": "cpu"}
    with pytest.raises(ValueError, match=r"is_loaded_in_8bit.*CPU or disk offload.*device_map="):
        Accelerator(cpu=True).prepare_model(model)


def test_a_device_is_named_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:64")
    accelerator = Accelerator()
    assert str(accelerator.device) == str(accelerator.state.device) == "cpu:64"
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "no-device:1")
    with pytest.raises(ConfigError, match="ACCELERATE_TORCH_DEVICE='no-device:1' names no device"):
        Accelerator()


def test_a_scheduler_that_was_sent_with_its_optimizer_does_not_warn_of_an_overridden_step() -> None:
    optimizer = torch.optim.SGD(line().parameters(), lr=0.1)
    sent = pickle.dumps((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)))
    model = line()
    received, scheduler = pickle.loads(sent)
    _, optimizer, scheduler = Accelerator(cpu=True).prepare(model, received, scheduler)
    optimizer.step()
    scheduler.step()  # warnings are errors
    assert scheduler.get_last_lr() == pytest.approx([0.01])
    pickle.dumps(optimizer)
