"""The package's source as the house tests read it: as text and as syntax trees, never imported."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
    def dotted_name(self) -> str:
        """As it is imported."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def at(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        """`file:line` of a node, for a message one can click."""
        return f"{self.name}:{node.lineno}"


@functools.cache
def package_files() -> tuple[SourceFile, ...]:
    """Every Python file of the package."""
    return read(PACKAGE)


def read(folder: Path) -> tuple[SourceFile, ...]:
    """Every Python file of a folder."""
    with no_garbage_collection():
        return tuple(
            SourceFile(path, text := path.read_text(encoding="utf-8"), ast.parse(text))
            for path in sorted(folder.rglob("*.py"))
        )


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """What `ast.walk` finds, but for contexts such as `Load`, which are a third of it.

    It is kept: several figures are taken from each tree, and most of the time goes into walking.
    """
    found: list[ast.AST] = [tree]
    with no_garbage_collection():
        for node in found:  # it grows
            for name in node._fields:
                value = getattr(node, name, None)
                if isinstance(value, list):
                    found.extend(one for one in value if isinstance(one, ast.AST))
                elif isinstance(value, ast.AST) and name != "ctx":
                    found.append(value)
    return tuple(found)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For what creates many objects that stay, each of which the collector would look at often."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def tracked_files() -> list[Path] | None:
    """The files that git tracks, or None outside a checkout (an unpacked sdist)."""
    # safe.directory: the checkout may belong to another user than the one who tests
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def put_into(text: str, made: str, begin: str, end: str) -> str:
    """A page of the documentation with something that is made between its two markers."""
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n\n{made}\n\n{end}{tail}"
