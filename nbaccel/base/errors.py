"""The errors of nbaccel, in branches by who can do something about it.

A `UserMistake` is answered by asking differently, `MissingBackend` by an installation, a
`WorkerFailed` by a look at what the worker raised. Each leaf is also the built-in exception that a
reader would expect. Every message has the value, the reason and the remedy.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from nbaccel.base.frames import render_failure, render_mistake

__all__ = [
    "CheckpointDamaged",
    "CheckpointFailed",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigError",
    "InputRefused",
    "InternalError",
    "LaunchInterrupted",
    "LaunchTimeout",
    "MissingBackend",
    "ModelNotShareable",
    "NbaccelError",
    "NotSendable",
    "NothingFits",
    "PlatformUnsupported",
    "PortTaken",
    "PrecisionMismatch",
    "StartupFailed",
    "TrainingDiverged",
    "UnsafeFork",
    "UnsafeMoment",
    "UserMistake",
    "WorkerDied",
    "WorkerFailed",
    "WrongArguments",
]


class NbaccelError(Exception):
    """Any error that nbaccel raises on purpose."""


class _PlainlyShownError(NbaccelError):
    """Shown in a notebook without the frames of nbaccel."""

    def _render_traceback_(self) -> list[str]:
        return render_mistake(self)


class UserMistake(_PlainlyShownError):
    """What was asked cannot be done; asking differently can."""


class ConfigError(UserMistake, ValueError):
    """Settings that are wrong or contradict each other, all of them at once."""

    _what = "settings are wrong"

    def __init__(self, *mistakes: str) -> None:
        # The arguments themselves stay in `args`, so that pickling rebuilds the list.
        super().__init__(*mistakes)

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Every mistake found, in the order of the settings."""
        return tuple(_shortened(str(mistake)) for mistake in self.args)

    def __str__(self) -> str:
        if len(self.mistakes) <= 1:
            return "".join(self.mistakes)
        numbered_lines = (
            f"  {number}. {text}"
            for number, text in enumerate(self.mistakes[:_MOST_LISTED], start=1)
        )
        num_left = len(self.mistakes) - _MOST_LISTED
        last_lines = [f"  and {num_left} more"] if num_left > 0 else []
        return "\n".join([f"{len(self.mistakes)} {self._what}:", *numbered_lines, *last_lines])


_MOST_LISTED = 20
_MOST_CHARS = 4000
_LAST_CHARS = 1000


def _shortened(mistake: str) -> str:
    """A message whose value is too long, without its middle: the remedy is at the end."""
    if len(mistake) <= _MOST_CHARS:
        return mistake
    return f"{mistake[: _MOST_CHARS - _LAST_CHARS]} … {mistake[-_LAST_CHARS:]}"


class CheckpointDamaged(ConfigError):
    """Files of a checkpoint are not as they were saved, all of them listed; nothing was loaded."""

    _what = "files of the checkpoint cannot be used"


class WrongArguments(ConfigError, TypeError):
    """A call of nbaccel, or of a function to be launched, whose arguments do not fit."""


class ModelNotShareable(UserMistake, ValueError):
    """A model that cannot be put into shared memory (a parameter on ``meta``, for example)."""


class NotSendable(UserMistake, TypeError):
    """A function, an argument or a result that cannot be pickled."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class PortTaken(UserMistake, OSError):
    """The port that was asked for belongs to another process."""

    def __init__(self, message: str, *, port: int | None = None) -> None:
        super().__init__(message)
        # From two arguments OSError would make a text of its own; code tests the number.
        self.errno = errno.EADDRINUSE
        self.port = port


class InputRefused(UserMistake, EOFError):
    """``input()`` was called in a worker, which has no keyboard."""


class MissingBackend(_PlainlyShownError, ImportError):
    """A package is not installed, cannot be imported, or is hidden by a file of its name."""


class UnsafeMoment(_PlainlyShownError, RuntimeError):
    """The request is right, but this process is in no state to serve it now."""


class UnsafeFork(UnsafeMoment):
    """Forking this process would give workers that hang or crash."""


class PrecisionMismatch(_PlainlyShownError, RuntimeError):
    """Training would run in another precision than the one asked for."""


class CheckpointFailed(_PlainlyShownError, RuntimeError):
    """A process could not write or read its part of a checkpoint, so none goes on with it."""


class CollectiveMismatch(_PlainlyShownError, RuntimeError):
    """Processes met with different collectives, or with data that do not go together."""


class CollectiveTimeout(_PlainlyShownError, RuntimeError, TimeoutError):
    """Some processes did not come to a collective that others wait in."""


class TrainingDiverged(_PlainlyShownError, RuntimeError):
    """Losses or gradients are not finite any more, and no further step can correct that."""


class NothingFits(_PlainlyShownError, RuntimeError):
    """No batch size is small enough for the memory there is."""


class _WatchedRunEnd(BaseException):
    """A run that was watched has not come to its end."""

    make_report: Callable[[], Any] | None = None  # makes its report; None where nothing was watched

    def _render_traceback_(self) -> list[str]:
        return render_failure(self)

    def report(self) -> Any:
        """What the run can tell of itself up to here, as `results.report()` does of a whole one.

        Raises:
            ConfigError: Nothing was watched: the workers had not begun.
        """
        if self.make_report is None:
            raise ConfigError(
                f"{type(self).__name__} has nothing to report: its run ended before workers were "
                "watched, or this is a copy of the error that was raised."
            )
        return self.make_report()


class WorkerFailed(_WatchedRunEnd, NbaccelError, RuntimeError):
    """A launch failed because a worker did."""

    def __init__(
        self, message: str = "", *, failure: object | None = None, failures: tuple[object, ...] = ()
    ) -> None:
        super().__init__(message)
        self.failure = failure
        self.failures = tuple(failures)


class WorkerDied(WorkerFailed):
    """A worker was killed by a signal, or left without handing over a result."""


class LaunchTimeout(WorkerFailed, TimeoutError):
    """The launch did not end within the time allowed."""


class StartupFailed(WorkerFailed):
    """Workers did not become ready to run the function."""


class LaunchInterrupted(_WatchedRunEnd, KeyboardInterrupt):
    """The user stopped a launch. Like any interrupt it is no `Exception`.

    Attributes:
        results: What the functions had returned by then, where a step had ended and the trained
            weights are in the notebook's modules; else None.
    """

    results: Any = None


# A kernel sends its clients the name of the class, and they recognise an interrupt by this one.
LaunchInterrupted.__name__ = "KeyboardInterrupt"


class StoppedAtStep(KeyboardInterrupt):
    """Raised in the function of a launch that the user has stopped, where a step has ended."""


class PlatformUnsupported(_PlainlyShownError, RuntimeError):
    """This operating system lacks something that the request needs."""


class InternalError(NbaccelError):
    """A state that nbaccel holds impossible: a bug, to be reported."""


# Tracebacks show where users import them from.
for _name in __all__:
    globals()[_name].__module__ = "nbaccel.errors"
