"""A package with backends, installed into a folder of its own: as pip does it, without pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.source import ROOT

HERE = Path(__file__).parent
ENTRY_POINTS = {
    "nbaccel.devices": {"abacus": "added_backends.rows:DEVICE"},
    "nbaccel.precisions": {"bead16": "added_backends.rows:PRECISION"},
    "nbaccel.strategies": {"averaging": "added_backends.rows:STRATEGY"},
    "nbaccel.fp8_backends": {
        "bead8": "added_backends.rows:FP8",
        "lost8": "added_backends.rows:FP8_ELSEWHERE",
    },
}

Run = Callable[..., str]


def install(folder: Path, entry_points: dict[str, dict[str, str]]) -> None:
    """Put the package there with its metadata."""
    shutil.copytree(HERE / "added_backends", folder / "added_backends")
    metadata = folder / "added_backends-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: added-backends\nVersion: 1.0\n"
    )
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code in a process of its own that has the package; gives what it prints."""

    def run(
        code: str,
        *,
        entry_points: dict[str, dict[str, str]] | None = None,
        **environment: str,
    ) -> str:
        site = tmp_path / "site"
        if not site.exists():
            install(site, ENTRY_POINTS if entry_points is None else entry_points)
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        path = os.pathsep.join([str(site), str(ROOT)])
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": path, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
