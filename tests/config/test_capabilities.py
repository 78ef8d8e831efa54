from __future__ import annotations

from typing import get_args

import pytest

from nbaccel.abc.device import Device, DeviceRuntime, LaunchHooks, StepHooks
from nbaccel.abc.precision import Precision
from nbaccel.abc.strategy import Strategy
from nbaccel.config import capabilities, run_config
from nbaccel.config.fp8 import Fp8Config
from nbaccel.plan import registry


def test_there_is_a_row_for_every_word_of_the_configuration():
    names = {row.name for row in capabilities.DEVICES}
    strategies = {row.name for row in capabilities.STRATEGIES}
    assert strategies == set(get_args(run_config.StrategyName)) - {"auto"}
    assert names == set(get_args(run_config.DeviceName)) - {"auto"}
    assert {row.name for row in capabilities.PRECISIONS} == set(get_args(run_config.PrecisionName))
    methods = {row.name for row in capabilities.START_METHODS}
    assert methods == set(get_args(run_config.StartMethodName)) - {"auto"}
    backends = get_args(Fp8Config.model_fields["backend"].annotation)
    assert {row.name for row in capabilities.FP8_BACKENDS} == set(backends) - {"auto"}
    for row in capabilities.FP8_BACKENDS:
        assert set(row.settings) <= set(Fp8Config.model_fields) - {"backend"}
        assert set(row.devices) <= {other.name for other in capabilities.DEVICES}
        assert issubclass(registry.load_object(row.path), Precision)


@pytest.mark.parametrize("row", capabilities.DEVICES, ids=lambda row: row.name)
def test_rows_refer_to_rows(row):
    assert set(row.precisions) <= {other.name for other in capabilities.PRECISIONS}
    assert set(row.start_methods) <= {other.name for other in capabilities.START_METHODS}
    assert set(dict(row.slow)) <= set(row.precisions)
    assert bool(row.precisions) == bool(row.start_methods)
    kind = registry.load_object(row.path)
    assert issubclass(kind, Device)
    assert kind.name == row.name


@pytest.mark.parametrize("row", capabilities.STRATEGIES, ids=lambda row: row.name)
def test_a_strategy_row_names_what_is_there(row):
    assert row.devices
    assert row.precisions
    kind = registry.load_object(row.path)
    assert issubclass(kind, Strategy)
    assert kind.name == row.name
    assert set(row.devices) <= {other.name for other in capabilities.DEVICES}
    assert set(row.precisions) <= {other.name for other in capabilities.PRECISIONS if other.path}
    if row.settings:
        settings = registry.load_object(row.settings)
        assert f"{settings.__module__}:{settings.__qualname__}" == row.settings
    assert row.processes in ("", "one", "several")


def test_one_strategy_each_is_taken_for_one_process_and_for_several():
    for device in capabilities.DEVICES:
        defaults = [
            row.processes
            for row in capabilities.STRATEGIES
            if row.is_default and capabilities.strategy_fits(row, device)
        ]
        alone = device.start_methods == ("inline",)
        assert sorted(defaults) == (["one"] if alone else ["one", "several"]), device.name


@pytest.mark.parametrize("row", capabilities.PRECISIONS, ids=lambda row: row.name)
def test_a_precision_row_names_what_is_there(row):
    paths = [row.path] if row.path else [r.path for r in capabilities.FP8_BACKENDS]
    assert bool(row.path) != row.has_backends
    for path in paths:
        kind = registry.load_object(path)
        assert issubclass(kind, Precision)
        assert kind.name == row.name


def test_contracts_stay_narrow_and_nccl_is_for_workers_with_a_gpu_each():
    for contract in (Device, DeviceRuntime, LaunchHooks, StepHooks, Precision, Strategy):
        methods = [n for n, value in vars(contract).items() if callable(value) and n[0] != "_"]
        assert len(methods) <= 12, f"{contract.__name__}: {methods}"
    row = capabilities.device_row("cuda")
    assert capabilities.group_backend(row, num_local=2, num_devices=2) == "nccl"
    assert capabilities.group_backend(row, num_local=1, num_devices=2) == "nccl"
    assert capabilities.group_backend(row, num_local=2, num_devices=1) == "gloo"
