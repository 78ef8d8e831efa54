"""What a pool goes by: its plan, the notebook's names, and where the notebook stands now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nbaccel import env
from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError, PlatformUnsupported
from nbaccel.plan import Plan, resolve
from nbaccel.pool.source import Source

__all__ = ["Footsteps", "notebook_names", "plan_of", "source_of"]


def plan_of(config: RunConfig) -> Plan:
    """What live workers will be started as.

    Raises:
        ConfigError: Settings are wrong, or do not fit this machine or a pool; all mistakes at once.
        PlatformUnsupported: This system cannot have live workers.
    """
    if not sys.platform.startswith("linux"):
        raise PlatformUnsupported(
            f"Live workers need Linux (memfd, pidfd): this is {sys.platform}. Run the code in an "
            "ordinary cell."
        )
    mistakes = []
    if config.num_nodes > 1:
        mistakes.append(
            f"num_nodes={config.num_nodes}: live workers belong to one notebook on one machine. "
            "Use notebook_launcher(num_nodes=...) for several."
        )
    if config.start_method == "inline":
        mistakes.append(
            'start_method="inline" has no workers: the code would run in this very process. Run it '
            'in an ordinary cell, or use "template".'
        )
    if config.max_restarts:
        mistakes.append(
            f"max_restarts={config.max_restarts}: a cell is not run again after a failure, because "
            "its variables would be those of the first try. Leave it at 0."
        )
    if mistakes:
        raise ConfigError(*mistakes)
    plan = resolve(config)
    if plan.start_method in ("inline", "auto"):
        reason = "live workers are processes of their own, whatever their number"
        return plan.with_start_method("template", reason)
    return plan


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
        self._directory = Path.cwd()
        self._environment = env.snapshot()

    def directory(self) -> str | None:
        """The notebook's folder, if it has changed since the last call."""
        here, before = Path.cwd(), self._directory
        self._directory = here
        return str(here) if here != before else None

    def environment(self) -> dict[str, str | None]:
        """Variables that have changed since the last call; None for one that is gone."""
        now, before = env.snapshot(), self._environment
        self._environment = now
        if now == before:
            return {}
        gone: dict[str, str | None] = {name: None for name in before if name not in now}
        return gone | {name: value for name, value in now.items() if before.get(name) != value}
