from __future__ import annotations

import copy
import errno
import pickle

import pytest

from nbaccel import errors

LEAVES = [
    (errors.ConfigError, ValueError),
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


def test_every_error_is_in_the_drawing():
    for name in errors.__all__:
        assert name in (errors.__doc__ or "")


def test_several_mistakes_are_numbered():
    error = errors.ConfigError("a is wrong.", "b is wrong.")

    assert error.mistakes == ("a is wrong.", "b is wrong.")
    assert str(error) == "2 settings are wrong:\n  1. a is wrong.\n  2. b is wrong."
    assert pickle.loads(pickle.dumps(error)).mistakes == error.mistakes


def test_one_mistake_is_its_message():
    assert str(errors.ConfigError("a is wrong.")) == "a is wrong."
    assert str(errors.ConfigError()) == ""


def test_a_taken_port_says_so_in_errno():
    error = errors.PortTaken("port 29500 is taken", port=29500)

    for twin in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert twin.errno == errno.EADDRINUSE
        assert twin.port == 29500


@pytest.mark.parametrize(
    "kind",
    [errors.WorkerFailed, errors.WorkerDied, errors.LaunchTimeout, errors.StartupFailed],
)
def test_failures_survive_pickling(kind):
    error = kind("rank 1 raised", failure={"rank": 1}, failures=({"rank": 1}, {"rank": 0}))

    for twin in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert twin.failure == {"rank": 1}
        assert twin.failures == ({"rank": 1}, {"rank": 0})
        assert str(twin) == "rank 1 raised"


def test_failures_are_there_without_being_given():
    assert errors.WorkerFailed("x").failure is None
    assert errors.WorkerFailed("x").failures == ()


def test_not_sendable_keeps_the_path():
    error = errors.NotSendable("a lock cannot be pickled", path="args[0].lock")

    assert pickle.loads(pickle.dumps(error)).path == "args[0].lock"
