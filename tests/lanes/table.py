"""The table of what was run with what, in the documentation: made from what the lanes wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BEGIN", "END", "put_into", "render"]

BEGIN = "<!-- lanes:begin (made by `python3 -m tests.lanes --render`) -->"
END = "<!-- lanes:end -->"

_PACKAGES = {
    "python": "Python",
    "torch": "torch",
    "ipython": "IPython",
    "ipykernel": "ipykernel",
    "ipywidgets": "ipywidgets",
    "deepspeed": "DeepSpeed",
}
_TPU_DRIVERS = {"torch-tpu": "torch_tpu", "torch-xla": "torch_xla"}


def render(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The table.

    Args:
        records: What each lane has written: date, versions, front end, counts of tests.
    """
    titles = ["lane", *_PACKAGES.values(), "TPU driver", "front end", "tests", "notebooks", "date"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for record in records.values():
        counts = record["tests"]
        versions = [record["versions"][name] or "-" for name in _PACKAGES]
        versions.append(_tpu_driver(record["versions"]))
        told = f"{counts['passed']} passed, {counts['skipped']} skipped"
        row = [record["title"], *versions, record["front_end"], told, str(record["notebooks"])]
        lines.append(f"| {' | '.join([*row, record['date']])} |")
    return "\n".join(lines)


def _tpu_driver(versions: Mapping[str, str]) -> str:
    """Name and version; records of other lanes may be older than the drivers."""
    found = [f"{name} {versions[key]}" for key, name in _TPU_DRIVERS.items() if versions.get(key)]
    return ", ".join(found) or "-"


def put_into(text: str, table: str) -> str:
    """The page with this table in it."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"
