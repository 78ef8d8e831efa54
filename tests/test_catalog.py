from __future__ import annotations

import dataclasses

import pytest

from nbaccel import _catalog, capabilities
from nbaccel.abc.device import Device
from nbaccel.config import Fp8Config
from nbaccel.errors import InternalError, PlatformUnsupported


def test_a_device_comes_by_name():
    found = _catalog.device("cpu")
    assert isinstance(found, Device)
    assert found.name == "cpu"


def test_a_strategy_and_a_precision_come_by_name():
    assert _catalog.strategy("single").name == "single"
    assert _catalog.precision("bf16").name == "bf16"


def test_a_backend_of_fp8_comes_by_name_and_a_missing_one_is_told(monkeypatch):
    assert _catalog.precision("fp8", Fp8Config(backend="native")).__name__ == "NativeFp8"
    assert _catalog.precision("fp8", Fp8Config(backend="msamp")).__name__ == "MsAmpFp8"
    monkeypatch.setattr(capabilities, "is_installed", lambda name: False)
    assert _catalog.precision("fp8", device_name="cpu").__name__ == "NativeFp8"
    with pytest.raises(PlatformUnsupported, match=r"'fp8'.*torchao, which is not installed.*bf16"):
        _catalog.precision("fp8", Fp8Config(backend="ao"))


def test_a_row_that_names_another_contract_is_a_bug(monkeypatch):
    row = capabilities.strategy_row("single")
    wrong = dataclasses.replace(row, path="nbaccel.devices.cpu:CpuDevice")
    monkeypatch.setattr(_catalog, "strategy_row", lambda name: wrong)
    with pytest.raises(InternalError, match="is no Strategy"):
        _catalog.strategy("single")


@pytest.mark.parametrize("path", ["nbaccel.devices.none:X", "nbaccel.devices.cpu:None_"])
def test_a_row_that_names_nothing_is_a_bug(path):
    with pytest.raises(InternalError, match="report this as a bug"):
        _catalog.load_object(path)


def test_an_unknown_name_is_a_bug():
    with pytest.raises(InternalError, match="'npu'"):
        _catalog.device("npu")
