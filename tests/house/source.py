"""The package's source as the house tests read it: as text and as syntax trees, never imported."""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nbaccel"


@dataclass(frozen=True)
class SourceFile:
    """One file of the package."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The path as a reader would say it, e.g. `nbaccel/workers/messaging.py`."""
        return str(self.path.relative_to(ROOT))

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def at(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        """`file:line` of a node, for a message one can click."""
        return f"{self.name}:{node.lineno}"


@functools.cache
def package_files() -> tuple[SourceFile, ...]:
    """Every Python file of the package."""
    return tuple(
        SourceFile(path, text := path.read_text(encoding="utf-8"), ast.parse(text))
        for path in sorted(PACKAGE.rglob("*.py"))
    )


def tracked_files() -> list[Path] | None:
    """The files that git tracks, or None outside a checkout (an unpacked sdist)."""
    # safe.directory: the checkout may belong to another user than the one who tests
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
