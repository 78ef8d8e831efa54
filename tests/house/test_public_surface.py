"""The public face: what it offers is pinned, resolves, and costs nothing until it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import nbaccel
from tests.house.source import ROOT

PUBLIC = {
    "Choice",
    "ConfigError",
    "Inventory",
    "LaunchTimeout",
    "NbaccelError",
    "Plan",
    "PrecisionMismatch",
    "RunConfig",
    "Topology",
    "WorkerDied",
    "WorkerFailed",
    "__version__",
    "debug_launcher",
    "inspect_machine",
    "notebook_launcher",
    "resolve",
    "shutdown",
}
HEAVY = {"IPython", "deepspeed", "ipywidgets", "numpy", "pydantic", "torch", "torch_xla"}


def test_the_public_names_are_these():
    assert set(nbaccel.__all__) == PUBLIC, "a public change needs a changelog line, too"
    assert len(nbaccel.__all__) == len(PUBLIC), "a name is listed twice"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_resolves_and_is_listed(name):
    assert getattr(nbaccel, name) is not None
    assert name in dir(nbaccel)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_a_public_name_is_documented(name):
    assert (getattr(nbaccel, name).__doc__ or "").strip(), f"nbaccel.{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="notebook_lunacher"):
        nbaccel.notebook_lunacher  # noqa: B018 - the access is the test


def test_importing_the_package_imports_nothing_heavy():
    """The first cell answers at once: torch alone costs seconds."""
    script = "import json, sys; import nbaccel; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert not HEAVY & set(json.loads(loaded))
