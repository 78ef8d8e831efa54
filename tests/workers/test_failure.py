from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from nbaccel.accelerator import accelerator
from nbaccel.base.frames import Frame
from nbaccel.train import call_check, collectives
from nbaccel.workers import failure
from nbaccel.workers.failure import (
    FailureRecord,
    RaisedError,
    RankActivity,
    describe_error,
    first_cause,
    parse_stack,
)

LOST = [
    ("RuntimeError", "[../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:3127"),
    ("RuntimeError", "Connection reset by peer"),
    ("torch.distributed.DistNetworkError", "failed to recv, got 0 bytes"),
    ("torch.distributed.DistBackendError", "NCCL error: remote process exited or network error"),
    ("torch.distributed.DistStoreError", "Socket closed"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("ConnectionRefusedError", "[Errno 111] Connection refused"),
]


def raised(rank: int, time: float, kind: str = "ValueError", text: str = "bad") -> FailureRecord:
    return FailureRecord(
        rank=rank, time=time, raised=RaisedError(type_name=kind, message=text, frames=())
    )


@pytest.mark.parametrize(("kind", "text"), LOST)
def test_a_lost_connection_is_a_consequence_however_early(kind, text):
    early, late = raised(0, 1.0, kind, text), raised(1, 2.0)
    assert early.is_consequence
    assert first_cause([early, late]) is late


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ValueError", "Connection closed by peer"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
        ("torch.OutOfMemoryError", "CUDA out of memory"),
        ("mine.ConnectionTrouble", "connection reset"),
    ],
)
def test_other_errors_are_causes(kind, text):
    assert not raised(0, 1.0, kind, text).is_consequence


def test_the_first_by_time_is_the_cause_whatever_its_rank_and_deaths_count():
    assert first_cause([raised(0, 3.0), raised(1, 2.0), raised(2, 2.5)]).rank == 1
    # If all lost their connections, the first is told.
    assert first_cause([raised(0, 2.0, *LOST[0]), raised(1, 1.0, *LOST[1])]).rank == 1
    # A rank that was stopped for it is none.
    stopped = FailureRecord(rank=1, time=float("inf"), doing="was waiting when nbaccel stopped it")
    assert first_cause([stopped, raised(0, 2.0, *LOST[0])]).rank == 0
    dead = FailureRecord(rank=1, time=5.0, exit_status=-signal.SIGKILL)
    assert first_cause([raised(0, 1.0, *LOST[0]), dead]) is dead
    # A missing process is a consequence only where the connection broke.
    lost = RaisedError(
        type_name="torch.distributed.DistNetworkError",
        message="Connection reset by peer",
        frames=(),
    )
    left = RaisedError(
        type_name="CollectiveTimeout", message="process 0 has left", frames=(), cause=lost
    )
    never = RaisedError(type_name="CollectiveTimeout", message="did not come", frames=())
    assert first_cause([FailureRecord(rank=0, time=1.0, raised=left), dead]) is dead
    assert not FailureRecord(rank=1, time=1.0, raised=never).is_consequence


def caught_from(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (whatever it is)
        function()
    return caught.value


def test_exceptions_are_taken_down_with_causes_notes_and_frames():
    def inner() -> None:
        raise KeyError("x")

    def outer() -> None:
        try:
            inner()
        except KeyError as error:
            trouble = ValueError("outer")
            trouble.__notes__ = ["a note"]
            raise trouble from error

    found = describe_error(caught_from(outer))
    assert (found.type_name, found.message, found.notes) == ("ValueError", "outer", ("a note",))
    assert found.cause is not None
    assert found.cause.type_name == "KeyError"
    assert [f.function for f in found.cause.frames][-1] == "inner"

    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    found = describe_error(one)
    assert found.cause is not None
    assert found.cause.cause is None

    def use() -> None:
        unknown_name  # noqa: B018, F821

    assert describe_error(caught_from(use)).missing_name == "unknown_name"
    assert describe_error(NameError("name 'x' is not defined")).missing_name == ""
    assert describe_error(KeyError("x")).missing_name == ""


DUMP = """\
Fatal Python error: Segmentation fault

Thread 0x00007f0a1affd6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0a9c0d2740 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/tmp/ipykernel_1/22.py", line 7 in crash
  File "/home/me/train (old), v2.py", line ??? in <module>
  File "{house}/workers/worker.py", line 300 in _call
  File "{house}/workers/worker.py", line 90 in main

Extension modules: numpy.core (total: 1)
""".replace("{house}", failure.__file__.rpartition("/workers/")[0])


def test_the_main_threads_stack_is_read_from_a_dump_without_what_ran_where_it_was_forked():
    found = parse_stack(DUMP)
    assert [(f.file.rpartition("/")[2], f.line, f.function) for f in found] == [
        ("__init__.py", 519, "string_at"),
        ("22.py", 7, "crash"),
        ("train (old), v2.py", 0, "<module>"),
    ]
    assert parse_stack(DUMP + DUMP.replace("line 7", "line 8"))[1].line == 8, "the latest counts"

    of_notebook = (
        '  File "{house}/workers/worker.py", line 80 in run_worker\n'
        '  File "{house}/workers/worker_processes.py", line 60 in start\n'
        '  File "/tmp/ipykernel_9/33.py", line 1 in <module>\n'
        '  File "/site-packages/ipykernel/kernelapp.py", line 7 in start\n'
    ).replace("{house}", failure.__file__.rpartition("/workers/")[0])
    forked_in_cell = DUMP.replace("\nExtension modules", of_notebook + "\nExtension modules")
    assert parse_stack(forked_in_cell) == parse_stack(DUMP)
    head, _, _ = DUMP.rpartition('  File "/usr/lib/python3.11/ctypes')
    assert parse_stack(head + of_notebook) == ()


TORCH = "/site-packages/torch/distributed/distributed_c10d.py"
GATHERS = [
    (TORCH, "all_gather"),
    (collectives.__file__, "_gather_one"),
    (collectives.__file__, "gather"),
    (accelerator.__file__, "gather_for_metrics"),
    ("me.py", "f"),
]
COMPARES = [(call_check.__file__, "_await_all"), (call_check.__file__, "compare"), *GATHERS[1:]]


@pytest.mark.parametrize(
    ("stack", "text", "waits"),
    [
        ([(TORCH, "wrapper"), (TORCH, "barrier"), ("me.py", "f")], "waiting in barrier", True),
        (GATHERS, "waiting in gather_for_metrics", True),
        (COMPARES, "waiting before gather_for_metrics, to compare calls", True),
        ([("me.py", "f")], "running", False),
        ([("/lib/python3.11/time.py", "nap"), ("me.py", "waiting in")], "in nap", False),
        ([], "running", False),
    ],
)
def test_what_a_rank_does_is_known_without_reading_its_text(stack, text, waits):
    frames = [Frame(file=file, line=3, function=function) for file, function in stack]
    found = RankActivity.of_stack(frames)
    assert str(found) == text + (" (me.py:3)" if stack else "")
    assert bool(found.collective) == waits


@pytest.mark.parametrize(
    ("status", "name", "says"),
    [
        (0, "left with exit code 0 before the function returned", ""),
        (1, "left with exit code 1 before the function returned", ""),
        (-45, "was killed by signal 45", ""),
        (-signal.SIGRTMIN, "was killed by SIGRTMIN", ""),
        (-signal.SIGILL, "was killed by SIGILL", ""),
        (-signal.SIGFPE, "was killed by SIGFPE", ""),
        (-signal.SIGKILL, "was killed by SIGKILL (signal 9)", "ran out of memory"),
        (-signal.SIGSEGV, "was killed by SIGSEGV", "memory that is not its own"),
        (-signal.SIGABRT, "was killed by SIGABRT", "gave up on purpose"),
        (-signal.SIGTERM, "was killed by SIGTERM", "asked it to end"),
        (-signal.SIGBUS, "was killed by SIGBUS", "/dev/shm is full"),
    ],
)
def test_every_exit_is_named_and_explained_in_a_few_lines(status, name, says):
    assert failure.name_exit(status).startswith(name)
    record = FailureRecord(rank=0, time=0.0, exit_status=status, max_rss_bytes=3 * 2**30)
    lines = failure.explain_exit(record)
    assert len(lines) <= 3
    assert says in " ".join(lines)


def test_the_report_on_many_ranks_stays_short():
    records = tuple(raised(rank, float(rank), text="x\n" * 50) for rank in range(64))
    text = failure.failure_text(
        records, 64, last_output={0: ["line"] * 20, 1: ["other"]}
    ).splitlines()
    assert len(text) <= 40
    assert text[0].startswith("rank 0 of 64 raised ValueError: x")
    assert any("56 more" in line or "55 more" in line for line in text)
