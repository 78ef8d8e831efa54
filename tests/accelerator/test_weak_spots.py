"""Where Accelerate hangs, gives wrong numbers or ignores an argument: one test for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from nbaccel.errors import ConfigError, NbaccelError
from nbaccel.utils import TERecipeKwargs
from tests.accelerator.loops import line, numbers, rows, sgd, together, told, weight


def test_split_batches_as_an_argument_is_honoured() -> None:
    def body(accelerator: Accelerator) -> Any:
        return accelerator.split_batches, [rows(b) for b in accelerator.prepare(numbers(8, 4))]

    assert together(body, split_batches=True) == [
        (True, [[0, 1], [4, 5]]),
        (True, [[2, 3], [6, 7]]),
    ]
    with pytest.raises(ConfigError, match=r"and dataloader_config=.*only one of them can hold"):
        Accelerator(split_batches=True, dataloader_config=DataLoaderConfiguration())


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


def test_a_setting_that_an_iterable_dataset_ignores_is_told() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(DataLoader(type("Numbers", (IterableDataset,), {"__iter__": iter})()))
    joining = accelerator.join_uneven_inputs([], even_batches=False)
    with (
        pytest.warns(UserWarning, match="even_batches=False.*only supported for map-style"),
        joining,
    ):
        assert accelerator.num_processes == 1


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
