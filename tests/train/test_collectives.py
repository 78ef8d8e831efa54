from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

from nbaccel import WorkerFailed
from nbaccel.abc.place import Place
from nbaccel.errors import CollectiveMismatch, ConfigError
from nbaccel.train.call_check import default_group_check
from nbaccel.train.collectives import Collectives
from nbaccel.train.distributed import init_process
from tests.accelerator.loops import told
from tests.train.ranks import together

ALONE = Collectives(Place(device=torch.device("cpu")))
EACH_CHECK = pytest.mark.parametrize("check", ["first", "always", "off"])
COMPARING = pytest.mark.parametrize("check", ["first", "always"])


@EACH_CHECK
def test_tensors_are_joined_in_order_of_rank_and_broadcast_in_place(check):
    def body(c: Collectives) -> Any:
        rank = c.place.rank
        joined = c.gather(
            {
                "rows": torch.full((2, 3), rank),
                "scalar": torch.tensor(rank + 0.5),
                "truth": (torch.tensor([rank == 0]),),
                "turned": torch.arange(6).view(2, 3).t() + 10 * rank,
            }
        )
        mine = torch.nn.Parameter(torch.full((2,), float(rank)))
        sent = c.broadcast([mine], from_process=1)
        return joined, (sent[0] is mine, mine.tolist(), c.broadcast_object({"from": rank}))

    for joined, sent in together(body, check=check):
        assert joined["rows"].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
        assert joined["scalar"].tolist() == [0.5, 1.5]
        assert joined["truth"][0].tolist() == [True, False]
        assert joined["turned"].shape == (6, 2)
        assert joined["turned"][3:].tolist() == [[10, 13], [11, 14], [12, 15]]
        assert sent == (True, [1, 1], {"from": 0})


def test_tensors_of_every_dtype_and_views_are_joined_and_what_has_no_shape_is_refused():
    names = ["int16", "uint16", "float8_e4m3fn", "bfloat16", "bool", "complex64"]

    def body(c: Collectives) -> Any:
        found = []
        for name in names:
            mine = torch.tensor([[c.place.rank], [1]]).to(getattr(torch, name))
            joined = c.gather(mine)
            single = torch.tensor(c.place.rank).to(mine.dtype)
            c.broadcast(single, from_process=1)
            values = joined.real if joined.is_complex() else joined
            found.append((str(joined.dtype), values.to(torch.int64).tolist(), bool(single == 1)))
        mine = torch.tensor([1 + 2j])
        single = torch.arange(6).view(2, 3)[1:, 1:2]  # whose stride nobody looks at
        views = c.gather({"conj": mine.conj(), "imag": mine.conj().imag, "single": single})
        shape = (1, 5) if c.place.rank == 0 else (1, 1, 6)
        no_shape = told(lambda: c.gather({"x": torch.ones(1), "name": "text"}))
        uneven = told(lambda: c.pad_across_processes({"tensor": torch.zeros(shape)}, dim=0))
        return found, {name: view.tolist() for name, view in views.items()}, no_shape, uneven

    expected = [(f"torch.{name}", [[0], [1], [1], [1]], True) for name in names]
    for found, views, no_shape, uneven in together(body):
        assert found == expected
        assert views == {"conj": [1 - 2j] * 2, "imag": [-2] * 2, "single": [[4]] * 2}
        assert no_shape.startswith("TypeError")
        assert "got str in it" in no_shape
        assert "gather_object" in no_shape
        assert uneven.startswith("CollectiveMismatch")
        assert "process 0: [[1, 5]], process 1: [[1, 1, 6]]" in uneven


# ------------------------------------------------------------------------- alone


def test_one_process_gets_back_what_it_gave():
    x = torch.tensor(3.0)
    assert ALONE.gather(x) is x
    assert ALONE.gather_object([1, 2]) == [1, 2]
    assert ALONE.pad_across_processes(x) is x
    assert ALONE.broadcast_object("a") == "a"
    assert ALONE.reduce(torch.tensor([2.0, 4.0]), "mean").tolist() == [2, 4]
    assert ALONE.answers("anything", 5) == [5]
    ALONE.barrier()
    with pytest.raises(ConfigError, match=r"reduction='avg'.*sum, mean, max"):
        ALONE.reduce(torch.ones(1), "avg")


# ------------------------------------------------------------------------- going wrong


@COMPARING
def test_uneven_tensors_raise_with_every_shape_where_gloo_returns_garbage(check):
    with pytest.raises(WorkerFailed, match=r"process 0: float32 \(1, 4\)") as caught:
        together(lambda c: c.gather(torch.ones(c.place.rank + 1, 4)), check=check)
    assert "process 1: float32 (2, 4)" in str(caught.value)
    assert "pad_across_processes" in str(caught.value)
    assert isinstance(caught.value, CollectiveMismatch)


@COMPARING
def test_different_collectives_raise_on_all_processes(check):
    def body(c: Collectives) -> Any:
        x = torch.ones(2)
        return told(lambda: c.gather(x) if c.place.rank else c.reduce(x))

    for text in together(body, check=check):
        assert text.startswith("CollectiveMismatch")
        assert "process 0: reduce, test_collectives.py:" in text
        assert "process 1: gather, test_collectives.py:" in text
        assert "c.gather(x) if c.place.rank else c.reduce(x)" in text


@COMPARING
def test_a_process_that_does_not_come_is_named_with_the_line_it_was_last_seen_at(check):
    def body(c: Collectives) -> Any:
        c.barrier("warm up")
        if c.place.rank == 1:
            time.sleep(1.5)  # busy elsewhere
            return None
        return told(lambda: c.gather(torch.ones(1)))

    text, _ = together(body, timeout_s=0.6, check=check)
    assert text.startswith("CollectiveTimeout")
    assert re.search(r"process 0 has waited [\d.]+ m?s in gather, test_collectives.py:\d+", text)
    assert "1 of 2 processes did not come:" in text
    assert "process 1: last seen in warm up, test_collectives.py:" in text


@COMPARING
def test_a_long_wait_is_told_before_it_is_given_up(capfd, check):
    def body(c: Collectives) -> str:
        c.barrier("warm up")
        if c.place.rank == 1:
            time.sleep(1.2)
        c.barrier("late")
        return "came"

    assert list(together(body, timeout_s=2, check=check)) == ["came", "came"]
    shown = capfd.readouterr()
    assert re.search(r"process 0 has waited 1\.[01] s in late", shown.out + shown.err)


@COMPARING
def test_collectives_of_a_second_group_on_the_same_store_start_afresh(check):
    def body(c: Collectives) -> Any:
        first = c.gather(torch.tensor([c.place.rank])).tolist()
        torch.distributed.destroy_process_group()
        again = Collectives(init_process(cpu=True), 10)
        assert default_group_check().calls_begun == 0
        return first, again.gather(torch.tensor([c.place.rank + 10])).tolist()

    assert list(together(body, check=check)) == [([0, 1], [10, 11])] * 2


# ------------------------------------------------------------------------- many, and large


def test_eight_processes_get_what_torch_gives():
    def body(c: Collectives) -> Any:
        rank, found = c.place.rank, {}
        mine = torch.arange(6.0).view(2, 3) + rank
        summed, rows = mine.clone(), [torch.empty(2, 3) for _ in range(8)]
        torch.distributed.all_reduce(summed)
        torch.distributed.all_gather(rows, mine)
        found["gather"] = torch.equal(c.gather(mine), torch.cat(rows))
        found["reduce"] = torch.equal(c.reduce(mine, "sum"), summed)
        found["broadcast"] = c.broadcast(torch.tensor([rank]), 5).tolist()
        found["answers"] = c.answers("who", {"rank": rank})
        c.barrier()
        with pytest.raises(CollectiveMismatch) as caught:
            c.gather(torch.ones(rank // 7 + 1))
        found["named"] = [f"process {named}: float32" in str(caught.value) for named in range(8)]
        c.barrier()
        return found

    expected = {
        "named": [True] * 8,
        "gather": True,
        "reduce": True,
        "broadcast": [5],
        "answers": [{"rank": rank} for rank in range(8)],
    }
    assert list(together(body, n=8)) == [expected] * 8


def test_answers_of_any_length_are_exchanged_and_forgotten():
    def body(c: Collectives) -> Any:
        c.barrier()
        store = default_group_check()._store
        lengths = []
        num_before = store.num_keys()
        for turn in range(6):
            # A process forgets while it waits for others: each comes last once, and waits else.
            time.sleep(0.1 * (turn - 2 == c.place.rank))
            told = c.answers("long", "x" * (200_000 + 10 * turn + c.place.rank))
            lengths.append([len(text) - 200_000 for text in told])
        torch.distributed.barrier()
        num_more = store.num_keys() - num_before
        torch.distributed.barrier()  # a function that returns leaves a key, too
        return lengths, num_more

    for lengths, num_more in together(body, n=4):
        assert lengths == [[10 * turn + rank for rank in range(4)] for turn in range(6)]
        # Of each process the last two, and one more of that which came last to the last one.
        assert num_more <= 5
