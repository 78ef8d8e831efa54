"""Run the tests with the versions that other people have.

    python3 -m tests.lanes colab           # a fresh environment below .lanes/, tests, a record
    python3 -m tests.lanes colab --keep    # the environment stays, for another look
    python3 -m tests.lanes colab --reuse   # the one that stayed is taken as it is
    python3 -m tests.lanes --render        # the table in docs/versions.md, from the records

Each lane writes what it ran with and what came of it to benchmarks/results/lanes/. It needs nothing
but a Python of its version, as `python3.12` on the PATH or below ~/.pyenv.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.lanes import table
from tests.lanes.lanes import LANES, Lane

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "lanes"
PAGE = ROOT / "docs" / "versions.md"
_REPORTED = ("torch", "ipython", "ipykernel", "ipywidgets", "deepspeed")
_VERSIONS = f"""
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {{"python": platform.python_version()}}
for name in {_REPORTED!r}:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = ""
print(json.dumps(found))
"""


def interpreter(version: str) -> str:
    """A Python of this version on this machine.

    Raises:
        SystemExit: There is none.
    """
    found = shutil.which(f"python{version}")
    # pyenv has a command for each version that it knows of, and some of them only fail.
    if found and not subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode:
        return found
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if of_pyenv:
        return str(of_pyenv[-1])
    raise SystemExit(f"this lane needs Python {version}: there is no python{version} on the PATH")


def install(name: str, lane: Lane, folder: Path) -> Path:
    """Make the environment; returns its interpreter.

    The versions of the image go in first. That installing nbaccel changes none of them is checked.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter(lane.python), "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    constraints = ROOT / "constraints" / f"{name}.txt"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    image = [
        line.split("#")[0].strip()
        for line in constraints.read_text().splitlines()
        if line.split("#")[0].strip()
    ]
    subprocess.run([*pip, *image], check=True)
    before = frozen(python)
    subprocess.run([*pip, "--editable", f"{ROOT}[notebook]", *lane.all_packages], check=True)
    after = frozen(python)
    changed = {name: after[name] for name in before if after.get(name) != before[name]}
    if changed:
        raise SystemExit(f"installing nbaccel changed what the image has: {changed}")
    return python


def frozen(python: Path) -> dict[str, str]:
    """What is installed."""
    command = [python, "-m", "pip", "list", "--format", "json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {item["name"]: item["version"] for item in json.loads(found)}


def run_tests(python: Path, lane: Lane, folder: Path, jobs: int) -> tuple[bool, dict[str, int]]:
    """Run the lane's tests; returns whether all passed, and how many."""
    report = folder / "report.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Old packages in a Python that is newer than they are.
    command += ["-W", "ignore::DeprecationWarning", "-W", "ignore::PendingDeprecationWarning"]
    command += ["--numprocesses", str(jobs), "--dist", "loadfile", *lane.tests]
    done = subprocess.run(command, cwd=ROOT, check=False)
    suite = ET.parse(report).getroot().find("testsuite")
    total, bad, skipped = (
        0 if suite is None else int(suite.get(key, 0)) for key in ("tests", "failures", "skipped")
    )
    counts = {"passed": total - bad - skipped, "failed": bad, "skipped": skipped}
    return done.returncode == 0, counts


def run_notebooks(python: Path, lane: Lane) -> bool:
    """Run the lane's notebooks from beginning to end."""
    runner = ROOT / "notebooks" / "run.py"
    runs = [
        subprocess.run([python, runner, ROOT / notebook], check=False, cwd=ROOT)
        for notebook in lane.notebooks
    ]
    return not any(run.returncode for run in runs)


def run(name: str, *, keep: bool, reuse: bool, jobs: int) -> int:
    """Run one lane; returns the exit status."""
    lane, folder, began = LANES[name], ROOT / ".lanes" / name, time.monotonic()
    try:
        python = folder / "bin" / "python" if reuse else install(name, lane, folder)
        installed_s = time.monotonic() - began
        passed, counts = run_tests(python, lane, folder, jobs)
        is_good = run_notebooks(python, lane) and passed
        versions = subprocess.run(
            [python, "-c", _VERSIONS], check=True, capture_output=True, text=True
        ).stdout
    finally:
        if not (keep or reuse):
            shutil.rmtree(folder, ignore_errors=True)
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "title": lane.title,
        "versions": json.loads(versions),
        "front_end": lane.front_end,
        "tests": counts,
        "notebooks": len(lane.notebooks),
    }
    took = f"{time.monotonic() - began:.0f} s, {installed_s:.0f} s of it for the environment"
    print(f"lane {name}: {counts}, {'green' if is_good else 'RED'}, {took}", flush=True)
    if is_good:
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    return 0 if is_good else 1


def records() -> dict[str, dict[str, Any]]:
    """What the lanes have written, in their order."""
    paths = {name: RECORDS / f"{name}.json" for name in LANES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lane", nargs="*", choices=[[], *LANES])
    parser.add_argument("--keep", action="store_true", help="leave the environment there")
    parser.add_argument("--reuse", action="store_true", help="take the environment kept before")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--render", action="store_true", help="renew the table in docs/versions.md")
    asked = parser.parse_args()
    how = {"keep": asked.keep, "reuse": asked.reuse, "jobs": asked.jobs}
    status = max([run(name, **how) for name in asked.lane], default=0)
    if asked.render:
        PAGE.write_text(table.put_into(PAGE.read_text(), table.render(records())))
    return status


if __name__ == "__main__":
    sys.exit(main())
