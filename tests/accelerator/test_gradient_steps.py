"""Accumulation, clipping and autocast: what is done to gradients, and what they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nbaccel import Accelerator, GradientAccumulationPlugin, GradScalerKwargs
from nbaccel.errors import ConfigError, UserMistake
from tests.accelerator.loops import line, numbers, sgd, together, told, weight


def test_five_batches_in_groups_of_two_sync_at_the_second_fourth_and_last() -> None:
    def body(accelerator: Accelerator) -> Any:
        model = line()
        model, optimizer, loader = accelerator.prepare(model, sgd(model), numbers(10, 1))
        own = accelerator.unwrap_model(model)
        synced, grads, steps = [], [], []
        optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(accelerator.step))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[0]).sum())
                synced.append(accelerator.sync_gradients)
                grads.append(float(own.weight.grad))
                optimizer.step()
                optimizer.zero_grad()
        return synced, grads, len(steps), accelerator.step, weight(own)

    first, second = together(body, gradient_accumulation_steps=2)
    assert first[0] == second[0] == [False, True, False, True, True]
    assert first[2:] == second[2:]
    assert first[2:4] == (3, 0)
    # Process 0 has 0, 2, 4, 6, 8 and process 1 has 1, 3, 5, 7, 9; each is halved, the mean taken.
    assert first[1] == [0, 1.5, 2, 5.5, 4.25]
    assert second[1] == [0.5, 1.5, 2.5, 5.5, 4.25]


def test_a_group_may_go_on_over_the_end_of_a_loader() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, loader = accelerator.prepare(line(), numbers(3, 1))
    synced = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
    assert synced == [False, True, False, True, False, True]


def test_gradients_are_reduced_when_they_are_to_and_only_then() -> None:
    def body(accelerator: Accelerator) -> Any:
        model = accelerator.prepare(line())
        own = accelerator.unwrap_model(model)
        x = torch.full((1, 1), float(accelerator.process_index))

        def gradient() -> float:
            found = float(own.weight.grad)
            own.weight.grad = None
            return found

        model(x).sum().backward()
        together_ = gradient()
        with accelerator.no_sync(model):
            model(x).sum().backward()
        apart = gradient()
        with accelerator.no_sync(model):
            first, second = model(x), model(x)
        with accelerator.trigger_sync_in_backward(model):
            (first + second).sum().backward()
        return together_, apart, gradient()

    assert together(body) == [(0.5, 0.0, 1.0), (0.5, 1.0, 1.0)]


def test_gradients_may_be_reduced_after_every_batch() -> None:
    def body(accelerator: Accelerator) -> Any:
        model = accelerator.prepare(line())
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), accelerator.process_index * 4.0)).sum())
        return accelerator.sync_gradients, float(accelerator.unwrap_model(model).weight.grad)

    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    assert together(body, gradient_accumulation_plugin=plugin) == [(False, 1.0)] * 2


def test_steps_and_syncing_can_be_set_while_training() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = line()
    model, optimizer = accelerator.prepare(model, sgd(model))
    model(torch.ones(1, 1)).sum().backward()
    accelerator.sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()
    assert (weight(model), float(model.weight.grad)) == (1.0, 1.0)
    accelerator.sync_gradients = True
    optimizer.step()
    assert weight(model) == pytest.approx(0.9)
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_state.num_steps == 3
    with pytest.raises(ConfigError, match="num_steps=0"):
        accelerator.gradient_accumulation_steps = 0


def test_a_step_skipped_by_the_scaler_leaves_weights_and_schedule() -> None:
    handlers = [GradScalerKwargs(init_scale=16.0, growth_interval=1)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    model = line()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for bad in (True, True, False):
        accelerator.backward(model(torch.ones(1, 1)).sum() * (torch.inf if bad else 1))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped = accelerator.optimizer_step_was_skipped
        seen.append((skipped, scheduler.last_epoch, weight(model) == 1.0))
    assert seen == [(True, 0, True), (True, 0, True), (False, 1, False)]
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 8.0  # halved twice, doubled once


def test_schedules_advance_once_per_process_unless_batches_are_split() -> None:
    def body(accelerator: Accelerator) -> Any:
        model = line()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        _, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        optimizer.step()
        scheduler.step()
        return scheduler.last_epoch

    assert together(body) == [2, 2]
    assert together(body, split_batches=True) == [1, 1]
    assert together(body, step_scheduler_with_optimizer=False) == [1, 1]


def clipping(accelerator: Accelerator) -> Any:
    model = line()
    model, optimizer = accelerator.prepare(model, sgd(model))
    own = accelerator.unwrap_model(model)
    x = torch.full((1, 1), 3.0 + 2 * accelerator.process_index)
    accelerator.backward(model(x).sum())
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer)  # nothing is left to do
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
    after = float(own.weight.grad)
    accelerator.clip_grad_value_(model.parameters(), 0.5)
    cut = float(own.weight.grad)
    optimizer.step()
    return norm, round(after, 4), cut, round(weight(own), 4)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_sees_unscaled_gradients_of_all_processes(precision: str) -> None:
    handlers = [GradScalerKwargs(init_scale=16.0)]
    found = together(clipping, mixed_precision=precision, kwargs_handlers=handlers)
    assert found == [(4.0, 1.0, 0.5, 0.95)] * 2


def test_clipping_amid_a_group_of_scaled_batches_is_refused() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    model = line()
    model, _ = accelerator.prepare(model, sgd(model))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        message = told(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    assert message.startswith("ConfigError")
    assert "after batch 1 of a group of 2" in message
    assert "if accelerator.sync_gradients" in message


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_and_the_context_compute_in_the_precision(precision: str, dtype: Any) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    seen: list[torch.dtype] = []
    inner = nn.Linear(2, 2)
    inner.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    model = accelerator.prepare(nn.Sequential(inner))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [dtype or torch.float32]
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert accelerator.native_amp is (dtype is not None)
    assert (accelerator.scaler is not None) is (precision == "fp16")


@pytest.mark.parametrize("clips", [False, True])
def test_a_loss_that_was_not_scaled_is_told_with_the_way_out(clips: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()

    def finish() -> None:
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with pytest.raises(UserMistake, match=r"Write accelerator\.backward\(loss\) in place of loss"):
        finish()
