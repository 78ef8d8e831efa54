from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import notebook_launcher
from nbaccel.config.handlers import InitProcessGroupKwargs
from nbaccel.errors import ConfigError
from nbaccel.train import distributed
from tests.accelerator.loops import told

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_processes_find_each_other_or_meet_at_a_place_of_the_users_own(tmp_path):
    def body() -> Any:
        before = dist.is_initialized()
        settings = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=40))
        place = distributed.init_process(cpu=True, settings=settings)
        group = dist.group.WORLD
        again = distributed.init_process(cpu=True)
        return before, place == again, group is dist.group.WORLD, place, distributed.rank()

    for rank, (before, same, kept, place, number) in enumerate(
        notebook_launcher(body, num_processes=2)
    ):
        assert (before, same, kept, number) == (False, True, True, rank)
        assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (
            rank,
            rank,
            2,
            2,
        )
        assert "gloo" in place.backend

    def body() -> Any:
        settings = InitProcessGroupKwargs(init_method=f"file://{tmp_path}/meet")
        place = distributed.init_process(cpu=True, settings=settings)
        total = torch.ones(1)
        dist.all_reduce(total)
        return place.world_size, total.item()

    assert list(notebook_launcher(body, num_processes=2)) == [(2, 2.0)] * 2
    assert (tmp_path / "meet").exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "one"}, "RANK must be a whole number: got 'one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not fit WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = told(lambda: distributed.init_process(cpu=True))
    assert message.startswith(ConfigError.__name__)
    assert words in message
    assert not dist.is_initialized()


def test_the_cpu_can_be_asked_for_by_argument_or_environment(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not distributed.wants_cpu()
    assert distributed.wants_cpu(True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    assert distributed.wants_cpu()
    assert distributed.find_device(3) == torch.device("cpu")
