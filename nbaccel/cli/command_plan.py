"""The plan of a run that a command starts, whose process nobody has prepared as a notebook's is."""

from __future__ import annotations

from nbaccel.config import RunConfig
from nbaccel.config.capabilities import engine_row
from nbaccel.config.run_config import chosen_engine
from nbaccel.plan import Plan, registry, resolve


def plan_of_command(config: RunConfig) -> Plan:
    """Connect this process to what the engine runs on, and resolve the settings."""
    name, _ = chosen_engine(config)
    if engine_row(name).runs_on_hosts:
        registry.engine(name).connect()
    return resolve(config)
