"""The process environment, and small files of the system: nothing else touches ``os.environ``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nbaccel.base.errors import ConfigError

# The words that Accelerate reads so, too.
YES_WORDS = frozenset({"1", "true", "yes", "on", "y", "t"})
_OF_THIS_MACHINE = frozenset({"PATH", "HOME", "PWD", "TMPDIR", "HOSTNAME", "LD_LIBRARY_PATH"})
NO_WORDS = frozenset({"0", "false", "no", "off", "n", "f"})


def read(variable_name: str, default: str | None = None) -> str | None:
    """Value of one variable."""
    return os.environ.get(variable_name, default)


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, to give to :func:`replace_all` later."""
    return dict(os.environ)


def changes() -> dict[str, str]:
    """The variables that this process has set since it was started."""
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # no /proc: all may have been set
        started_with = []
    return {
        name: value
        for name, value in os.environ.items()
        if os.fsencode(f"{name}={value}") not in started_with and name not in _OF_THIS_MACHINE
    }


def read_file(path: Path) -> str:
    """What a file of ``/proc`` or ``/sys`` says; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # another system, no such thing here, or no permission
        return ""


def replace_all(environment: Mapping[str, str]) -> None:
    """Make the environment exactly ``environment``: what it lacks is unset."""
    # Not clear() + update(): another thread would see an environment without PATH or HOME.
    update(dict.fromkeys(os.environ.keys() - environment.keys()) | dict(environment))


@contextmanager
def applied(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for the length of a ``with`` block."""
    previous_values = {name: os.environ.get(name) for name in changes}
    update(changes)
    try:
        yield
    finally:
        update(previous_values)


def flag(variable_name: str) -> bool | None:
    """A variable read as yes or no."""
    variable_text = os.environ.get(variable_name, "").strip()
    if not variable_text:
        return None
    if variable_text.lower() in YES_WORDS | NO_WORDS:
        return variable_text.lower() in YES_WORDS
    raise ConfigError(
        f"Environment variable {variable_name} must be yes or no: got {variable_text!r}. "
        "Guessing could turn on what you meant to turn off. Set it to 1 or 0, or unset it."
    )


def update(changes: Mapping[str, str | None]) -> None:
    """Set variables, or remove them."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
