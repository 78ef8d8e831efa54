"""Tests that fork pass in a process in which a library uses the CUDA driver, as any GPU machine has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.apart import IS_APART
from tests.isolation import ROOT

FORKS = [
    "tests/launch/test_loggers.py",
    "tests/workers/test_reaping.py::test_a_fork_of_the_notebook_ends_its_own",
    "tests/pool/test_pool.py::test_a_pool_can_be_forked_from_the_notebook",
]
A_FORK = """
import os
import pytest
from nbaccel import notebook_launcher
from nbaccel.devices.cuda import driver_in_use

def test_plain():
    assert driver_in_use()
    notebook_launcher(os.getpid, (), 2, start_method="fork")
"""


def run_with_a_described_gpu(*tests: str) -> str:
    if not os.access("/dev", os.W_OK):
        pytest.skip("needs a /dev that may be written to, to describe a GPU in it")
    environ = {name: text for name, text in os.environ.items() if name != IS_APART}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ["-p", "tests.described_gpu", *tests],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr
