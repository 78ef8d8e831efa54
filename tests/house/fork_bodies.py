"""Tests for `test_harness.py`, which runs them in a process in which CUDA seems to be in use."""

from __future__ import annotations

import pytest

from nbaccel import notebook_launcher


@pytest.mark.forks
@pytest.mark.parametrize("word", ["skip", "fail"])
def test_with_the_mark(word: str) -> None:
    getattr(pytest, word)("as asked")


def test_without_the_mark() -> None:
    notebook_launcher(int, (), 2, start_method="fork")
