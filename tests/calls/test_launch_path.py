"""Which of the package's files a launch of two CPU workers enters in the notebook's process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.house.source import ROOT

# Of a second launch: what is done once, such as the start of a template, is left out.
PROGRAM = """
import json, sys, threading
from nbaccel import notebook_launcher
import torch._dynamo

def function():
    return 1

def launch():
    assert list(notebook_launcher(function, (), 2, start_method=sys.argv[1])) == [1, 1]

def note(frame, event, _value):
    if event == "call":
        files.add(frame.f_code.co_filename)

files = set()
launch()
threading.setprofile(note)
sys.setprofile(note)
launch()
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(sorted(files)))
"""


@pytest.fixture(scope="module", params=["template", "fork"])
def entered(request: pytest.FixtureRequest) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, request.param],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: Any = json.loads(done.stdout.splitlines()[-1])
    package = f"{ROOT / 'nbaccel'}/"
    return [path.removeprefix(package) for path in found if path.startswith(package)]


def test_a_launch_on_cpus_enters_nothing_of_other_devices_engines_or_hosts(entered):
    assert "calls/launch.py" in entered
    others = ("deepspeed/", "devices/tpu/", "hosts/")
    assert [path for path in entered if path.startswith(others)] == []


def test_a_launch_on_cpus_enters_no_more_files_than_it_did(entered):
    """The aim is 30: one who reads what a launch does has all of them to read."""
    assert len(entered) <= 30, entered
