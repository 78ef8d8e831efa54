"""A plugin of `make test` and the lanes: what failed runs again, alone, when all are through.

If it passes then, the run is green, and its last lines say `unsteady: NAME`. CONTRIBUTING says what
becomes of such a test; tests/unsteady.md lists those that were seen. A test that fails again, fails
the run, and so does a run of which many tests have failed: that is no unsteadiness.

There is no other retry: not of a step, a lane, a notebook or a kill.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST_TESTS = 10
LIST = Path(__file__).parent / "unsteady.md"
FOUND = Path("build") / "unsteady.txt"
"""Below the root: the names of all runs since it was removed, for the last lines of `.ci/run`."""
UNSTEADY = pytest.StashKey[list[str]]()
_HEAD = "what failed at first, and passed when it ran alone"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[UNSTEADY] = []


@pytest.hookimpl(trylast=True)  # after xdist has ended its processes
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    bad = [one for kind in ("failed", "error") for one in reporter.stats.get(kind, [])]
    names = dict.fromkeys(_alone(report.nodeid) for report in bad)
    # Nothing is run again where a person asked for the first failure, or pressed Stop.
    if exitstatus != pytest.ExitCode.TESTS_FAILED or config.getvalue("maxfail"):
        return
    if not all(isinstance(one, pytest.TestReport) for one in bad) or len(names) > MOST_TESTS:
        return
    unsteady = [name for name in names if _passes_alone(name, config, reporter)]
    _tell_apart(reporter.stats, unsteady)
    config.stash[UNSTEADY] = unsteady
    if len(unsteady) == len(names):
        session.exitstatus = pytest.ExitCode.OK


def _alone(name: str) -> str:
    """What can run alone: a test, or a whole notebook, whose cells follow from each other."""
    return name.partition("::")[0] if ".ipynb::" in name else name


def _passes_alone(name: str, config: pytest.Config, reporter: pytest.TerminalReporter) -> bool:
    reporter.ensure_newline()
    reporter.write_line(f"again, alone: {name}")
    options = [f"-W{one}" for one in config.option.pythonwarnings or ()]
    plugins = [one for one in config.option.plugins if one.startswith("tests.")]
    options += [f"-p{one}" for one in plugins if one != __name__]
    if name.endswith(".ipynb"):
        options += ["--nbval-lax", "--nbval-current-env"]
    command = [sys.executable, "-m", "pytest", "-pno:cacheprovider", *options, name]
    done = subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, check=False)
    # Skipped, or not found, is not passed.
    passed = done.returncode == 0 and re.search(r"\b\d+ passed\b", done.stdout) is not None
    reporter.write_line("  passed" if passed else f"  failed again\n{done.stdout}{done.stderr}")
    return passed


def _tell_apart(stats: dict[str, list[Any]], unsteady: list[str]) -> None:
    """Count what was unsteady as that, in the closing line too."""
    for kind in ("failed", "error"):
        reports = stats.pop(kind, [])
        kept = [one for one in reports if _alone(one.nodeid) not in unsteady]
        if kept:
            stats[kind] = kept
        passed_alone = [one for one in reports if one not in kept]
        if passed_alone:
            stats.setdefault("unsteady", []).extend(passed_alone)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Any:
    result = yield
    if names := config.stash[UNSTEADY]:
        terminalreporter.write_sep("=", _HEAD)
        for report in terminalreporter.stats["unsteady"]:
            terminalreporter.write_sep("_", report.nodeid)
            report.toterminal(terminalreporter._tw)
        known = LIST.read_text(encoding="utf-8") if LIST.exists() else ""
        advice = ("add it to tests/unsteady.md", "for the second time: mend or delete it")
        lines = [f"unsteady: {name} ({advice[f'`{name}`' in known]})" for name in names]
        terminalreporter.write_line("\n".join(lines))
        (config.rootpath / FOUND).parent.mkdir(exist_ok=True)
        with (config.rootpath / FOUND).open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return result
