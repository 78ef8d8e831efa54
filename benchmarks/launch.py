"""How fast, how frugal and how helpful launching is, beside the peers, from real kernels.

    python benchmarks/launch.py                    everything, 9 repeats, about five hours
    python benchmarks/launch.py --sections df --repeats 2 --no-page
    python benchmarks/launch.py --sections g --libraries sklearn images --repeats 1 --no-page
    python benchmarks/launch.py --render           the tables again, from the stored result
    python benchmarks/launch.py --check            exit status 1 when a bar does not hold

Read docs/pages/figures.md for what each row means. A choice of rows goes to README.md.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from harness import bars, comparison, endings, home, latency, libraries, memory, table
from harness.namespace import can_isolate
from harness.report import PAGES
from harness.samples import Results, say
from harness.subjects import SUBJECTS, Subject

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
SECTIONS = "abcdefg"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--sections", default=SECTIONS, help=f"letters of {SECTIONS}")
    names = [subject.name for subject in SUBJECTS]
    parser.add_argument("--subjects", nargs="+", default=names, choices=names, metavar="NAME")
    names = [library.name for library in libraries.LIBRARIES]
    parser.add_argument("--libraries", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "launch.json")
    parser.add_argument("--no-page", action="store_true", help="leave the documentation as it is")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--check", action="store_true", help="fail when a bar does not hold")
    return parser.parse_args()


def choose(names: list[str]) -> list[Subject]:
    chosen = [subject for subject in SUBJECTS if subject.name in names]
    for subject in chosen:
        if not subject.is_installed:
            say(f"{subject.name} is left out: {subject.module} cannot be imported here")
    return [subject for subject in chosen if subject.is_installed]


def measure(results: Results, options: argparse.Namespace) -> None:
    subjects = choose(options.subjects)
    run_libraries = partial(libraries.run, names=options.libraries)
    runs = {"a": latency.run, "b": memory.run, "c": home.run, "g": run_libraries}
    if not can_isolate():
        say("no namespaces (they need root, unshare and ip): subjects share this machine's")
    for section in options.sections:
        results.forget(section)
        if section in runs:
            runs[section](results, subjects, options.repeats)
        else:
            endings.run(results, subjects, options.repeats, section)
        results.note(section, repeats=options.repeats, isolated=can_isolate())
        results.save()


def main() -> int:
    options = parse()
    results = Results(options.output)
    if not options.render:
        measure(results, options)
    verdicts = bars.judge(results)
    text = table.render(results, verdicts)
    print(text)
    if not options.no_page:
        table.put_into(PAGES / "figures.md", text)
        beside = comparison.render(results)
        table.put_into(README, beside, comparison.BEGIN, comparison.END)
    holds = bool(verdicts) and all(verdict.holds for verdict in verdicts)
    return 0 if holds or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
