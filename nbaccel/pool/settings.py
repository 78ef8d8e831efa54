"""What a pool goes by: the notebook's names, and where the notebook stands now."""

from __future__ import annotations

import sys
from typing import Any

from nbaccel import env
from nbaccel.launch import folder
from nbaccel.pool.source import Source

__all__ = ["Footsteps", "notebook_names", "source_of"]


def notebook_names() -> dict[str, Any]:
    """The namespace of the notebook; outside of one, that of the main module."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None:
        return shell.user_ns  # type: ignore[no-any-return]
    return vars(sys.modules["__main__"])


def source_of(text: str) -> Source:
    """Code that comes from no cell."""
    return Source.of_text(text, filename=f"<pool code {abs(hash(text)):x}>")


class Footsteps:
    """What workers must do to stand where the notebook stands: folder and environment.

    It starts where they were when they were started.
    """

    def __init__(self) -> None:
        self._directory = folder.here()
        self._state = env.state()
        self._environment = env.snapshot()

    def directory(self) -> str | None:
        """The notebook's folder, if it has changed since the last call."""
        here, before = folder.here(), self._directory
        self._directory = here
        return here if here != before else None

    def environment(self) -> dict[str, str | None]:
        """Variables that have changed since the last call; None for one that is gone."""
        state, before = env.state(), self._environment
        if state == self._state:
            return {}
        self._state, self._environment = state, env.snapshot()
        now = self._environment
        gone: dict[str, str | None] = {name: None for name in before if name not in now}
        return gone | {name: value for name, value in now.items() if before.get(name) != value}
