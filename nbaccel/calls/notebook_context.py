"""The notebook's namespace, working folder and environment, as a pool needs them."""

from __future__ import annotations

import sys
from typing import Any

from nbaccel.base import env
from nbaccel.base.errors import WrongArguments
from nbaccel.calls.cell_source import CellSource
from nbaccel.config.mistakes import shown
from nbaccel.workers import working_folder

__all__ = ["CwdEnvTracker", "notebook_names", "source_of"]


def notebook_names() -> dict[str, Any]:
    """The namespace of the notebook; outside of one, that of the main module."""
    module = sys.modules.get("IPython")
    notebook_shell = module.get_ipython() if module is not None else None
    if notebook_shell is not None:
        return notebook_shell.user_ns  # type: ignore[no-any-return]
    return vars(sys.modules["__main__"])


def source_of(cell_text: str) -> CellSource:
    """Code that comes from no cell."""
    if not isinstance(cell_text, str):
        raise WrongArguments(
            f"Pool.run takes a cell's code as text: got {shown(cell_text)}. There is nothing to "
            "parse. Give text, or pool.call(function, ...) for a function."
        )
    # Equal code gets an equal name, so that linecache does not grow with each call.
    return CellSource.of_text(cell_text, filename=f"<pool code {abs(hash(cell_text)):x}>")


class CwdEnvTracker:
    """Changes of the notebook's folder and environment that workers have to follow.

    It starts with what they were when the workers were started.
    """

    def __init__(self) -> None:
        self._directory = working_folder.current_folder()
        self._state = env.state()
        self._environment = env.snapshot()

    def directory(self) -> str | None:
        """The notebook's folder, if it has changed since the last call."""
        current_directory = working_folder.current_folder()
        known_directory = self._directory
        self._directory = current_directory
        return current_directory if current_directory != known_directory else None

    def environment(self) -> dict[str, str | None]:
        """Variables that have changed since the last call; None for one that is gone."""
        state = env.state()
        known_variables = self._environment
        if state == self._state:
            return {}
        self._state = state
        self._environment = env.snapshot()
        variables = self._environment
        removed_names: dict[str, str | None] = {
            variable_name: None
            for variable_name in known_variables
            if variable_name not in variables
        }
        return removed_names | {
            variable_name: value
            for variable_name, value in variables.items()
            if known_variables.get(variable_name) != value
        }
