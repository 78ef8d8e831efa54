"""Draw the package from its imports: what lies on what, and what each folder is for.

    python -m docs.drawing      # into ARCHITECTURE.md; `python -m docs.tables` does it, too

The order is that of the layers in pyproject.toml, the sentences are the first lines of docstrings,
figures and imports are read from the source. A folder that has no layer, or that imports what is
beside or above it, is not drawn but named as a mistake.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Collection, Iterator

from tests.house import import_graph
from tests.house.source import ROOT, package_files, put_into

PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- drawing:begin (made by `python -m docs.drawing`) -->", "<!-- drawing:end -->"
_LINE = "{:>2}  {:<10}  {:>5}  {:>5}  {:<42}  {}"
_SENTENCE, _LIST = 42, 36  # columns; what is longer goes on in the next line


def layers() -> list[list[str]]:
    """What lies directly below the package, by layers, the top one first."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^layers = (\[.*?^\])", text, re.MULTILINE | re.DOTALL)
    # Such a list is one of Python, too, and Python 3.10 has no parser of TOML.
    return [re.split(r"\s*[:|]\s*", layer) for layer in ast.literal_eval(listed[1])]


def floors(order: list[list[str]], places: dict[str, str]) -> list[list[str]]:
    """What the drawing shows, by floors, the top one first.

    Args:
        order: What lies directly below the package, by layers.
        places: As what each of them is drawn (`import_graph.places`).
    """
    if wrong := places.keys() ^ {name for layer in order for name in layer}:
        raise ValueError(f"either no layer in pyproject.toml or not in the package: {wrong}")
    shown = [list(dict.fromkeys(places[name] for name in layer)) for layer in order]
    shown = [names for names, _ in itertools.groupby(shown)]
    names = [name for floor in shown for name in floor]
    if parted := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"drawn as one, but with another layer in between: {parted}")
    return shown


def check(shown: list[list[str]], arrows: import_graph.Arrows) -> None:
    """Refuse imports of what is beside or above."""
    floor = {name: number for number, names in enumerate(shown) for name in names}
    up = [example for (one, other), example in arrows.items() if floor[other] <= floor[one]]
    if up:
        raise ValueError(
            "\n".join(f"{one} imports {other}: that is not below" for one, other in up)
        )


def common(shown: list[list[str]], arrows: Collection[tuple[str, str]]) -> list[str]:
    """The lowest floors that whatever lies above imports: named once, not in each line."""
    found: list[str] = []
    for number in range(len(shown) - 1, 0, -1):
        above = [name for names in shown[:number] for name in names]
        if any((one, other) not in arrows for one in above for other in shown[number]):
            break
        found += shown[number]
    return found


def sentence(name: str) -> str:
    """What a folder is for: the first line of its docstring."""
    if name == import_graph.IMPORT_PATHS:
        return "Import paths of Accelerate's users."
    file = next(file for file in package_files() if file.dotted_name == f"nbaccel.{name}")
    return (ast.get_docstring(file.tree) or "").partition("\n")[0]


def size(name: str, places: dict[str, str]) -> tuple[int, str]:
    """The number of files, and that of lines in thousands."""
    inside = [
        len(file.lines)
        for file in package_files()
        if places.get(import_graph.top_name(file.dotted_name)) == name
    ]
    return len(inside), f"{sum(inside) / 1000:.1f}k"


def rows(cells: tuple[object, ...], told: str, imports: list[str]) -> Iterator[str]:
    """The lines of one folder; the second and third hold what did not fit."""
    left, right = textwrap.wrap(told, _SENTENCE) or [""], textwrap.wrap(" ".join(imports), _LIST)
    for one, other in itertools.zip_longest(left, right, fillvalue=""):
        yield _LINE.format(*cells, one, other).rstrip()
        cells = ("",) * len(cells)


def draw(order: list[list[str]]) -> str:
    """The package as text."""
    places = import_graph.places()
    arrows = import_graph.arrows(places)
    shown = floors(order, places)
    check(shown, arrows)
    names = [name for floor in shown for name in floor]
    everywhere = common(shown, arrows)
    text = [_LINE.format("", "", "files", "lines", "", "imports *")]
    for number, floor in zip(reversed(range(len(shown))), shown, strict=True):
        for name in floor:
            below = [one for one in names if (name, one) in arrows and one not in everywhere]
            cells = (number if name == floor[0] else "", name, *size(name, places))
            text += rows(cells, sentence(name), below)
    told = f"* and {', '.join(everywhere)}: each is imported by all that is above it"
    return "\n".join([*text, "", told])


def drawing() -> str:
    """nbaccel, as ARCHITECTURE.md shows it."""
    return f"```text\n{draw(layers())}\n```"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(put_into(page, drawing(), BEGIN, END), encoding="utf-8")
