"""Where Accelerate hangs, gives wrong numbers or ignores an argument: one test for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from nbaccel import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)
from nbaccel.errors import ConfigError, NbaccelError
from nbaccel.utils import TERecipeKwargs
from tests.accelerator.loops import line, numbers, rows, sgd, together, told, weight


def test_metrics_have_no_duplicates_after_skipping_batches() -> None:
    def body(accelerator: Accelerator) -> Any:
        loader = accelerator.skip_first_batches(accelerator.prepare(numbers()), 1)
        return [i for batch in loader for i in rows(accelerator.gather_for_metrics(batch))]

    assert together(body) == [[6, 7, 8, 9]] * 2


def test_an_outer_loader_sees_its_end_after_an_inner_one_was_left_by_break() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = line()
    model, optimizer, outer, inner = accelerator.prepare(
        model, sgd(model), numbers(5, 1), numbers(5, 1)
    )
    synced = []
    for batch in outer:
        for _ in inner:
            break
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[0]).sum())
            optimizer.step()
            optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
    assert synced == [False, True, False, True, True]
    assert model.weight.grad is None  # the short last group was used
    assert not accelerator.gradient_state.in_dataloader


def test_tensors_of_unequal_shapes_raise_instead_of_giving_garbage() -> None:
    def body(accelerator: Accelerator) -> Any:
        mine = torch.arange(3 + accelerator.process_index)
        first = told(lambda: accelerator.gather(mine))
        padded = accelerator.pad_across_processes(mine, pad_index=-1)
        return first, accelerator.gather(padded).tolist()

    for message, after in together(body):
        assert message.startswith("CollectiveMismatch")
        assert "int64 (3,)" in message
        assert "int64 (4,)" in message
        assert after == [0, 1, 2, -1, 0, 1, 2, 3]


@pytest.mark.parametrize("seedable", [False, True])
def test_differently_seeded_processes_draw_every_sample_once(seedable: bool) -> None:
    def body(accelerator: Accelerator) -> Any:
        torch.manual_seed(100 + accelerator.process_index)
        loader = accelerator.prepare(numbers(12, 3, shuffle=True))
        return [[i for batch in loader for i in rows(batch)] for _ in range(2)]

    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    first, second = together(body, dataloader_config=config)
    for epoch in (0, 1):
        assert sorted(first[epoch] + second[epoch]) == list(range(12))
    assert first[0] != first[1]


def resume(folder: Path, seed: int, **arguments: Any) -> Any:
    def body(accelerator: Accelerator) -> Any:
        torch.manual_seed(seed)
        loader = accelerator.prepare(numbers(12, 2, shuffle=True))
        for _ in loader:
            pass
        done = []
        for number, batch in enumerate(loader):
            done.append(rows(batch))
            if number == 0:
                accelerator.save_state(folder)
        third = [rows(batch) for batch in loader]

        torch.manual_seed(seed + 77)  # another process, later
        again = Accelerator(cpu=True, **arguments)
        reborn = again.prepare(numbers(12, 2, shuffle=True))
        again.load_state(folder)
        epoch = reborn.iteration
        rest = [rows(batch) for batch in again.skip_first_batches(reborn)]
        return epoch, done[1:] == rest, third == [rows(batch) for batch in reborn]

    return together(body, **arguments)


@pytest.mark.parametrize("seedable", [False, True])
def test_loading_a_state_brings_back_epoch_and_order_of_the_loaders(
    tmp_path: Path, seedable: bool
) -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=seedable)
    assert resume(tmp_path / "state", 5, dataloader_config=config) == [(1, True, True)] * 2
    assert (tmp_path / "state" / "sampler.bin").stat().st_size > 0


@pytest.mark.filterwarnings("ignore:GradientAccumulationPlugin:UserWarning")  # at the first True
@pytest.mark.parametrize(
    ("adjust", "epochs"),
    [(True, [0, 2, 2, 4, 5]), (None, [0, 1, 1, 2, 3]), (False, [0, 1, 1, 2, 3])],
)
def test_a_schedule_in_batches_advances_by_every_batch_of_a_group(
    adjust: bool | None, epochs: list[int]
) -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=2, adjust_scheduler=adjust
        ),
    )
    model = line()
    optimizer = sgd(model)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, numbers(5, 1), LambdaLR(optimizer, lambda n: 1 / (n + 1))
    )
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[0]).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(scheduler.last_epoch)
    assert seen == epochs


def test_split_batches_as_an_argument_is_honoured() -> None:
    def body(accelerator: Accelerator) -> Any:
        return accelerator.split_batches, [rows(b) for b in accelerator.prepare(numbers(8, 4))]

    assert together(body, split_batches=True) == [
        (True, [[0, 1], [4, 5]]),
        (True, [[2, 3], [6, 7]]),
    ]
    with pytest.raises(ConfigError, match="contradicts dataloader_config"):
        Accelerator(split_batches=True, dataloader_config=DataLoaderConfiguration())


def test_what_the_call_says_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    plain = Accelerator(cpu=True)
    assert (plain.gradient_accumulation_steps, plain.mixed_precision) == (7, "bf16")
    said = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="no")
    assert (said.gradient_accumulation_steps, said.mixed_precision) == (4, "no")
    # Also where it says what would be the default.
    assert Accelerator(cpu=True, gradient_accumulation_steps=1).gradient_accumulation_steps == 1
    plugin = GradientAccumulationPlugin(num_steps=3)
    by_plugin = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    assert by_plugin.gradient_accumulation_steps == 3


def test_a_failed_start_says_why_and_does_not_poison_the_next_one() -> None:
    for _ in range(2):
        with pytest.raises(NbaccelError, match="fp8"):
            Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"

    def body(accelerator: Accelerator) -> Any:
        handlers = [TERecipeKwargs()]
        failed = told(
            lambda: Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
        )
        return failed, accelerator.gather(torch.tensor(accelerator.process_index)).tolist()

    for failed, gathered in together(body):
        assert "fp8" in failed
        assert gathered == [0, 1]


def test_uneven_inputs_can_be_joined_on_the_cpu() -> None:
    def body(accelerator: Accelerator) -> Any:
        model = line()
        model, optimizer, loader = accelerator.prepare(model, sgd(model), numbers(5, 1))
        before = len(loader)
        count = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            during = len(loader)
            for batch in loader:
                count += 1
                accelerator.backward(model(batch[0]).sum())
                optimizer.step()
                optimizer.zero_grad()
        return before, during, count, len(loader), weight(model)

    (*first, w0), (*second, w1) = together(body)
    assert first == [3, 3, 3, 3]
    assert second == [3, 2, 2, 3]
    assert w0 == w1
    # 0.1 * the mean over two processes of 0 + 1, 2 + 3 and 4 + nothing
    assert w0 == pytest.approx(1 - 0.1 * (0.5 + 2.5 + 2.0))


def test_sharded_models_refuse_to_join_uneven_inputs() -> None:
    def body(accelerator: Accelerator) -> Any:
        model = accelerator.prepare(nn.Linear(4, 4))

        def join() -> None:
            with accelerator.join_uneven_inputs([model]):
                pass

        return told(join)

    for message in together(body, fsdp_plugin=FullyShardedDataParallelPlugin()):
        assert message.startswith("ConfigError")
        assert "even_batches=True" in message


def test_a_second_accelerator_leaves_the_first_ones_steps_alone() -> None:
    first = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator(cpu=True)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 1)
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    with first.accumulate():
        assert not first.sync_gradients
        assert second.sync_gradients


@pytest.mark.parametrize(
    "name",
    ["dispatch_batches", "even_batches", "use_seedable_sampler", "logging_dir"],
)
def test_arguments_that_do_not_exist_are_refused(name: str) -> None:
    make: Any = Accelerator
    with pytest.raises(TypeError, match=name):
        make(**{name: True})


def test_fp16_on_the_cpu_computes_in_fp16_and_scales_the_loss() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
    )
    seen = []
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    inner: list[torch.dtype] = []
    body = nn.Sequential(model)
    model.register_forward_hook(lambda _m, _i, out: inner.append(out.dtype))
    body, optimizer = accelerator.prepare(body, sgd(body))
    out = body(torch.ones(1, 1))
    assert inner == [torch.float16]
    assert seen == [True]
    assert out.dtype == torch.float32
    accelerator.backward(out.sum())
    assert float(model.weight.grad) == 8.0
    optimizer.step()
    assert weight(body) == pytest.approx(0.9)


def test_splitting_a_dict_leaves_the_callers_one_as_it_was() -> None:
    def body(accelerator: Accelerator) -> Any:
        mine = {"a": [1, 2, 3], "b": {"c": torch.arange(3)}["c"]}
        with accelerator.split_between_processes(mine) as part:
            return len(part["a"]), len(part["b"]), len(mine["a"]), len(mine["b"])

    assert together(body) == [(2, 2, 3, 3), (1, 1, 3, 3)]


def test_what_is_no_tensor_cannot_be_gathered_and_is_named() -> None:
    def body(accelerator: Accelerator) -> Any:
        message = told(lambda: accelerator.gather({"x": torch.ones(1), "name": "me"}))
        return message, accelerator.gather_for_metrics([f"p{accelerator.process_index}"])

    for message, objects in together(body):
        assert message.startswith("TypeError")
        assert "got str" in message
        assert objects == ["p0", "p1"]
