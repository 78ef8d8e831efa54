"""Launches through the public door: every result and every failure, with real processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # a forked worker's first optimizer would import it: seconds
import torch.distributed as dist
from torch import nn

from nbaccel import (
    Accelerator,
    ConfigError,
    LaunchTimeout,
    PrecisionMismatch,
    RunConfig,
    WorkerDied,
    WorkerFailed,
    debug_launcher,
    notebook_launcher,
)
from nbaccel.errors import InputRefused, NotSendable, PortTaken, UnsafeFork
from nbaccel.workers import worker
from tests import worker_functions as workers
from tests.isolation import isolated
from tests.process import lives, memory_files, stop_pressed_when
from tests.strategies.needs import SHARDING
from tests.worker_functions import Net

Launch = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_thread_of_another_test() -> None:
    """End the thread that tqdm keeps once a bar has been shown: with a thread, `auto` forks not."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None and tqdm.tqdm.monitor is not None:
        tqdm.tqdm.monitor.exit()
        tqdm.tqdm.monitor = None


@pytest.fixture(params=["template", "fork"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """Launch two workers with either start method."""

    def two(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        return notebook_launcher(function, args, 2, start_method=request.param, **settings)

    two.method = request.param  # type: ignore[attr-defined]
    return two


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def report_of(error: BaseException) -> str:
    text = str(error)
    assert len(text.splitlines()) <= 40, text
    return text


def fail(launch: Launch, function: Callable[..., Any], *args: Any, **settings: Any) -> WorkerFailed:
    """Launch what must fail; a model that is passed along must stay as it was."""
    with pytest.raises(WorkerFailed) as caught:
        launch(function, *args, **settings)
    report_of(caught.value)
    return caught.value


# ------------------------------------------------------------------------- results


def test_results_come_by_rank_from_processes_of_their_own(launch):
    results = launch(workers.whoami, "x", 2)
    assert [r[0] for r in results] == [0, 1]
    assert [r[2:] for r in results] == [("x", 2)] * 2
    assert len({os.getpid(), *(r[1] for r in results)}) == 3
    assert not any(lives(r[1]) for r in results)
    assert results.plan.start_method == launch.method  # type: ignore[attr-defined]
    assert isinstance(results, list)

    def leave() -> None:
        sys.exit(0 if workers.rank() else None)

    assert launch(leave) == [None, None]

    model = Net()
    before = values(model)
    first, _ = launch(workers.train, model, share_back=False)
    assert_equal(values(model), before)
    assert not torch.equal(first["body.weight"], before["body.weight"])


def test_a_worker_may_return_its_model(launch):
    model = Net()

    def give(net: Net) -> Any:
        with torch.no_grad():
            net.body.weight.fill_(workers.rank() + 5.0)
        return net, net.body.weight

    def give_prepared(net: Net) -> Any:
        return Accelerator().prepare(net)

    # DDP belongs to the workers' process group: what it wraps comes.
    assert [type(net) for net in launch(give_prepared, Net())] == [Net, Net]
    with pytest.warns(UserWarning, match="different models"):
        results = launch(give, model)
    for number, (net, weight) in enumerate(results):
        assert float(net.body.weight.detach().mean()) == number + 5
        assert net.body.weight is weight
        assert weight.data_ptr() != model.body.weight.data_ptr()
    assert float(model.body.weight.detach().mean()) == 5


@pytest.mark.forks
def test_one_worker_runs_here_and_more_than_two_run_too():
    assert notebook_launcher(os.getpid, (), num_processes=1) == [os.getpid()]
    assert debug_launcher(workers.rank, (), 4) == [0, 1, 2, 3]
    for method in ("template", "fork"):
        (pid,) = notebook_launcher(os.getpid, (), 1, start_method=method)
        assert pid != os.getpid(), "one worker in a process of its own, if that is asked for"


def test_a_result_that_cannot_be_sent_loses_neither_the_others_nor_the_weights(launch):
    model = Net()

    def train(net: Net) -> Any:
        found = workers.train(net)
        return found if workers.rank() == 0 else (i for i in range(3))

    refusal = "(?s)rank 1 returned a generator, which cannot be sent.*Return what can be pickled"
    with pytest.warns(UserWarning, match=refusal):
        results = launch(train, model)
    assert_equal(values(model), results[0])
    assert "generator" in repr(results[1])


# ------------------------------------------------------------------------- weights are copied back


def test_the_notebooks_model_is_the_trained_model(launch):
    model, memory_before = Net(), memory_files()
    before, address = values(model), None
    for _ in range(3):
        first, second = launch(workers.train, model, "AdamW")
        assert_equal(values(model), first)
        assert torch.equal(first["body.weight"], second["body.weight"]), "DDP keeps ranks equal"
        assert model.tied is model.head.weight
        assert address in (None, model.body.weight.data_ptr()), "shared once"
        address = model.body.weight.data_ptr()
    assert int(model.norm.num_batches_tracked) == 9
    assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])
    assert not torch.equal(model.body.weight, before["body.weight"])
    # One of the model, and the template's for errors.
    assert memory_files() <= memory_before + 1 + (launch.method == "template")


@SHARDING
def test_every_rank_writes_its_own_shard_home(launch):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    before = values(model)

    def train(net: nn.Module) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        workers.join()
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return {n: p.full_tensor().detach() for n, p in net.named_parameters()}

    first, _ = launch(train, model)
    assert_equal(values(model), first)
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].bias, before["2.bias"])


def test_weights_that_are_sums_over_the_ranks_do_not_fail_the_launch(launch):
    model = nn.Linear(3, 2, bias=False)
    before = values(model)

    def train(net: nn.Linear) -> str:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial

        workers.join()
        mesh = init_device_mesh("cpu", (2,))
        with torch.no_grad():
            net.weight = nn.Parameter(DTensor.from_local(net.weight + 1, mesh, [Partial()]))
        return "trained"

    with pytest.warns(UserWarning, match=r"args\[0\].*weight is placed as .*Partial.*full_tensor"):
        results = launch(train, model)
    assert list(results) == ["trained", "trained"]
    assert_equal(values(model), before)
    assert torch.equal(results.state_dicts["args[0]"]["weight"], before["weight"] + 1)


# ------------------------------------------------------------------------- failures


def test_the_rank_that_raised_is_named_not_the_one_that_lost_it(launch):
    model = Net()
    before = values(model)

    def train(net: Net) -> None:
        workers.join()
        workers.fit(net, "SGD", steps=1)
        if workers.rank() == 1:
            raise ValueError("the loss is NaN")  # this very line
        workers.wait_in_all_reduce()

    error = fail(launch, train, model)
    assert isinstance(error, ValueError)
    text = report_of(error)
    assert text.startswith("rank 1 of 2 raised ValueError: the loss is NaN")
    assert 'raise ValueError("the loss is NaN")  # this very line' in text
    assert "rank 0: " in text
    assert "wait_in_all_reduce" in text or "worker_functions.py" in text
    assert "as it was before the launch" in text
    assert "ValueError: the loss is NaN" in str(error.__cause__)
    assert error.failure.rank == 1
    assert_equal(values(model), before)


@pytest.mark.parametrize(
    ("leave", "kind", "says", "line"),
    [
        (lambda: sys.exit(3), WorkerFailed, "raised SystemExit: 3", ""),
        (lambda: sys.exit("no data"), WorkerFailed, "raised SystemExit: no data", ""),
        (lambda: os._exit(0), WorkerDied, "left with exit code 0 before the", "os._exit"),
        (lambda: os._exit(7), WorkerDied, "left with exit code 7 before the", "os._exit"),
        (workers.segfault, WorkerDied, "was killed by SIGSEGV", "ctypes.string_at(0)"),
        (workers.abort, WorkerDied, "was killed by SIGABRT", "os.abort()"),
    ],
)
def test_a_worker_that_leaves_or_crashes_is_told_with_the_line(launch, leave, kind, says, line):
    def work() -> None:
        if workers.rank() == 1:
            leave()
        workers.sleep_for_ever()

    error = fail(launch, work)
    assert isinstance(error, kind)
    assert f"rank 1 of 2 {says}" in report_of(error)
    assert line in report_of(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang", [workers.sleep_for_ever, workers.lock_up_in_c, workers.ignore_everything]
)
def test_a_launch_that_hangs_ends_in_time(launch, hang):
    model = Net()
    before = values(model)

    def train(net: Net) -> None:
        with torch.no_grad():
            net.body.weight.zero_()
        if workers.rank() == 1:
            hang()

    began = time.monotonic()
    with pytest.raises(LaunchTimeout, match="did not end within timeout=3") as caught:
        launch(train, model, timeout=3.0)
    assert time.monotonic() - began < 30
    assert isinstance(caught.value, TimeoutError)
    text = report_of(caught.value)
    assert "rank 1 " in text
    assert "rank 0 had returned" in text
    assert_equal(values(model), before)


@pytest.mark.slow
def test_a_rank_that_returned_early_is_named(launch):
    def train() -> None:
        workers.join()
        if workers.rank() == 0:
            workers.wait_in_all_reduce()

    error = fail(launch, train)
    text = report_of(error)
    assert "rank 0 of 2 waited for rank 1, which had already returned" in text
    assert "needs every rank" in text


def test_classes_made_in_functions(launch):
    """Those of the notebook are the same; one made in the worker comes as a copy."""

    class Mine(Exception):
        pass

    class Found:
        def __init__(self, value: int) -> None:
            self.value = value

    def train(raises: bool) -> Any:
        class Made:
            value = 5

        if raises:
            raise Mine("of my own")
        return Found(workers.rank()), Made()

    results = launch(train, False)
    assert [type(found) for found, _ in results] == [Found, Found]
    assert [found.value for found, _ in results] == [0, 1]
    assert [(type(made).__name__, made.value) for _, made in results] == [("Made", 5)] * 2
    with pytest.raises(Mine, match="of my own"):
        launch(train, True)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (workers.MissingKey("epoch"), KeyError, "epoch"),
        (KeyError("epoch"), KeyError, "raised KeyError: 'epoch'"),
        (workers.DiskTrouble(28, "No space left on device", "/data"), OSError, "No space left"),
        (FileNotFoundError(2, "No such file", "/x"), FileNotFoundError, "/x"),
        (workers.BadText("utf-8", b"\xff", 0, 1, "bad"), UnicodeDecodeError, "can't decode"),
        (StopIteration("done"), StopIteration, "done"),
        (ImportError("no module", name="x"), ImportError, "no module"),
        (SyntaxError("bad", ("f.py", 1, 2, "text")), SyntaxError, "bad"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_built_in_exceptions_and_their_children_keep_their_types(pool, error, kind, says):
    def train() -> None:
        raise error

    with pytest.raises(WorkerFailed) as caught:
        pool.call(train)
    assert isinstance(caught.value, kind)
    assert says in report_of(caught.value)
    for slot in ("errno", "filename", "value", "name", "reason", "lineno"):
        assert getattr(caught.value, slot, None) == getattr(error, slot, None)
    repr(caught.value)


def test_an_exception_without_a_pickle_or_a_text_is_told_and_frees_who_waits(launch):
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def train(error: type[Exception]) -> None:
        if workers.rank() == 1:
            raise error
        workers.join()  # which rank 1 never does

    error = fail(launch, train, workers.Unpicklable)
    assert isinstance(error, workers.Unpicklable)
    assert "rank 1 of 2 raised" in report_of(error)
    assert "Unpicklable: holds a generator" in report_of(error)
    assert "__str__ raised RuntimeError" in report_of(fail(launch, train, Mute))


def test_questions_are_refused(launch):
    def ask() -> None:
        input("learning rate? ")

    def debug() -> None:
        breakpoint()  # noqa: T100

    with pytest.raises(InputRefused, match=r"input\('learning rate\? '\) in worker \d") as caught:
        launch(ask)
    assert isinstance(caught.value, EOFError)
    with pytest.raises(InputRefused, match="num_processes=1"):
        launch(debug)


def test_a_killed_worker_is_told_and_leaves_no_data_loader_behind(launch, tmp_path, capfd):
    model = Net()
    before = values(model)

    def train(net: Net) -> None:
        loader = torch.utils.data.DataLoader(range(10_000), num_workers=2, batch_size=1)
        batches = iter(loader)
        next(batches)
        pids = [w.pid for w in batches._workers]
        (tmp_path / str(workers.rank())).write_text(" ".join(map(str, [os.getpid(), *pids])))
        workers.join()
        workers.fit(net, "SGD", steps=1)
        dist.barrier()
        if workers.rank() == 1:
            sys.stdout.write("last words")
            sys.stdout.flush()
            workers.kill_self(signal.SIGKILL)
        workers.sleep_for_ever()

    error = fail(launch, train, model)
    assert isinstance(error, WorkerDied)
    assert "rank 1 of 2 was killed by SIGKILL" in report_of(error)
    assert "last words" in report_of(error)
    assert "last words" in capfd.readouterr().out
    assert_equal(values(model), before)
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 6
    deadline = time.monotonic() + 20
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(lives, pids))


# ------------------------------------------------------------------------- interrupts


def test_stop_while_a_failure_is_wound_up_hurries_and_tells_the_failure(launch, tmp_path):
    failing = tmp_path / "failing"

    def train() -> None:
        if workers.rank() == 1:
            failing.touch()
            raise ValueError("the cause")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        time.sleep(60)

    # The other rank cannot be interrupted: the end takes longer than this.
    with pytest.raises(ValueError, match="the cause"):
        with stop_pressed_when(failing.exists, after_s=0.4):
            launch(train)


def test_an_interrupted_worker_may_tidy_up(launch, tmp_path):
    ready, tidied = tmp_path / "ready", tmp_path / "tidied"
    ready.mkdir()
    tidied.mkdir()

    def train() -> None:
        try:
            (ready / str(workers.rank())).touch()
            workers.sleep_for_ever()
        finally:
            time.sleep(0.5)
            (tidied / str(workers.rank())).touch()

    with pytest.raises(KeyboardInterrupt):
        with stop_pressed_when(lambda: len(list(ready.iterdir())) == 2):
            launch(train)
    assert sorted(p.name for p in tidied.iterdir()) == ["0", "1"]


# ------------------------------------------------------------------------- precision


def test_a_precision_that_nobody_reads_is_an_error_and_autocast_and_bf16_fulfil_it(launch):
    with pytest.raises(PrecisionMismatch, match=r"mixed_precision='bf16' was asked.*runs in fp32"):
        launch(workers.train, Net(), mixed_precision="bf16")

    def train(net: Net) -> str:
        workers.join()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            workers.fit(net, "SGD", steps=1)
        return os.environ["ACCELERATE_MIXED_PRECISION"]

    def train_in_bf16(net: Net) -> None:
        stepper = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.randn(4, 8, dtype=torch.bfloat16)).sum().backward()
        stepper.step()

    assert launch(train, Net(), mixed_precision="bf16") == ["bf16", "bf16"]
    launch(train_in_bf16, Net().bfloat16(), mixed_precision="bf16")


# ------------------------------------------------------------------------- what workers see


def test_a_worker_sees_variables_folder_modules_and_random_numbers_of_now(
    launch, monkeypatch, tmp_path
):
    launch(workers.nothing)
    (tmp_path / "written_after_the_start.py").write_text("VALUE = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OF_THE_NOTEBOOK", "yes")
    monkeypatch.delenv("HOME", raising=False)

    def seed() -> None:
        random.seed(3)
        np.random.seed(4)
        torch.manual_seed(5)

    def draw() -> Any:
        return random.random(), np.random.random(), torch.rand(2).tolist()

    def look() -> Any:
        import written_after_the_start

        return dict(os.environ), str(Path.cwd()), written_after_the_start.VALUE, draw()

    seed()
    found = launch(look)
    assert found[0][1:] == found[1][1:] == (str(tmp_path), 42, found[0][3])
    seed()
    assert found[0][3] == draw(), "and the launch itself draws none"
    for number, (variables, *_) in enumerate(found):
        expected = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_MIXED_PRECISION": "no",
            "OF_THE_NOTEBOOK": "yes",
        }
        assert expected.items() <= variables.items()
        assert "HOME" not in variables
    assert found[0][0]["MASTER_PORT"] == found[1][0]["MASTER_PORT"]
    assert "RANK" not in os.environ


# ------------------------------------------------------------------------- ports


def test_a_taken_port_names_its_holder_and_a_free_one_is_used_again(launch):
    def look() -> Any:
        import psutil

        workers.join()
        port = int(os.environ["MASTER_PORT"])
        found = {c.laddr.ip for c in psutil.net_connections("tcp") if c.laddr.port == port > 0}
        dist.barrier()
        dist.destroy_process_group()
        return port, sorted(found)

    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"use_port={taken} is taken by this very process"):
            launch(workers.nothing, use_port=taken)
    for _ in range(2):
        assert [port for port, _ in launch(look, use_port=taken)] == [taken] * 2
    assert [addresses for _, addresses in launch(look, use_port="0")] == [["127.0.0.1"]] * 2


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("args", "settings", "words"),
    [
        (
            (workers.nothing, (), 0, "bf61"),
            {"use_port": 70_000},
            ["num_processes", "mixed_precision", "use_port"],
        ),
        ((3, 4, 2), {}, ["function=3 is not callable", "args=4 is no tuple", "args=(model,)"]),
        (
            (workers.nothing, (), 2),
            {"config": RunConfig()},
            ["config and num_processes were both given", "changed("],
        ),
    ],
)
def test_all_mistakes_are_told_before_any_process(args, settings, words):
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(*args, **settings)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.forks
def test_what_cannot_be_sent_is_named_for_the_template_and_auto_forks_and_says_so(capfd):
    args = ({"lock": threading.Lock()},)
    with pytest.raises(NotSendable, match=r"args\[0\]\['lock'\] \(a _thread.lock\)") as caught:
        notebook_launcher(workers.whoami, args, 2, start_method="template")
    assert caught.value.path == "args[0]['lock'] (a _thread.lock)"
    assert "start_method='fork'" in str(caught.value)

    generator = (i for i in range(3))
    results = notebook_launcher(list, (generator,), 2)
    assert results == [[0, 1, 2]] * 2
    assert results.plan.start_method == "fork"
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "forked from the notebook, because args[0] (a generator) cannot be pickled" in said

    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait, name=f"mine-{i}") for i in range(20)]
    for thread in threads:
        thread.start()
    try:
        assert notebook_launcher(workers.train, (Net(),), 2)[0]
        with pytest.raises(NotSendable, match=r"(?s)20 thread\(s\) of yours are running \(mine-0"):
            notebook_launcher(workers.whoami, ((i for i in range(3)),), 2)
        assert notebook_launcher(workers.rank, (), 2, start_method="fork") == [0, 1]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@isolated(timeout_s=60)
def test_what_the_notebook_shares_with_processes_is_shared_with_its_workers():
    tensor = torch.zeros(2).share_memory_()
    with multiprocessing.Manager() as manager:
        noted, queue = manager.list(["notebook"]), multiprocessing.Queue()
        queue.put("notebook")  # by a thread, which no fork takes along

        def note(queue=None):
            tensor[int(os.environ["RANK"])] += 1
            for _ in range(100):  # one connection for both ranks would break
                noted.append(1)
            return queue and (queue.put(1) or queue.get(timeout=20))

        assert notebook_launcher(note, (), 2).plan.start_method == "template"
        assert notebook_launcher(note, (queue,), 2).plan.start_method == "fork"
        assert (noted.count(1), queue.get(timeout=20)) == (400, 1)
    assert tensor.tolist() == [2, 2]


@pytest.mark.slow
@isolated(timeout_s=100)
def test_a_worker_that_hangs_at_its_birth_is_ended_and_shown_with_its_stack():
    from nbaccel.errors import StartupFailed
    from nbaccel.workers import time_limits

    time_limits.FIRST_MESSAGE_S = 2.0  # seconds; twenty by default

    def stay_in_the_child() -> None:
        time.sleep(600)

    os.register_at_fork(after_in_child=stay_in_the_child)
    with pytest.raises(StartupFailed, match="never ran") as caught:
        notebook_launcher(os.getpid, (), 2, start_method="fork")
    assert "stay_in_the_child" in str(caught.value)
    assert "start_method='template'" in str(caught.value)
    assert len(notebook_launcher(os.getpid, (), 2, start_method="template")) == 2


@pytest.mark.slow
@isolated(timeout_s=100)
def test_a_live_process_group_forbids_the_fork():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    with pytest.raises(UnsafeFork, match=r"(?s)process group is alive.*destroy_process_group"):
        notebook_launcher(workers.nothing, (), 2, start_method="fork")
    with pytest.raises(NotSendable, match=r"(?s)args\[0\] \(a generator\).*process group is alive"):
        notebook_launcher(workers.whoami, ((i for i in range(3)),), 2)
    assert notebook_launcher(workers.rank, (), 2) == [0, 1], "the template does not mind"
    dist.destroy_process_group()
    assert notebook_launcher(workers.rank, (), 2, start_method="fork") == [0, 1]


def test_a_launch_that_waits_for_another_threads_launch_says_so(capfd, tmp_path):
    def wait_for_file() -> None:
        (tmp_path / str(workers.rank())).touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    found: list[Any] = []
    first = threading.Thread(
        target=lambda: found.append(notebook_launcher(wait_for_file, num_processes=2))
    )
    first.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.02)
    second = threading.Thread(
        target=lambda: found.append(notebook_launcher(workers.rank, num_processes=2))
    )
    second.start()
    said = ""
    deadline = time.monotonic() + 60
    while "waits" not in said and time.monotonic() < deadline:
        said += capfd.readouterr().err
        time.sleep(0.02)
    (tmp_path / "go").touch()
    first.join()
    second.join()
    assert found == [[None, None], [0, 1]]
    assert said.count("another thread of this notebook has begun a launch") == 1


@pytest.mark.slow
def test_a_worker_that_does_not_leave_after_its_return_is_ended():
    """Its value is there; what keeps it (here: somebody has stopped it) keeps nobody else."""

    def stop_at_the_end() -> int:
        told: list[int] = []
        worker.flush_streams = lambda: (
            os.kill(os.getpid(), signal.SIGSTOP) if told else told.append(1)
        )
        return 7

    assert list(notebook_launcher(stop_at_the_end, num_processes=2)) == [7, 7]
