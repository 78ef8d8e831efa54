"""Imports go down only, and the low levels stay light."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.house import by_name
from tests.house.source import ROOT, package_files

LINTER = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def test_the_levels_hold():
    linter = subprocess.run(
        [sys.executable, "-c", LINTER, "--no-cache", "--no-logo"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert linter.returncode == 0, linter.stdout + linter.stderr


# The folders of the backends themselves, and the tables.
THEIR_OWN = (
    "nbaccel/devices/",
    "nbaccel/strategies/",
    "nbaccel/precision/",
    "nbaccel/deepspeed/",
    "nbaccel/config/capabilities.py",
)
# Words that happen to be names of backends.
NO_BACKENDS = {
    (
        "nbaccel/calls/process_groups.py",
        "gloo",
    ): "the kind of torch's group, whose abort does not work",
    ("nbaccel/train/checkpoint/loading.py", "cpu"): "Accelerate's word in map_location",
}


def test_no_backend_is_told_by_its_name_outside_its_folder():
    found = {
        (file.name, names): f"{file.name}:{number}: {names}: {file.lines[number - 1].strip()}"
        for file in package_files()
        if not file.name.startswith(THEIR_OWN)
        for number, names in by_name.findings(file.tree)
    }
    wrong = [text for place, text in found.items() if place not in NO_BACKENDS]
    assert not wrong, "ask the capabilities row or the contract instead:\n" + "\n".join(wrong)
    assert NO_BACKENDS.keys() <= found.keys(), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    "code",
    [
        "if anything == 'ddp': pass",
        "if plan.device != 'cuda': pass",
        "x = 1 if 'nccl' == f(y) else 2",
        "if kind in ('cpu', 'xpu'): pass",
        "match kind:\n    case 'fsdp': pass",
        "make = {'ddp': 1, 'fsdp': 2}[name]",
        "make = {'ddp': 1}.get(name)",
        "registry.strategy('deepspeed')",
        "strategy_row('deepspeed').library",
        "device.startswith('cuda')",
        "row = {row.name: row for row in DEVICES}['cuda']",
    ],
)
def test_a_backend_by_name_is_seen_whatever_the_variable_is_called(code):
    assert [*by_name.findings(ast.parse(code))]


@pytest.mark.parametrize(
    "code",
    [
        "self.strategy = strategy",
        "message = 'Give device=\"cpu\"'",
        "if tensor.device.type == 'cpu': pass",
        "if precision == 'no': pass",
        "torch.device('cpu')",
        "registry.strategy(plan.strategy)",
    ],
)
def test_what_asks_for_no_backend_is_not_seen(code):
    assert not [*by_name.findings(ast.parse(code))]


# Whom `from accelerate.utils import ...` served must only change the import.
PEERS_NAMES = "nbaccel/utils/"
NOWHERE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def test_every_file_has_a_name_that_says_what_is_in_it():
    found = [f.name for f in package_files() if NOWHERE_NAMES & set(f.path.with_suffix("").parts)]
    found = [name for name in found if not name.startswith(PEERS_NAMES)]
    assert not found, f"a file is named for what it holds, not 'utils': {found}"
