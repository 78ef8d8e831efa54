"""What glibc keeps of freed memory, and what it returns when it is told to."""

from __future__ import annotations

import platform
import sys

import pytest

from tests.house.source import ROOT
from tests.programs import run_program

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt is told")

FREED = """
import sys
from pathlib import Path

import torch

from nbaccel.deepspeed import engines as heap


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if sys.argv[1] == "at once":
    heap.return_at_once()
for _ in range(2):
    torch.ones(7 << 20)  # 28 MiB, freed: glibc takes all smaller blocks from its heap from now on
before = resident()
blocks = [torch.ones(1 << 19) for _ in range(64)]  # 2 MiB each
kept = [torch.ones(64) for _ in range(1000)]  # above them in the heap, so that it cannot shrink
del blocks
if sys.argv[1] == "later":
    heap.return_all()
print((resident() - before) >> 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "most", "least"), [("at once", 16, -99), ("later", 16, -99),
                                                     ("never", 999, 24)])  # fmt: skip
def test_freed_blocks_are_returned_when_it_is_asked_for(when, most, least):
    assert least <= int(run_program([sys.executable, "-c", FREED, when], cwd=ROOT).stdout) <= most
