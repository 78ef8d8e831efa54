"""``Plan``: what will happen, with the reason for each choice. It is printed, never guessed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nbaccel.capabilities import START_METHODS, start_method_row
from nbaccel.config import RunConfig
from nbaccel.errors import ConfigError
from nbaccel.plan.inventory import Inventory
from nbaccel.units import counted

__all__ = ["Choice", "Plan", "table"]

_LINE_CHARS = 100
_KIND = {"cpu": "CPU", "cuda": "GPU", "tpu": "TPU"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that was decided.

    Attributes:
        name: What was decided, named as the setting that decides it.
        value: The decision.
        reason: Why, in one clause with this machine's numbers.
    """

    name: str
    value: str | int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a launch will do.

    Attributes:
        config: What the user said, unchanged.
        inventory: What was found.
        device: What the workers compute on: ``cpu`` or ``cuda``.
        num_processes: Workers on this node.
        world_size: Workers on all nodes.
        start_method: ``template``, ``fork`` or ``inline``.
        threads_per_process: CPU threads of each worker.
        process_group_backend: ``gloo`` or ``nccl``.
        master_addr: Address where workers meet.
        port: TCP port there; None takes a free one.
        choices: Every decision with its reason.
        warnings: What will work and may disappoint.
    """

    config: RunConfig
    inventory: Inventory
    device: str
    num_processes: int
    world_size: int
    start_method: str
    threads_per_process: int
    process_group_backend: str
    master_addr: str = "127.0.0.1"
    port: int | None = None
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.start_method == "inline" and self.world_size > 1:
            raise ConfigError(
                f'start_method="inline" cannot run {self.world_size} workers. '
                "Inline means in this very process, which is one. "
                'Plan one worker, or use start_method="template".'
            )

    def headline(self) -> str:
        """The plan in one line.

        Returns:
            ``2 CPU workers, 1 thread each, started from the template``, for example.
        """
        each = "" if self.num_processes == 1 else " each"
        parts = [
            counted(self.num_processes, f"{_KIND.get(self.device, self.device)} worker"),
            counted(self.threads_per_process, "thread") + each,
        ]
        if self.config.mixed_precision != "no":
            parts.append(self.config.mixed_precision)
        if self.config.uses_deepspeed:
            parts.append(f"ZeRO-{self.config.zero_stage}")
        parts.append(start_method_row(self.start_method).headline)
        if self.config.num_nodes > 1:
            parts.append(f"node {self.config.node_rank} of {self.config.num_nodes}")
        return ", ".join(parts)

    def explain(self) -> str:
        """The plan as a table: what, value, why; warnings under it.

        Returns:
            Text for a fixed-width font, at most 100 characters a line where words allow.
        """
        return table(self.headline(), self.choices, self.warnings)

    def __str__(self) -> str:
        return self.explain()

    def with_start_method(self, method: str, reason: str) -> Plan:
        """The same plan with workers started in another way.

        Args:
            method: ``template``, ``fork`` or ``inline``.
            reason: Why, for :meth:`explain`.

        Returns:
            A new plan.

        Raises:
            ConfigError: There is no such start method, or it cannot serve this plan.
        """
        known = [row.name for row in START_METHODS]
        if method not in known:
            raise ConfigError(
                f"start_method must be one of {', '.join(known)}: got {method!r}. "
                "Nothing could start the workers. Use one of these."
            )
        return replace(
            self,
            start_method=method,
            choices=tuple(
                Choice(choice.name, method, reason) if choice.name == "start_method" else choice
                for choice in self.choices
            ),
        )


def table(headline: str, choices: Sequence[Choice], warnings: Sequence[str]) -> str:
    """Choices as a table of what, value and why, under a headline; warnings under it.

    Args:
        headline: The first line.
        choices: What was decided.
        warnings: What may disappoint.

    Returns:
        Text for a fixed-width font, at most 100 characters a line where words allow.
    """
    rows = [("what", "value", "why")]
    rows += [(choice.name, str(choice.value), choice.reason) for choice in choices]
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    lines = [headline, ""]
    for name, value, reason in rows:
        lines += _wrapped(f"{name:<{names}}  {value:<{values}}  ", reason)
    if warnings:
        lines += ["", "Warnings:"]
    for warning in warnings:
        lines += _wrapped("  - ", warning)
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> Iterator[str]:
    """The text beside a head, going on under itself."""
    width = max(_LINE_CHARS - len(head), 30)
    first, *rest = textwrap.wrap(text, width, break_long_words=False) or [""]
    yield f"{head}{first}".rstrip()
    for line in rest:
        yield f"{' ' * len(head)}{line}"
