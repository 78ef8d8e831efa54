"""The package's imports, wherever they stand: in functions, and for type checkers, too."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import grimp
import networkx as nx

from tests.house import source

IMPORT_PATHS = "paths"
_FOLDERS_OF_ACCELERATE = {"accelerator", "utils"}
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
