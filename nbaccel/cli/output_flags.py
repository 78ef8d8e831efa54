"""``--tee``, ``--redirects`` and ``--local-ranks-filter`` of torchrun, as one setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EVERY_STREAM = 3
_STREAMS_TEXT = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedOutput:
    """What is to be shown.

    Attributes:
        text: ``RunConfig.shown_output``; None where all is shown.
        flag: The option that decides it.
        notes: Options without effect.
        mistakes: What is wrong.
    """

    text: str | None = None
    flag: str = ""
    notes: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()


def shown_output_of(given: Mapping[str, Any], *, has_log_dir: bool) -> WantedOutput:
    """What is to be shown, by torchrun's options.

    A stream that is redirected goes to its file alone, unless tee shows it beside.
    """
    streams = {}
    mistakes = []
    for option_name in ("redirects", "tee"):
        text = str(given.get(option_name) or "0").replace(" ", "")
        if not _STREAMS_TEXT.fullmatch(text):
            mistakes.append(
                f"--{option_name} must be 0, 1 (stdout), 2 (stderr), 3 (both) or pairs such as "
                f"0:3,1:2: got {text!r}. It says which streams it is about. Give 3 for both."
            )
            text = "0"
        streams[option_name] = _by_rank(text)
    notes: list[str] = []
    if not has_log_dir and any(streams["redirects"].values()):
        mistakes.append(
            f"--redirects={given['redirects']!r} needs a folder: what is redirected would be lost. "
            "Give --log-dir DIR, too."
        )
    if not has_log_dir and any(streams["tee"].values()):
        notes.append("--tee has no effect without --log-dir: everything is shown anyway.")
    shown_ranks = _ranks_of(given.get("local_ranks_filter"), mistakes)
    return WantedOutput(
        text=_shown_text(streams["redirects"], streams["tee"], shown_ranks),
        flag="--redirects" if any(streams["redirects"].values()) else "--local-ranks-filter",
        notes=tuple(notes),
        mistakes=tuple(mistakes),
    )


def _by_rank(text: str) -> dict[int | None, int]:
    """``0:3,1:2`` by local rank; a number alone stands for all ranks, under None."""
    parts = [part.rpartition(":") for part in text.split(",")]
    return {int(rank) if rank else None: int(number) for rank, _, number in parts}


def _ranks_of(filter_text: Any, mistakes: list[str]) -> list[int]:
    words = [word.strip() for word in str(filter_text or "").split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        mistakes.append(
            f"--local-ranks-filter must be local ranks: got {filter_text!r}. Only these are shown. "
            "Give for example 0,1."
        )
        return []
    return [int(word) for word in words]


def _shown_text(
    redirects: Mapping[int | None, int], tees: Mapping[int | None, int], shown_ranks: list[int]
) -> str | None:
    def streams(rank: int | None) -> int:
        hidden = redirects.get(rank, redirects.get(None, 0)) & ~tees.get(rank, tees.get(None, 0))
        return _EVERY_STREAM & ~hidden

    default_streams = 0 if shown_ranks else streams(None)
    named_ranks = {rank for rank in (*redirects, *tees) if rank is not None}
    ranks = sorted(shown_ranks or named_ranks)
    if default_streams == _EVERY_STREAM and not ranks:
        return None
    pairs = [f"{rank}:{streams(rank)}" for rank in ranks if streams(rank) != default_streams]
    return ",".join([str(default_streams), *pairs])
