from __future__ import annotations

import copy
import pickle
import re

import pytest

from nbaccel import errors

LEAVES = [
    (errors.ConfigError, ValueError),
    (errors.WrongArguments, TypeError),
    (errors.WrongArguments, errors.ConfigError),
    (errors.ModelNotShareable, ValueError),
    (errors.NotSendable, TypeError),
    (errors.PortTaken, OSError),
    (errors.InputRefused, EOFError),
    (errors.MissingBackend, ImportError),
    (errors.UnsafeFork, RuntimeError),
    (errors.PrecisionMismatch, RuntimeError),
    (errors.WorkerFailed, RuntimeError),
    (errors.WorkerDied, RuntimeError),
    (errors.LaunchTimeout, TimeoutError),
    (errors.StartupFailed, RuntimeError),
    (errors.PlatformUnsupported, RuntimeError),
    (errors.InternalError, Exception),
]


@pytest.mark.parametrize(("kind", "builtin"), LEAVES, ids=lambda value: value.__name__)
def test_a_leaf_is_the_builtin_one_expects_and_keeps_its_message(kind, builtin):
    error = kind("port 29500 is taken")

    assert isinstance(error, builtin)
    assert isinstance(error, errors.NbaccelError)
    assert str(error) == "port 29500 is taken"
    for twin in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is kind
        assert str(twin) == "port 29500 is taken"


def test_several_mistakes_are_numbered_and_failures_survive_pickling():
    error = errors.ConfigError("a is wrong.", "b is wrong.")
    assert error.mistakes == ("a is wrong.", "b is wrong.")
    assert str(error) == "2 settings are wrong:\n  1. a is wrong.\n  2. b is wrong."
    assert pickle.loads(pickle.dumps(error)).mistakes == error.mistakes
    for kind in (errors.WorkerFailed, errors.WorkerDied, errors.LaunchTimeout):
        failed = kind("rank 1 raised", failure={"rank": 1}, failures=({"rank": 1}, {"rank": 0}))
        for twin in (failed, pickle.loads(pickle.dumps(failed)), copy.deepcopy(failed)):
            assert (twin.failure, twin.failures) == ({"rank": 1}, ({"rank": 1}, {"rank": 0}))
            assert str(twin) == "rank 1 raised"


COLOURS = re.compile(r"\x1b\[[\d;]*m")


def shown(error):
    """What a notebook shows of an error, without colours."""
    return COLOURS.sub("", "\n".join(error._render_traceback_()))


def raised_through_the_house(error):
    """The error as it comes out of nbaccel: with frames of this file, of nbaccel and of torch."""
    try:
        try:
            raise OSError("underneath")
        except OSError as cause:
            raise error from cause
    except errors.NbaccelError as caught:
        return caught


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.NotSendable, errors.MissingBackend])
def test_a_mistake_shows_the_users_line_and_the_text(kind):
    lines = shown(raised_through_the_house(kind("got 7. Give 8."))).splitlines()

    assert re.fullmatch(r"  test_errors\.py:\d+, in raised_through_the_house", lines[0])
    assert lines[1].startswith("  ---->")
    assert "raise error from cause" in lines[1]
    assert lines[2:] == [f"{kind.__name__}: got 7. Give 8."]


def test_a_mistake_shows_no_frame_of_nbaccel():
    from nbaccel import RunConfig

    with pytest.raises(errors.ConfigError) as caught:
        RunConfig(num_processes=-1)

    text = shown(caught.value)
    assert "RunConfig(num_processes=-1)" in text
    assert "nbaccel/" not in text


def test_a_failure_shows_its_text_with_the_failing_line_in_bold():
    text = (
        "rank 1 of 2 raised ValueError: no labels\n  Cell In[2], line 8, in train\n"
        "          7 if bad:\n  ---->   8     raise ValueError()\nThe model is as it was."
    )
    lines = errors.WorkerFailed(text)._render_traceback_()

    assert COLOURS.sub("", "\n".join(lines)) == f"WorkerFailed: {text}"
    assert lines[0].startswith("\x1b[1m\x1b[31mWorkerFailed\x1b[")  # bold and red
    assert "\x1b[32mCell In[2], line 8\x1b[" in lines[1]
    assert "\x1b[1m   8     raise ValueError()" in lines[3]


def test_a_long_line_is_broken_between_words_and_source_is_not():
    words = "word " * 60
    code = "x = '" + "word " * 60 + "'"
    lines = shown(errors.WorkerFailed(f"{words}\n  ---->   1 {code}")).splitlines()

    prose, source = lines[:-1], lines[-1]
    assert max(map(len, prose)) <= 100
    assert " ".join(" ".join(prose).split()) == f"WorkerFailed: {words.strip()}"
    assert source == f"  ---->   1 {code}"


def test_a_failure_says_how_to_see_frames_that_it_leaves_out_and_who_launched():
    trace = 'File "cell", line 1, in f\n  File "/site-packages/torch/x.py", line 2, in g'
    error = errors.WorkerFailed("raised\n  ---->   1 f()")
    assert "__cause__" not in shown(error)
    error.__cause__ = RuntimeError(f"  {trace}")
    assert "import sys; print(sys.last_value.__cause__)\n%debug cannot enter" in shown(error)

    def train_all():
        raise errors.WorkerFailed("rank 0 of 2 raised ValueError")

    with pytest.raises(errors.WorkerFailed) as caught:
        train_all()
    assert re.search(r"Launched at test_errors.py:\d+ → test_errors.py:\d+\.$", shown(caught.value))


def test_an_interrupt_is_a_keyboard_interrupt_to_everybody():
    error = errors.LaunchInterrupted("all 2 workers have been stopped")

    assert isinstance(error, KeyboardInterrupt)
    assert not isinstance(error, Exception)
    assert type(error).__name__ == "KeyboardInterrupt"
    assert shown(error) == "KeyboardInterrupt: all 2 workers have been stopped"
    assert isinstance(pickle.loads(pickle.dumps(error)), errors.LaunchInterrupted)
