"""``Plan``: what a launch will do, with the reason for each choice."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nbaccel.base.units import count_noun
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import device_row, engine_row, start_method_row
from nbaccel.plan.inventory import Inventory

_TABLE_LINE_CHARS = 100


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
        device: What the workers compute on: the name of a device row, such as ``cuda``.
        num_processes: Workers on this node; on all hosts, if the engine has others.
        world_size: Workers on all nodes.
        start_method: ``template``, ``fork`` or ``inline``.
        threads_per_process: CPU threads of each worker.
        process_group_backend: The device row's backend: ``gloo`` or ``nccl``, for example.
        engine: What brings workers on several machines together: the name of an engine row.
        strategy: The strategy of the configuration; empty where the training decides.
        strategy_headline: The strategy's part of :meth:`headline`.
        master_addr: Address where workers meet.
        port: TCP port there; None takes a free one.
        choices: Every decision with its reason.
        warnings: What works but may not do what is expected.
    """

    config: RunConfig
    inventory: Inventory
    device: str
    num_processes: int
    world_size: int
    start_method: str
    threads_per_process: int
    process_group_backend: str
    engine: str = "local"
    strategy: str = ""
    strategy_headline: str = ""
    master_addr: str = "127.0.0.1"
    port: int | None = None
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """The plan in one line.

        Returns:
            ``2 CPU workers, 1 thread each, started from the template``, for example.
        """
        parts = [
            count_noun(self.num_processes, f"{device_row(self.device).noun} worker"),
            count_noun(self.threads_per_process, "thread") + " each" * (self.num_processes > 1),
        ]
        if self.config.mixed_precision != "no":
            parts.append(self.config.mixed_precision)
        if self.strategy_headline:
            parts.append(self.strategy_headline)
        parts.append(start_method_row(self.start_method).headline)
        if engine_row(self.engine).runs_on_hosts:
            parts.append(f"on hosts of engine {self.engine}")
        if self.config.num_nodes > 1:
            parts.append(f"node {self.config.node_rank} of {self.config.num_nodes}")
        return ", ".join(parts)

    def explain(self) -> str:
        """The plan as a table: what, value, why; warnings under it.

        Returns:
            Text for a fixed-width font, at most 100 characters a line where words allow.
        """
        return choices_table(self.headline(), self.choices, self.warnings)

    def __str__(self) -> str:
        return self.explain()

    def with_start_method(self, method: str, reason: str) -> Plan:
        """The same plan with workers started in another way.

        Args:
            method: ``template``, ``fork`` or ``inline``.
            reason: Why, for :meth:`explain`.

        Returns:
            A new plan.
        """
        return replace(
            self,
            start_method=method,
            choices=tuple(
                Choice(choice.name, method, reason) if choice.name == "start_method" else choice
                for choice in self.choices
            ),
        )


def copies_in_turn(num_workers: int, model_bytes: int, free_bytes: int) -> bool:
    """Whether workers should copy a model to their devices one after another."""
    # A copy may take as much host memory as the model; half of what is free is for all else.
    return num_workers * model_bytes > free_bytes // 2


def choices_table(headline: str, choices: Sequence[Choice], warnings: Sequence[str]) -> str:
    """Choices as a table of what, value and why, under a headline; warnings under it."""
    rows = [("what", "value", "why"), *((one.name, str(one.value), one.reason) for one in choices)]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    table_lines = [headline, ""]
    for name, value, reason in rows:
        table_lines += _hanging_lines(f"{name:<{name_width}}  {value:<{value_width}}  ", reason)
    if warnings:
        table_lines += ["", "Warnings:"]
    for warning in warnings:
        table_lines += _hanging_lines("  - ", warning)
    return "\n".join(table_lines)


def _hanging_lines(head: str, text: str) -> list[str]:
    """The text beside a head, with its further lines indented to the same column."""
    # Beside a long value a reason still gets a readable width, beyond the line's limit.
    width = max(_TABLE_LINE_CHARS, len(head) + 30)
    wrapper = textwrap.TextWrapper(width, head, " " * len(head), break_long_words=False)
    return wrapper.wrap(text) or [head.rstrip()]
