"""The figures of FP8 on a GPU: a machine that is lent keeps what was measured, in a table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.isolation import ROOT
from tests.kernel.kernel import wait_for


@pytest.mark.slow
def test_interrupted_it_ends_with_the_table_of_what_there_is(tmp_path: Path) -> None:
    stored = tmp_path / "fp8.json"
    command = [sys.executable, "benchmarks/fp8.py", "--sections", "gpu", "--quick", "--no-page"]
    with subprocess.Popen(
        [*command, "--output", str(stored)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert wait_for(stored.exists, timeout_s=200)
        running.send_signal(signal.SIGINT)
        table, said = running.communicate(timeout=60)
    assert running.returncode == 1, said
    assert "interrupted: this is what there is" in said
    assert json.loads(stored.read_text())["measures"]["gpu tokens, eager"]["bf16"]["n"] == 1
    assert "| bf16 | 0." in table or "k (1.00x) |" in table, table
    assert "| nbaccel, MS-AMP's O2 | - | - | - | - |" in table
