"""The figures of FP8 on a GPU: a machine that is lent keeps what was measured, in a table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import nbaccel
from tests.isolation import ROOT
from tests.kernel.kernel import wait_for

VERSIONS = """
import sys
sys.path[:0] = sys.argv[1:]
from harness.report import versions
from harness.samples import machine
print(versions(machine(), ("python", "nbaccel", "torch", "no such package")))
"""


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


def test_versions_are_told_where_nbaccel_is_on_the_path_and_not_installed(tmp_path: Path) -> None:
    installed = Path(psutil.__file__).parents[1]
    for entry in installed.iterdir():
        if "nbaccel" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    # -S: nothing else is installed.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", VERSIONS]
        + [str(path) for path in (ROOT, ROOT / "benchmarks", tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f", nbaccel {nbaccel.__version__}, torch " in done.stdout, done.stderr
    assert "no such package" not in done.stdout
