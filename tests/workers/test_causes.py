"""What a failure says of its cause, when it is long, wrapped or a group; with real processes."""

from __future__ import annotations

import builtins
import dataclasses
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from nbaccel import WorkerFailed, notebook_launcher
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


def test_head_and_tail_of_a_long_message_are_shown_and_a_huge_one_does_not_travel(fail):
    def explain() -> None:
        lines = (f"line {i} {'x' * 300 * (i > 1)}" for i in range(500))
        raise ValueError("\n".join(lines) + "\nTHE ACTUAL CAUSE")

    text = str(fail(explain))
    assert len(text.splitlines()) <= 40
    assert "raised ValueError: line 0 \n  line 1 \n" in text
    assert "more lines\n" in text
    assert "  THE ACTUAL CAUSE\n" in text

    def explain_at_length() -> None:
        raise ValueError("the start " + "x" * 30_000_000 + " the end")

    error = fail(explain_at_length)
    text = str(error)
    assert "the start xxx" in text
    assert "xxx the end\n" in text
    assert "29,999,018 characters not shown" in text
    assert len(text) < 5_000
    assert len(str(error.__cause__)) < 30_000


class Labels(Dataset[int]):
    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise self.error()  # in row 7
        return index


def with_cause() -> BaseException:
    error = OSError("cannot read row 7")
    error.__cause__ = ValueError("seven")
    return error


def test_an_error_of_a_dataloader_worker_is_told_as_the_original(fail):
    errors = [
        lambda: KeyError("label column missing in row 7"),
        # Torch raises RuntimeError for a class that takes other arguments than a text.
        lambda: CallersError(17, "seventeen\nis too many"),
        with_cause,
    ]

    def train(number: int) -> None:
        for _ in DataLoader(Labels(errors[number]), batch_size=4, num_workers=1):
            pass

    error, callers, caused = (fail(partial(train, number)) for number in range(3))
    text = str(error)
    assert isinstance(error, KeyError)
    assert "raised KeyError: 'label column missing in row 7'\n" in text
    assert "raise self.error()  # in row 7" in text, "the line of the dataset"
    assert "for _ in DataLoader(" in text, "the line of the loop"
    assert "in DataLoader worker process 0" in text
    assert "Original Traceback" not in text
    assert "_worker_loop" in str(error.__cause__), "the whole stack"
    assert isinstance(callers, CallersError)
    assert "CallersError: 17: seventeen\n  is too many\n" in str(callers)
    assert isinstance(caused, OSError)
    assert "raised OSError: cannot read row 7\n" in str(caused)


def test_classes_of_the_notebook_come_out_of_dataloader_workers():
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


def test_lack_of_memory_and_texts_of_libraries_are_told_as_what_they_are(fail):
    def raise_error(error: Exception | None) -> None:
        if error is None:
            # Its class calls itself MemoryError, and so cannot be found by its name.
            np.zeros((1 << 20, 1 << 20, 1 << 10))
        raise error

    only_like_torchs = "Caught ValueError in replica 0.\nOriginal Traceback (most recent)\n x"
    of_deepspeed = "Detected a disagreement on list contents between rank0 and rank1: ..."
    for error, kind, says in (
        (MemoryError("nothing is left"), MemoryError, "raised MemoryError: nothing is left"),
        (None, MemoryError, "Unable to allocate 8.00 PiB"),
        (RuntimeError(only_like_torchs), WorkerFailed, "RuntimeError: Caught ValueError in rep"),
        (RuntimeError(of_deepspeed), WorkerFailed, "all ranks must run the same modules, in the"),
    ):
        found = fail(partial(raise_error, error))
        assert isinstance(found, kind)
        assert says in str(found)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_of_a_group_every_exception_is_told_with_its_line(fail):
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
