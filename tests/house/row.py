"""The package's structure in numbers: lines and functions; and its imports, as grimp finds them.

    python -m tests.house.row FOLDER [FOLDER ...]   # other packages, by their folders, as JSON

The table of ARCHITECTURE.md is written by `python -m docs.tables`; what it shows of other packages
is stored in benchmarks/results/structure_peers.json. A code line is one that is neither blank, nor
a comment, nor part of a docstring. Imports count wherever they stand: inside functions, and for
type checkers, too.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import grimp
import networkx as nx

from tests.house import source
from tests.house.source import ROOT, SourceFile

PEERS = ROOT / "benchmarks" / "results" / "structure_peers.json"
BEGIN, END = "<!-- structure:begin (made by `python -m docs.tables`) -->", "<!-- structure:end -->"
IMPORT_PATHS = "paths"
_FOLDERS_OF_ACCELERATE = {"accelerator", "utils"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Arrows = dict[tuple[str, str], tuple[str, str]]


@functools.cache
def imports() -> tuple[tuple[str, str], ...]:
    """Each import of a module of nbaccel by another, both by their dotted names."""
    graph = grimp.build_graph("nbaccel", cache_dir=None)
    return tuple(
        (one, other)
        for one in sorted(graph.modules)
        for other in sorted(graph.find_modules_directly_imported_by(one))
    )


def top_name(name: str) -> str:
    """The name of the folder that a module is in; nothing for the package itself."""
    return name.split(".")[1] if "." in name else ""


def places() -> dict[str, str]:
    """As what the drawing of ARCHITECTURE.md shows each folder and module at the top level.

    A module is there because users of Accelerate import it, and so are two folders.
    """
    files = {file.dotted_name.split(".")[1]: file for file in source.package_files()[1:]}
    modules = {name for name, file in files.items() if file.path.parent == source.PACKAGE}
    paths = dict.fromkeys(modules | _FOLDERS_OF_ACCELERATE, IMPORT_PATHS) | {"__main__": "cli"}
    return {name: paths.get(name, name) for name in files}


def arrows(shown: Mapping[str, str]) -> Arrows:
    """The imports between what is shown as a folder (`places`), each with two modules."""
    found: Arrows = {}
    for one, other in imports():
        ends = shown.get(top_name(one), ""), shown.get(top_name(other), "")
        if all(ends) and ends[0] != ends[1]:
            found.setdefault(ends, (one, other))
    return found


def cycles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of names that lead to each other."""
    groups = nx.strongly_connected_components(nx.DiGraph(edges))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def measure(files: Iterable[SourceFile]) -> dict[str, str]:
    """The figures of one package, by what they are of."""
    files = list(files)
    code_lines = {file.path: _code_lines(file) for file in files}
    lengths = sorted(
        len(code_lines[file.path].intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
        for file in files
        for node in source.nodes(file.tree)
        if isinstance(node, _FUNCTIONS)
    )
    return {
        "files": str(len(files)),
        "raw lines": f"{sum(len(file.lines) for file in files):,}",
        "code lines": f"{sum(map(len, code_lines.values())):,}",
        "function: median / p90 / p99 / longest": " / ".join(
            str(lengths[min(int(q * len(lengths)), len(lengths) - 1)]) for q in (0.5, 0.9, 0.99, 1)
        ),
    }


def _code_lines(file: SourceFile) -> set[int]:
    lines = {n for n, line in enumerate(file.lines, 1) if line.strip()[:1] not in ("", "#")}
    return lines.difference(_docstring_lines(file.tree))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in source.nodes(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            value = one.value if isinstance(one, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from range(one.lineno, (one.end_lineno or one.lineno) + 1)


def table() -> str:
    """The figures of the package, beside those of others that were stored."""
    own, peers = measure(source.package_files()), json.loads(PEERS.read_text(encoding="utf-8"))
    lines = [f"|  | nbaccel | {' | '.join(peers)} |", "|---" + "|--:" * (1 + len(peers)) + "|"]
    for name, value in own.items():
        lines.append(f"| {' | '.join([name, value, *(peer[name] for peer in peers.values())])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="+", type=Path)
    folders = parser.parse_args().folder
    print(json.dumps({one.name: measure(source.read(one.resolve())) for one in folders}, indent=1))
