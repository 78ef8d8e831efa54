"""A torch, IPython or other package that has dropped a private name: what the user then reads."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from nbaccel.base import ipython_private, torch_private, training_libraries
from nbaccel.errors import PlatformUnsupported


class _Without:
    """An object that lacks one name, however deep below it."""

    def __init__(self, whole: Any, dotted_name: str) -> None:
        self._whole, self._name = whole, dotted_name

    def __getattr__(self, name: str) -> Any:
        first, _, rest = self._name.partition(".")
        if name != first:
            return getattr(self._whole, name)
        if not rest:
            raise AttributeError(name)
        return _Without(getattr(self._whole, name), rest)


@pytest.mark.parametrize("name", torch_private.PRIVATE_NAMES)
def test_a_torch_without_the_name_is_refused(name, monkeypatch):
    module = max((m for m in sys.modules if name.startswith(f"{m}.")), key=len)
    without = _Without(sys.modules[module], name.removeprefix(f"{module}."))
    monkeypatch.setitem(sys.modules, module, without)  # type: ignore[arg-type]
    with pytest.raises(PlatformUnsupported) as told:
        torch_private._check_names()
    message = str(told.value)
    assert f"torch {torch.__version__} lacks {name}: " in message
    assert "install one of these" in message


def test_the_refusal_comes_before_any_worker_is_started():
    """In the notebook's process, when the machinery of launches is imported."""
    code = (
        "import torch.distributed.distributed_c10d as c10d\n"
        "del c10d._pg_map\n"
        "import nbaccel\n"
        "nbaccel.notebook_launcher(print, num_processes=2)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("nbaccel.errors.PlatformUnsupported: torch ")
    assert "_pg_map: workers could not be launched" in last


def test_an_ipython_or_a_torch_without_names_of_convenience_goes_without(capsys, monkeypatch):
    shell = types.SimpleNamespace()
    assert ipython_private.cell_numbers(shell) is None
    ipython_private.number_cell(shell, "a cell", 3)
    ipython_private.keep_cell_lines("a cell", None)
    ipython_private.inspect_also(shell, lambda earlier: earlier)()
    assert vars(shell) == {}
    ipython_private.show_traceback_lines(shell, ValueError, ValueError(), ["one", "two"])
    assert capsys.readouterr().err == "one\ntwo\n"


def test_an_accelerate_without_its_names(monkeypatch):
    state = types.ModuleType("accelerate.state")
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert not training_libraries.accelerate_is_set_up()
    assert training_libraries.accelerates_precision() is None
    training_libraries.forget_accelerate()
    state.PartialState = types.SimpleNamespace(_shared_state={"a": 1})
    with pytest.raises(
        PlatformUnsupported, match=r"has no AcceleratorState\._reset_state: workers"
    ):
        training_libraries.forget_accelerate()


def test_an_xla_or_a_torch_tpu_without_its_names_is_told_of(monkeypatch):
    from nbaccel.devices.tpu import TpuDevice

    monkeypatch.setitem(sys.modules, "torch_xla", types.ModuleType("torch_xla"))
    (hazard,) = TpuDevice().hazards()
    assert "cannot tell whether its runtime runs" in hazard
    from nbaccel.devices.tpu.torch_tpu_driver import TorchTpuDriver

    monkeypatch.setitem(sys.modules, "torch_tpu", types.ModuleType("torch_tpu"))
    monkeypatch.setattr(torch, "tpu", types.SimpleNamespace(), raising=False)
    with pytest.warns(RuntimeWarning, match=r"no torch\.tpu\._get_cache_stats, .* not reported"):
        assert TorchTpuDriver().compile_counts().programs == 0
    monkeypatch.delattr(torch._C, "_get_privateuse1_backend_name")
    with pytest.raises(PlatformUnsupported, match=r"_get_privateuse1_backend_name, which was seen"):
        TorchTpuDriver().is_loaded()
