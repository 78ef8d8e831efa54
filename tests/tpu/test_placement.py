"""Models on their way to chips, and collectives that must not be lost on the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from nbaccel import RunConfig, notebook_launcher
from nbaccel.calls.launch import launch_plan
from nbaccel.plan import Plan
from tests.tpu import bodies


def test_a_moved_model_keeps_its_objects_and_what_hangs_on_them(
    driver: str, config: RunConfig
) -> None:
    (moved,) = notebook_launcher(
        bodies.move_with_all_that_hangs_on_it, (), config=config.changed(num_processes=1)
    )
    assert moved == dict.fromkeys(moved, True)


def test_where_memory_is_short_workers_copy_one_after_another(
    driver: str, config: RunConfig, tmp_path: Path
) -> None:
    times = notebook_launcher(bodies.place_in_turn, (str(tmp_path),), config=config)
    (_, first_ended), (second_began, _) = sorted(times)
    assert first_ended <= second_began


def test_the_plan_says_how_much_host_memory_the_model_takes_at_most(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    net = bodies.make_net()
    num_bytes = sum(one.nbytes for one in net.parameters())
    plenty = launch_plan(plan, bodies.where_it_is, (net,)).plan
    (choice,) = (choice for choice in plenty.choices if choice.name == "host_memory")
    assert "at once" in choice.reason
    assert "host memory" not in capsys.readouterr().err
    # Less is free than one worker's copy takes.
    short = dataclasses.replace(plan.inventory, host_available_bytes=num_bytes // 2)
    tight = launch_plan(dataclasses.replace(plan, inventory=short), bodies.where_it_is, (net,)).plan
    (choice,) = (choice for choice in tight.choices if choice.name == "host_memory")
    assert "one worker after another" in choice.reason
    assert "a worker may be killed (SIGSEGV, SIGKILL)" in tight.warnings[-1]
    assert tight.warnings[-1] in capsys.readouterr().err


def test_no_collective_is_left_to_gloo_which_would_change_nothing(
    driver: str, config: RunConfig
) -> None:
    given = (torch.distributed.all_reduce,)  # as imported in a cell, before the driver is bound
    for answers in notebook_launcher(bodies.try_collectives_of_torch, given, config=config):
        refused = {name for name, answer in answers.items() if "Error: " in answer}
        assert refused == set(answers), answers
        if driver == "torch_xla":
            said = answers["from the notebook"]
            assert said.startswith("ConfigError: torch.distributed.all_reduce got a tensor on xla")
            assert "accelerator.reduce(tensor)" in said
            assert "accelerator.gather(tensor)" in answers["all_gather_into_tensor"]
            assert "tensor.cpu()" in answers["all_to_all_single"]
