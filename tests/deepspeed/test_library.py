"""A DeepSpeed that is too old, or has other private parts, is refused before anything is lost."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import pytest
from torch import nn

import nbaccel.deepspeed
from nbaccel.deepspeed import library
from nbaccel.deepspeed.checking import device_mistakes
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.errors import MissingBackend
from tests.deepspeed import needs
from tests.house.source import ROOT
from tests.programs import run_program


@pytest.mark.parametrize("version", ["0.16.9", "0.18.4", "0.9.2", "0.16", "0.12.7+cu121"])
def test_what_is_too_old_is_refused_with_what_to_install(monkeypatch, version):
    monkeypatch.setattr(library, "_installed_version", lambda: version)
    with pytest.raises(MissingBackend, match=r'pip install "deepspeed>=') as told:
        library.check_version()
    assert f"DeepSpeed {version} is installed" in str(told.value)


def test_what_is_as_new_as_declared_is_not(monkeypatch):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert set(re.findall(r'"deepspeed>=([\d.]+)"', text)) == {library.OLDEST}
    for version in (library.OLDEST, "0.19.8", "0.19.8+e2f1a", "0.20", "1.0.0", "main"):
        monkeypatch.setattr(library, "_installed_version", lambda version=version: version)
        library.check_version()


ON_DISK = ZeroConfig(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"})


@needs.DEEPSPEED
@pytest.mark.parametrize(
    ("version", "device", "is_refused"),
    [("0.19.5", "cpu", True), ("0.19.6", "cpu", False), ("0.19.5", "cuda", False)],
)
def test_a_version_that_would_abort_is_refused_where_it_does(
    monkeypatch, version, device, is_refused
):
    """Without a GPU an optimizer swapped to disk ends the process before 0.19.6."""
    monkeypatch.setattr(library, "_installed_version", lambda: version)
    told = "\n".join(device_mistakes(ON_DISK, device=device))
    assert ("needs DeepSpeed 0.19.6" in told) == is_refused
    assert (version in told) == is_refused


PROGRAM = """
import json, sys
from nbaccel import DeepSpeedPlugin, RunConfig, deepspeed_environment, notebook_launcher
from nbaccel.deepspeed import check_config
from nbaccel.errors import MissingBackend

settings = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
ways = {
    "plugin": lambda: DeepSpeedPlugin(zero_stage=2),
    "check": lambda: check_config(settings),
    "environment": lambda: deepspeed_environment(device="cpu"),
    "launch": lambda: notebook_launcher(print, config=RunConfig(num_processes=2, zero_stage=2)),
    "file": lambda: notebook_launcher(print, config=RunConfig(num_processes=2, deepspeed=settings)),
}
for name, way in ways.items():
    try:
        way()
        print(name, "went on")
    except MissingBackend as error:
        print(name, "refused", "DeepSpeed 0.16.9 is installed" in str(error))
print("imported", "deepspeed" in sys.modules)
"""


@needs.DEEPSPEED
def test_every_way_in_refuses_it_without_importing_it(tmp_path):
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('too old for this torch')")
    about = tmp_path / "deepspeed-0.16.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.9\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = run_program([sys.executable, "-c", PROGRAM], env=environ, check=False)
    names = ("plugin", "check", "environment", "launch", "file")
    expected = [f"{name} refused True" for name in names]
    assert done.stdout.splitlines() == [*expected, "imported False"], done.stderr


@needs.DEEPSPEED
def test_the_package_alone_wakes_nothing_and_every_name_is_where_it_says():
    for name in nbaccel.deepspeed.__all__:
        assert getattr(nbaccel.deepspeed, name).__name__ == name
        assert name in dir(nbaccel.deepspeed)
    code = "import sys, nbaccel.deepspeed; print({'torch', 'deepspeed'} & sys.modules.keys())"
    assert run_program([sys.executable, "-c", code]).stdout.strip() == "set()"


@needs.DEEPSPEED
@pytest.mark.parametrize(("stage", "name"), [(2, "_hp_mapping"), (3, "_z3_optimizer")])
def test_what_would_lose_weights_without_a_word_is_refused(stage, name):
    library.load_module("deepspeed", why="A test")
    module = nn.Linear(2, 2)
    engine = SimpleNamespace(
        module=module, basic_optimizer=object(), zero_optimization_stage=lambda: stage
    )
    with pytest.raises(MissingBackend, match=f"{name} at stage {stage}.*could not be read back"):
        library.check_fp32_copies(engine)
    setattr(module.weight, name, None)
    library.check_fp32_copies(engine)
