"""Tests that fork pass where a library uses the CUDA driver, as on any machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.apart import OUTCOMES
from tests.isolation import ROOT

pytestmark = pytest.mark.slow

FORKS = (
    "tests/output/test_worker_prints.py::test_lines_are_shown_while_the_workers_run",
    "tests/workers/test_causes.py::test_the_last_lines_of_a_long_message_are_shown",
)
BODIES = "tests/house/fork_bodies.py"


@pytest.mark.skipif(not os.access("/dev", os.W_OK), reason="needs a /dev to describe a GPU in")
def test_tests_that_fork_get_a_process_of_their_own_where_cuda_is_in_use() -> None:
    plugins = ["-p", "no:cacheprovider", "-p", "tests.described_gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rfsp", *plugins, BODIES, *FORKS],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name != OUTCOMES},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = done.stdout
    for nodeid in (FORKS[0], *(f"{FORKS[1]}[{method}]" for method in ("template", "fork"))):
        assert f"PASSED {nodeid}" in said, said
    assert f"FAILED {BODIES}::test_with_the_mark[fail]" in said, said
    assert f"FAILED {BODIES}::test_without_the_mark" in said, said
    assert "a library other than torch uses the CUDA driver in this process" in said
    assert said.splitlines()[-1].strip("= ").startswith("2 failed, 3 passed, 1 skipped"), said
