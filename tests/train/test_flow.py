from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from nbaccel import PartialState, notebook_launcher
from tests.accelerator.loops import told


def each(body: Any, n: int = 2) -> list[Any]:
    """What ``body(state)`` returns on each of `n` processes."""

    def run() -> Any:
        return body(PartialState(cpu=True))

    return list(notebook_launcher(run, num_processes=n))


def test_every_process_knows_its_numbers() -> None:
    def body(state: PartialState) -> Any:
        return (
            state.process_index,
            state.local_process_index,
            state.num_processes,
            state.is_main_process,
            state.is_local_main_process,
            state.is_last_process,
            state.use_distributed,
            str(state.device),
        )

    assert each(body, 3) == [
        (0, 0, 3, True, True, False, True, "cpu"),
        (1, 1, 3, False, False, False, True, "cpu"),
        (2, 2, 3, False, False, True, True, "cpu"),
    ]
    assert body(PartialState(cpu=True)) == (0, 0, 1, True, True, True, False, "cpu")


def test_inputs_are_split_into_contiguous_parts_and_tensors_by_rows() -> None:
    rows = torch.arange(6).view(3, 2)
    padded = {"apply_padding": True}
    cases: list[tuple[Any, dict[str, Any], list[Any]]] = [
        ((0, 1, 2), {}, [(0, 1), (2,)]),
        ([], {}, [[], []]),
        ("text", {}, ["text", "text"]),
        ({"a": [1, 2], "b": [4, 5]}, {}, [{"a": [1], "b": [4]}, {"a": [2], "b": [5]}]),
        (rows, {}, [[[0, 1], [2, 3]], [[4, 5]]]),
        (rows, padded, [[[0, 1], [2, 3]], [[4, 5], [4, 5]]]),
        (torch.arange(1), padded, [[0], [0]]),
    ]

    def body(state: PartialState) -> Any:
        parts = []
        for inputs, options, _ in cases:
            with state.split_between_processes(inputs, **options) as part:
                parts.append(part.tolist() if isinstance(part, torch.Tensor) else part)
        return parts

    def by_three(state: PartialState) -> Any:
        with (
            state.split_between_processes([0, 1, 2, 3, 4]) as five,
            state.split_between_processes([7]) as one,
        ):
            return five, one

    for found, (_, _, expected) in zip(zip(*each(body), strict=True), cases, strict=True):
        assert list(found) == expected
    assert each(by_three, 3) == [([0, 1], [7]), ([2, 3], []), ([4], [])]


def test_values_of_different_lengths_are_refused_and_one_process_gets_all() -> None:
    def body(state: PartialState) -> Any:
        def call() -> None:
            with state.split_between_processes({"a": [1, 2], "b": [1]}):
                pass

        return told(call)

    for message in each(body):
        assert message.startswith("ConfigError")
        assert "{'a': 2, 'b': 1}" in message
    mine = [1, 2]
    with PartialState(cpu=True).split_between_processes(mine) as part:
        assert part is mine


def test_functions_run_on_the_processes_they_are_for() -> None:
    def body(state: PartialState) -> Any:
        def here() -> int:
            """Says where."""
            return state.process_index

        @state.on_process(process_index=1)
        def only_one() -> int:
            return state.process_index

        chosen = [
            state.on_main_process(here),
            state.on_local_main_process(here),
            state.on_last_process(here),
            only_one,
            state.on_local_process(local_process_index=2)(here),
            state.on_process(here, 0),
        ]
        wrong = told(lambda: state.on_process(here, process_index=3))
        return [one() for one in chosen], {one.__name__ for one in chosen}, wrong

    found = each(body, 3)
    assert [ran for ran, _, _ in found] == [
        [0, 0, None, None, None, 0],
        [None, None, None, 1, None, None],
        [None, None, 2, None, 2, None],
    ]
    for _, names, wrong in found:
        assert names == {"here", "only_one"}
        assert "process_index=3 names no process: there are 3" in wrong


def test_the_main_process_goes_first_also_if_it_fails() -> None:
    def body(state: PartialState) -> Any:
        found = []
        for first in (state.main_process_first, state.local_main_process_first):
            with first():
                if state.is_main_process:
                    time.sleep(0.1)
                found.append(time.time())

        def failing() -> None:
            with state.main_process_first():
                if state.is_main_process:
                    raise OSError("the disk is full")

        return found, told(failing), state.wait_for_everyone()

    (main, failed, _), (other, fine, _) = each(body)
    assert all(m < o for m, o in zip(main, other, strict=True))
    assert failed == "OSError: the disk is full"
    assert fine == "nothing was raised"


def test_printing_happens_once(capfd: pytest.CaptureFixture[str]) -> None:
    def body(state: PartialState) -> None:
        state.print("hello from", state.process_index, sep=" ", end="!\n")

    each(body, 3)
    captured = capfd.readouterr().out
    assert captured.count("hello from") == 1
    assert "hello from 0!" in captured
