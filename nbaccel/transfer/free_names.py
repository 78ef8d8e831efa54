"""Which names a cell reads that it has not bound itself: they may have to come from the notebook.

Python's compiler says what belongs to which scope. What is left is the order: the compiled cell is
followed along all its paths, and a name counts as bound where every path has bound it.

[Note: with] What a `with` block binds counts as bound behind it, although a manager that swallows
exceptions could skip it: `with torch.no_grad(): out = model(x)` is what people write.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

_NO_NAMES: frozenset[str] = frozenset()
_IPYTHON_NAMES = frozenset(("In", "Out", "exit", "quit", "get_ipython"))
_IPYTHON_NAME_PATTERN = re.compile(r"__\w+__|_{1,3}|_\d+|_i{1,3}|_i\d+|_[oid]h")
_NAME_IN_TEXT = re.compile(r"[^\W\d]\w*")
# What IPython's transformer calls for magics and commands; their text may name variables.
_RUN_TEXT = frozenset(("run_line_magic", "run_cell_magic", "getoutput", "system"))

_READ_GLOBAL = frozenset(("LOAD_GLOBAL", "DELETE_GLOBAL"))
_READ_NAME = frozenset(("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME"))
_BIND = frozenset(("STORE_NAME", "STORE_GLOBAL"))
_UNBIND = frozenset(("DELETE_NAME", "DELETE_GLOBAL"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_NEVER_GO_ON = frozenset(
    (
        *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"),
        *("JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
    )
)
# Python 3.10 has an instruction where a block begins; later versions have a table.
_TRY_BLOCK = "SETUP_FINALLY"
_WITH_BLOCKS = frozenset(("SETUP_WITH", "SETUP_ASYNC_WITH"))
_WITH_HANDLER_INSTRUCTIONS = 3
"""In so many of its first instructions the handler of a `with` block calls the manager."""
_OWN_SCOPES = re.compile(r"<(listcomp|setcomp|dictcomp|genexpr)>|<generic parameters of .*>")
"""Names of code that the compiler puts into a scope of its own and that runs at once."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a cell reads from outside itself."""

    needed: frozenset[str] = _NO_NAMES
    """Read by top-level code before the cell itself binds them for sure."""
    possible: frozenset[str] = _NO_NAMES
    """Read only inside functions, or in the text given to magics."""


@functools.lru_cache(maxsize=4096)
def is_users(read_name: str) -> bool:
    """Whether a name belongs to the user, not to Python or IPython (`_`, `In`, `__name__`)."""
    return read_name not in _IPYTHON_NAMES and not _IPYTHON_NAME_PATTERN.fullmatch(read_name)


@functools.lru_cache(maxsize=512)
def names_of(cell_text: str) -> Names:
    """The names that a cell's code reads. Code that does not compile reads none."""
    try:
        # What there is to warn of, the worker that runs the cell says.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            python_text = _to_python(cell_text)
            code_object = compile(
                python_text, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
    # ValueError: the text contains a null character.
    except (SyntaxError, ValueError):
        return Names()
    reads = _Reads()
    if "get_ipython" in python_text:
        reads.possible.update(_names_in_magics(ast.parse(python_text)))
    reads.follow(code_object, _NO_NAMES)
    names = frozenset(filter(is_users, reads.needed))
    return Names(names, frozenset(filter(is_users, reads.possible)) - names)


@functools.lru_cache(maxsize=4096)
def globals_read(code_object: CodeType) -> frozenset[str]:
    """The global names that code may read, that of the functions inside it included."""
    names: set[str] = set()
    for instruction in dis.get_instructions(code_object):
        if instruction.opname in _READ_GLOBAL or instruction.opname in _READ_NAME:
            names.add(instruction.argval)
    for code_constant in code_object.co_consts:
        if isinstance(code_constant, CodeType):
            names |= globals_read(code_constant)
    return frozenset(names)


def _to_python(cell_text: str) -> str:
    """IPython's `%magic`, `!command` and `name?` as the calls that they stand for."""
    module = sys.modules.get("IPython.core.inputtransformer2")
    if module is None:
        return cell_text
    # Without a shell: transforming looks at the text only.
    python_text: str = module.TransformerManager().transform_cell(cell_text)
    return python_text


def _names_in_magics(syntax_tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(syntax_tree):
        if isinstance(node, ast.Call) and _is_magic(node):
            # The first argument of a magic is its own name.
            num_skipped = 1 if node.func.attr.startswith("run_") else 0  # type: ignore[attr-defined]
            for argument_node in node.args[num_skipped:]:
                if isinstance(argument_node, ast.Constant) and isinstance(argument_node.value, str):
                    yield from _NAME_IN_TEXT.findall(argument_node.value)


def _is_magic(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in _RUN_TEXT
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "get_ipython"
    )


class _Reads:
    """Collects what code reads that runs at once, and what the functions in it may read later."""

    def __init__(self) -> None:
        self.needed: set[str] = set()
        self.possible: set[str] = set()

    def follow(
        self, code_object: CodeType, bound_outside: frozenset[str], *, is_class: bool = False
    ) -> None:
        """Take code that runs where these names are bound."""
        for instruction, bound in _paths_through(code_object, bound_outside):
            # What a class binds is seen by its own body only, not by its methods.
            seen_inside = bound_outside if is_class else bound
            argument = instruction.argval
            if isinstance(argument, CodeType):
                self._enter(argument, seen_inside)
            elif instruction.opname in _READ_NAME:
                self.needed |= {argument} - bound
            elif instruction.opname in _READ_GLOBAL:
                self.needed |= {argument} - seen_inside

    def _enter(self, code_object: CodeType, bound_outside: frozenset[str]) -> None:
        is_class = not code_object.co_flags & inspect.CO_NEWLOCALS
        if is_class or _OWN_SCOPES.fullmatch(code_object.co_name):
            self.follow(code_object, bound_outside, is_class=is_class)
        else:
            self.possible |= globals_read(code_object) - bound_outside


def _paths_through(
    code_object: CodeType, bound_at_start: frozenset[str]
) -> Iterator[tuple[dis.Instruction, frozenset[str]]]:
    """Each instruction that can be reached, with the names that every way to it has bound."""
    bytecode = dis.Bytecode(code_object)
    instructions = list(bytecode)
    positions = {instruction.offset: place for place, instruction in enumerate(instructions)}
    handlers = dict(_handlers(bytecode, instructions, positions))
    deleted_names = {step.argval for step in instructions if step.opname in _UNBIND}
    bound_at = {0: bound_at_start}
    unvisited = [0]
    while unvisited:
        place = unvisited.pop()
        instruction = instructions[place]
        bound_before = bound_after = bound_at[place]
        if instruction.opname in _BIND:
            bound_after = bound_before | {instruction.argval}
        elif instruction.opname in _UNBIND:
            bound_after = bound_before - {instruction.argval}
        next_steps = []
        if instruction.opname not in _NEVER_GO_ON:
            next_steps.append((place + 1, bound_after))
        if instruction.opname == _TRY_BLOCK:
            # An exception may occur anywhere in the block, also after a `del` in it.
            next_steps.append((positions[instruction.argval], bound_before - deleted_names))
        elif instruction.opcode in _JUMPS and instruction.opname not in _WITH_BLOCKS:
            next_steps.append((positions[instruction.argval], bound_after))
        if place in handlers:
            next_steps.append((handlers[place], bound_before))
        for next_place, names in next_steps:
            known_names = bound_at.get(next_place)
            bound_there = names if known_names is None else known_names & names
            if bound_there != known_names:
                bound_at[next_place] = bound_there
                unvisited.append(next_place)
    for place, names in bound_at.items():
        yield instructions[place], names


def _handlers(
    bytecode: dis.Bytecode, instructions: list[dis.Instruction], positions: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """Where an exception at each place leads to, but for the ends of `with` blocks."""
    for entry in getattr(bytecode, "exception_entries", ()):
        handler = positions[entry.target]
        first_steps = instructions[handler : handler + _WITH_HANDLER_INSTRUCTIONS]
        if any(step.opname == "WITH_EXCEPT_START" for step in first_steps):
            continue
        for offset in range(entry.start, entry.end, 2):
            if offset in positions:
                yield positions[offset], handler
