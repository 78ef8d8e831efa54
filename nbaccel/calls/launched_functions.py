"""What a call knows of its function: its title, and where a launch that is stopped keeps its state.

The next launch of the same function goes on with that.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbaccel.base.errors import ConfigError, LaunchInterrupted
from nbaccel.calls.script import Script
from nbaccel.config.capabilities import engine_row
from nbaccel.config.value_readers import RESUME_HERE
from nbaccel.config.variables import FOLDER_VARIABLE
from nbaccel.plan import Plan

_FOLDERS: dict[str, str] = {}
"""Module and name of a function → its folder, which goes with this process."""


def call_title(function: Any, args: tuple[Any, ...]) -> str:
    """What a call runs, in a word: the function, or the script that it is to run."""
    if args and isinstance(args[0], Script):
        return Path(args[0].target).name
    name = getattr(function, "__qualname__", type(function).__name__)
    return str(name).rpartition("<locals>.")[2]


def resume_folder(plan: Plan, function: Callable[..., Any]) -> Path | None:
    """The folder for launches of this function, by the setting `resume`; None without it."""
    config = plan.config
    if not config.resume:
        return None
    if config.num_nodes > 1:
        raise ConfigError(
            f"resume={config.resume!r} with num_nodes={config.num_nodes}: notebooks that meet stop "
            "each on its own, in no common step, so there is nothing to go on from. Leave it out, "
            "and call accelerator.save_state."
        )
    if config.resume != RESUME_HERE:
        return Path(config.resume).absolute()
    if engine_row(plan.engine).runs_on_hosts:
        raise ConfigError(
            f"resume=True with engine={plan.engine!r}: what is kept would lie on this host, where "
            "the other hosts' workers do not find it. Give a folder that all hosts see."
        )
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if name not in _FOLDERS:
        _FOLDERS[name] = tempfile.mkdtemp(prefix="nbaccel-resume-")
        atexit.register(_remove, os.getpid(), _FOLDERS[name])
    return Path(_FOLDERS[name])


def variables_of(folder: Path | None) -> dict[str, str]:
    """What tells a function which folder it has."""
    return {FOLDER_VARIABLE: str(folder)} if folder is not None else {}


def note_end(
    folder: Path | None, stopped: LaunchInterrupted | None, *, has_ended: bool = False
) -> None:
    """A launch was stopped, or its functions have ended: whether the next one can go on."""
    kept = list(folder.glob("*/position.json")) if folder is not None else []
    if stopped is None or has_ended:
        for position in kept:
            shutil.rmtree(position.parent, ignore_errors=True)
    elif kept:
        stopped.args = (f"{stopped}; run it again to go on from there",)
    elif folder is None:
        stopped.args = (f"{stopped}; with resume=True the next launch would go on from there",)


def _remove(process_id: int, folder: str) -> None:
    # A process that was forked from this one has the function, too.
    if os.getpid() == process_id:
        shutil.rmtree(folder, ignore_errors=True)
