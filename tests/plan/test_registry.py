from __future__ import annotations

import pytest

from nbaccel.abc.device import Device
from nbaccel.config import Fp8Config, capabilities
from nbaccel.errors import InternalError, PlatformUnsupported
from nbaccel.plan import registry


def test_devices_strategies_and_precisions_come_by_name_and_others_are_a_bug():
    found = registry.device("cpu")
    assert isinstance(found, Device)
    assert found.name == "cpu"
    assert registry.strategy("single").name == "single"
    assert registry.precision("bf16").name == "bf16"
    with pytest.raises(InternalError, match="'npu'"):
        registry.device("npu")


def test_a_backend_of_fp8_comes_by_name_and_a_missing_one_is_told(monkeypatch):
    assert registry.precision("fp8", Fp8Config(backend="native")).__name__ == "NativeFp8"
    assert registry.precision("fp8", Fp8Config(backend="msamp")).__name__ == "MsAmpFp8"
    monkeypatch.setattr(capabilities, "is_installed", lambda name: False)
    assert registry.precision("fp8", device_name="cpu").__name__ == "NativeFp8"
    with pytest.raises(PlatformUnsupported, match=r"'fp8'.*torchao, which is not installed.*bf16"):
        registry.precision("fp8", Fp8Config(backend="ao"))
