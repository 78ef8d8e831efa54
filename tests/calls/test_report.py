"""Reports of real launches: each rank's time is where it was spent."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbaccel
from nbaccel import Accelerator, ConfigError, Pool, RunConfig, WorkerFailed, notebook_launcher
from nbaccel.launchers import Results
from nbaccel.output.panel.facts import ENDED_RUNS, RankTimes
from nbaccel.output.report import report_of
from tests import worker_functions as workers

BATCHES = 24
SLOW_STEP_S = 0.15  # long beside what a step computes, on busy cores too
SLOW_SAMPLE_S = 0.006
START_S = 3.0


class SlowDataset(TensorDataset):
    """Takes its time for each sample."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(SLOW_SAMPLE_S)
        return super().__getitem__(index)


class WarmsUp(nn.Linear):
    """Its first forward takes as long as a device that starts."""

    has_started = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.has_started:
            self.has_started = True
            time.sleep(START_S)
        return super().forward(inputs)


def train(
    slow_rank: int | None = None,
    dataset_class: type[TensorDataset] = TensorDataset,
    model_class: type[nn.Linear] = nn.Linear,
) -> int:
    """Train a small model, with a rank that takes longer for each step."""
    accelerator = Accelerator()
    model = model_class(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    inputs = torch.randn(BATCHES * 4 * accelerator.num_processes, 8)
    loader = DataLoader(dataset_class(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in accelerator.progress(loader):
        if accelerator.process_index == slow_rank:
            time.sleep(SLOW_STEP_S)
        loss = (model(inputs) - targets).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item(), "rank": float(accelerator.process_index)})
    if accelerator.is_main_process:
        sys.stderr.write("train.py:3: UserWarning: nearly done\n")
    return accelerator.process_index


def all_reduce_beside(slow_rank: int) -> None:
    """Sum tensors with torch's own functions; a rank comes late to each sum."""
    accelerator = Accelerator()
    for (inputs,) in accelerator.prepare(DataLoader(TensorDataset(torch.ones(40, 2)), 2)):
        if accelerator.process_index == slow_rank:
            time.sleep(SLOW_STEP_S)
        dist.all_reduce(inputs)
        pending = dist.all_reduce(inputs, async_op=True)
        assert pending is not None
        pending.wait()


def gather_beside(slow_rank: int) -> None:
    """The same with the accelerator's functions."""
    accelerator = Accelerator()
    for (inputs,) in accelerator.prepare(DataLoader(TensorDataset(torch.ones(40, 2)), 2)):
        if accelerator.process_index == slow_rank:
            time.sleep(SLOW_STEP_S)
        accelerator.gather(inputs)


def fail_after_loop(failing_rank: int) -> None:
    """Log something, and raise on one rank."""
    accelerator = Accelerator()
    for step in accelerator.progress(range(4)):
        accelerator.log({"loss": 1.0 / (1 + step)})
    if accelerator.process_index == failing_rank:
        raise ValueError("as asked")


def come_late_to_first_call(slow_rank: int) -> None:
    """Meet the others for the first time after the loop."""
    accelerator = Accelerator()
    for _ in accelerator.progress(range(4)):
        pass
    if accelerator.process_index == slow_rank:
        time.sleep(BATCHES * SLOW_STEP_S)
    accelerator.wait_for_everyone()


def timed(results: Results) -> list[RankTimes]:
    return [*results.report().facts.timed_ranks.values()]


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_with_slow_steps_holds_the_others_up(slow_rank, tmp_path):
    results = notebook_launcher(train, (slow_rank,), num_processes=2)
    facts = results.report().facts
    assert facts.slowest is not None
    assert facts.slowest.rank == slow_rank
    times = facts.timed_ranks
    slept_s = BATCHES * SLOW_STEP_S
    # Beside it the loop does next to nothing; the first step is not waited for in DDP's log.
    assert 0.7 * slept_s < times[1 - slow_rank].waiting_s < times[1 - slow_rank].total_s
    assert times[slow_rank].computing_s > 0.9 * slept_s
    assert times[slow_rank].waiting_s < 0.2 * slept_s
    assert f"Rank {slow_rank} holds the others up" in str(results.report())
    assert "it computes longer than the other" in str(results.report())
    document = results.report().to_dict()
    assert [figures["steps"] for figures in document["ranks"]] == [BATCHES] * 2
    assert [figures["samples"] for figures in document["ranks"]] == [BATCHES * 4] * 2
    curves = {(curve["name"], curve["rank"]): curve for curve in document["curves"]}
    assert set(curves) == {(name, rank) for name in ("loss", "rank") for rank in (0, 1)}
    assert set(curves["rank", 1]["values"]) == {1.0}
    assert curves["loss", 0]["steps"] == sorted(curves["loss", 0]["steps"])
    assert {"text": "UserWarning: nearly done", "count": 1, "ranks": [0]} in document["warnings"]
    assert document["plan"]["text"] == results.plan.explain()
    assert document["nbaccel_version"] == nbaccel.__version__
    saved = results.report().save(tmp_path / "run.json")
    assert json.loads(saved.read_text()) == document


@pytest.mark.parametrize("loop", [all_reduce_beside, gather_beside])
def test_collectives_of_torch_and_of_the_accelerator_are_counted(loop):
    results = notebook_launcher(loop, (1,), num_processes=2)
    first, second = timed(results)
    slept_s = 10 * SLOW_STEP_S
    assert first.waiting_s > 0.8 * slept_s
    assert second.computing_s > 0.9 * slept_s
    slowest = results.report().facts.slowest
    assert slowest is not None
    assert slowest.rank == 1


def test_waiting_at_the_first_call_of_all_is_waiting_and_waiting_for_data_is_a_share():
    results = notebook_launcher(come_late_to_first_call, (3,), num_processes=4)
    slept_s = BATCHES * SLOW_STEP_S
    for times in timed(results)[:3]:
        assert times.waiting_s + times.communicating_s > 0.8 * slept_s
    slowest = results.report().facts.slowest
    assert slowest is not None
    assert slowest.rank == 3
    assert slowest.waited_s > 0.7 * slept_s

    results = notebook_launcher(train, (None, SlowDataset, WarmsUp), num_processes=2)
    for times in timed(results):
        assert times.starting_s > 0.9 * START_S
        assert times.computing_s < 0.5 * START_S
        assert times.data_s >= BATCHES * 4 * SLOW_SAMPLE_S
        assert times.data_s > 0.5 * times.steady_s
        parts_s = times.computing_s + times.communicating_s + times.data_s + times.waiting_s
        assert times.total_s == pytest.approx(parts_s + times.starting_s, abs=0.01)
    assert "Left out is the start in the first step, 3." in str(results.report())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_without_loops_has_a_report_that_says_so(num_processes):
    """In this process, it shares none with the run before."""
    if num_processes == 1:
        facts = notebook_launcher(train, (0,), num_processes=1).report().facts
        (times,) = facts.timed_ranks.values()
        assert times.computing_s > BATCHES * SLOW_STEP_S
        assert times.waiting_s == 0
        assert (facts.ranks[0].steps, facts.ranks[0].samples) == (BATCHES, BATCHES * 4)
        assert (facts.ranks[0].peak_host_bytes or 0) > 1 << 20
        assert set(facts.curves) == {"loss", "rank"}
        assert "start_method" in facts.plan.text
    results = notebook_launcher(workers.nothing, num_processes=num_processes)
    report = results.report()
    assert report.facts.timed_ranks == {}
    assert report.facts.ranks[0].steps is None
    assert "No loop over batches was seen" in str(report)
    assert report.facts.plan.text == results.plan.explain()
    assert 0 < report.facts.seconds < 60


@pytest.mark.parametrize(("num_processes", "failing_rank"), [(2, 1), (1, 0)])
def test_a_run_that_failed_has_a_report(num_processes, failing_rank):
    with pytest.raises(ValueError, match="as asked") as caught:
        notebook_launcher(fail_after_loop, (failing_rank,), num_processes)
    latest = report_of(ENDED_RUNS[-1], "the latest")
    assert latest.facts.ending == "failed"
    assert set(latest.facts.curves) == {"loss"}
    assert latest.facts.ranks[failing_rank].steps == 4
    # In this process the function's own error is raised, which knows nothing of the run.
    if num_processes > 1:
        assert isinstance(caught.value, nbaccel.WorkerFailed)
        assert caught.value.report().to_dict() == latest.to_dict()


def test_cells_and_calls_have_reports_of_their_own():
    with Pool(2) as pool:
        cell = pool.run("import warnings; warnings.simplefilter('always'); warnings.warn('late')")
        assert [seen.text for seen in cell.report().facts.warnings] == ["UserWarning: late"]
        assert cell.report().facts.plan.num_processes == 2

        results = notebook_launcher(train, (1,), pool=pool)
        facts = results.report().facts
        assert facts.slowest is not None
        assert facts.slowest.rank == 1
        assert pool.report().to_dict() == results.report().to_dict()

        # Neither the account nor the metrics of a call are continued by the next.
        later = pool.run("1").report().facts
        assert later.timed_ranks == {}
        assert later.curves == {}

        # A DDP model of an earlier call is still measured; what it has waited there is not told.
        again = notebook_launcher(train, (0,), pool=pool).report().facts
        assert again.slowest is not None
        assert again.slowest.rank == 0

        with pytest.raises(WorkerFailed):
            pool.run("1 / 0")
        assert pool.report().facts.ending == "failed"


def test_what_was_no_run_has_no_report_and_is_not_compared():
    results = notebook_launcher(workers.nothing, num_processes=1)
    for nothing, says in (
        (nbaccel.WorkerFailed("made by hand"), "WorkerFailed has nothing to report"),
        (Results([1], results.plan), "1 results has nothing to report"),
        (Pool(2), "nothing to report"),
    ):
        with pytest.raises(ConfigError, match=says):
            nothing.report()
    for runs, says in (
        ([], r"got 0: two runs or more"),
        ([3, 4], r"got 3, which has no report"),
        (["missing.json", "x.json"], r"missing\.json.*cannot be read as a report"),
    ):
        with pytest.raises(ConfigError, match=says):
            nbaccel.compare(*runs)
    with pytest.raises(ConfigError, match="at least 10"):
        RunConfig(compare=3)


def go_through(model: nn.Module, wait_s: float = 0.0) -> None:
    accelerator = Accelerator()
    data = DataLoader(TensorDataset(torch.ones(240, 4)), batch_size=4)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
    model, optimizer, loader = prepared
    for (batch,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        # The more ranks, the longer each step: nothing is won.
        time.sleep(wait_s * accelerator.num_processes)


def test_two_runs_are_laid_side_by_side(tmp_path):
    one = notebook_launcher(go_through, (nn.Linear(4, 2), 0.03), 1)
    two = notebook_launcher(go_through, (nn.Linear(4, 2), 0.03), 2)
    compared = nbaccel.compare(one, two)
    lines = [line.strip().split("  ") for line in str(compared).splitlines()]
    rows = {name: [cell.strip() for cell in cells if cell.strip()] for name, *cells in lines}
    assert rows["run"] == ["go_through on 1 worker", "go_through on 2 workers"]
    assert rows["steps"] == ["60", "30"]
    assert all("→" in cell for cell in rows["loss"])
    html = compared._repr_html_()
    assert html.count("<img") == 1, "one chart for the metric that both have"
    assert "go_through on 2 workers" in html
    saved = tmp_path / "one.json"
    one.report(saved)
    assert str(nbaccel.compare(str(saved), two.report())) == str(compared)
    # Each of two ranks takes twice as long for half as many steps.
    (advice,) = two.report().facts.advice
    assert "times the samples per second of 1 rank (an earlier run of go_through)" in advice
    assert "num_processes=1" in advice
    assert not one.report().facts.advice


def test_one_worker_is_measured_on_request(capfd):
    model = nn.Linear(4, 2)

    def slower_together(model: nn.Module) -> None:
        go_through(model, 0.03)  # far longer than what a loaded machine adds to a step

    results = notebook_launcher(slower_together, (model,), 2, compare=20)
    assert "20 steps in one worker first, to compare" in capfd.readouterr().err
    (advice,) = results.report().facts.advice
    assert "an earlier run of slower_together" in advice
    assert results.report().to_dict()["title"] == "slower_together"
