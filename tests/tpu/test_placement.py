"""Models on their way to chips, and collectives that must not be lost on the way."""

from __future__ import annotations

from pathlib import Path

from nbaccel import RunConfig, notebook_launcher
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


def test_gloo_refuses_what_it_would_leave_as_it_is(driver: str, config: RunConfig) -> None:
    answers = list(notebook_launcher(bodies.reduce_by_torch, (), config=config))
    if driver == "torch_xla":
        refusal = "ConfigError: torch.distributed.all_reduce got a tensor on xla:0"
        assert all(answer.startswith(refusal) for answer in answers), answers
        assert all("accelerator.reduce(tensor)" in answer for answer in answers)
    else:
        assert all("Error: " in answer for answer in answers), answers
