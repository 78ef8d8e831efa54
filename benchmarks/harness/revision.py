"""Another revision of this repository, to be measured beside this checkout."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """The revision in a folder of its own, for as long as it is needed."""
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run([*git, "add", "--detach", str(other), revision], check=True)
        try:
            yield other
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
