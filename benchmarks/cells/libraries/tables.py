"""datasets: two `map`s with functions of the notebook, and a filter."""

from __future__ import annotations

from typing import Any

import datasets

datasets.disable_progress_bars()


def with_length(row: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(row["text"])}


def in_capitals(rows: dict[str, Any]) -> dict[str, Any]:
    return {"text": [text.upper() for text in rows["text"]]}


def use(rank: int) -> int:
    table = datasets.Dataset.from_dict({"text": [f"line {rank} {i}" for i in range(200)]})
    table = table.map(with_length).map(in_capitals, batched=True)
    kept = table.filter(lambda row: row["length"] > 8)
    assert kept[0]["text"].startswith("LINE")
    return len(kept)
