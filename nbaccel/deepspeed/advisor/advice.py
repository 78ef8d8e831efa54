"""``Advice``: the configuration that was chosen, and all that were looked at, with reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.units import count_noun, format_bytes
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.memory.estimate import MemoryEstimate, paragraphs, table_html, table_lines
from nbaccel.memory.ways import Candidate

_LINE_CHARS = 100
_HEAD = ("way", "batch", "device", "host", "NVMe", "measured", "verdict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The most bytes of tensors that a real step took: on a device, and in one process's memory."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to train with one batch, and its verdict.

    Attributes:
        candidate: The way, with its memory.
        batch_size: Samples of a process in one forward pass.
        accumulation_steps: Forward passes of one optimizer step.
        verdict: ``fits`` or ``does not fit``, by estimate; ``works``, ``out of memory``, by a real
            step; ``not tried``; ``not available``.
        reason: Why, in one sentence.
        config: DeepSpeed's configuration; None where the way is not available.
        measured: What a real step took, where one worked.
    """

    candidate: Candidate
    batch_size: int
    accumulation_steps: int
    verdict: str
    reason: str
    config: dict[str, Any] | None
    measured: Measured | None = None

    @property
    def name(self) -> str:
        """Its name: ``ZeRO-2, optimizer on the CPU``."""
        return self.candidate.name

    @property
    def estimate(self) -> MemoryEstimate | None:
        """What it needs, beside what there is; None where the way is not available."""
        return None if self.candidate.need is None else self.candidate.need.estimate

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activations are computed again."""
        return self.candidate.config.activation_checkpointing

    @property
    def is_accepted(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.verdict in ("fits", "works")

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        batch = str(self.batch_size)
        if self.accumulation_steps > 1:
            batch += f" x {self.accumulation_steps}"
        sizes = ["", "", ""]
        if self.estimate is not None:
            # Without a GPU there is no memory of devices: what they need comes out of the host's.
            on_host = self.estimate.device_free is None
            host = self.estimate.host_needed if on_host else self.estimate.host.peak
            needs = (self.estimate.device.peak, host, self.estimate.nvme.total)
            sizes = [format_bytes(size) if size else "-" for size in needs]
        measured = ""
        if self.measured is not None:
            taken = (self.measured.device_bytes, self.measured.host_bytes)
            measured = " + ".join(format_bytes(size) for size in taken if size)
        return (self.name, batch, *sizes, measured, self.verdict)


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Which DeepSpeed configuration to train with.

    Attributes:
        rungs: All ways that were looked at, in order.
        chosen: The one to take; None where none fits.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        num_processes: Processes on each machine.
        largest_batch_size: The most samples of a process with which a real step worked; None where
            that was not tried.
        is_largest: Whether a larger one failed; False where the search was ended before.
        warnings: What may not work as expected, and what the numbers leave out.
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
        return self.chosen is not None and self.chosen.gradient_checkpointing

    @property
    def nearest(self) -> Rung | None:
        """Where nothing fits: the way that lacks least."""
        lacking = [
            (sum(rung.estimate.lacking.values()), number)
            for number, rung in enumerate(self.rungs)
            if rung.estimate is not None
        ]
        return self.rungs[min(lacking)[1]] if lacking and self.chosen is None else None

    def headline(self) -> str:
        """The advice in one line."""
        rung = self.chosen or self.nearest
        if rung is None or rung.estimate is None:
            return f"Nothing fits: none of {count_noun(len(self.rungs), 'way')} is available here"
        if self.chosen is None:
            way = f"{rung.name} with a batch of {rung.batch_size}"
            # A real step may fail although the estimate says that it fits.
            if not rung.estimate.lacking:
                return f"Nothing fits: {way} should by estimate, and did not"
            return f"Nothing fits: {way} comes nearest, and lacks {rung.estimate.lacking_text}"
        checkpointing = "gradient checkpointing"
        adds_checkpointing = rung.gradient_checkpointing and checkpointing not in rung.name
        batch = f"batch {rung.batch_size}"
        if rung.accumulation_steps > 1:
            batch += f" x {rung.accumulation_steps} accumulated"
        processes = count_noun(self.num_processes, "process")
        parts = [rung.name, *([checkpointing] if adds_checkpointing else []), self.precision, batch]
        proof = "a real step" if rung.verdict == "works" else "estimate"
        return f"{', '.join(parts)}, {processes}: fits by {proof}"

    def explain(self) -> str:
        """All ways with what they need, the verdict and the reason; remarks below the table."""
        head, *lines = table_lines(self._rows())
        text = [self.headline(), "", f"   {head}"]
        for line, rung in zip(lines, self.rungs, strict=True):
            text.append(f"{self._mark(rung):<2} {line}")
            # A reason is a sentence, too long for a column of text of fixed width.
            indent = " " * 6
            text += textwrap.wrap(
                rung.reason, _LINE_CHARS, initial_indent=indent, subsequent_indent=indent
            )
        return "\n".join([*text, "", *self._remarks()])

    def _mark(self, rung: Rung) -> str:
        return "→" if rung is self.chosen else ""

    def _rows(self) -> list[list[str]]:
        """The table without columns that have no value, such as that of NVMe."""
        rows = [_HEAD, *(rung.cells() for rung in self.rungs)]
        columns = [column for column in zip(*rows, strict=True) if {*column[1:]} - {"", "-"}]
        return [list(row) for row in zip(*columns, strict=True)]

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"<Advice: {self.headline()}>"

    # Without it IPython would take `__repr__`, which is one line, as the text form.
    def _repr_mimebundle_(
        self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None
    ) -> dict[str, str]:
        return {"text/plain": self.explain(), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        head, *lines = self._rows()
        rows = [["", head[0], "why", *head[1:]]]
        for line, rung in zip(lines, self.rungs, strict=True):
            rows.append([self._mark(rung), line[0], rung.reason, *line[1:]])
        table = table_html(rows, num_left=3)
        return f"{paragraphs([self.headline()])}{table}{paragraphs(self._remarks())}"

    def _remarks(self) -> list[str]:
        if self.largest_batch_size is None:
            return list(self.warnings)
        note = "" if self.is_largest else "; larger ones were not tried"
        size = f"{self.largest_batch_size} samples per process{note}."
        return [f"Largest batch with which a real step worked: {size}", *self.warnings]
