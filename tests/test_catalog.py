from __future__ import annotations

import dataclasses

import pytest

from nbaccel import _catalog, capabilities
from nbaccel.abc.device import Device
from nbaccel.errors import InternalError, PlatformUnsupported


def test_a_device_comes_by_name():
    found = _catalog.device("cpu")
    assert isinstance(found, Device)
    assert found.name == "cpu"


def test_a_strategy_and_a_precision_come_by_name():
    assert _catalog.strategy("single").name == "single"
    assert _catalog.precision("bf16").name == "bf16"


def test_fp8_says_that_it_is_not_there_yet_and_what_to_use():
    with pytest.raises(PlatformUnsupported, match=r"'fp8'.*in this version.*Use one of no, fp16"):
        _catalog.precision("fp8")


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
