"""What was measured: values, and what went wrong instead of a value."""

from __future__ import annotations

import json
import platform
import re
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count, getloadavg
from pathlib import Path
from typing import Any

import nbaccel

PACKAGES = (
    *("torch", "accelerate", "deepspeed", "lightning", "ipykernel", "jupyter_client"),
    *("ipyparallel", "nbdistributed", "jupyter-distributed", "torch_tpu", "torch_xla", "torchao"),
    *("transformers", "peft", "datasets", "scikit-learn", "pillow", "transformer_engine"),
)


@dataclass
class Samples:
    """All repeats of one measure of one subject."""

    values: list[float] = field(default_factory=list)
    hangs: int = 0
    errors: list[str] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def num_tries(self) -> int:
        return len(self.values) + self.hangs + len(self.errors)

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    def as_json(self) -> dict[str, Any]:
        numbers = {"median": self.median, "n": len(self.values)}
        if self.values:
            numbers |= {"min": min(self.values), "max": max(self.values)}
        return {**numbers, **asdict(self)}


class Results:
    """Samples by measure and subject, kept section by section in one JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sections: dict[str, dict[str, Any]] = {}
        self.samples: dict[tuple[str, str], Samples] = {}
        if path.exists():
            self._load(json.loads(path.read_text()))

    def _load(self, stored: dict[str, Any]) -> None:
        self.sections = stored["sections"]
        for measure, row in stored["measures"].items():
            for subject, numbers in row.items():
                kept = {name: numbers[name] for name in ("values", "hangs", "errors", "facts")}
                self.samples[measure, subject] = Samples(**kept)

    def of(self, measure: str, subject: str) -> Samples:
        return self.samples.setdefault((measure, subject), Samples())

    def get(self, measure: str, subject: str) -> Samples | None:
        return self.samples.get((measure, subject))

    def median(self, measure: str, subject: str) -> float | None:
        found = self.get(measure, subject)
        return found.median if found else None

    def forget(self, section: str) -> None:
        """A section is taken in one run, all subjects together, or not at all."""
        self.samples = {key: s for key, s in self.samples.items() if key[0].split()[0] != section}
        self.sections.pop(section, None)

    def note(self, section: str, **facts: Any) -> None:
        load = round(getloadavg()[0], 1)
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self.sections[section] = {"taken": when, "load": load, **machine(), **facts}

    def save(self) -> None:
        measures: dict[str, dict[str, Any]] = {}
        for (measure, subject), samples in self.samples.items():
            row = samples.as_json()
            # What a subject showed is looked at while measuring, not kept: it is full of folders.
            row["facts"] = [{k: v for k, v in fact.items() if k != "text"} for fact in row["facts"]]
            measures.setdefault(measure, {})[subject] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"sections": self.sections, "measures": measures}, indent=1)
        self.path.write_text(without_places(text) + "\n")


def without_places(text: str) -> str:
    """The text without the folders of the machine it was taken on: figures are to be published."""
    text = re.sub(r"sys\.path\[:\] = \[[^\"\\]*", "sys.path[:] = …", text)
    return re.sub(r"(?<![\w./])/(?:[\w.+-]+/)+(?=[\w.+-]+)", "…/", text)


def machine() -> dict[str, Any]:
    # Nbaccel's is its own word: it may be on the path without being installed.
    versions = {"python": platform.python_version(), "nbaccel": nbaccel.__version__}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory_gib = round(int(meminfo["MemTotal"].split()[0]) / 2**20)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "num_cores": cpu_count(),
        "memory_gib": memory_gib,
        "versions": versions,
    }


_STARTED = time.monotonic()


def say(text: str) -> None:
    """Progress, on stderr: stdout is for the table."""
    print(f"[{time.monotonic() - _STARTED:6.0f} s] {text}", file=sys.stderr, flush=True)
