"""The pages of the documentation as tests read them: their code, and what it is said to print."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from pathlib import Path

from tests.isolation import ROOT
from tests.programs import run_program

PAGES = ROOT / "docs" / "pages"


def python_of(page: Path) -> list[str]:
    """The blocks of Python in a page."""
    return _blocks(page, "python")


def printed_by(page: Path) -> list[str]:
    """What the page says that they print; not all that they print."""
    return _blocks(page, 'text title="prints"')


def run_page(page: Path, folder: Path) -> str:
    """Run the Python of a page from top to bottom, as one script in a process of its own.

    Returns:
        All that it printed.
    """
    script = folder / f"{page.stem}_page.py"
    script.write_text("\n".join(python_of(page)), encoding="utf-8")
    environ = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
    }
    words = [sys.executable, "-W", "ignore", str(script)]
    done = run_program(words, check=False, cwd=folder, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _blocks(page: Path, kind: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    pattern = rf"^```{re.escape(kind)}\n(.*?)^```"
    return re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)
