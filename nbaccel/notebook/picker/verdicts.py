"""Whether a run fits, in a sentence with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nbaccel.base.units import format_bytes
from nbaccel.notebook.picker.memory_model import MemoryBar, MemoryNeed, joined_text

__all__ = ["FitVerdict", "lacking_text", "verdict_of"]


@dataclass(frozen=True, slots=True)
class FitVerdict:
    """Whether a run fits.

    Attributes:
        fits: None where nothing is known.
        text: The verdict with its numbers.
        remedy: What to do; empty where nothing is to be done.
    """

    fits: bool | None
    text: str
    remedy: str = ""


def verdict_of(need: MemoryNeed, remedy: Callable[[], str], *, remark: str) -> FitVerdict:
    """Whether a need can be met."""
    if need.lacking:
        return FitVerdict(False, f"Does not fit: {lacking_text(need)}.", remedy())
    needed_bars = [memory_bar for memory_bar in need.bars if memory_bar.needed]
    return FitVerdict(True, f"Fits: {', '.join(joined_text(needed_bars, _share_words))}.", remark)


def lacking_text(need: MemoryNeed) -> str:
    """What is missing in each place: ``3.3 GiB too little``; empty where nothing is."""
    short_bars = [memory_bar for memory_bar in need.bars if memory_bar.lacking]
    return ", ".join(joined_text(short_bars, _lacking_words))


def _lacking_words(bar: MemoryBar) -> str:
    return f"{format_bytes(bar.lacking)} too little"


def _share_words(bar: MemoryBar) -> str:
    return f"{format_bytes(bar.needed)} of {format_bytes(bar.capacity)}"
