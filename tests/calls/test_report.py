"""Reports of real launches: each rank's time is where it was spent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import nbaccel
from nbaccel import ConfigError, Pool, WorkerFailed, notebook_launcher
from nbaccel.launchers import Results
from nbaccel.output.panel.facts import ENDED_RUNS
from nbaccel.output.panel.rank_times import RankTimes
from nbaccel.output.report.run_report import report_of
from tests import worker_functions as workers
from tests.calls import report_loops as loops


def timed(results: Results) -> list[RankTimes]:
    return [*results.report().facts.timed_ranks.values()]


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_with_slow_steps_holds_the_others_up(slow_rank: int) -> None:
    results = notebook_launcher(loops.train, (slow_rank,), num_processes=2)
    facts = results.report().facts
    assert facts.slowest is not None
    assert facts.slowest.rank == slow_rank
    times = facts.timed_ranks
    slept_s = loops.BATCHES * loops.SLOW_STEP_S
    # Beside it the loop does next to nothing; the first step is not waited for in DDP's log.
    assert 0.7 * slept_s < times[1 - slow_rank].waiting_s < times[1 - slow_rank].total_s
    assert times[slow_rank].computing_s > 0.9 * slept_s
    assert times[slow_rank].waiting_s < 0.2 * slept_s
    assert f"Rank {slow_rank} holds the others up" in str(results.report())
    assert "it computes longer than the other" in str(results.report())


@pytest.mark.parametrize("loop", [loops.all_reduce_beside, loops.gather_beside])
def test_collectives_of_torch_and_of_the_accelerator_are_counted(loop: Any) -> None:
    results = notebook_launcher(loop, (1,), num_processes=2)
    first, second = timed(results)
    slept_s = 10 * loops.SLOW_STEP_S
    assert first.waiting_s > 0.8 * slept_s
    assert second.computing_s > 0.9 * slept_s
    slowest = results.report().facts.slowest
    assert slowest is not None
    assert slowest.rank == 1


def test_waiting_at_the_first_call_of_all_is_waiting() -> None:
    results = notebook_launcher(loops.come_late_to_first_call, (3,), num_processes=4)
    slept_s = loops.BATCHES * loops.SLOW_STEP_S
    for times in timed(results)[:3]:
        assert times.waiting_s + times.communicating_s > 0.8 * slept_s
    slowest = results.report().facts.slowest
    assert slowest is not None
    assert slowest.rank == 3
    assert slowest.waited_s > 0.7 * slept_s


def test_waiting_for_data_is_a_share_and_the_start_in_a_first_step_is_none() -> None:
    results = notebook_launcher(
        loops.train, (None, loops.SlowDataset, loops.WarmsUp), num_processes=2
    )
    for times in timed(results):
        assert times.starting_s > 0.9 * loops.START_S
        assert times.computing_s < 0.5 * loops.START_S
        assert times.data_s >= loops.BATCHES * 4 * loops.SLOW_SAMPLE_S
        assert times.data_s > 0.5 * times.steady_s
        parts_s = times.computing_s + times.communicating_s + times.data_s + times.waiting_s
        assert times.total_s == pytest.approx(parts_s + times.starting_s, abs=0.01)
    assert "Left out is the start in the first step, 3." in str(results.report())


def test_a_loader_of_torch_is_timed_in_the_progress_loop() -> None:
    results = notebook_launcher(loops.read_alone, num_processes=2)
    for times in timed(results):
        assert times.data_s > 0.8 * times.steady_s


def test_a_report_tells_of_curves_samples_warnings_and_the_plan(tmp_path: Path) -> None:
    results = notebook_launcher(loops.train, (1,), num_processes=2)
    document = results.report().to_dict()
    assert [figures["steps"] for figures in document["ranks"]] == [loops.BATCHES] * 2
    assert [figures["samples"] for figures in document["ranks"]] == [loops.BATCHES * 4] * 2
    curves = {(curve["name"], curve["rank"]): curve for curve in document["curves"]}
    assert set(curves) == {(name, rank) for name in ("loss", "rank") for rank in (0, 1)}
    assert set(curves["rank", 1]["values"]) == {1.0}
    assert curves["loss", 0]["steps"] == sorted(curves["loss", 0]["steps"])
    assert {"text": "UserWarning: nearly done", "count": 1, "ranks": [0]} in document["warnings"]
    assert document["plan"]["text"] == results.plan.explain()
    assert document["nbaccel_version"] == nbaccel.__version__
    saved = results.report().save(tmp_path / "run.json")
    assert json.loads(saved.read_text()) == document


def test_a_run_without_loops_has_a_report_that_says_so() -> None:
    results = notebook_launcher(workers.nothing, num_processes=2)
    report = results.report()
    assert report.facts.timed_ranks == {}
    assert "No loop over batches was seen" in str(report)
    assert report.facts.plan.text == results.plan.explain()
    assert 0 < report.facts.seconds < 60


def test_a_run_in_this_process_has_a_report() -> None:
    results = notebook_launcher(loops.train, (0,), num_processes=1)
    facts = results.report().facts
    (times,) = facts.timed_ranks.values()
    assert times.computing_s > loops.BATCHES * loops.SLOW_STEP_S
    assert times.waiting_s == 0
    assert facts.ranks[0].samples == loops.BATCHES * 4
    assert (facts.ranks[0].peak_host_bytes or 0) > 1 << 20
    assert set(facts.curves) == {"loss", "rank"}
    assert "start_method" in facts.plan.text


@pytest.mark.parametrize(("num_processes", "failing_rank"), [(2, 1), (1, 0)])
def test_a_run_that_failed_has_a_report(num_processes: int, failing_rank: int) -> None:
    with pytest.raises(ValueError, match="as asked") as caught:
        notebook_launcher(loops.fail_after_loop, (failing_rank,), num_processes)
    latest = report_of(ENDED_RUNS[-1], "the latest")
    assert latest.facts.ending == "failed"
    assert set(latest.facts.curves) == {"loss"}
    assert latest.facts.ranks[failing_rank].steps == 4
    # In this process the function's own error is raised, which knows nothing of the run.
    if num_processes > 1:
        assert isinstance(caught.value, nbaccel.WorkerFailed)
        assert caught.value.report().to_dict() == latest.to_dict()


def test_two_runs_in_this_process_do_not_share_a_report() -> None:
    first = notebook_launcher(loops.train, num_processes=1)
    second = notebook_launcher(workers.nothing, num_processes=1)
    assert first.report().facts.ranks[0].steps == loops.BATCHES
    assert second.report().facts.ranks[0].steps is None


# ------------------------------------------------------------------------- live workers


def test_cells_and_calls_have_reports_of_their_own() -> None:
    with Pool(2) as pool:
        cell = pool.run("import warnings; warnings.simplefilter('always'); warnings.warn('late')")
        assert [seen.text for seen in cell.report().facts.warnings] == ["UserWarning: late"]
        assert cell.report().facts.plan.num_processes == 2

        results = notebook_launcher(loops.train, (1,), pool=pool)
        facts = results.report().facts
        assert facts.slowest is not None
        assert facts.slowest.rank == 1
        assert pool.report().to_dict() == results.report().to_dict()

        # Neither the account nor the metrics of a call are continued by the next.
        later = pool.run("1").report().facts
        assert later.timed_ranks == {}
        assert later.curves == {}

        # A DDP model of an earlier call is still measured; what it has waited there is not told.
        again = notebook_launcher(loops.train, (0,), pool=pool).report().facts
        assert again.slowest is not None
        assert again.slowest.rank == 0

        with pytest.raises(WorkerFailed):
            pool.run("1 / 0")
        assert pool.report().facts.ending == "failed"


def test_what_was_no_run_has_no_report() -> None:
    results = notebook_launcher(workers.nothing, num_processes=1)
    for nothing, says in (
        (nbaccel.WorkerFailed("made by hand"), "WorkerFailed has nothing to report"),
        (Results([1], results.plan), "1 results has nothing to report"),
        (Pool(2), "nothing to report"),
    ):
        with pytest.raises(ConfigError, match=says):
            nothing.report()
