"""Workers that die before they have been told anything, and folders that are gone."""

from __future__ import annotations

import os
import signal

import pytest

from nbaccel import Pool, WorkerDied, notebook_launcher
from nbaccel.calls.group import Group
from nbaccel.workers import template
from nbaccel.workers.worker_processes import ForkStarter, WorkerHandle
from tests import worker_functions as workers
from tests.kernel.kernel import wait_for
from tests.process import lives

pytestmark = pytest.mark.slow


@pytest.fixture(params=[(0,), (1,), (0, 1)], ids=str)
def dying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Ranks that are killed as soon as they have been forked, and are gone a moment later."""
    ranks: tuple[int, ...] = request.param
    start = Group._start_worker

    def start_and_kill(group: Group, rank: int) -> WorkerHandle:
        member = start(group, rank)
        if rank in ranks:
            os.kill(member.pid, signal.SIGKILL)
            assert wait_for(
                lambda: isinstance(member.starter, ForkStarter) or not lives(member.pid)
            )
        return member

    monkeypatch.setattr(Group, "_start_worker", start_and_kill)
    return ranks


@pytest.mark.parametrize("method", ["template", "fork"])
def test_launch_and_pool_tell_of_a_worker_that_died_at_its_start(dying, method, monkeypatch):
    ranks = "".join(map(str, dying))
    told = rf"rank [{ranks}] of 2 was killed by SIGKILL"
    with pytest.raises(WorkerDied, match=told):
        notebook_launcher(workers.rank, (), 2, start_method=method, timeout=15)
    pool = Pool(2, namespace={}, start_method=method)
    with pytest.raises(WorkerDied, match=told):
        pool.start()
    monkeypatch.undo()
    assert notebook_launcher(workers.rank, (), 2, start_method=method) == [0, 1]
    with pool:
        pool.run("x = 1")


def test_a_deleted_working_folder_does_not_keep_workers_from_running(tmp_path, monkeypatch, capfd):
    gone = tmp_path / "there" / "gone"
    gone.mkdir(parents=True)
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(gone)
    gone.rmdir()
    gone.parent.rmdir()
    # The template process, too, is started there.
    template.stop()
    assert notebook_launcher(os.getcwd, (), 2) == [str(tmp_path)] * 2
    told = capfd.readouterr().err
    assert f"working folder {gone} has been deleted, so its workers run in {tmp_path}" in told
    with Pool(2, namespace={}) as pool:
        pool.run("import os; folder = os.getcwd()")
        assert pool.pull("folder")["folder"] == [str(tmp_path)] * 2
