"""The package's structure in numbers: lines, functions, cycles.

    python -m tests.house.row FOLDER [FOLDER ...]   # other packages, by their folders, as JSON

The table of ARCHITECTURE.md is written by `python -m docs.tables`; what it shows of other packages
is stored in benchmarks/results/structure_peers.json. A code line is one that is neither blank, nor
a comment, nor part of a docstring. A folder is one directly below the package, or a module that is;
as drawn, all import paths of Accelerate's users are one (`places`). Imports count on three levels:
those that run with the module, those inside functions as well, and those for type checkers as well.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from tests.house import source
from tests.house.source import PACKAGE, ROOT, SourceFile

PEERS = ROOT / "benchmarks" / "results" / "structure_peers.json"
BEGIN, END = "<!-- structure:begin (made by `python -m docs.tables`) -->", "<!-- structure:end -->"
_LEVELS = ("module", "lazy", "typing")
IMPORT_PATHS = "paths"
_FOLDERS_OF_ACCELERATE = {"accelerator", "utils"}
Arrows = dict[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True)
class Module:
    """One file, read."""

    name: str
    is_package: bool
    tree: ast.Module
    raw_lines: int
    code_lines: frozenset[int]
    imports: tuple[tuple[str, str], ...]
    """Modules of the package, each with the level on which it is imported."""


@functools.cache
def nbaccel() -> list[Module]:
    """Every module of nbaccel."""
    return _modules(PACKAGE, source.package_files())


def read(folder: Path) -> list[Module]:
    """Every module of the package in a folder."""
    return _modules(folder, source.read(folder))


def _modules(folder: Path, files: Iterable[SourceFile]) -> list[Module]:
    named = {_name_of(file.path, folder): file for file in files}
    modules = []
    for name, file in named.items():
        is_package = file.path.stem == "__init__"
        imports = tuple(_imports(name, file.tree, named.keys(), is_package=is_package))
        code = {n for n, line in enumerate(file.lines, 1) if line.strip()[:1] not in ("", "#")}
        code_lines = frozenset(code - _docstring_lines(file.tree))
        modules.append(Module(name, is_package, file.tree, len(file.lines), code_lines, imports))
    return modules


def _name_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in source.nodes(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for one in body:
            value = one.value if isinstance(one, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return lines


# ---------------------------------------------------------------- functions
def function_lengths(modules: list[Module]) -> list[int]:
    """Code lines of every function, without those of functions inside it."""
    lengths = []
    for module in modules:
        for node in _functions(module.tree):
            inside = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            lengths.append(len(inside & module.code_lines))
    return lengths


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in source.nodes(tree) if isinstance(node, kinds))


# ---------------------------------------------------------------- imports
def cycles(modules: list[Module], level: str) -> list[list[str]]:
    """Groups of modules that import each other, on a level and those before it."""
    return _groups(_arrows(modules, level))


def folder_cycles(modules: list[Module], level: str) -> list[list[str]]:
    """Groups of folders that import each other, on a level and those before it."""
    return _groups([*arrows(modules, _top_names(modules), level)])


def places(modules: list[Module]) -> dict[str, str]:
    """As what the drawing of ARCHITECTURE.md shows each folder and module at the top level.

    A module is there because users of Accelerate import it, and so are two folders.
    """
    files = {m.name.split(".")[1] for m in modules if m.name.count(".") == 1 and not m.is_package}
    paths = dict.fromkeys(files | _FOLDERS_OF_ACCELERATE, IMPORT_PATHS) | {"__main__": "cli"}
    return {name: paths.get(name, name) for name in _top_names(modules)}


def arrows(modules: list[Module], shown: Mapping[str, str], level: str = "typing") -> Arrows:
    """The imports between folders, each with two modules as its example."""
    found: Arrows = {}
    for one, other in _arrows(modules, level):
        ends = shown.get(top_name(one), ""), shown.get(top_name(other), "")
        if all(ends) and ends[0] != ends[1]:
            found.setdefault(ends, (one, other))
    return found


def _top_names(modules: list[Module]) -> dict[str, str]:
    return {name: name for module in modules if (name := top_name(module.name))}


def _arrows(modules: list[Module], level: str) -> Iterator[tuple[str, str]]:
    for module in modules:
        for target, found in module.imports:
            if _LEVELS.index(found) <= _LEVELS.index(level):
                yield module.name, target


def top_name(name: str) -> str:
    """The name of the folder that a module is in; nothing for the package itself."""
    return name.split(".")[1] if "." in name else ""


def _groups(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    groups = nx.strongly_connected_components(nx.DiGraph(arrows))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _imports(
    name: str, tree: ast.Module, names: Collection[str], *, is_package: bool
) -> Iterator[tuple[str, str]]:
    for node, level in _statements(tree, "module"):
        if isinstance(node, ast.Import):
            yield from ((alias.name, level) for alias in node.names if alias.name in names)
        else:
            origin = _origin(name, node, is_package=is_package)
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                target = inner if inner in names else origin
                if target in names:
                    yield target, level


def _origin(name: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    """The absolute name of what a statement imports from."""
    if not node.level:
        return node.module or ""
    above = name.split(".")[: None if is_package else -1]
    base = above[: len(above) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _statements(node: ast.AST, level: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in _inside(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, level
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _statements(child, "typing" if level == "typing" else "lazy")
        elif isinstance(child, ast.If) and _is_for_types(child.test):
            yield from _statements(ast.Module(child.body, []), "typing")
            yield from _statements(ast.Module(child.orelse, []), level)
        else:
            yield from _statements(child, level)


def _is_for_types(test: ast.expr) -> bool:
    parts = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(test))
    return "TYPE_CHECKING" in parts


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a statement: expressions, most of a tree, import nothing."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, name, ())


# ---------------------------------------------------------------- the table
def measure(modules: list[Module]) -> dict[str, str]:
    """The figures of one package, by what they are of."""
    lengths = sorted(function_lengths(modules))
    return {
        "files": str(len(modules)),
        "raw lines": f"{sum(module.raw_lines for module in modules):,}",
        "code lines": f"{sum(len(module.code_lines) for module in modules):,}",
        "function: median / p90 / p99 / longest": " / ".join(
            str(lengths[min(int(q * len(lengths)), len(lengths) - 1)]) for q in (0.5, 0.9, 0.99, 1)
        ),
        "cycles of modules: imports / lazy ones too / for types too": " / ".join(
            str(len(cycles(modules, level))) for level in _LEVELS
        ),
        "cycles of folders: imports / lazy ones too / for types too": " / ".join(
            str(len(folder_cycles(modules, level))) for level in _LEVELS
        ),
    }


def table() -> str:
    """The figures of the package, beside those of others that were stored."""
    own, peers = measure(nbaccel()), json.loads(PEERS.read_text(encoding="utf-8"))
    lines = [f"|  | nbaccel | {' | '.join(peers)} |", "|---" + "|--:" * (1 + len(peers)) + "|"]
    for name, value in own.items():
        cells = [name, value, *(peer[name] for peer in peers.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the figures of other packages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="+", type=Path)
    folders = parser.parse_args().folder
    print(json.dumps({one.name: measure(read(one.resolve())) for one in folders}, indent=1))


if __name__ == "__main__":
    main()
