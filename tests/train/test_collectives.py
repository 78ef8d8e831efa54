from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbaccel import WorkerFailed, notebook_launcher
from nbaccel.abc.place import Place
from nbaccel.errors import CollectiveMismatch, CollectiveTimeout, ConfigError
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process

ALONE = Collectives(Place(device=torch.device("cpu")))


def together(body: Callable[[Collectives], Any], *, timeout_s: float = 30, n: int = 2) -> list[Any]:
    """What `body` returns on each of `n` processes."""

    def run() -> Any:
        return body(Collectives(init_process(cpu=True), timeout_s))

    return notebook_launcher(run, num_processes=n)


def test_tensors_are_joined_in_order_of_rank_whatever_holds_them() -> None:
    def body(c: Collectives) -> Any:
        rank = c.place.rank
        return c.gather(
            {
                "rows": torch.full((2, 3), rank),
                "scalar": torch.tensor(rank + 0.5),
                "truth": (torch.tensor([rank == 0]),),
                "turned": torch.arange(6).view(2, 3).t() + 10 * rank,
            }
        )

    for found in together(body):
        assert found["rows"].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
        assert found["scalar"].tolist() == [0.5, 1.5]
        assert found["truth"][0].tolist() == [True, False]
        assert found["turned"].shape == (6, 2)
        assert found["turned"][3:].tolist() == [[10, 13], [11, 14], [12, 15]]


@pytest.mark.parametrize("dtype", ["int16", "uint16", "float8_e4m3fn", "bfloat16", "bool"])
def test_tensors_of_every_dtype_are_joined(dtype: str) -> None:
    def body(c: Collectives) -> Any:
        mine = torch.tensor([[c.place.rank], [1]]).to(getattr(torch, dtype))
        found = c.gather(mine)
        return str(found.dtype), found.to(torch.int64).tolist()

    assert list(together(body)) == [(f"torch.{dtype}", [[0], [1], [1], [1]])] * 2


def test_objects_are_joined_in_order_of_rank() -> None:
    found = together(lambda c: c.gather_object([c.place.rank] * (c.place.rank + 1)))
    assert list(found) == [[0, 1, 1]] * 2


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum", [3, 5]), ("mean", [1.5, 2.5]), ("max", [2, 4]), ("none", None)],
)
def test_reductions_combine_element_by_element(reduction: str, expected: Any) -> None:
    def body(c: Collectives) -> Any:
        mine = torch.tensor([1, 1]) if c.place.rank == 0 else torch.tensor([2, 4])
        return c.reduce({"x": mine}, reduction)["x"].tolist()

    found = together(body)
    assert list(found) == ([expected] * 2 if expected else [[1, 1], [2, 4]])


def test_the_scale_of_a_reduction_holds_on_every_device() -> None:
    """Accelerate honours it on TPUs alone."""
    found = together(lambda c: c.reduce(torch.ones(2), "sum", scale=0.25).tolist())
    assert list(found) == [[0.5, 0.5]] * 2


def test_a_broadcast_fills_everybodys_tensors_in_place() -> None:
    def body(c: Collectives) -> Any:
        mine = torch.full((2,), float(c.place.rank))
        found = c.broadcast([mine], from_process=1)
        return found[0] is mine, mine.tolist(), c.broadcast_object({"from": c.place.rank})

    assert list(together(body)) == [(True, [1, 1], {"from": 0})] * 2


@pytest.mark.parametrize(
    ("first", "rows"), [(False, [[1, 2, -1], [1, 2, 3]]), (True, [[-1, 1, 2], [1, 2, 3]])]
)
def test_tensors_are_made_equally_long(first: bool, rows: list[list[int]]) -> None:
    def body(c: Collectives) -> Any:
        mine = torch.arange(1, c.place.rank + 3)
        return c.pad_across_processes(
            {"x": mine, "scalar": torch.tensor(1)}, pad_index=-1, pad_first=first
        )["x"].tolist()

    assert list(together(body)) == rows


def test_tensors_of_different_numbers_of_dimensions_are_told_apart() -> None:
    def body(collectives: Collectives) -> str:
        shape = (1, 5) if collectives.place.rank == 0 else (1, 1, 6)
        try:
            collectives.pad_across_processes({"tensor": torch.zeros(shape)}, dim=0)
        except CollectiveMismatch as error:
            return str(error)
        return "nothing was raised"

    for text in together(body):
        assert "process 0: [1, 5], process 1: [1, 1, 6]" in text


def test_padding_works_on_any_dimension() -> None:
    def body(c: Collectives) -> Any:
        r = c.place.rank
        x = torch.ones(2, r + 1, 3)
        return [tuple(c.pad_across_processes(x, dim=dim).shape) for dim in (1, -2)] + [
            tuple(c.pad_across_processes(torch.ones(2, 3), dim=5).shape)
        ]

    assert list(together(body)) == [[(2, 2, 3), (2, 2, 3), (2, 3)]] * 2


# ------------------------------------------------------------------------- alone


def test_one_process_gets_back_what_it_gave() -> None:
    x = torch.tensor(3.0)
    assert ALONE.gather(x) is x
    assert ALONE.gather_object([1, 2]) == [1, 2]
    assert ALONE.pad_across_processes(x) is x
    assert ALONE.broadcast_object("a") == "a"
    assert ALONE.reduce(torch.tensor([2.0, 4.0]), "mean").tolist() == [2, 4]
    assert ALONE.answers("anything", 5) == [5]
    ALONE.barrier()


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reduction='avg'.*sum, mean, max"):
        ALONE.reduce(torch.ones(1), "avg")


# ------------------------------------------------------------------------- going wrong


def test_uneven_tensors_raise_with_every_shape_where_gloo_returns_garbage() -> None:
    with pytest.raises(WorkerFailed, match=r"process 0: float32 \(1, 4\)") as caught:
        together(lambda c: c.gather(torch.ones(c.place.rank + 1, 4)))
    assert "process 1: float32 (2, 4)" in str(caught.value)
    assert "pad_across_processes" in str(caught.value)
    assert isinstance(caught.value, CollectiveMismatch)


def test_different_collectives_raise_on_all_processes() -> None:
    def body(c: Collectives) -> Any:
        x = torch.ones(2)
        try:
            return c.gather(x) if c.place.rank else c.reduce(x)
        except CollectiveMismatch as error:
            return str(error)

    for text in together(body):
        assert "process 0: reduce, test_collectives.py:" in text
        assert "process 1: gather, test_collectives.py:" in text
        assert "return c.gather(x) if c.place.rank else c.reduce(x)" in text


def test_a_process_that_does_not_come_is_named_with_the_line_it_was_last_seen_at() -> None:
    def body(c: Collectives) -> Any:
        c.barrier("warm up")
        if c.place.rank == 1:
            time.sleep(1.5)  # busy elsewhere
            return None
        try:
            c.gather(torch.ones(1))
        except CollectiveTimeout as error:
            return str(error)
        return "came"

    text, _ = together(body, timeout_s=0.6)
    assert re.search(r"process 0 has waited 6\d\d ms in gather, test_collectives.py:\d+", text)
    assert "1 of 2 processes did not come:" in text
    assert "process 1: last seen in warm up, test_collectives.py:" in text


def test_a_long_wait_is_told_before_it_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    def body(c: Collectives) -> str:
        c.barrier("warm up")
        if c.place.rank == 1:
            time.sleep(1.2)
        c.barrier("late")
        return "came"

    assert list(together(body, timeout_s=2)) == ["came", "came"]
    shown = capfd.readouterr()
    assert "process 0 has waited 1.0 s in late" in shown.out + shown.err


def test_a_process_that_has_never_come_is_told_so() -> None:
    def body(c: Collectives) -> Any:
        c.answers("first", 0)
        other = Collectives(c.place, 0.4)
        torch.distributed.barrier()
        if c.place.rank == 0:
            time.sleep(1.0)
            return None
        try:
            other.barrier("second")
        except CollectiveTimeout as error:
            return str(error)
        return "came"

    _, text = together(body)
    assert "process 0: last seen in first" in text


def test_a_leaf_without_a_shape_is_refused_by_name() -> None:
    def body(c: Collectives) -> Any:
        try:
            c.gather({"x": torch.ones(1), "name": "text"})
        except TypeError as error:
            return str(error)
        return None

    for text in together(body):
        assert "got str in it" in text
        assert "gather_object" in text


def test_collectives_of_a_second_group_on_the_same_store_start_afresh() -> None:
    def body(c: Collectives) -> Any:
        first = c.gather(torch.tensor([c.place.rank])).tolist()
        torch.distributed.destroy_process_group()
        again = Collectives(init_process(cpu=True), 10)
        return first, again.gather(torch.tensor([c.place.rank + 10])).tolist()

    assert list(together(body)) == [([0, 1], [10, 11])] * 2
