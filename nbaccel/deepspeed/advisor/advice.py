"""``Advice``: the configuration that was chosen, and the rungs of the ladder with their reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nbaccel.base.units import count_noun, format_bytes
from nbaccel.deepspeed.advisor.ladder import LadderStep
from nbaccel.deepspeed.zero_config import ZeroConfig
from nbaccel.memory.estimate import MemoryEstimate

__all__ = ["Advice", "Measured", "Rung"]

_ADVICE_LINE_CHARS = 100
_TABLE_HEAD = ("", "rung", "batch", "device", "host", "NVMe", "measured", "verdict")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The memory that a real step took, the most of all processes.

    Attributes:
        device_bytes: The most bytes of tensors on a device; 0 where processes compute on the CPU.
        host_bytes: The same in host memory, of one process.
    """

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One rung of the ladder, and its verdict.

    Attributes:
        step: Stage, offloading and gradient checkpointing.
        batch_size: Samples of a process in one forward pass.
        accumulation_steps: Forward passes of one optimizer step.
        config: DeepSpeed's configuration; None where the rung is not available.
        estimate: What it needs, beside what there is; None where the rung is not available.
        verdict: ``fits`` or ``does not fit``, by estimate; ``works``, ``out of memory``, by a real
            step; ``not available``.
        reason: Why, in one sentence.
        measured: What a real step took until it ended or failed.
    """

    step: LadderStep
    batch_size: int
    accumulation_steps: int
    config: dict[str, Any] | None
    estimate: MemoryEstimate | None
    verdict: str
    reason: str
    measured: Measured | None = None

    @property
    def name(self) -> str:
        """Its name: ``ZeRO-2, optimizer on CPU``."""
        return self.step.name

    @property
    def is_accepted(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.verdict in ("fits", "works")

    def cells(self, *, is_chosen: bool) -> tuple[str, ...]:
        """Its line of the table."""
        memory_estimate = self.estimate
        measured_step = self.measured
        batch_text = str(self.batch_size)
        if self.accumulation_steps > 1:
            batch_text += f" x {self.accumulation_steps}"
        size_texts = ("", "", "")
        if memory_estimate is not None:
            # Without a GPU there is no memory of devices: what they need comes out of the host's.
            host_bytes = (
                memory_estimate.host.peak
                if memory_estimate.device_free is not None
                else memory_estimate.host_needed
            )
            size_texts = (
                _size_text(memory_estimate.device.peak),
                _size_text(host_bytes),
                _size_text(memory_estimate.nvme.total),
            )
        measured_text = ""
        if measured_step is not None:
            byte_counts = (measured_step.device_bytes, measured_step.host_bytes)
            measured_text = " + ".join(
                format_bytes(byte_count) for byte_count in byte_counts if byte_count
            )
        return (
            "→" if is_chosen else "",
            self.name,
            batch_text,
            *size_texts,
            measured_text,
            self.verdict,
        )


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
        return self.chosen is not None and self.chosen.step.gradient_checkpointing

    @property
    def nearest(self) -> Rung | None:
        """Where nothing fits: the rung that lacks least."""
        refused_rungs = [
            ladder_rung for ladder_rung in self.rungs if ladder_rung.estimate is not None
        ]
        return min(refused_rungs, key=_lacking_bytes, default=None) if self.chosen is None else None

    def headline(self) -> str:
        """The advice in one line."""
        machine_text = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        ladder_rung = self.chosen
        if ladder_rung is not None:
            proof_note = "a real step" if ladder_rung.verdict == "works" else "estimate"
            batch_text = f"batch {ladder_rung.batch_size}"
            if ladder_rung.accumulation_steps > 1:
                batch_text += f" x {ladder_rung.accumulation_steps} accumulated"
            checkpointing_note = ""
            if ladder_rung.step.stage and ladder_rung.step.gradient_checkpointing:
                checkpointing_note = ", gradient checkpointing"
            return (
                f"{ladder_rung.name}{checkpointing_note}, {self.precision}, {batch_text}, "
                f"{machine_text}: fits by {proof_note}"
            )
        nearest_rung = self.nearest
        if nearest_rung is None or nearest_rung.estimate is None:
            return f"Nothing fits: none of {count_noun(len(self.rungs), 'rung')} is available here"
        batch_text = f"with a batch of {nearest_rung.batch_size}"
        # A real step may fail although the estimate says that it fits.
        if not nearest_rung.estimate.lacking:
            return f"Nothing fits: {nearest_rung.name} {batch_text} should by estimate, and did not"
        return (
            f"Nothing fits: {nearest_rung.name} {batch_text} comes nearest, and lacks "
            f"{_missing_memory(nearest_rung)}"
        )

    def explain(self) -> str:
        """All rungs with what they need, the verdict and the reason; remarks below the table."""
        table_rows = [
            _TABLE_HEAD,
            *(rung.cells(is_chosen=rung is self.chosen) for rung in self.rungs),
        ]
        # A column without a value, such as that of NVMe, would only take width.
        used_columns = [
            column_index
            for column_index in range(len(_TABLE_HEAD))
            if any(table_row[column_index] for table_row in table_rows[1:])
        ]
        column_widths = {
            column_index: max(len(table_row[column_index]) for table_row in table_rows)
            for column_index in used_columns
        }
        output_lines = [self.headline(), ""]
        for table_row, rung in zip(table_rows, (None, *self.rungs), strict=True):
            cells = [
                _aligned_text(table_row[column_index], column_widths[column_index], column_index)
                for column_index in used_columns
            ]
            output_lines.append("  ".join(cells).rstrip())
            # A reason is a sentence, too long for a column of text of fixed width.
            if rung is not None:
                output_lines += textwrap.wrap(
                    rung.reason,
                    _ADVICE_LINE_CHARS,
                    initial_indent=" " * 6,
                    subsequent_indent=" " * 6,
                )
        return "\n".join([*output_lines, "", *self._remarks()])

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
        table_rows = [
            (*rung.cells(is_chosen=rung is self.chosen), rung.reason) for rung in self.rungs
        ]
        columns = [0] + [
            column_index
            for column_index in range(1, len(_TABLE_HEAD) + 1)
            if {table_row[column_index] for table_row in table_rows} - {"", "-"}
        ]
        table_head = "".join(
            _html_cell("th", (*_TABLE_HEAD, "why")[column_index], column_index)
            for column_index in columns
        )
        table_body = "".join(
            "<tr>"
            + "".join(
                _html_cell("td", table_row[column_index], column_index) for column_index in columns
            )
            + "</tr>"
            for table_row in table_rows
        )
        remarks_html = "".join(f"<p>{escape(text)}</p>" for text in self._remarks())
        return (
            f"<p><b>{escape(self.headline())}</b></p><table><thead><tr>{table_head}</tr></thead>"
            f"<tbody>{table_body}</tbody></table>{remarks_html}"
        )

    def _remarks(self) -> list[str]:
        texts = []
        if self.largest_batch_size is not None:
            note = "" if self.is_largest else "; larger ones were not tried"
            texts.append(
                f"Largest batch with which a real step worked: {self.largest_batch_size} samples "
                f"per process{note}."
            )
        return [*texts, *self.warnings]


def _lacking_bytes(rung: Rung) -> int:
    return sum(rung.estimate.lacking.values()) if rung.estimate is not None else 0


def _missing_memory(rung: Rung) -> str:
    words = {"device": "on each device", "host": "of host memory", "nvme": "of disk"}
    lacking_bytes = rung.estimate.lacking if rung.estimate is not None else {}
    return " and ".join(
        f"{format_bytes(missing_bytes)} {words[name]}"
        for name, missing_bytes in lacking_bytes.items()
    )


def _html_cell(html_tag: str, text: str, index: int) -> str:
    # Numbers, from the batch to what was measured, are compared by their last digits.
    side = "right" if 2 <= index <= 6 else "left"
    # Only the last column, with the reasons, may be wrapped.
    style = "" if index == len(_TABLE_HEAD) else ";white-space:nowrap"
    return f"<{html_tag} style='text-align:{side}{style}'>{escape(text)}</{html_tag}>"


def _aligned_text(text: str, width: int, index: int) -> str:
    return text.rjust(width) if 2 <= index <= 6 else text.ljust(width)


def _size_text(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
