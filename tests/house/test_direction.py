"""No backend is asked for by its name, and every file has a name of its own.

A backend is told apart by its row or its contract. What counts is therefore not how a variable is
called, but that a name of a row stands where code decides: beside a comparison, in a `case`, among
the keys of a dictionary that is looked up at once, or as the argument of a look-up.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from nbaccel.config.capabilities import DEVICES, FP8_BACKENDS, PRECISIONS, STRATEGIES
from tests.house.source import package_files

NAMES = {row.name for rows in (DEVICES, STRATEGIES, PRECISIONS, FP8_BACKENDS) for row in rows}
NAMES |= {name for row in DEVICES for name in (row.group_backend, row.shared_group_backend)}
# "no" is float32, and the word for nothing: a format, not a backend.
NAMES -= {"no"}
LOOKUPS = {
    *("check_strategy", "device", "device_row", "known_device", "precision", "precision_row"),
    *("strategy", "strategy_row", "startswith", "endswith", "partition"),
}
# The folders of the backends themselves, and the tables.
THEIR_OWN = (
    *("nbaccel/devices/", "nbaccel/strategies/", "nbaccel/precision/", "nbaccel/deepspeed/"),
    "nbaccel/config/capabilities.py",
)
# Words that happen to be names of backends.
NO_BACKENDS = {
    (
        "nbaccel/calls/process_groups.py",
        "gloo",
    ): "the kind of torch's group, whose abort does not work",
    ("nbaccel/train/checkpoint/loading.py", "cpu"): "Accelerate's word in map_location",
}


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and names of each place in a module that decides by names of backends."""
    for node in ast.walk(tree):
        words = {word for part in decides_by(node) for word in words_in(part)}
        if words & NAMES and not asks_for_host_memory(node, words):
            yield node.lineno, ", ".join(sorted(words & NAMES))


def decides_by(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.MatchValue(value=value):
            return [value]
        case ast.Subscript(value=ast.Dict() as table):
            return [table]
        # A table by name, as `{row.name: row for row in DEVICES}` is.
        case ast.Subscript(value=ast.DictComp(), slice=key):
            return [key]
        case ast.Call(func=ast.Attribute(value=ast.Dict() as table, attr="get")):
            return [table]
        case ast.Call(func=ast.Attribute(value=ast.DictComp(), attr="get"), args=[key, *_]):
            return [key]
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=arguments):
            is_lookup = name in LOOKUPS and ast.unparse(node.func) != "torch.device"
            return arguments if is_lookup else []
    return []


def words_in(node: ast.expr | None) -> Iterator[str]:
    match node:
        case ast.Constant(value=str() as word):
            yield word
        case (
            ast.Tuple(elts=parts)
            | ast.List(elts=parts)
            | ast.Set(elts=parts)
            | ast.Dict(keys=parts)
        ):
            for part in parts:
                yield from words_in(part)


def asks_for_host_memory(node: ast.AST, words: set[str]) -> bool:
    """Whether it is `tensor.device.type == "cpu"`: where torch keeps it, not what computes."""
    sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
    return words <= {"cpu", "meta"} and any(ast.unparse(side).endswith(".type") for side in sides)


def test_no_backend_is_told_by_its_name_outside_its_folder():
    found = {
        (file.name, names): f"{file.name}:{number}: {names}: {file.lines[number - 1].strip()}"
        for file in package_files()
        if not file.name.startswith(THEIR_OWN)
        for number, names in findings(file.tree)
    }
    wrong = [text for place, text in found.items() if place not in NO_BACKENDS]
    assert not wrong, "ask the capabilities row or the contract instead:\n" + "\n".join(wrong)
    assert NO_BACKENDS.keys() <= found.keys(), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    ("code", "is_seen"),
    [
        ("if anything == 'ddp': pass", True),
        ("if plan.device != 'cuda': pass", True),
        ("x = 1 if 'nccl' == f(y) else 2", True),
        ("if kind in ('cpu', 'xpu'): pass", True),
        ("match kind:\n    case 'fsdp': pass", True),
        ("make = {'ddp': 1, 'fsdp': 2}[name]", True),
        ("make = {'ddp': 1}.get(name)", True),
        ("registry.strategy('deepspeed')", True),
        ("strategy_row('deepspeed').library", True),
        ("device.startswith('cuda')", True),
        ("row = {row.name: row for row in DEVICES}['cuda']", True),
        ("self.strategy = strategy", False),
        ("message = 'Give device=\"cpu\"'", False),
        ("if tensor.device.type == 'cpu': pass", False),
        ("if precision == 'no': pass", False),
        ("torch.device('cpu')", False),
        ("registry.strategy(plan.strategy)", False),
    ],
)
def test_a_backend_by_name_is_seen_whatever_the_variable_is_called(code, is_seen):
    assert bool([*findings(ast.parse(code))]) == is_seen


# Whom `from accelerate.utils import ...` served must only change the import.
PEERS_NAMES = "nbaccel/utils/"
NOWHERE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def test_every_file_has_a_name_that_says_what_is_in_it():
    found = [f.name for f in package_files() if NOWHERE_NAMES & set(f.path.with_suffix("").parts)]
    found = [name for name in found if not name.startswith(PEERS_NAMES)]
    assert not found, f"a file is named for what it holds, not 'utils': {found}"
