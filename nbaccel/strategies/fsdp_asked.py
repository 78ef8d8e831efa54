"""Whether models are to be sharded by torch's ``fully_shard``; without torch."""

from __future__ import annotations

from nbaccel.config.fsdp_settings import FullyShardedDataParallelPlugin
from nbaccel.plan.contracts.asking import Said, Wanted

__all__ = ["fsdp_request"]

_FSDP_NAME = "fsdp"


def fsdp_request(said: Said) -> Wanted | None:
    """Asked for by ``fsdp_plugin``, by name, or by ``ACCELERATE_USE_FSDP``.

    Args:
        said: The arguments, configuration and environment.
    """
    plugin = said.arguments.get("fsdp_plugin")
    request_source = said.source_of_name(_FSDP_NAME)
    if plugin is not None:
        return Wanted(
            strategy=_FSDP_NAME,
            source="argument",
            what="fsdp_plugin",
            reason="an fsdp_plugin was given: torch's fully_shard",
            settings=lambda: plugin,
        )
    if request_source is None and said.flag("ACCELERATE_USE_FSDP"):
        request_source = "environment"
    if request_source is None:
        return None
    return Wanted(
        strategy=_FSDP_NAME,
        source=request_source,
        what='strategy="fsdp"' if request_source == "config" else "ACCELERATE_USE_FSDP",
        reason="torch's fully_shard was asked for",
        settings=FullyShardedDataParallelPlugin,
    )
