"""The long lane: hundreds of moments, and the table of what survives what.

python -m tests.chaos --moments 320
python -m tests.chaos --render      the table in docs/pages/reliability.md again, from the record
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests import selection
from tests.chaos.harness import Moment, faults, figures, run_notebooks
from tests.isolation import ROOT

RECORD = ROOT / "benchmarks" / "results" / "chaos.json"
PAGE = ROOT / "docs" / "pages" / "reliability.md"
BEGIN = "<!-- chaos:begin (made by `python -m tests.chaos --render`) -->"
END = "<!-- chaos:end -->"

_COLUMNS = (
    ("moments", "moments"),
    ("told", "told"),
    ("old", "old"),
    ("new", "new"),
    ("half done", "half done"),
    ("gone", "kernel killed"),
    ("hung", "hung until Stop"),
    ("torn", "**torn**"),
    ("silent", "**silent**"),
)


def main() -> int:
    """Run the lane; the exit status is 1 if anything was torn, silent or left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=320)
    parser.add_argument("--seed", type=int, help="of the random moments; the commit's, if none")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at the same time")
    parser.add_argument("--output", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.render:
        PAGE.write_text(put_into(PAGE.read_text(), render(json.loads(RECORD.read_text()))))
        return 0
    # Each commit has its own, so that what is found can be found again.
    commit = selection.git("rev-parse", "HEAD")
    own_seed = int(commit[:8], 16) if commit else int(time.time())
    seed = own_seed if options.seed is None else options.seed
    print(f"chaos: {options.moments} moments, seed {seed}", flush=True)
    began = time.monotonic()
    moments = run_notebooks(options.moments, seed, options.jobs)
    record = _record(seed, moments)
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(render(record))
    print("\n".join(record["faults"]))
    seconds = time.monotonic() - began
    print(f"chaos: {len(moments)} moments, {len(record['faults'])} faults, in {seconds:.0f} s")
    return bool(record["faults"])


def _record(seed: int, moments: list[Moment]) -> dict[str, Any]:
    memory = psutil.virtual_memory().total / 2**30
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "machine": f"{psutil.cpu_count()} CPU cores, {memory:.0f} GiB",
        "seed": seed,
        "scenes": figures(moments),
        "faults": faults(moments),
        "moments": [asdict(moment) for moment in moments],
    }


def render(record: Mapping[str, Any]) -> str:
    """The table of a record, and the line above it."""
    scenes = record["scenes"]
    total = sum(of_scene["moments"] for of_scene in scenes.values())
    titles = [title for _, title in _COLUMNS]
    lines = [
        f"{total} moments on {record['date']}, {record['machine']}:",
        "",
        f"| while | {' | '.join(titles)} | to the prompt (median, worst) |",
        f"|---|{'---:|' * (len(titles) + 1)}",
    ]
    for name, of_scene in scenes.items():
        counts = " | ".join(str(of_scene[key]) for key, _ in _COLUMNS)
        waits = f"{of_scene['prompt_median_s']:.2f} s, {of_scene['prompt_worst_s']:.1f} s"
        lines.append(f"| {name} | {counts} | {waits} |")
    return "\n".join(lines)


def put_into(text: str, table: str) -> str:
    """The page with this table in it."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{tail}"


if __name__ == "__main__":
    sys.exit(main())
