"""A mix of parallelisms: names of a part that is still to come."""

from __future__ import annotations

from typing import Any

from nbaccel.base.public_names import missing_names_of

_MISSING = missing_names_of(__name__)
__all__ = list(_MISSING)


def __getattr__(name: str) -> Any:
    if name not in _MISSING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _MISSING[name]
