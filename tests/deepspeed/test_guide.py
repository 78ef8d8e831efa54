"""docs/deepspeed.md: its code runs from top to bottom, prints what it shows, and has the table."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.deepspeed import needs
from tests.isolation import ROOT

pytestmark = pytest.mark.slow

GUIDE = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)
PRINTED = re.findall(r"^```text printed\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that the code prints, run as one script in a process and a folder of its own."""
    folder = tmp_path_factory.mktemp("guide")
    script = folder / "guide.py"
    script.write_text("\n".join(CODE))
    environ = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs.DEEPSPEED
@needs.ENGINE[1]
@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_its_code_prints_what_it_shows(printed: str, number: int) -> None:
    for line in PRINTED[number].splitlines():
        assert line in printed


def test_the_guide_shows_the_table_of_the_stored_result(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    benchmark = _module(folder / "zero_training.py")
    results = benchmark.Results(folder / "results" / "zero_training.json")
    table, holds = benchmark.render(results)
    _, _, rest = GUIDE.partition(benchmark.REPORT.begin)
    shown, _, _ = rest.partition(benchmark.REPORT.end)
    assert shown.strip() == table.strip()
    assert holds


def _module(path: Path) -> object:
    spec = importlib.util.spec_from_file_location("zero_training_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
