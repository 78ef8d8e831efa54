from __future__ import annotations

import subprocess
import sys

import pytest

import nbaccel
from nbaccel._optional import is_installed

HEAVY = ("torch", "pydantic", "psutil", "pynvml", "yaml", "numpy", "IPython", "ipywidgets")


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_surface_is_pinned():
    assert nbaccel.__all__ == [
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
    ]


@pytest.mark.parametrize("name", nbaccel.__all__)
def test_every_name_is_there(name):
    if nbaccel._HOME_OF.get(name) == "nbaccel.launchers" and not is_installed("nbaccel.launchers"):
        pytest.skip("this checkout has no launchers yet")
    assert getattr(nbaccel, name) is not None
    assert name in dir(nbaccel)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'notebook_luncher'"):
        _ = nbaccel.notebook_luncher


def test_importing_it_imports_nothing_heavy():
    done = run(
        f"import sys, nbaccel; dir(nbaccel); nbaccel.__version__\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not found, found"
    )
    assert done.returncode == 0, done.stderr


def test_planning_imports_no_torch():
    done = run(
        "import sys, nbaccel\n"
        "nbaccel.resolve(nbaccel.RunConfig(device='cpu')).explain()\n"
        "import nbaccel.capabilities, nbaccel._catalog\n"
        "for name in ('cpu', 'cuda'): nbaccel._catalog.device(name).hazards()\n"
        "found = [n for n in ('torch', 'IPython', 'ipywidgets', 'numpy') if n in sys.modules]\n"
        "assert not found, found"
    )
    assert done.returncode == 0, done.stderr
