"""Run the tests with the versions that other people have.

    python3 -m tests.lanes colab           # a fresh environment below .lanes/, tests, a record
    python3 -m tests.lanes colab --keep    # the environment stays, for another look
    python3 -m tests.lanes colab --reuse   # the one that stayed is taken as it is
    python3 -m tests.lanes --in-turn       # dist, and those whose turn it is, by number of landings
    python3 -m tests.lanes --render        # the table in docs/pages/versions.md, from the records

Each lane writes what it ran with and what came of it to benchmarks/results/lanes/. It needs nothing
but a Python of its version, as `python3.12` on the PATH or below ~/.pyenv, and an index that has
its packages; where one is missing, the lane is skipped, and that is said. While the tests of one
lane run, the environment of the next is made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests import selection
from tests.house.source import put_into
from tests.isolation import ROOT
from tests.lanes import builds
from tests.lanes.environment import HOME, Environment, MissingPackages, MissingPython, check_shared
from tests.lanes.lanes import LANES, TURNS, Lane

RECORDS = ROOT / "benchmarks" / "results" / "lanes"
PAGE = ROOT / "docs" / "pages" / "versions.md"
CONSTRAINTS = ROOT / "constraints"
_REPORTED = ("torch", "ipython", "ipykernel", "ipywidgets", "deepspeed", "torch-tpu", "torch-xla")
# As in tests/tpu/pretended.py.
_PRETENDED, _HOST = "NBACCEL_TEST_PRETENDED_TPU", "NBACCEL_TEST_TPU_HOST"


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
    """The table."""
    titles = ["lane", *_PACKAGES.values(), "TPU driver", "front end", "tests", "notebooks", "date"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for record in records.values():
        counts = record["tests"]
        found = record["versions"]  # records of other lanes may be older than the drivers
        drivers = [f"{name} {found[key]}" for key, name in _TPU_DRIVERS.items() if found.get(key)]
        versions = [*(found[name] or "-" for name in _PACKAGES), ", ".join(drivers) or "-"]
        told = f"{counts['passed']} passed, {counts['skipped']} skipped"
        row = [record["title"], *versions, record["front_end"], told, str(record["notebooks"])]
        lines.append(f"| {' | '.join([*row, record['date']])} |")
    return "\n".join(lines)


def prepare(name: str, folder: Path) -> Environment:
    """Make the environment of a lane, in a folder of the lane's own."""
    lane, environment = LANES[name], Environment(folder / "environment")
    {"checkout": _checkout, "builds": _builds, "binder": _binder}[lane.source](
        name, lane, environment
    )
    if lane.pretends_tpu:
        _pretend_tpu(environment)
    environment.warm()
    return environment


def _pretend_tpu(environment: Environment) -> None:
    """Let every process of the environment, if it is asked to, believe in two chips.

    Beside the line in a `.pth` file, which looks at one variable, nothing of it acts on others.
    """
    (environment.site_packages() / "pretended_tpu.pth").write_text(
        f"import os, sys; os.environ.get({_PRETENDED!r}) == '1' and (sys.path.insert(0, "
        f"{str(ROOT)!r}), __import__('tests.tpu.pretended', fromlist=['x']).install(), "
        "sys.path.remove({root!r}))\n".format(root=str(ROOT))
    )
    if environment.run("-m", "tests.tpu.recorded_host", environment.folder.parent / "host"):
        raise RuntimeError("the files of the recorded TPU host could not be written")


def _variables(lane: Lane, environment: Environment) -> dict[str, str]:
    """The variables of a lane's tests and notebooks."""
    pretended = {_PRETENDED: "1", _HOST: str(environment.folder.parent / "host")}
    return {**dict(lane.variables), **(pretended if lane.pretends_tpu else {})}


def _checkout(name: str, lane: Lane, environment: Environment) -> None:
    """What the image has goes in first. That installing nbaccel changes none of it is checked."""
    environment.create(lane.python)
    if lane.shared_python:
        check_shared(str(environment.python))
    install = environment.install_if_there if lane.may_be_missing else environment.install
    install("--requirement", CONSTRAINTS / f"{name}.txt")
    before = environment.frozen()
    environment.install("--editable", f"{ROOT}[{lane.extras}]", *lane.packages)
    after = environment.frozen()
    changed = {one: after.get(one) for one in before if after.get(one) != before[one]}
    if changed:
        raise RuntimeError(f"installing nbaccel changed what the image has: {changed}")


def _builds(name: str, lane: Lane, environment: Environment) -> None:
    """Build sdist and wheel, and install one after the other; the tests run with the wheel."""
    tools = Environment(environment.folder.parent / "tools")
    tools.create(lane.python)
    tools.install(*builds.TOOLS)
    sdist, wheel = builds.build(environment.folder.parent / "dist", tools)
    if faults := builds.faults(sdist, wheel):
        raise RuntimeError("\n".join(faults))
    tools.remove()
    environment.create(lane.python)
    environment.install("--constraint", CONSTRAINTS / "cpu.txt", sdist, *lane.packages)
    _launch(environment)
    environment.install("--reinstall", "--no-deps", wheel)
    _launch(environment)
    builds.unpack_tests(sdist, environment.folder.parent / "unpacked")


def _launch(environment: Environment) -> None:
    script = ROOT / "tests" / "lanes" / "first_launch.py"
    with tempfile.TemporaryDirectory() as elsewhere:
        if environment.run("-I", script, cwd=Path(elsewhere)):
            raise RuntimeError(f"a first launch failed in {environment.folder.name}")


def _binder(name: str, lane: Lane, environment: Environment) -> None:
    """Do as repo2docker does: its interpreter and pip, then `postBuild` in the repository."""
    environment.create(lane.python, with_pip=True)
    environ = {**os.environ, "PATH": f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"}
    # Here torch's own index may be out of reach. A CPU build is needed on Binder's machines only.
    environ |= {"TORCH_INDEX": "", "PIP_NO_COMPILE": "1", "PIP_QUIET": "1"}
    subprocess.run([ROOT / "binder" / "postBuild"], cwd=ROOT, env=environ, check=True)
    with tempfile.TemporaryDirectory() as settings:
        environ["JUPYTER_CONFIG_DIR"] = settings
        subprocess.run([ROOT / "binder" / "start", "true"], env=environ, check=True)
        for file in Path(settings).iterdir():
            page = json.loads(file.read_text())["ServerApp"]["default_url"]
            if not (ROOT / page.removeprefix("/lab/tree/")).exists():
                raise RuntimeError(f"binder/start opens {page}, which does not exist")


def run_tests(
    environment: Environment, lane: Lane, folder: Path, jobs: int
) -> tuple[bool, dict[str, int]]:
    """Run the lane's tests; returns whether all passed, and how many."""
    if not lane.tests:
        return True, {"passed": 0, "failed": 0, "skipped": 0}
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--durations=5"]
    options += ["-p", "tests.rerun_alone"]
    # Old packages in a Python that is newer than they are.
    options += ["-W", "ignore::DeprecationWarning", "-W", "ignore::PendingDeprecationWarning"]
    options += ["--numprocesses", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    unpacked = folder / "unpacked"
    cwd = next(unpacked.iterdir()) if unpacked.exists() else ROOT
    asked = ["-m", "pytest", *options, *lane.tests]
    status = environment.run(*asked, cwd=cwd, variables=_variables(lane, environment))
    suite = ET.parse(report).getroot().find("testsuite")
    kinds = ("tests", "failures", "errors", "skipped")
    total, failures, errors, skipped = (
        int(suite.get(kind, 0)) if suite is not None else 0 for kind in kinds
    )
    failed = failures + errors
    counts = {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}
    return status == 0, counts


def run_notebooks(environment: Environment, lane: Lane) -> bool:
    """Run the lane's notebooks from beginning to end."""
    runner: list[str | Path] = [ROOT / "notebooks" / "run.py"]
    if lane.with_nbval:
        runner = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.no_grammar"]
        runner += ["--nbval-lax", "--nbval-current-env"]
    variables = _variables(lane, environment)
    done = [
        environment.run(*runner, ROOT / notebook, variables=variables)
        for notebook in lane.notebooks
    ]
    return not any(done)


def run(name: str, environment: Environment, folder: Path, jobs: int) -> bool:
    """Run one lane in its environment; returns whether it is green."""
    lane, began = LANES[name], time.monotonic()
    is_built = not lane.operations or not environment.run("-m", "tests.deepspeed.operations")
    with ThreadPoolExecutor(1) as aside:
        notebooks = aside.submit(run_notebooks, environment, lane)
        passed, counts = run_tests(environment, lane, folder, jobs)
        is_green = notebooks.result() and passed and is_built
    verdict = "green" if is_green else "RED"
    print(f"lane {name}: {counts}, {verdict}, {time.monotonic() - began:.0f} s", flush=True)
    if is_green:
        _record(name, lane, environment, counts)
    return is_green


def _record(name: str, lane: Lane, environment: Environment, counts: dict[str, int]) -> None:
    installed = environment.frozen()
    asked = "import platform; print(platform.python_version())"
    python = subprocess.run([environment.python, "-c", asked], check=True, capture_output=True)
    record: dict[str, Any] = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "title": lane.title,
        "versions": {
            "python": python.stdout.decode().strip(),
            **{one: installed.get(one, "") for one in _REPORTED},
        },
        "front_end": lane.front_end,
        "tests": counts,
        "notebooks": len(lane.notebooks),
    }
    RECORDS.mkdir(parents=True, exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    # At once, or the tests that run next would find a page of another day.
    render_page()


def render_page() -> None:
    """Put the records into the table of the page."""
    PAGE.write_text(put_into(PAGE.read_text(), render(records()), BEGIN, END))


def run_all(names: list[str], *, keep: bool, reuse: bool, jobs: int) -> dict[str, str]:
    """Run lanes one after another; returns what became of each."""
    became = {}
    with ThreadPoolExecutor(1) as aside:
        coming = aside.submit(_environment, names[0], reuse)
        for name, after in zip(names, [*names[1:], ""], strict=True):
            began, made = time.monotonic(), coming.result()
            print(f"lane {name}: {time.monotonic() - began:.0f} s until its environment was there")
            coming = aside.submit(_environment, after, reuse)
            if isinstance(made, Environment):
                became[name] = "green" if run(name, made, HOME / name, jobs) else "RED"
            else:
                became[name] = made
            print(f"lane {name}: {became[name]}", flush=True)
            if not (keep or reuse):
                shutil.rmtree(HOME / name, ignore_errors=True)
    return became


def _environment(name: str, reuse: bool) -> Environment | str:
    """The environment of a lane, or why there is none."""
    folder = HOME / name
    if reuse or not name:
        return Environment(folder / "environment")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return prepare(name, folder)
    except (MissingPython, MissingPackages) as error:
        return f"SKIPPED, {error}"
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        return f"RED, {error}"


def records() -> dict[str, dict[str, Any]]:
    """What the lanes have written, in their order."""
    paths = {name: RECORDS / f"{name}.json" for name in LANES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def _in_turn() -> list[str]:
    """What this landing runs."""
    landings = len(selection.landings())
    names = ["dist", *TURNS[landings % len(TURNS)]]
    print(f"lanes: {', '.join(names)} (landing {landings + 1})", flush=True)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lane", nargs="*", choices=[[], *LANES])
    parser.add_argument("--keep", action="store_true", help="leave the environment there")
    parser.add_argument("--reuse", action="store_true", help="take the environment kept before")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument(
        "--render", action="store_true", help="renew the table in docs/pages/versions.md"
    )
    parser.add_argument(
        "--in-turn", action="store_true", help="dist, and those whose turn it is, as CI does"
    )
    asked = parser.parse_args()
    names = _in_turn() if asked.in_turn else asked.lane
    # uv compiles nothing: with it, each process of a lane would compile torch for itself.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    became = {}
    if names:
        became = run_all(names, keep=asked.keep, reuse=asked.reuse, jobs=asked.jobs)
        for name, what in became.items():
            print(f"{name}: {what.partition(chr(10))[0]}")
    if asked.render:
        render_page()
    return int(any(what.startswith("RED") for what in became.values()))


if __name__ == "__main__":
    sys.exit(main())
