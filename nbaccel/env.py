"""The process environment: the only file that touches ``os.environ``.

Everything else asks here, so that one can see where a value came from and who changed it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from nbaccel.errors import ConfigError

__all__ = ["applied", "flag", "read", "replace_all", "snapshot"]

_YES = frozenset({"1", "true", "yes", "on", "y", "t"})
_NO = frozenset({"0", "false", "no", "off", "n", "f"})


def read(name: str, default: str | None = None) -> str | None:
    """Value of one variable.

    Args:
        name: The variable.
        default: What to answer when it is not set.

    Returns:
        The value as it stands (an empty one included), or ``default``.
    """
    return os.environ.get(name, default)


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, to give to :func:`replace_all` later.

    Returns:
        Names and values; changing it changes nothing.
    """
    return dict(os.environ)


def state() -> Mapping[bytes, bytes]:
    """The environment as it is now, to compare with later: much faster than a :func:`snapshot`.

    Returns:
        Names and values, as the system has them.
    """
    found: Mapping[bytes, bytes] = dict(os.environb._data)  # type: ignore[attr-defined]  # noqa: SLF001 - the rest decodes
    return found


def replace_all(mapping: Mapping[str, str]) -> None:
    """Make the environment exactly ``mapping``: what it lacks is unset.

    Args:
        mapping: The complete environment.
    """
    # Not clear() + update(): another thread would see an environment without PATH or HOME.
    for name in [name for name in os.environ if name not in mapping]:
        del os.environ[name]
    os.environ.update(mapping)


@contextmanager
def applied(mapping: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for the length of a ``with`` block.

    Args:
        mapping: Names and values; ``None`` unsets a variable.

    Yields:
        Nothing. Afterwards exactly these variables are as they were, also after an exception;
        what the block did to others stays.
    """
    before = {name: os.environ.get(name) for name in mapping}
    _write(mapping)
    try:
        yield
    finally:
        _write(before)


def flag(name: str) -> bool | None:
    """A variable read as yes or no.

    Args:
        name: The variable.

    Returns:
        True or False, or None where it is unset or empty.

    Raises:
        ConfigError: It holds something that is neither.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if text.lower() in _YES:
        return True
    if text.lower() in _NO:
        return False
    raise ConfigError(
        f"Environment variable {name} must be yes or no: got {text!r}. "
        "Guessing could turn on what you meant to turn off. Set it to 1 or 0, or unset it."
    )


def update(changes: Mapping[str, str | None]) -> None:
    """Set variables, or remove them.

    Args:
        changes: Values by name; None removes a variable.
    """
    _write(changes)


def _write(mapping: Mapping[str, str | None]) -> None:
    for name, value in mapping.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
