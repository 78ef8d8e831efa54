"""The package's structure: no circles of imports, short functions, names, messages with a value."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbaccel.config.capabilities import DEVICES, FP8_BACKENDS, PRECISIONS, STRATEGIES
from tests.house.import_graph import arrows, cycles, imports, places
from tests.house.source import SourceFile, package_files


def test_imports_make_no_circle():
    folders = arrows({name: name for name in places()})
    assert cycles(imports()) == cycles(folders) == []
    assert cycles([("a", "b"), ("b", "c"), ("c", "a"), ("a", "d")]) == [["a", "b", "c"]]


LONGEST_FUNCTION = 60


def functions(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Each function's number of lines, from its `def` on and without its docstring."""
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                docstring = node.body[0]
                lines -= docstring.end_lineno - docstring.lineno + 1
            yield lines, f"{file.at(node)} {node.name}: {lines} lines"


def test_no_function_is_long():
    found = sorted(one for file in package_files() for one in functions(file))
    long = [where for lines, where in found if lines > LONGEST_FUNCTION]
    assert not long, f"over {LONGEST_FUNCTION} lines:\n" + "\n".join(long)


# Messages that have no value to show: the text, and why it has none.
CONSTANT_MESSAGES: dict[str, str] = {
    "a truth value is not a number": "pydantic puts the setting and its value in front",
    "the other process closed its end": "an end of file is all that is known",
}

BROAD = {"Exception", "BaseException"}


def constant_messages(file: SourceFile) -> Iterator[tuple[str, str]]:
    """Each `raise X("text")` whose text is the same whatever happened."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, file.at(node)


def test_a_message_shows_the_value_it_is_about():
    found = {text: where for file in package_files() for text, where in constant_messages(file)}
    silent = [f"{where}: {text}" for text, where in found.items() if text not in CONSTANT_MESSAGES]
    assert not silent, (
        "say what was asked, why it cannot be, what to do (or list the text here with a reason):\n"
        + "\n".join(silent)
    )
    gone = CONSTANT_MESSAGES.keys() - found.keys()
    assert not gone, f"allowed here, but raised nowhere: {gone}"


def unexplained(file: SourceFile) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(k is None or (isinstance(k, ast.Name) and k.id in BROAD) for k in kinds):
            reason = file.lines[node.lineno - 1].partition("#")[2]
            reason = reason.rpartition("BLE001")[2].strip(" -:")
            if len(reason.split()) < 2:
                yield f"{file.at(node)}: {file.lines[node.lineno - 1].strip()}"


def test_a_broad_except_says_why_on_its_line():
    found = [where for file in package_files() for where in unexplained(file)]
    assert not found, "name the exceptions, or say why all are meant:\n" + "\n".join(found)


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


# A backend is told apart by its row or its contract. What counts is not how a variable is called,
# but that a name of a row stands where code decides: beside a comparison, in a `case`, among the
# keys of a dictionary that is looked up at once, or as the argument of a look-up.
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
