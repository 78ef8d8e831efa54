"""Which tests run: all, those that are not slow, or the slow ones of what has changed.

    python -m tests.selection            # the folders and files of tests that mirror what changed
    pytest --slow=changed                # the quick tests, and the slow ones among those

What has changed is what differs from the last landed commit, committed or not. A checkout that has
`origin/main` ahead of which it is asks git; elsewhere, as in the clone that CI runs in, the last
line of `.ci/landings` names it. If neither is known, everything has changed.
"""

from __future__ import annotations

import re
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

from tests.isolation import ROOT

__all__ = [
    "SLOW_NOTEBOOKS",
    "add_option",
    "changed",
    "deselect",
    "git",
    "is_ignored",
    "landings",
    "skip_if_late",
]

LANDINGS = ROOT / ".ci" / "landings"
SLOW_NOTEBOOKS = {
    "notebooks/03_accelerator.ipynb": "tests/accelerator",
    "notebooks/05_deepspeed.ipynb": "tests/deepspeed",
    "notebooks/06_pickers.ipynb": "tests/notebook",
    "notebooks/07_fp8.ipynb": "tests/precision",
    "notebooks/09_big_models.ipynb": "tests/bigmodel",
    "notebooks/10_leave_the_notebook.ipynb": "tests/cli",
    "notebooks/11_zero_inference.ipynb": "tests/deepspeed",
}
"""Those that take half a minute or more, with the tests of what they show."""
_ALSO = {
    "accelerator": ("peers",),
    "calls": ("kernel", "stress"),
    "notebook": ("browser", "kernel"),
    "output": ("browser", "kernel"),
    "train": ("peers",),
    "transfer": ("kernel",),
    "workers": ("kernel", "stress"),
}
"""Folders of tests that look at a folder of the package from outside, beside those of its name."""
_ALL_SLOW = re.compile(r"^pytestmark = (\[[^\]]*)?.*mark\.slow", re.MULTILINE)


# ---------------------------------------------------------------- what has changed
def landings() -> list[str]:
    """The commits at which main has landed, as far as they are noted."""
    lines = LANDINGS.read_text().splitlines() if LANDINGS.exists() else []
    return [line.split()[0] for line in lines if line and not line.startswith("#")]


def git(*arguments: str) -> str | None:
    """What a command of git prints; None where it fails, or there is no checkout."""
    # safe.directory: the checkout may belong to another user than the one who tests
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _last_landed() -> str | None:
    """The commit to compare with."""
    here = git("rev-parse", "HEAD")
    common = git("merge-base", "HEAD", "origin/main")
    noted = landings()[-1] if landings() else None
    if common is not None and common != here:
        return common
    return noted if noted and git("merge-base", "--is-ancestor", noted, "HEAD") == "" else None


@cache
def changed() -> frozenset[str]:
    """Folders and files of tests that mirror what has changed, as paths from the root."""
    base = _last_landed()
    if base is None:
        return frozenset({"tests"})
    differing = git("diff", "--name-only", base) or ""
    new = git("ls-files", "--others", "--exclude-standard") or ""
    paths = [*differing.splitlines(), *new.splitlines()]
    found = {where for path in paths for where in _mirrors(path)}
    return frozenset(path for path in found if (ROOT / path).exists())


def _mirrors(path: str) -> tuple[str, ...]:
    """Where the tests of a file are; nothing where none are its own."""
    folder, _, name = path.rpartition("/")
    top, _, inner = folder.partition("/")
    if path.endswith(".ipynb") or (top == "tests" and name.startswith("test_")):
        return (path,)
    if top == "tests" and inner:  # what the tests of a folder share
        return (folder,)
    if top == "nbaccel" and inner:
        part = inner.split("/")[0]
        return tuple(f"tests/{one}" for one in (part, *_ALSO.get(part, ())))
    return (f"tests/test_{name}",) if top == "nbaccel" else ()


def _is_changed(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in changed())


# ---------------------------------------------------------------- hooks of conftest
def add_option(parser: pytest.Parser) -> None:
    """Add `--slow`, which says what becomes of the slow tests."""
    parser.addoption(
        "--slow",
        choices=["all", "none", "changed", "only"],
        default="all",
        help="slow tests: all of them; none; those of what has changed; or nothing but them",
    )
    parser.addoption(
        "--slow-until",
        type=float,
        default=float("inf"),
        help="when no further slow test begins, in seconds since the epoch; those left are skipped",
    )


def is_ignored(path: Path, config: pytest.Config) -> bool:
    """Whether nothing of a file runs, so that nothing of it need be imported.

    Each process of pytest-xdist imports all that it collects, and what tests train beside is large.
    """
    chosen = config.getoption("slow")
    if chosen == "all" or path.suffix != ".py" or not path.name.startswith("test_"):
        return False
    text = path.read_text(encoding="utf-8")
    if chosen == "only":
        return "mark.slow" not in text
    return _ALL_SLOW.search(text) is not None and not _is_taken(path, chosen)


def _is_taken(path: Path, chosen: str) -> bool:
    """Whether the slow tests of a file run."""
    if chosen != "changed":
        return chosen != "none"
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return _is_changed(name) or _is_changed(SLOW_NOTEBOOKS.get(name, name))


def _is_slow(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") is not None:
        return True
    return item.path.suffix == ".ipynb" and item.path.relative_to(ROOT).as_posix() in SLOW_NOTEBOOKS


def skip_if_late(item: pytest.Item) -> None:
    """Skip a slow test that would begin after `--slow-until`: CI ends a run that takes too long."""
    if time.time() > item.config.getoption("slow_until") and _is_slow(item):
        pytest.skip("slow, and no time is left for it: make test SLOW=all runs it")


def deselect(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out the slow tests that are not asked for, or the others."""
    chosen = config.getoption("slow")
    kept, left_out = [], []
    for item in items:
        runs = _is_taken(item.path, chosen) if _is_slow(item) else chosen != "only"
        (kept if runs else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


if __name__ == "__main__":
    print(" ".join(sorted(changed())))
