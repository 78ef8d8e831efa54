"""``Advice``: the configuration that was chosen, and the rungs of the ladder with their reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nbaccel.deepspeed.advisor.ladder import Step
from nbaccel.deepspeed.config import ZeroConfig
from nbaccel.deepspeed.estimate import MemoryEstimate
from nbaccel.units import counted, format_bytes

__all__ = ["Advice", "Measured", "Rung"]

_LINE_CHARS = 100
_HEAD = ("", "rung", "batch", "device", "host", "NVMe", "measured", "verdict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a real step took, the most of all processes.

    Attributes:
        device_bytes: The most bytes of tensors on a device; 0 where processes compute on the CPU.
        host_bytes: The same in host memory, of one process.
    """

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One rung of the ladder, and what came of it.

    Attributes:
        step: Stage, offloading and gradient checkpointing.
        batch_size: Samples of a process in one forward pass.
        accumulation_steps: Forward passes of one optimizer step.
        config: DeepSpeed's configuration; None where it cannot be had.
        estimate: What it needs, beside what there is; None where it cannot be had.
        verdict: ``fits`` or ``does not fit``, by estimate; ``works``, ``out of memory``, by a real
            step; ``not available``.
        reason: Why, in one sentence.
        measured: What a real step took, as far as it came.
    """

    step: Step
    batch_size: int
    accumulation_steps: int
    config: dict[str, Any] | None
    estimate: MemoryEstimate | None
    verdict: str
    reason: str
    measured: Measured | None = None

    @property
    def name(self) -> str:
        """How it is called: ``ZeRO-2, optimizer on CPU``."""
        return self.step.name

    @property
    def is_accepted(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.verdict in ("fits", "works")

    def cells(self, *, is_chosen: bool) -> tuple[str, ...]:
        """Its line of the table."""
        found, took = self.estimate, self.measured
        batch = str(self.batch_size)
        if self.accumulation_steps > 1:
            batch += f" x {self.accumulation_steps}"
        sizes = ("", "", "")
        if found is not None:
            host = found.host.peak if found.device_free is not None else found.host_needed
            sizes = (_size(found.device.peak), _size(host), _size(found.nvme.total))
        measured = ""
        if took is not None:
            parts = (took.device_bytes, took.host_bytes)
            measured = " + ".join(format_bytes(part) for part in parts if part)
        return ("→" if is_chosen else "", self.name, batch, *sizes, measured, self.verdict)


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Which DeepSpeed configuration to train with.

    Attributes:
        rungs: All that were looked at, in order.
        chosen: The one to take; None where none fits.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        num_processes: Processes on each machine.
        largest_batch_size: The most samples of a process with which a real step worked; None where
            that was not tried.
        is_largest: Whether a larger one failed; False where the search was ended before.
        warnings: What may disappoint, and what the numbers leave out.
    """

    rungs: tuple[Rung, ...]
    chosen: Rung | None
    precision: str
    num_processes: int
    largest_batch_size: int | None = None
    is_largest: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any] | None:
        """What ``deepspeed.initialize(config=...)`` takes; None where nothing fits."""
        return None if self.zero is None else self.zero.to_dict()

    @property
    def zero(self) -> ZeroConfig | None:
        """The same as a `ZeroConfig`."""
        if self.chosen is None or self.chosen.config is None:
            return None
        return ZeroConfig.from_dict(self.chosen.config)

    @property
    def batch_size(self) -> int | None:
        """Samples of a process in one forward pass."""
        return None if self.chosen is None else self.chosen.batch_size

    @property
    def accumulation_steps(self) -> int | None:
        """Forward passes of one optimizer step."""
        return None if self.chosen is None else self.chosen.accumulation_steps

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether to turn gradient checkpointing on: that is the model's setting."""
        return self.chosen is not None and self.chosen.step.gradient_checkpointing

    @property
    def nearest(self) -> Rung | None:
        """Where nothing fits: the rung that lacks least."""
        refused = [rung for rung in self.rungs if rung.estimate is not None]
        return min(refused, key=_lacks, default=None) if self.chosen is None else None

    def headline(self) -> str:
        """The advice in one line.

        Returns:
            What to take, or what is missing.
        """
        where = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        rung = self.chosen
        if rung is not None:
            by = "a real step" if rung.verdict == "works" else "estimate"
            batch = f"batch {rung.batch_size}"
            if rung.accumulation_steps > 1:
                batch += f" x {rung.accumulation_steps} accumulated"
            also = ""
            if rung.step.stage and rung.step.gradient_checkpointing:
                also = ", gradient checkpointing"
            return f"{rung.name}{also}, {self.precision}, {batch}, {where}: fits by {by}"
        near = self.nearest
        if near is None or near.estimate is None:
            return f"Nothing fits: none of {counted(len(self.rungs), 'rung')} can be had here"
        batch = f"with a batch of {near.batch_size}"
        if not near.estimate.lacking:
            return f"Nothing fits: {near.name} {batch} should by estimate, and did not"
        return f"Nothing fits: {near.name} {batch} comes nearest, and lacks {_missing(near)}"

    def explain(self) -> str:
        """All rungs with what they need, the verdict and why; what to know under it.

        Returns:
            Text for a fixed-width font.
        """
        rows = [_HEAD, *(rung.cells(is_chosen=rung is self.chosen) for rung in self.rungs)]
        used = [column for column in range(len(_HEAD)) if any(row[column] for row in rows[1:])]
        widths = {column: max(len(row[column]) for row in rows) for column in used}
        lines = [self.headline(), ""]
        for row, rung in zip(rows, (None, *self.rungs), strict=True):
            cells = [_aligned(row[column], widths[column], column) for column in used]
            lines.append("  ".join(cells).rstrip())
            if rung is not None:
                lines += textwrap.wrap(
                    rung.reason, _LINE_CHARS, initial_indent=" " * 6, subsequent_indent=" " * 6
                )
        return "\n".join([*lines, "", *self._remarks()])

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"<Advice: {self.headline()}>"

    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, str]:
        return {"text/plain": self.explain(), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        rows = [(*rung.cells(is_chosen=rung is self.chosen), rung.reason) for rung in self.rungs]
        used = [0] + [c for c in range(1, len(_HEAD) + 1) if {row[c] for row in rows} - {"", "-"}]
        head = "".join(_cell("th", (*_HEAD, "why")[column], column) for column in used)
        body = "".join(
            "<tr>" + "".join(_cell("td", row[column], column) for column in used) + "</tr>"
            for row in rows
        )
        remarks = "".join(f"<p>{escape(text)}</p>" for text in self._remarks())
        return (
            f"<p><b>{escape(self.headline())}</b></p><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>{remarks}"
        )

    def _remarks(self) -> list[str]:
        remarks = []
        if self.largest_batch_size is not None:
            more = "" if self.is_largest else "; larger ones were not tried"
            remarks.append(
                f"Largest batch with which a real step worked: {self.largest_batch_size} samples "
                f"per process{more}."
            )
        return [*remarks, *self.warnings]


def _lacks(rung: Rung) -> int:
    return sum(rung.estimate.lacking.values()) if rung.estimate is not None else 0


def _missing(rung: Rung) -> str:
    words = {"device": "on each device", "host": "of host memory", "nvme": "of disk"}
    lacking = rung.estimate.lacking if rung.estimate is not None else {}
    return " and ".join(f"{format_bytes(size)} {words[name]}" for name, size in lacking.items())


def _cell(tag: str, text: str, column: int) -> str:
    side = "right" if 2 <= column <= 6 else "left"
    wrap = "" if column == len(_HEAD) else ";white-space:nowrap"  # reasons are long
    return f"<{tag} style='text-align:{side}{wrap}'>{escape(text)}</{tag}>"


def _aligned(text: str, width: int, column: int) -> str:
    return text.rjust(width) if 2 <= column <= 6 else text.ljust(width)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
