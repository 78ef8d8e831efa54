from __future__ import annotations

import dataclasses

import pytest

from nbaccel.abc.device import Device
from nbaccel.config import Fp8Config, capabilities
from nbaccel.errors import InternalError, PlatformUnsupported
from nbaccel.plan import registry


def test_a_device_comes_by_name():
    found = registry.device("cpu")
    assert isinstance(found, Device)
    assert found.name == "cpu"


def test_a_strategy_and_a_precision_come_by_name():
    assert registry.strategy("single").name == "single"
    assert registry.precision("bf16").name == "bf16"


def test_a_backend_of_fp8_comes_by_name_and_a_missing_one_is_told(monkeypatch):
    assert registry.precision("fp8", Fp8Config(backend="native")).__name__ == "NativeFp8"
    assert registry.precision("fp8", Fp8Config(backend="msamp")).__name__ == "MsAmpFp8"
    monkeypatch.setattr(capabilities, "is_installed", lambda name: False)
    assert registry.precision("fp8", device_name="cpu").__name__ == "NativeFp8"
    with pytest.raises(PlatformUnsupported, match=r"'fp8'.*torchao, which is not installed.*bf16"):
        registry.precision("fp8", Fp8Config(backend="ao"))


def test_a_row_that_names_another_contract_is_a_bug(monkeypatch):
    row = capabilities.strategy_row("single")
    wrong = dataclasses.replace(row, path="nbaccel.devices.cpu:CpuDevice")
    monkeypatch.setattr(registry, "strategy_row", lambda name: wrong)
    with pytest.raises(InternalError, match="is no Strategy"):
        registry.strategy("single")


@pytest.mark.parametrize("path", ["nbaccel.devices.none:X", "nbaccel.devices.cpu:None_"])
def test_a_row_that_names_nothing_is_a_bug(path):
    with pytest.raises(InternalError, match="report this as a bug"):
        registry.load_object(path)


def test_an_unknown_name_is_a_bug():
    with pytest.raises(InternalError, match="'npu'"):
        registry.device("npu")
