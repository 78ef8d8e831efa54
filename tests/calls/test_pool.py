"""The pool through its own door, with real workers: cells, names, calls, failures, ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import nbaccel
from nbaccel import ConfigError, Pool, RunConfig, WorkerDied, WorkerFailed, notebook_launcher
from nbaccel.calls.pool_planning import PoolState
from nbaccel.errors import CollectiveMismatch, NotSendable, UnsafeMoment
from nbaccel.workers import template
from tests import worker_functions as workers
from tests.process import descriptors, lives, stop_pressed_when


def pids(pool: Pool) -> list[int]:
    return pool.call(os.getpid)


def test_cells_keep_names_show_values_once_where_equal_and_run_on_some_ranks(pool, capsys):
    with pytest.raises(TypeError, match=r"code as text.*pool\.call"):
        pool.run(len)  # type: ignore[arg-type]
    pool.run("import os; rank = int(os.environ['RANK']); kept = [rank]")
    pool.run("kept.append(10 * rank + 5)")
    assert pool.pull("kept") == {"kept": [[0, 5], [1, 15]]}
    found = pool.run("import torch; total = torch.arange(3) * 2.0", out=["total"])
    assert [t.tolist() for t in found.out["total"]] == [[0.0, 2.0, 4.0]] * 2
    pool.run("40 + 2")
    assert capsys.readouterr().out.split() == ["42"]
    pool.run("rank * 7")
    assert capsys.readouterr().out.splitlines() == ["[0] 0", "[1] 7"]
    pool.run("mark = 0")
    pool.run("mark = 1", ranks=[1])
    assert pool.pull("mark") == {"mark": [0, 1]}
    assert pool.pull("mark", ranks=[1]) == {"mark": 1}


def test_cells_follow_the_notebook_and_no_error_ends_workers(pool, tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBACCEL_PROBE", "changed")
    pool.run("here = None", ranks=[0])  # the other is not told of what has changed until its next
    pool.run("import os; here, probe = os.getcwd(), os.environ['NBACCEL_PROBE']")
    assert pool.pull("here", "probe") == {"here": [str(tmp_path)] * 2, "probe": ["changed"] * 2}

    names["model"] = model = nn.Linear(4, 2)
    with pytest.raises(ZeroDivisionError):
        pool.run("import torch\nwith torch.no_grad(): model.weight.fill_(5.0)\n1 / 0")
    assert model.weight.mean().item() == 5.0

    before = pids(pool)
    pool.run("import sys; sys.exit()")
    with pytest.raises(WorkerFailed, match="SystemExit: 3"):
        pool.run("sys.exit(3)")
    assert pids(pool) == before


def test_what_cannot_be_sent_is_named_before_anything_runs_and_unknown_names_are_guessed(
    pool, names
):
    names["lock"] = threading.Lock()
    pool.run("ran = False")
    with pytest.raises(NotSendable, match="lock"):
        pool.run("ran = True\nlock.acquire()")
    assert pool.pull("ran") == {"ran": [False, False]}
    pool.run("losses = [1]")
    said = r"'loses' is not defined in worker \d\. Did you mean 'losses'"
    with pytest.raises(NameError, match=said):
        pool.pull("loses")


def test_a_group_is_joined_by_the_first_collective_and_left_again_and_again(fresh):
    """Connections of a destroyed group are closed by gloo itself, whose thread still uses them."""
    fresh.run("import torch, torch.distributed as dist\nbefore = dist.is_initialized()")
    fresh.run("who = dist.get_rank()", ranks=[1])  # the rank without the cell joins, too
    assert fresh.pull("who", ranks=[1]) == {"who": 1}
    fresh.run("x = torch.ones(1)\ndist.all_reduce(x)")
    assert fresh.pull("before", "x") == {"before": [False] * 2, "x": [torch.tensor([2.0])] * 2}
    fresh.run("dist.init_process_group('gloo'); dist.all_reduce(x)")  # a second time does no harm
    fresh.run("dist.init_process_group(backend='gloo')")  # by the name that torch gives it
    assert fresh.pull("x") == {"x": [torch.tensor([4.0])] * 2}
    fresh.run(
        "from tests.process import descriptors\n"
        "def replaced(): return list(descriptors().values()).count('/dev/null')\n"
        "dist.destroy_process_group()\nbefore = replaced()"
    )
    for _ in range(8):  # one rank is through while the other is still leaving
        fresh.run("dist.all_reduce(x); dist.destroy_process_group()")
    assert fresh.pull("x") == {"x": [torch.tensor([4.0 * 256])] * 2}
    # What listened, once for each group. (Rank 0 serves the store over connections, besides.)
    fresh.run("joined = dist.is_initialized(); more = replaced() - before")
    assert fresh.pull("joined") == {"joined": [False, False]}
    assert fresh.pull("more", ranks=[1]) == {"more": 8}


def test_an_error_frees_a_rank_that_waits_and_the_pool_goes_on(fresh):
    fresh.run(
        "import os, torch, torch.distributed as dist\nx, rank = torch.ones(1), dist.get_rank()"
    )
    before = pids(fresh)
    with pytest.raises(ValueError, match="no data") as caught:
        fresh.run("if rank == 1:\n    raise ValueError('no data')\ndist.all_reduce(x)")
    text = str(caught.value)
    assert isinstance(caught.value, WorkerFailed)
    assert "rank 1 of 2 raised ValueError: no data" in text
    assert "rank 0: was waiting in all_reduce" in text
    assert "live on" in text
    assert "process groups were ended" in text
    assert pids(fresh) == before
    fresh.run("dist.all_reduce(x)")  # in a new group
    assert [x.item() for x in fresh.pull("x")["x"]] == [2.0, 2.0]


def test_a_rank_that_comes_late_has_not_left_since_it_returned_from_an_earlier_call(fresh):
    def meet() -> int:
        accelerator = nbaccel.Accelerator(cpu=True)
        time.sleep(0.2 * accelerator.process_index)
        return accelerator.gather(torch.ones(1)).numel()

    assert [fresh.call(meet) for _ in range(2)] == [[2, 2], [2, 2]]
    fresh.run("import time, nbaccel\naccelerator = nbaccel.Accelerator(cpu=True)")
    fresh.run("time.sleep(0.2 * accelerator.process_index)\naccelerator.wait_for_everyone()")


@pytest.mark.parametrize("has_group", [True, False])
def test_a_cell_whose_ranks_call_a_collective_unequally_ends_at_once(fresh, has_group):
    start = "import os, torch, nbaccel\nAccelerator = nbaccel.Accelerator\n"
    fresh.run(start + ("accelerator = Accelerator(cpu=True)" if has_group else ""))
    waited = "rank 0 of 2 waited for rank 1, which had already"
    with pytest.raises(WorkerFailed, match=f"(?s){waited}((?!ConnectionReset).)*$"):
        fresh.run("if os.environ['RANK'] == '0': Accelerator(cpu=True).gather(torch.ones(1))")
    with pytest.raises(CollectiveMismatch, match="not given to process 1"):
        fresh.run("Accelerator(cpu=True).gather(torch.ones(1))", ranks=[0])
    fresh.run("found = Accelerator(cpu=True).gather(torch.ones(1)).numel()")
    assert fresh.pull("found") == {"found": [2, 2]}


def test_what_keeps_a_group_and_uneven_collectives_that_are_told(fresh, capsys):
    fresh.run(
        "import torch, torch.distributed as dist\n"
        "rank, x = dist.get_rank(), torch.ones(1)\n"
        "alone = dist.new_group([0]); kept = dist.group.WORLD\n"
        "if rank == 0: dist.all_reduce(x, group=alone)\n"
        "dist.send(x, 1) if rank == 0 else dist.recv(x, 0)"
    )
    with pytest.raises(ZeroDivisionError):
        fresh.run("1 / 0")  # on all ranks
    fresh.run("same = dist.group.WORLD is kept; dist.all_reduce(x)")
    assert fresh.pull("same", "x") == {"same": [True, True], "x": [torch.tensor([2.0])] * 2}
    assert "different numbers" not in capsys.readouterr().err
    fresh.run("work = dist.all_reduce(x.clone(), async_op=True) if rank == 0 else None")
    assert "different numbers of collectives" in capsys.readouterr().err
    fresh.run("dist.all_reduce(x)")
    assert fresh.pull("x") == {"x": [torch.tensor([4.0])] * 2}


def test_a_killed_worker_breaks_the_pool_and_the_next_cell_starts_anew(fresh, capsys):
    fresh.run("import os, signal, time, torch.distributed as dist\nrank = dist.get_rank()")
    before = pids(fresh)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        fresh.run("if rank: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert "rank 0: " in str(caught.value)
    assert fresh.state is PoolState.BROKEN
    assert str(fresh.status()).endswith("The next cell starts " + fresh.plan.headline())
    assert not any(map(lives, before))
    fresh.run("new = 1")
    assert "because rank 1 was killed by SIGKILL" in capsys.readouterr().err
    assert fresh.state is PoolState.IDLE


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSEGV"])  # the latter leaves its stack unread
def test_a_worker_that_dies_between_cells_is_noticed_by_the_next(fresh, end):
    victim = pids(fresh)[1]
    os.kill(victim, signal.Signals[end])
    psutil.wait_procs([psutil.Process(victim)] if lives(victim) else [], timeout=100)
    with pytest.raises(WorkerDied, match=end):
        fresh.run("1 + 1")
    fresh.run("1 + 1")


@pytest.mark.parametrize(
    "stuck",
    ["while True: time.sleep(0.01)", "dist.barrier() if rank else time.sleep(600)"],
    ids=["python", "collective"],
)
def test_stop_keeps_the_workers(fresh, tmp_path, stuck):
    fresh.run(
        "import time, pathlib, torch, torch.distributed as dist\nrank = dist.get_rank(); kept = 7"
    )
    before = pids(fresh)
    mark = tmp_path / "running"
    with pytest.raises(KeyboardInterrupt, match="live on"), stop_pressed_when(mark.exists):
        fresh.run(f"pathlib.Path({str(mark)!r}).touch()\n{stuck}")
    assert pids(fresh) == before
    fresh.run("x = torch.ones(1); dist.all_reduce(x)")
    assert fresh.pull("kept", "x") == {"kept": [7, 7], "x": [torch.tensor([2.0])] * 2}


def test_a_rank_that_dies_after_a_stopped_cell_is_not_taken_for_stopped(fresh, tmp_path):
    victim = pids(fresh)[1]
    mark = tmp_path / "running"
    with pytest.raises(KeyboardInterrupt, match="live on"), stop_pressed_when(mark.exists):
        fresh.run(f"import pathlib, time\npathlib.Path({str(mark)!r}).touch()\ntime.sleep(600)")
    kill_1 = f"import os, signal, time; os.kill({victim}, signal.SIGKILL); time.sleep(600)"
    with pytest.raises(WorkerDied, match="rank 1 of 2 was killed by SIGKILL"):
        fresh.run(kill_1, ranks=[0])


def test_a_worker_deaf_to_stop_is_ended_and_that_is_said(fresh, tmp_path):
    mark = tmp_path / "running"
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])"
    with (
        pytest.raises(KeyboardInterrupt, match="variables are lost"),
        stop_pressed_when(mark.exists),
    ):
        fresh.run(
            f"import pathlib, signal, time\n{deaf}\n"
            f"pathlib.Path({str(mark)!r}).touch()\ntime.sleep(600)"
        )
    assert fresh.state is PoolState.BROKEN
    assert "did not answer" in fresh.reason


def test_a_timeout_ends_a_cell_and_keeps_the_workers():
    with Pool(2, namespace={}, timeout=3) as pool:
        before = pids(pool)
        with pytest.raises(TimeoutError, match="rank 0"):
            pool.run("import time; time.sleep(600)")
        assert pids(pool) == before


def test_a_launch_can_use_live_workers(pool):
    before = pids(pool)
    model = workers.Net()
    first = model.head.weight.detach().clone()
    for _ in range(2):
        found = notebook_launcher(workers.train, (model,), pool=pool)
    assert [f["head.weight"].equal(model.head.weight) for f in found] == [True, True]
    assert not torch.equal(first, model.head.weight)
    assert pids(pool) == before
    trained = model.head.weight.detach().clone()

    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model.head.weight.zero_()
        raise workers.CallersError(5, "spoilt")

    with pytest.raises(workers.CallersError, match="spoilt"):
        notebook_launcher(spoil, (model,), pool=pool)
    assert torch.equal(model.head.weight, trained)
    with pytest.raises(ConfigError, match="num_processes=3"):
        notebook_launcher(workers.whoami, (), 3, pool=pool)
    assert len(notebook_launcher(workers.whoami, (), 2, pool=pool)) == 2
    with pytest.raises(ConfigError) as caught:
        Pool(config=RunConfig(num_nodes=2, max_restarts=1))
    assert len(caught.value.mistakes) == 2


def test_a_busy_pool_says_so(pool, tmp_path):
    mark, go = tmp_path / "running", tmp_path / "go"
    code = (
        f"import pathlib, time\npathlib.Path({str(mark)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)"
    )
    thread = threading.Thread(target=pool.run, args=(code,))
    thread.start()
    while not mark.exists():
        time.sleep(0.01)
    try:
        with pytest.raises(UnsafeMoment, match="another thread"):
            pool.run("1")
        assert pool.complete("os.", 3) is None
    finally:
        go.touch()
        thread.join()


@pytest.mark.forks
def test_a_pool_can_be_forked_from_the_notebook():
    with Pool(2, namespace={"word": "here"}, start_method="fork") as pool:
        pool.run("said = word")
        assert pool.pull("said") == {"said": ["here", "here"]}
        assert psutil.Process(pids(pool)[0]).ppid() == os.getpid()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_pool_that_is_stopped_or_that_nobody_holds_ends_its_workers(is_stopped):
    before = len(descriptors())
    pool = Pool(1, namespace={})
    pool.start()
    found = pids(pool)
    assert found != [os.getpid()], "one worker is a process, too"
    pool.run("import torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)")
    if is_stopped:
        pool.stop()
        assert pool.state is PoolState.STOPPED
    else:
        del pool
    assert not any(map(lives, found))
    assert len(descriptors()) <= before + 3  # the template's, if it was not there before


def processor_time(pid: int) -> dict[str, str]:
    """Nanoseconds on a processor and number of times there, of every thread."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {task.name: (task / "schedstat").read_text() for task in tasks}


def test_idle_workers_use_no_processor_time_and_two_pools_do_not_disturb_each_other(fresh, pool):
    """In a process group it is more: gloo's own thread wakes up all the time."""
    fresh.run("1 + 1")
    found = pids(fresh)
    time.sleep(0.3)  # they tidy up after the last task
    before = [processor_time(pid) for pid in found]
    time.sleep(1.0)
    assert [processor_time(pid) for pid in found] == before

    pool.run("mine = 'first'")
    with Pool(2, namespace={}) as other:
        other.run("mine = 'second'")
        with pytest.raises(WorkerDied):
            other.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert pool.pull("mine") == {"mine": ["first", "first"]}
    assert notebook_launcher(workers.whoami, (), 2)[1][0] == 1
    assert pool.pull("mine") == {"mine": ["first", "first"]}


@pytest.mark.slow
def test_the_end_of_the_template_breaks_the_pool_and_the_next_cell_starts_anew(fresh, capsys):
    before = [psutil.Process(pid) for pid in pids(fresh)]
    nbaccel.shutdown()
    with pytest.raises(WorkerDied, match="are forked from was ended on request"):
        fresh.run("1 + 1")
    assert not psutil.wait_procs(before, timeout=100)[1]
    fresh.run("1 + 1")
    assert "new workers started" in capsys.readouterr().err


@pytest.mark.slow
def test_a_template_that_is_killed_is_told_as_what_it_was(fresh, capsys):
    before = [psutil.Process(pid) for pid in pids(fresh)]
    os.kill(template.running()[0].process.pid, signal.SIGSEGV)
    assert not psutil.wait_procs(before, timeout=10)[1]
    with pytest.raises(WorkerDied) as caught:
        fresh.run("1 + 1")
    told = "process that workers are forked from was killed by SIGSEGV"
    assert told in str(caught.value)
    assert "SIGTERM" not in str(caught.value)
    assert "on request" not in str(caught.value)
    fresh.run("1 + 1")
    assert f"new workers started, because the {told}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_launch_whose_template_is_killed_says_so():
    def kill() -> None:
        if workers.rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(workers.FOREVER_S)

    with pytest.raises(WorkerFailed, match="are forked from was killed by SIGKILL"):
        notebook_launcher(kill, (), 2, start_method="template")
    assert notebook_launcher(workers.rank, (), 2) == [0, 1]
