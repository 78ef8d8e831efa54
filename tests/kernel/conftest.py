"""Kernels for tests: one that many share, and fresh ones for tests that spoil theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel

SETUP = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from nbaccel import notebook_launcher
from tests import worker_functions as workers
notebook_launcher(os.getpid, (), 2, start_method="template");
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel that has launched once, so that its template is running."""
    with Kernel() as found:
        found.run(SETUP).check()
        yield found


@pytest.fixture
def fresh_kernel() -> Iterator[Kernel]:
    with Kernel() as found:
        yield found
