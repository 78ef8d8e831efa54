"""What a failure says of its cause, when it is long, wrapped or a group; with real processes."""

from __future__ import annotations

import builtins
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from nbaccel import Pool, WorkerFailed, notebook_launcher
from tests.worker_functions import CallersError

ExceptionGroup: Any = getattr(builtins, "ExceptionGroup", None)  # Python 3.11
Fail = Callable[[Callable[[], Any]], WorkerFailed]


@pytest.fixture(params=["template", "fork"])
def fail(request: pytest.FixtureRequest) -> Fail:
    """Launch in two workers what raises; what the notebook gets."""

    def launch(function: Callable[[], Any]) -> WorkerFailed:
        with pytest.raises(WorkerFailed) as caught:
            notebook_launcher(function, (), 2, start_method=request.param)
        return caught.value

    return launch


def test_ranks_that_ran_other_modules_under_zero_3_are_told_what_must_be_alike() -> None:
    def disagree() -> None:  # the text of DeepSpeed 0.19
        raise RuntimeError("Detected a disagreement on list contents between rank0 and rank1: ...")

    with pytest.raises(
        WorkerFailed, match="all ranks must run the same modules, in the same order"
    ):
        notebook_launcher(disagree, (), 2)


# ------------------------------------------------------------------------- long messages


def test_the_last_lines_of_a_long_message_are_shown(fail: Fail) -> None:
    def explain() -> None:
        lines = (f"line {i} {'x' * 300 * (i > 1)}" for i in range(500))
        raise ValueError("\n".join(lines) + "\nTHE ACTUAL CAUSE")

    text = str(fail(explain))
    assert len(text.splitlines()) <= 40
    assert "raised ValueError: line 0 \n  line 1 \n" in text
    assert "more lines\n" in text
    assert "  THE ACTUAL CAUSE\n" in text


def test_a_huge_message_does_not_travel(fail: Fail) -> None:
    def explain() -> None:
        raise ValueError("the start " + "x" * 30_000_000 + " the end")

    error = fail(explain)
    text = str(error)
    assert "the start xxx" in text
    assert "xxx the end\n" in text
    assert "29,999,018 characters not shown" in text
    assert len(text) < 5_000
    assert len(str(error.__cause__)) < 30_000


# ------------------------------------------------------------------------- DataLoader workers


class Labels(Dataset[int]):
    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise self.error()  # in row 7
        return index


def load(error: Callable[[], BaseException]) -> Callable[[], None]:
    def train() -> None:
        for _ in DataLoader(Labels(error), batch_size=4, num_workers=1):
            pass

    return train


def test_an_error_of_a_dataloader_worker_is_told_as_the_original(fail: Fail) -> None:
    error = fail(load(lambda: KeyError("label column missing in row 7")))
    text = str(error)
    assert isinstance(error, KeyError)
    assert "raised KeyError: 'label column missing in row 7'\n" in text
    assert "raise self.error()  # in row 7" in text, "the line of the dataset"
    assert "for _ in DataLoader(" in text, "the line of the loop"
    assert "in DataLoader worker process 0" in text
    assert "Original Traceback" not in text
    assert "_worker_loop" in str(error.__cause__), "the whole stack"


def test_an_error_of_a_dataloader_worker_keeps_its_class(fail: Fail) -> None:
    """Torch raises RuntimeError for a class that takes other arguments than a text."""
    error = fail(load(lambda: CallersError(17, "seventeen\nis too many")))
    assert isinstance(error, CallersError)
    assert "CallersError: 17: seventeen\n  is too many\n" in str(error)


def test_a_cause_of_an_error_in_a_dataloader_worker_does_not_hide_it(fail: Fail) -> None:
    def make() -> BaseException:
        try:
            return int("seven")  # type: ignore[return-value]
        except ValueError as cause:
            error = OSError("cannot read row 7")
            error.__cause__ = cause
            return error

    error = fail(load(make))
    assert isinstance(error, OSError)
    assert "raised OSError: cannot read row 7\n" in str(error)


def test_an_error_that_only_looks_like_torchs_is_left_alone(fail: Fail) -> None:
    def train() -> None:
        raise RuntimeError("Caught ValueError in replica 0.\nOriginal Traceback (most recent)\n x")

    assert "raised RuntimeError: Caught ValueError in replica 0." in str(fail(train))


def test_classes_of_the_notebook_come_out_of_dataloader_workers() -> None:
    """They are pickled by `multiprocessing`, by a name that only the notebook's `__main__` has."""

    @dataclasses.dataclass
    class Batch:
        total: int

    class OwnError(Exception):
        pass

    for kind in (Batch, OwnError):
        kind.__module__, kind.__qualname__ = "__main__", kind.__name__

    def train(breaks: bool) -> list[Any]:
        def collate(rows: list[int]) -> Batch:
            if breaks:
                raise OwnError("mine")
            return Batch(sum(rows))

        found = [*DataLoader(range(8), batch_size=4, num_workers=1, collate_fn=collate)]
        return [isinstance(batch, Batch) and batch.total for batch in found]

    launch: dict[str, Any] = {"num_processes": 2, "start_method": "template", "timeout": 60}
    assert notebook_launcher(train, (False,), **launch) == [[6, 22]] * 2
    with pytest.raises(OwnError, match="OwnError: mine"):
        notebook_launcher(train, (True,), **launch)


# ------------------------------------------------------------------------- classes


def lack_numpys() -> None:
    """The class calls itself MemoryError, and so cannot be found by its name."""
    np.zeros((1 << 20, 1 << 20, 1 << 10))


def lack() -> None:
    raise MemoryError("nothing is left")


@pytest.mark.parametrize(
    ("work", "says"),
    [(lack, "raised MemoryError: nothing is left"), (lack_numpys, "Unable to allocate 8.00 PiB")],
)
def test_lack_of_memory_is_caught_as_such(fail: Fail, work: Callable[[], None], says: str) -> None:
    error = fail(work)
    assert isinstance(error, MemoryError)
    assert says in str(error)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_of_a_group_every_exception_is_told_with_its_line(fail: Fail) -> None:
    def check() -> None:
        found: list[Exception] = []
        for column in ("a", "b"):
            try:
                {}[column]
            except KeyError as error:
                found.append(error)
        deeper = ExceptionGroup("deeper", [ValueError("z" * 1_000_000)])
        group = ExceptionGroup("two columns", [*found, deeper])
        group.add_note("while loading")
        raise group

    error = fail(check)
    text = str(error)
    assert isinstance(error, ExceptionGroup)
    assert "raised ExceptionGroup: two columns (3 sub-exceptions)" in text
    assert re.search(r"  1\. KeyError: 'a'\n.*in check\n.*\{\}\[column\]", text)
    assert "  2. KeyError: 'b'\n" in text
    assert "  3. ValueError: zzz" in text
    assert "while loading" in text
    assert len(text) < 6_000
    assert len(text.splitlines()) <= 40
    assert "two columns" in str(error.__cause__)
    assert [type(one) for one in error.exceptions] == [KeyError, KeyError, ExceptionGroup]


# ------------------------------------------------------------------------- children


@pytest.mark.forks
def test_a_child_that_returns_from_the_function_is_not_the_rank() -> None:
    def split() -> int:
        os.fork()
        return os.getpid()

    for method in ("template", "fork"):
        found = notebook_launcher(split, (), 2, start_method=method, timeout=60)
        assert len(set(found)) == 2

    def split_and_raise() -> int:
        if os.fork() == 0:
            raise ValueError("in the child")
        return 1

    assert notebook_launcher(split_and_raise, (), 2, timeout=60) == [1, 1]


def test_a_child_that_comes_to_the_end_of_a_cell_is_not_the_worker() -> None:
    with Pool(2, namespace={}, timeout=60) as pool:
        pool.run("import os\nchild = os.fork()\nmine = os.getpid()")
        assert all(pool.pull("child")["child"])
        first = pool.pull("mine")["mine"]
        pool.run("mine = os.getpid()")
        assert pool.pull("mine")["mine"] == first
