"""Which settings work together, as the tables of `docs/pages/reference/compatibility.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbaccel.config.capabilities import (
    DEVICES,
    FP8_BACKENDS,
    PRECISIONS,
    START_METHODS,
    STRATEGIES,
    computes_in,
    strategy_fits,
)
from nbaccel.config.capability_rows import DeviceRow, Fp8Row, PrecisionRow, StrategyRow

MATRIX_BEGIN = "<!-- capabilities:begin -->"
MATRIX_END = "<!-- capabilities:end -->"


def compatibility_tables() -> str:
    """The tables of the documentation, in Markdown."""
    precision_names = [capability_row.name for capability_row in PRECISIONS]
    method_names = [capability_row.name for capability_row in START_METHODS]
    device_rows = [
        [
            f"`{capability_row.name}`: {capability_row.meaning}",
            *(_precision_mark(capability_row, precision) for precision in PRECISIONS),
            *(
                _device_mark(capability_row) if row_name in capability_row.start_methods else ""
                for row_name in method_names
            ),
        ]
        for capability_row in DEVICES
    ]
    device_names = [capability_row.name for capability_row in DEVICES]
    strategy_rows = [
        [
            f"`{capability_row.name}`: {capability_row.meaning}",
            *(
                _device_mark(other_row) if strategy_fits(capability_row, other_row) else ""
                for other_row in DEVICES
            ),
            *("yes" if _trains_in(capability_row, precision) else "" for precision in PRECISIONS),
        ]
        for capability_row in STRATEGIES
    ]
    rows_by_kind: dict[str, Sequence[Any]] = {
        "precision": PRECISIONS,
        "strategy": STRATEGIES,
        "fp8 backend": FP8_BACKENDS,
        "start": START_METHODS,
    }
    need_rows = [
        [row_kind, f"`{capability_row.name}`", capability_row.meaning, capability_row.needs]
        for row_kind, capability_rows in rows_by_kind.items()
        for capability_row in capability_rows
    ]
    return "\n\n".join(
        [
            markdown_table(
                ["Device", *_code_names(precision_names), *_code_names(method_names)], device_rows
            ),
            markdown_table(
                ["Strategy", *_code_names(device_names), *_code_names(precision_names)],
                strategy_rows,
            ),
            markdown_table(["Kind", "Name", "Meaning", "Needs"], need_rows),
        ]
    )


def _code_names(names: Sequence[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _trains_in(strategy: StrategyRow, precision: PrecisionRow) -> bool:
    return strategy_fits(strategy, precision) or (
        precision.has_backends and any(strategy_fits(strategy, row) for row in FP8_BACKENDS)
    )


def _precision_mark(device: DeviceRow, precision: PrecisionRow) -> str:
    rows: list[PrecisionRow | Fp8Row] = [precision]
    if precision.has_backends:
        rows += FP8_BACKENDS
    computing = [row for row in rows if computes_in(device, row)]
    if not computing:
        return ""
    if precision.name in dict(device.slow):
        return "slow"
    # A device without a compute capability is below all of them.
    is_emulated = all(isinstance(row, Fp8Row) and row.emulated_below > (0, 0) for row in computing)
    return "emulated" if is_emulated and not device.never_run else _device_mark(device)


def _device_mark(device: DeviceRow) -> str:
    return "never run" if device.never_run else "yes"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    all_lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(table_line)} |" for table_line in all_lines)
