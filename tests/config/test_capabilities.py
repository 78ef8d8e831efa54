from __future__ import annotations

from typing import get_args

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


def test_rows_refer_to_rows_and_classes():
    devices = {row.name for row in capabilities.DEVICES}
    precisions = {row.name for row in capabilities.PRECISIONS}
    computed = {row.name for row in capabilities.PRECISIONS if row.path}
    for row in capabilities.DEVICES:
        assert set(row.precisions) <= precisions
        assert set(row.start_methods) <= {other.name for other in capabilities.START_METHODS}
        assert set(dict(row.slow)) <= set(row.precisions)
        assert bool(row.precisions) == bool(row.start_methods)
        check_class(row.path, Device, row.name)
        defaults = [
            one.processes
            for one in capabilities.STRATEGIES
            if one.is_default and capabilities.strategy_fits(one, row)
        ]
        alone = row.start_methods == ("inline",)
        assert sorted(defaults) == (["one"] if alone else ["one", "several"]), row.name
    for row in capabilities.STRATEGIES:
        assert row.devices
        assert row.precisions
        assert set(row.devices) <= devices
        assert set(row.precisions) <= computed
        check_class(row.path, Strategy, row.name)
        if row.settings:
            settings = registry.load_object(row.settings)
            assert f"{settings.__module__}:{settings.__qualname__}" == row.settings
        assert row.processes in ("", "one", "several")
    for row in capabilities.PRECISIONS:
        assert bool(row.path) != row.has_backends
        for path in [row.path] if row.path else [one.path for one in capabilities.FP8_BACKENDS]:
            check_class(path, Precision, row.name)


def check_class(path, contract, name):
    kind = registry.load_object(path)
    assert issubclass(kind, contract)
    assert kind.name == name


def test_contracts_stay_narrow_and_nccl_is_for_workers_with_a_gpu_each():
    for contract in (Device, DeviceRuntime, LaunchHooks, StepHooks, Precision, Strategy):
        methods = [n for n, value in vars(contract).items() if callable(value) and n[0] != "_"]
        assert len(methods) <= 12, f"{contract.__name__}: {methods}"
    row = capabilities.device_row("cuda")
    assert capabilities.group_backend(row, num_local=2, num_devices=2) == "nccl"
    assert capabilities.group_backend(row, num_local=1, num_devices=2) == "nccl"
    assert capabilities.group_backend(row, num_local=2, num_devices=1) == "gloo"
