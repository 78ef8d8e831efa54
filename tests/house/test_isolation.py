"""`isolated` runs a body elsewhere and brings home what became of it."""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from tests import isolation
from tests.isolation import isolated


@pytest.fixture
def outer_pid():
    return os.getpid()


@isolated
def test_the_body_runs_in_another_process_with_the_fixtures_values(tmp_path, outer_pid):
    assert Path(tmp_path).is_dir()
    assert os.getppid() == outer_pid
    assert "pytest" not in Path("/proc/self/cmdline").read_bytes().decode()


class TestMethod:
    word = "bound"

    @isolated
    def test_a_method_is_bound_to_an_object_of_its_class(self):
        assert self.word == "bound"


@isolated
def test_warnings_are_errors_there_too():
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", stacklevel=1)


def fail():
    print("said before")
    os.write(1, b"said by C\n")
    raise ValueError("the value 42 is odd")


def skip():
    pytest.skip("no such device")


def kill_itself():
    os.kill(os.getpid(), 9)


def hang():
    subprocess.Popen(["sleep", "66"])
    time.sleep(60)


def crash_late():
    import atexit

    atexit.register(os._exit, 3)


@pytest.mark.parametrize(
    ("body", "kind", "text", "said"),
    [
        (fail, "failed", 'raise ValueError("the value 42 is odd")', "said before"),
        (fail, "failed", "ValueError: the value 42 is odd", "said by C"),
        (skip, "skipped", "no such device", ""),
        (kill_itself, "failed", "ended with signal SIGKILL, before the test was over", ""),
        (crash_late, "failed", "exit status 3, after the test had passed", ""),
        pytest.param(hang, "failed", "not done after 10 s", "in hang", marks=pytest.mark.slow),
    ],
)
def test_what_became_of_the_body_comes_home(body, kind, text, said, capsys):
    limit_s = 10.0 if body is hang else 30.0
    request = isolation.Request(__name__, body.__qualname__, {}, list(warnings.filters), limit_s)
    outcome = isolation._run(request)
    assert outcome.kind == kind
    assert text in outcome.text
    assert said in capsys.readouterr().out


def test_the_decorated_function_raises_what_pytest_expects():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        isolated(skip)()
    with pytest.raises(pytest.fail.Exception, match="the value 42 is odd"):
        isolated(fail)()
