"""The public face: what it offers is pinned, resolves, and costs nothing until it is used."""

from __future__ import annotations

import json
import re
import sys

import pytest

import nbaccel
from tests.house.public_names import listed, offered, why_gone
from tests.house.source import ROOT, package_files
from tests.programs import run_program

HEAVY = {
    *("IPython", "deepspeed", "ipywidgets", "numpy", "psutil", "pydantic", "pynvml", "torch"),
    *("torch_xla", "yaml"),
}
# Of `nbaccel.NAME`, which other packages have in their metadata.
ENTRY_POINT_GROUPS = {"devices", "engines", "fp8_backends", "precisions", "strategies"}
PAGE = ROOT / "docs" / "pages" / "reference" / "public.md"
LEAVING = (
    "A public name goes after two minor versions in which it was deprecated "
    "(docs/pages/reference/public.md); only then take its line off tests/house/public_names.txt."
)
LISTING = "run python -m tests.house.public_names, python -m docs.tables; say it in CHANGELOG.md"


def test_public_names_are_completed_listed_and_none_has_gone():
    gone = [f"{name}: {why}" for name in listed() if (why := why_gone(name))]
    assert not gone, "\n".join([*gone, LEAVING])
    new = sorted(offered() - set(listed()))
    assert not new, "\n".join([*new, LISTING])
    assert listed() == sorted(set(listed())), "python -m tests.house.public_names puts it in order"
    assert len(nbaccel.__all__) > 60, "the imports for type checkers were not found"
    assert set(nbaccel.__all__) <= set(dir(nbaccel))


def test_the_groups_of_entry_points_are_these():
    text = "".join(file.text for file in package_files())
    groups = re.findall(r'rows_from_outside\(\s*"([\w.]+)"', text)
    assert sorted(groups) == sorted(f"nbaccel.{name}" for name in ENTRY_POINT_GROUPS), LEAVING
    page = PAGE.read_text(encoding="utf-8")
    assert [group for group in groups if f"`{group}`" not in page] == []


@pytest.mark.parametrize("name", sorted({*nbaccel.__all__} - {"__version__"}))
def test_a_public_name_is_documented(name):
    assert (getattr(nbaccel, name).__doc__ or "").strip(), f"nbaccel.{name} has no docstring"


def test_an_unknown_name_or_one_that_cannot_be_imported_is_told(monkeypatch):
    with pytest.raises(AttributeError, match="no attribute 'notebook_lunacher'"):
        nbaccel.notebook_lunacher  # noqa: B018 - the access is the test
    monkeypatch.setattr(nbaccel, "import_module", lambda name: object())
    monkeypatch.delitem(vars(nbaccel), "Pool", raising=False)
    with pytest.raises(ImportError, match=r"nbaccel\.Pool cannot be imported: 'object' object has"):
        from nbaccel import Pool  # noqa: F401


def test_importing_the_package_imports_nothing_heavy():
    """The first cell answers at once: torch alone costs seconds."""
    assert not HEAVY & loaded_by("import nbaccel; dir(nbaccel); nbaccel.__version__")


def test_planning_and_what_ray_runs_on_a_node_import_no_torch():
    loaded = loaded_by(
        "import nbaccel\n"
        "nbaccel.resolve(nbaccel.RunConfig(device='cpu')).explain()\n"
        "import nbaccel.config.capabilities, nbaccel.plan.registry\n"
        "for name in ('cpu', 'cuda'): nbaccel.plan.registry.device(name).hazards()"
    )
    assert not {"torch", "IPython", "ipywidgets", "numpy"} & loaded
    assert "torch" not in loaded_by("import nbaccel.hosts.node_actor")


def test_a_launch_of_one_process_imports_nothing_that_its_function_does_not_use():
    """Nor does its report."""
    loaded = loaded_by(
        "import os, nbaccel\nresults = nbaccel.notebook_launcher(os.getppid, (), 1)\n"
        "assert results and 'getppid on 1 worker' in str(results.report())"
    )
    assert not {"torch", "numpy", "deepspeed", "accelerate"} & loaded
    assert "nbaccel.deepspeed.local_shards" not in loaded


def loaded_by(code):
    """The modules that a fresh process has loaded after running the code."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    return set(json.loads(run_program([sys.executable, "-c", script], cwd=ROOT).stdout))
