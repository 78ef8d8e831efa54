"""`make gpu` in parts: each test is in one, and one whose time is over tells what it has."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.parts import ENDING_S, PARTS, run_until
from tests.isolation import ROOT

QUICK_AND_ENDLESS = """
import time

def test_quick():
    pass

def test_wrong():
    assert 1 == 2

def test_endless():
    try:
        time.sleep(600)
    finally:
        print("unwound", file=open({unwound!r}, "w"))
"""


def test_each_test_on_a_gpu_is_in_one_part() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    }
    # Two that only tell of the marker.
    marked -= {"tests/house/test_leak_police.py", str(Path(__file__).relative_to(ROOT))}
    assert Counter(file for part in PARTS.values() for file in part.tests) == Counter(marked)


@pytest.mark.slow
def test_one_whose_time_is_over_tells_what_it_has(tmp_path: Path) -> None:
    tests, results, unwound = (tmp_path / name for name in ("test_it.py", "it.txt", "unwound"))
    tests.write_text(QUICK_AND_ENDLESS.format(unwound=str(unwound)))
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.results", str(tests), "-n", "2"]
    began = time.monotonic()
    assert run_until(command, began + 20, results) == 124
    assert time.monotonic() - began < 20 + 2 * ENDING_S, "pytest ends when it is interrupted"
    told = results.read_text()
    assert re.search(r"^passed \d+\.\d s .*test_quick$", told, re.MULTILINE)
    assert "    E       assert 1 == 2" in told
    assert "test_endless" not in told
    assert unwound.exists(), "a test that was interrupted has cleaned up"
