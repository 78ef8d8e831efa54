"""Classes of the notebook between a worker and its own children, such as DataLoader workers.

`multiprocessing` pickles a class by its name, and looks for the notebook's in `__main__`, which in
a worker is not the notebook. What it does not find there is pickled as launches pickle it. Without
this a batch of such a class, or an exception, is lost in the child, and the rank waits for ever.
"""

from __future__ import annotations

import sys
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle

__all__ = ["send_notebook_classes"]


def send_notebook_classes() -> None:
    """Let `multiprocessing` send the notebook's classes and functions from now on."""
    ForkingPickler.reducer_override = _reduce  # type: ignore[method-assign, assignment]


def _reduce(pickler: ForkingPickler, found: Any) -> Any:
    if not isinstance(found, (type, FunctionType)) or found.__module__ != "__main__":
        return NotImplemented
    if getattr(sys.modules["__main__"], found.__qualname__, None) is found:
        return NotImplemented
    # cloudpickle knows a class again that it has made in this process or one this was forked from.
    return cloudpickle.loads, (cloudpickle.dumps(found),)
