"""Which driver the environment has; tests of this folder need one, with chips or without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbaccel import ConfigError, RunConfig
from nbaccel.plan import Plan, resolve
from tests.tpu.bodies import RANKS


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home folder for this session: programs that were compiled before would not be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def config() -> RunConfig:
    """A launch on two chips, real or pretended, or in a dry run of torch_xla."""
    return RunConfig(device="tpu", num_processes=RANKS)


@pytest.fixture(scope="session")
def plan(config: RunConfig) -> Plan:
    """How it will be done."""
    try:
        return resolve(config)
    except ConfigError as error:
        reason = str(error).partition(". ")[0]
        pytest.skip(f"{reason}. Without a TPU: make lane LANE='torch_tpu torch_xla'")


@pytest.fixture(scope="session")
def driver(plan: Plan) -> str:
    """`torch_tpu` or `torch_xla`."""
    (choice,) = (choice for choice in plan.choices if choice.name == "tpu_driver")
    return choice.value.split()[0]
