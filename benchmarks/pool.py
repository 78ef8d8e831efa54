"""How fast live workers start, answer, take a model, fail and rest, beside the peers.

    pip install -e '.[dev,bench]'                  the peers, too
    python benchmarks/pool.py                      everything, 7 repeats, about forty minutes
    python benchmarks/pool.py --sections ef --repeats 2 --no-page --output /tmp/quick.json
    python benchmarks/pool.py --render             the table again, from the stored result
    python benchmarks/pool.py --check              exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import argparse
import compileall
import sys
from importlib.util import find_spec
from pathlib import Path

from harness import live_table, live_work, table
from harness.live import SUBJECTS, Live
from harness.namespace import can_isolate
from harness.report import PAGES
from harness.samples import Results, say

HERE = Path(__file__).resolve().parent
SECTIONS = "abcdef"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--sections", default=SECTIONS, help=f"letters of {SECTIONS}")
    names = [subject.name for subject in SUBJECTS]
    parser.add_argument("--subjects", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "pool.json")
    parser.add_argument("--no-page", action="store_true", help="leave the documentation as it is")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="fail when a bar does not hold")
    return parser.parse_args()


def choose(names: list[str]) -> list[Live]:
    chosen = [subject for subject in SUBJECTS if subject.name in names]
    for subject in chosen:
        if not subject.is_installed:
            say(f"{subject.name} is left out: {subject.module} cannot be imported here")
    return [subject for subject in chosen if subject.is_installed]


def compile_bytecode() -> None:
    """As pip does for what it installs, the peers among it: a checkout may have none."""
    spec = find_spec("nbaccel")
    for place in (spec.submodule_search_locations or []) if spec else []:
        compileall.compile_dir(place, quiet=2)


def measure(results: Results, options: argparse.Namespace) -> None:
    if not can_isolate():
        say("no namespaces (they need root, unshare and ip): subjects share this machine's")
    compile_bytecode()
    for section in options.sections:
        results.forget(section)
    live_work.run(results, choose(options.subjects), options.repeats, options.sections)


def main() -> int:
    options = parse()
    results = Results(options.output)
    if not options.render:
        measure(results, options)
    verdicts = live_table.judge(results)
    text = live_table.render(results, verdicts)
    print(text)
    if not options.no_page:
        table.put_into(PAGES / "figures.md", text, live_table.BEGIN, live_table.END)
    holds = bool(verdicts) and all(verdict.holds for verdict in verdicts)
    return 0 if holds or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
