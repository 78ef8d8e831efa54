"""`isolated` runs a body elsewhere and brings home what became of it."""

from __future__ import annotations

import os
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from tests import isolation
from tests.isolation import Outcome, isolated


@pytest.fixture
def outer_pid():
    return os.getpid()


@isolated
def test_the_body_runs_in_another_process_with_the_fixtures_values(tmp_path, outer_pid):
    assert Path(tmp_path).is_dir()
    assert os.getppid() == outer_pid
    assert "pytest" not in Path("/proc/self/cmdline").read_bytes().decode()


@pytest.mark.parametrize("number", [1, 2])
@isolated(timeout_s=30)
def test_parameters_arrive(number):
    assert number in (1, 2)


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


def outcome_of(body, capsys, timeout_s=30.0) -> tuple[Outcome, str]:
    request = isolation.Request(__name__, body.__qualname__, {}, list(warnings.filters), timeout_s)
    outcome = isolation._run(request)
    return outcome, capsys.readouterr().out


def test_a_failure_comes_home_with_its_traceback_and_output(capsys):
    outcome, output = outcome_of(fail, capsys)
    assert outcome.kind == "failed"
    assert "ValueError: the value 42 is odd" in outcome.text
    assert 'raise ValueError("the value 42 is odd")' in outcome.text
    assert "said before" in output
    assert "said by C" in output


def test_a_skip_comes_home_with_its_reason(capsys):
    assert outcome_of(skip, capsys)[0] == Outcome("skipped", "no such device")


def test_a_killed_process_is_named_by_its_signal(capsys):
    outcome, _ = outcome_of(kill_itself, capsys)
    assert outcome == Outcome(
        "failed", "the fresh process ended with signal SIGKILL, before the test was over"
    )


@pytest.mark.slow
def test_a_hang_shows_its_stacks_and_leaves_nothing(capsys):
    outcome, output = outcome_of(hang, capsys, timeout_s=10)
    assert outcome.kind == "failed"
    assert "not done after 10 s" in outcome.text
    assert "in hang" in output


def test_a_crash_at_exit_fails_a_test_that_had_passed(capsys):
    outcome, _ = outcome_of(crash_late, capsys)
    assert outcome.kind == "failed"
    assert "exit status 3, after the test had passed" in outcome.text


def test_the_decorated_function_raises_what_pytest_expects():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        isolated(skip)()
    with pytest.raises(pytest.fail.Exception, match="the value 42 is odd"):
        isolated(fail)()
