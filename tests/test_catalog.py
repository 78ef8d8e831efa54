from __future__ import annotations

import pytest

from nbaccel import _catalog
from nbaccel.abc.device import Device
from nbaccel.errors import InternalError, PlatformUnsupported


def test_a_device_comes_by_name():
    found = _catalog.device("cpu")
    assert isinstance(found, Device)
    assert found.name == "cpu"


def test_a_device_without_implementation_says_what_there_is():
    with pytest.raises(PlatformUnsupported, match=r"'tpu' cannot be used.*Use one of cpu, cuda"):
        _catalog.device("tpu")


@pytest.mark.parametrize("path", ["nbaccel.devices.none:X", "nbaccel.devices.cpu:None_"])
def test_a_row_that_names_nothing_is_a_bug(path):
    with pytest.raises(InternalError, match="report this as a bug"):
        _catalog.load(path)


def test_an_unknown_name_is_a_bug():
    with pytest.raises(InternalError, match="'npu'"):
        _catalog.device("npu")
