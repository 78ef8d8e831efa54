"""Which engine brings the workers of a run together, and what contradicts it."""

from __future__ import annotations

from typing import Protocol

from nbaccel.config.capabilities import ENGINES, engine_row


class _EngineSettings(Protocol):
    """The settings of a `RunConfig` that are read here."""

    @property
    def engine(self) -> str: ...

    @property
    def hostfile(self) -> str | None: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def max_restarts(self) -> int: ...

    @property
    def rdzv_backend(self) -> str: ...

    @property
    def start_method(self) -> str: ...


def chosen_engine(config: _EngineSettings) -> tuple[str, str]:
    """The engine of a run, and why."""
    if config.engine != "auto":
        return config.engine, "asked for"
    for row in ENGINES:
        if row.setting and (value := getattr(config, row.setting)) is not None:
            return row.name, f"{row.setting}={value!r} names the hosts"
    if text := elastic_reason(config):
        name = next(row.name for row in ENGINES if row.starts_scripts_only)
        return name, f"{text}: the nodes agree again on who takes part"
    if config.num_nodes > 1:
        return ENGINES[0].name, f"a fixed set of {config.num_nodes} nodes"
    return ENGINES[0].name, "this machine"


def elastic_reason(config: _EngineSettings) -> str:
    """The settings that need torch elastic, whose nodes agree again on who takes part.

    A fixed set of nodes, and restarts on one node, need none: the launcher does those itself.
    """
    if config.num_nodes == 1:
        return ""
    if config.rdzv_backend != "static":
        return f"rdzv_backend={config.rdzv_backend!r}"
    if config.max_restarts > 0:
        return f"max_restarts={config.max_restarts} with num_nodes={config.num_nodes}"
    return ""


def _hosts_are_one_notebooks(config: _EngineSettings) -> str:
    if config.num_nodes == 1 or not engine_row(chosen_engine(config)[0]).runs_on_hosts:
        return ""
    return (
        f"num_nodes={config.num_nodes} contradicts engine={chosen_engine(config)[0]!r}, "
        "with which one notebook starts the workers of all machines: num_nodes counts machines "
        "with a notebook of their own each. Leave num_nodes and node_rank out; num_processes "
        "counts the workers on all hosts."
    )


def _hostfile_has_its_engine(config: _EngineSettings) -> str:
    if config.hostfile is None or config.engine in ("auto", _owner_of("hostfile")):
        return ""
    return (
        f"hostfile={config.hostfile!r} contradicts engine={config.engine!r}, which finds "
        f"its machines itself. One would be ignored. Leave one out, or give engine="
        f"{_owner_of('hostfile')!r}."
    )


def _hosts_fork_from_templates(config: _EngineSettings) -> str:
    name = chosen_engine(config)[0]
    if config.start_method in ("auto", "template"):
        return ""
    if not engine_row(name).runs_on_hosts:
        return ""
    return (
        f"start_method={config.start_method!r} contradicts engine={name!r}: workers on "
        "other machines cannot be forked from this process. Leave start_method out."
    )


def _owner_of(name: str) -> str:
    """The engine whose hosts a setting names."""
    return next(row.name for row in ENGINES if row.setting == name)


ENGINE_CONTRADICTIONS = (
    (("engine", "hostfile", "num_nodes", "rdzv_backend"), _hosts_are_one_notebooks),
    (("engine", "hostfile"), _hostfile_has_its_engine),
    (("engine", "hostfile", "start_method", "rdzv_backend"), _hosts_fork_from_templates),
)
"""Each with the settings that it is about."""
