from __future__ import annotations

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


def test_an_unknown_name_is_a_bug():
    with pytest.raises(InternalError, match="'npu'"):
        registry.device("npu")
