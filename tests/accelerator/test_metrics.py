from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from nbaccel import Accelerator, DataLoaderConfiguration
from tests.accelerator.loops import numbers, rows, together


class Output(NamedTuple):
    logits: torch.Tensor
    labels: torch.Tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "batch_size", "options", "expected"),
    [
        (10, 3, {}, range(10)),
        (12, 3, {}, range(12)),
        (10, 4, {"split_batches": True}, range(10)),
        (10, 3, {"dispatch_batches": True}, range(10)),
        (10, 3, {"even_batches": False, "dispatch_batches": True}, range(10)),
        (1, 4, {}, range(1)),
        (3, 4, {}, range(3)),
    ],
)
def test_metrics_have_every_sample_once(
    n: int, batch_size: int, options: dict[str, Any], expected: range
) -> None:
    def body(accelerator: Accelerator) -> Any:
        loader = accelerator.prepare(numbers(n, batch_size))
        return [i for batch in loader for i in rows(accelerator.gather_for_metrics(batch))]

    found = together(body, dataloader_config=DataLoaderConfiguration(**options))
    assert [sorted(one) for one in found] == [list(expected)] * 2


def test_an_accelerator_of_a_helper_function_knows_where_anothers_loader_is() -> None:
    def body(accelerator: Accelerator) -> Any:
        loader = accelerator.prepare(numbers(23, 4))

        def evaluate() -> list[int]:
            own = Accelerator(cpu=True)
            seen = [i for batch in loader for i in rows(own.gather_for_metrics(batch))]
            assert not own.gradient_state.in_dataloader
            return seen

        inner = Accelerator(cpu=True)
        its = inner.prepare(numbers(6, 3))
        for _ in loader:  # one's own loader comes before another one's
            assert inner.gradient_state.active_dataloader is loader
            for _ in its:
                assert inner.gradient_state.active_dataloader is its
                assert accelerator.gradient_state.active_dataloader is loader
        return evaluate()

    assert [sorted(one) for one in together(body)] == [list(range(23))] * 2


def test_metrics_of_any_shape_and_kind_are_cut_to_the_samples() -> None:
    def body(accelerator: Accelerator) -> Any:
        loader = accelerator.prepare(numbers(5, 2))
        found: dict[str, Any] = {}
        for batch in loader:  # rank 0: 0 1, 4 0; rank 1: 2 3, 1 2
            x = batch[0]
            tree = {"out": Output(x * 10, x[:, 0].long()), "list": [x.expand(-1, 2)]}
            gathered = accelerator.gather_for_metrics(tree)
            found["labels"] = gathered["out"].labels.tolist()
            found["kind"] = type(gathered["out"]).__name__
            found["wide"] = list(gathered["list"][0].shape)
            found["objects"] = accelerator.gather_for_metrics([f"s{i}" for i in rows(batch)])
            ragged = [torch.ones(i + 1) for i in rows(batch)]
            found["ragged"] = [
                len(t) for t in accelerator.gather_for_metrics(ragged, use_gather_object=True)
            ]
            found["mean"] = accelerator.gather_for_metrics(x.mean()).tolist()
        return found

    for found in together(body):
        assert found == {
            "labels": [4],
            "kind": "Output",
            "wide": [1, 2],
            "objects": ["s4"],
            "ragged": [5],
            "mean": [2.0],
        }


def test_nothing_is_cut_where_the_last_batch_is_dropped_or_no_loader_runs() -> None:
    def body(accelerator: Accelerator) -> Any:
        loader = accelerator.prepare(numbers(10, 3, drop_last=True))
        dropped = [i for batch in loader for i in rows(accelerator.gather_for_metrics(batch))]
        return dropped, accelerator.gather_for_metrics(torch.ones(3)).tolist()

    assert together(body) == [([0, 1, 2, 3, 4, 5], [1.0] * 6)] * 2


def test_values_are_combined_and_padded() -> None:
    def body(accelerator: Accelerator) -> Any:
        rank = accelerator.process_index
        mine = torch.tensor([1.0 + rank, 10.0])
        kept = mine.clone()
        return {
            "sum": accelerator.reduce(mine).tolist(),
            "mean": accelerator.reduce({"x": mine}, "mean")["x"].tolist(),
            "max": accelerator.reduce(mine, "max").tolist(),
            "scaled": accelerator.reduce(mine, "sum", scale=0.5).tolist(),
            "unchanged": torch.equal(mine, kept),
            "first": accelerator.pad_across_processes(
                torch.ones(1, 1 + rank), dim=1, pad_index=9, pad_first=True
            ).tolist(),
            "no such dim": accelerator.pad_across_processes(mine[: 1 + rank], dim=3).shape[0],
            "scalars": accelerator.gather(torch.tensor(rank)).tolist(),
        }

    for rank, found in enumerate(together(body)):
        assert found == {
            "sum": [3.0, 20.0],
            "mean": [1.5, 10.0],
            "max": [2.0, 10.0],
            "scaled": [1.5, 10.0],
            "unchanged": True,
            "first": [[1.0, 1.0] if rank else [9.0, 1.0]],
            "no such dim": 1 + rank,
            "scalars": [0, 1],
        }
