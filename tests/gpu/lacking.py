"""Say in one line which packages `make gpu` lacks, instead of failing at the first import.

python -m tests.gpu.lacking        # status 1 if there are any
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.isolation import ROOT

EXTRAS = ("deepspeed", "demo", "stateful")
TOOLS = ("pytest>=8.3", "pytest-timeout", "pytest-xdist", "nbval", "hypothesis")
# torch's own parts: whoever has torch has those that his build of it needs.
_OF_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")


def wanted() -> list[Requirement]:
    """What the tests and figures on a GPU import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *TOOLS]
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def lacking(requirements: Iterable[Requirement]) -> Iterator[str]:
    """Those that are not installed or too old, and those that these need, and so on."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(requirements)
    while waiting:
        one = waiting.pop()
        key = (canonicalize_name(one.name), frozenset(one.extras))
        if key in seen or key[0].startswith(_OF_TORCH):
            continue
        seen.add(key)
        try:
            there = metadata.distribution(one.name)
        except metadata.PackageNotFoundError:
            yield one.name
            continue
        if not one.specifier.contains(there.version, prereleases=True):
            yield f"{one.name}{one.specifier} (there is {there.version})"
        for line in there.requires or ():
            inner = Requirement(line)
            extras = one.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(inner)


def main() -> int:
    found = sorted(set(lacking(wanted())))
    if found:
        print(
            f"make gpu: {sys.executable} lacks {', '.join(found)}. If a test cannot import "
            "one of them, install it, or put its wheel into a folder: make gpu WHEELS=folder",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
