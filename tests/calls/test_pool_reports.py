"""Reports of what live workers have run."""

from __future__ import annotations

import pytest

from nbaccel import ConfigError, Pool, WorkerFailed, notebook_launcher
from tests.calls import report_loops as loops


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


def test_before_anything_has_run_there_is_no_report() -> None:
    with pytest.raises(ConfigError, match="nothing to report"):
        Pool(2).report()
