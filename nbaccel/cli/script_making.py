"""A script out of a notebook: its tagged cells, or the function that it launches.

    notebook_launcher(train, (model,))    ─► what `train` needs     stays at the top level
                                             what `model` needs     into main(), before the call

Each process of a script builds what the notebook built once and shared. Definitions stay at the top
level, where pickle and loader workers find them by name. Lines of magics and shell commands, and
cells in another language, become comments.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbaccel.base.errors import ConfigError
from nbaccel.config import Fp8Config, RunConfig
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.text_forms import changed_settings
from nbaccel.transfer.free_names import names_of

EXPORT_TAG = "export"
SKIP_TAG = "nbaccel-skip"
_PYTHON_CELL_MAGICS = ("accelerate", "time", "timeit", "capture", "prun")
_BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MAGIC_LINE = re.compile(r"^(?P<indent>\s*)(?P<magic>[%!?].*|[\w.]+\?{1,2}\s*|\w+\s*=\s*[%!].*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class NotebookCell:
    """A cell with code."""

    number: int  # its place among the cells with code, from 1
    code: str  # as plain Python
    tags: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A statement at the top level of a cell."""

    cell_number: int
    node: ast.stmt
    text: str  # its lines, with the comments above it
    binds: frozenset[str]  # the names that it binds or changes
    reads: frozenset[str]  # the names that it reads, inside of functions, too

    @property
    def is_definition(self) -> bool:
        """Whether it only says what something is, and computes nothing."""
        return isinstance(self.node, (*_BLOCKS, ast.Import, ast.ImportFrom))


def read_notebook(notebook_path: Path) -> list[NotebookCell]:
    """Read the code of a notebook file; cells that are to be left out are."""
    try:
        notebook = json.loads(notebook_path.read_text(encoding="utf-8"))
        code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{str(notebook_path)!r} cannot be read as a notebook: {error!r}. There is nothing to "
            "export. Give the path of a saved .ipynb file (format 4)."
        ) from error
    cells = []
    for number, cell in enumerate(code_cells, 1):
        tags = frozenset(cell.get("metadata", {}).get("tags", ()))
        code = _without_magics("".join(cell["source"]))
        cells.append(NotebookCell(number=number, code=code, tags=tags))
    kept_cells = [cell for cell in cells if SKIP_TAG not in cell.tags]
    refuse_mistakes(filter(None, map(_syntax_mistake, kept_cells)))
    return kept_cells


def _without_magics(source: str) -> str:
    cell_magic = re.match(r"\s*%%(\w+)(.*)", source)
    if cell_magic and cell_magic[1] not in _PYTHON_CELL_MAGICS:
        return "\n".join(f"# {line}" for line in source.splitlines())
    lines = source.splitlines()
    # Only of a cell that is no Python as it stands: a text may have a line that begins with "!".
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        goes_on = False
        for position, line in enumerate(lines):
            line_magic = _MAGIC_LINE.match(line)
            if line_magic or goes_on:
                # An indented magic may be all that its block has.
                indent = line_magic["indent"] if line_magic else ""
                block = f"{indent}pass  # " if indent else "# "
                lines[position] = f"{block}{line.strip()}"
                goes_on = line.rstrip().endswith("\\")
    return "\n".join(lines)


def _syntax_mistake(cell: NotebookCell) -> str:
    try:
        ast.parse(cell.code)
    except (SyntaxError, ValueError) as error:
        line_number = getattr(error, "lineno", None) or 1
        lines = cell.code.splitlines()
        text = lines[line_number - 1].strip() if line_number <= len(lines) else ""
        return (
            f"Code cell {cell.number}, line {line_number} is no Python: {error.args[0]}: got "
            f"{text[:60]!r}. The script would not run. Correct it, or give the cell the tag "
            f"{SKIP_TAG}."
        )
    return ""


def statements_of(cell: NotebookCell) -> list[Statement]:
    """The statements of a cell, in order."""
    lines = cell.code.splitlines()
    statements = []
    previous_end = 0
    for node in ast.parse(cell.code).body:
        first_line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        # Comments above a statement are about it. Two statements of one line stay together.
        text = "\n".join(lines[min(previous_end, first_line - 1) : node.end_lineno]).strip("\n")
        previous_end = node.end_lineno or previous_end
        names = names_of(ast.unparse(node))
        statements.append(
            Statement(
                cell_number=cell.number,
                node=node,
                text=text,
                binds=frozenset(_bound_names(node)),
                reads=names.needed | names.possible,
            )
        )
    return statements


def _bound_names(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds, or whose value it changes, outside of functions."""
    if isinstance(node, _BLOCKS):
        yield node.name
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield (alias.asname or alias.name).partition(".")[0]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    # `config.lr = 3` and `model.load_state_dict(...)` change what a name stands for.
    if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
        yield from _root_name(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from _root_name(node.value.func)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.Lambda, ast.expr_context)):
            yield from _bound_names(child)


def _root_name(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


_LAUNCHERS = ("notebook_launcher", "debug_launcher")
_PARAMETERS = ("function", "args", "num_processes", "mixed_precision", "use_port")
# Calls that decide random numbers: what is built after them depends on them.
_SEEDS = re.compile(r"(^|\.)(manual_seed|set_seed|seed|seed_everything|seed_all)$")
_CONFIG_CLASSES: Mapping[str, type[RunConfig | Fp8Config]] = {
    "RunConfig": RunConfig,
    "Fp8Config": Fp8Config,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchCall:
    """A call of a launcher in the notebook."""

    function: str  # what it launches, as written
    args: tuple[str, ...]  # its arguments, as written
    # Its settings, as far as they can be read without running the notebook.
    settings: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()  # settings that cannot
    statement: Statement  # where it stands


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeScript:
    """A script."""

    text: str
    cell_numbers: tuple[int, ...]
    launch: LaunchCall | None = None  # the call that it stands for; None where cells were tagged


def make_script(
    cells: Sequence[NotebookCell], notebook_name: str, function_name: str = ""
) -> MadeScript:
    """Make a script of a notebook."""
    statements = [statement for cell in cells for statement in statements_of(cell)]
    launches = find_launches(statements)
    tagged_cells = [cell for cell in cells if EXPORT_TAG in cell.tags]
    if tagged_cells and not function_name:
        return _of_tagged_cells(tagged_cells, launches, notebook_name)
    launch = _chosen_launch(launches, cells, function_name)
    return _of_launch(launch, statements, notebook_name)


def find_launches(statements: Iterable[Statement]) -> list[LaunchCall]:
    """Every call of a launcher at the top level."""
    configs: dict[str, Any] = {}
    launches = []
    for statement in statements:
        if isinstance(statement.node, ast.Assign) and isinstance(statement.node.value, ast.Call):
            for name in statement.binds:
                configs[name] = _literal(statement.node.value, configs)
        call = _launch_call(statement.node)
        if call is not None:
            launches.append(_read_launch(call, statement, configs))
    return launches


def _launch_call(node: ast.stmt) -> ast.Call | None:
    if isinstance(node, _BLOCKS):
        return None
    for inner_node in ast.walk(node):
        if isinstance(inner_node, ast.Call):
            name = ast.unparse(inner_node.func).rpartition(".")[2]
            if name in _LAUNCHERS and (inner_node.args or inner_node.keywords):
                return inner_node
    return None


def _read_launch(call: ast.Call, statement: Statement, configs: Mapping[str, Any]) -> LaunchCall:
    given = dict(zip(_PARAMETERS, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    function_node = given.pop("function", None)
    args_node = given.pop("args", None)
    settings: dict[str, Any] = {}
    unread_names = []
    for name, node in given.items():
        value = _literal(node, configs)
        if name == "config" and isinstance(value, RunConfig):
            settings |= changed_settings(value)
        elif name in RunConfig.model_fields and value is not _UNKNOWN:
            settings[name] = value
        elif name != "pool":
            unread_names.append(name)
    if ast.unparse(call.func).endswith("debug_launcher"):
        settings = {"num_processes": 2, "device": "cpu", **settings}
    if isinstance(args_node, (ast.Tuple, ast.List)):
        arg_texts = tuple(ast.unparse(node) for node in args_node.elts)
    else:
        arg_texts = () if args_node is None else (f"*{ast.unparse(args_node)}",)
    return LaunchCall(
        function="" if function_node is None else ast.unparse(function_node),
        args=arg_texts,
        settings=settings,
        unread=tuple(unread_names),
        statement=statement,
    )


_UNKNOWN: Any = object()  # Stands for a value that only running the notebook would tell


def _literal(node: ast.expr, found_configs: Mapping[str, Any]) -> Any:
    """The value of an expression that needs no running: literals, and settings made of them."""
    if isinstance(node, ast.Name):
        return found_configs.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Call):
        config_class = _CONFIG_CLASSES.get(ast.unparse(node.func).rpartition(".")[2])
        values = {one.arg: _literal(one.value, found_configs) for one in node.keywords if one.arg}
        if config_class is None or node.args or _UNKNOWN in values.values():
            return _UNKNOWN
        return config_class(**values)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


def _chosen_launch(
    launches: Sequence[LaunchCall], cells: Sequence[NotebookCell], function_name: str
) -> LaunchCall:
    fitting = [call for call in launches if not function_name or call.function == function_name]
    functions = list(dict.fromkeys(call.function for call in fitting))
    if len(functions) == 1:
        # The last one: what people keep after trying.
        return fitting[-1]
    if len(functions) > 1:
        raise ConfigError(
            f"The notebook launches {', '.join(functions)}: a script runs one of them. Say which: "
            f"--function {functions[-1]}; or give cells the tag {EXPORT_TAG}."
        )
    launched_text = ", ".join(dict.fromkeys(call.function for call in launches)) or "none"
    text = f" with the function {function_name!r}" if function_name else ""
    raise ConfigError(
        f"Nothing says what to export. Looked in {len(cells)} code cells for the tag "
        f"{EXPORT_TAG} and for a call of {' or '.join(_LAUNCHERS)}(function, ...) outside of "
        f"functions{text}; launched functions found: {launched_text}. Tag the cells that "
        "belong into the script, or launch the function in a cell."
    )


def _of_tagged_cells(
    cells: Sequence[NotebookCell], launches: Sequence[LaunchCall], notebook_name: str
) -> MadeScript:
    launched = None
    parts = [_heading(notebook_name)]
    for cell in cells:
        text = cell.code
        for launch in launches:
            if launch.statement.cell_number == cell.number:
                # Its place, in a script, is where nothing imports it.
                call = f"{launch.function}({', '.join(launch.args)})"
                guarded = f'if __name__ == "__main__":\n    {call}'
                text = text.replace(launch.statement.text, guarded)
                launched = launch
        parts.append(f"# Cell {cell.number}\n{text}")
    return MadeScript(
        text=_joined(parts), cell_numbers=tuple(cell.number for cell in cells), launch=launched
    )


def _of_launch(launch: LaunchCall, statements: Sequence[Statement], title: str) -> MadeScript:
    before = list(statements[: statements.index(launch.statement)])
    function_needs = _needed(before, names_of(launch.function).needed)
    launched_names = names_of(", ".join((launch.function, *launch.args))).needed
    all_needs = _needed(before, launched_names, with_seeds=True)
    definitions = [one for one in all_needs if one.is_definition or _has_long_text(one.node)]
    # What definitions read stays beside them: names of main() would be hidden from functions.
    beside = _needed(before, {name for statement in definitions for name in statement.reads})
    at_top = (*function_needs, *definitions, *beside)
    top_level = [statement for statement in before if statement in at_top]
    in_main = [statement for statement in all_needs if statement not in top_level]
    used_cells = {statement.cell_number for statement in (*top_level, *in_main)}
    body = [statement.text for statement in in_main]
    body.append(f"{launch.function}({', '.join(launch.args)})")
    return MadeScript(
        text=_joined(
            [
                _heading(title),
                _top_level_text(top_level),
                "def main():\n" + textwrap.indent("\n".join(body), "    "),
                'if __name__ == "__main__":\n    main()',
            ]
        ),
        cell_numbers=tuple(sorted(used_cells)),
        launch=launch,
    )


def _needed(
    statements: Sequence[Statement], names: Iterable[str], *, with_seeds: bool = False
) -> list[Statement]:
    """The statements that these names depend on, in order; with seeds before them, if wanted."""
    wanted_names = set(names)
    needed_statements: list[Statement] = []
    for statement in reversed(statements):
        if _launch_call(statement.node) is not None:
            continue
        is_needed = bool(statement.binds & wanted_names)
        call = statement.node.value if isinstance(statement.node, ast.Expr) else None
        if isinstance(call, ast.Call) and _SEEDS.search(ast.unparse(call.func)):
            is_needed = with_seeds and bool(needed_statements)
        if is_needed:
            needed_statements.insert(0, statement)
            wanted_names |= statement.reads
    # Functions may use what is bound after them: once more, until nothing is added.
    if wanted_names <= set(names):
        return needed_statements
    return _needed(statements, wanted_names, with_seeds=with_seeds)


def _has_long_text(node: ast.stmt) -> bool:
    """Whether a text of several lines is in it, which indenting would change."""
    return any(
        isinstance(inner_node, (ast.Constant, ast.JoinedStr))
        and inner_node.lineno != inner_node.end_lineno
        for inner_node in ast.walk(node)
    )


def _top_level_text(statements: Sequence[Statement]) -> str:
    """Statements with the blank lines that people put between them."""
    text = ""
    was_block = False
    for statement in statements:
        statement_text = _without_launchers(statement)
        is_block = isinstance(statement.node, _BLOCKS)
        if not statement_text:
            continue
        if text:
            text += "\n\n\n" if is_block or was_block else "\n"
        text += statement_text
        was_block = is_block
    return text


def _without_launchers(statement: Statement) -> str:
    node = statement.node
    if not isinstance(node, ast.ImportFrom):
        return statement.text
    names = [alias for alias in node.names if alias.name not in _LAUNCHERS]
    if len(names) == len(node.names):
        return statement.text
    if not names:
        return ""
    return ast.unparse(ast.ImportFrom(module=node.module, names=names, level=node.level))


def _heading(notebook_name: str) -> str:
    return (
        f'"""Exported from {notebook_name} by nbaccel export.\n\n'
        "Each process runs all of it. There is no notebook for the trained weights to come back "
        'to:\nsave them in the training function.\n"""'
    )


def _joined(parts: Iterable[str]) -> str:
    return "\n\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"
