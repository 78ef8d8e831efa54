"""Which names a cell reads that it has not bound itself: they may have to come from the notebook.

The compiled cell is followed along all its paths, and a name counts as bound where every path has
bound it; behind a `with` block, too, what that binds, although a manager that swallows exceptions
could skip it: `with torch.no_grad(): out = model(x)` is what people write.
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
_WITH_HANDLER_INSTRUCTIONS = 3  # in its first ones a `with` block's handler calls the manager
_OWN_SCOPES = re.compile(r"<(listcomp|setcomp|dictcomp|genexpr)>|<generic parameters of .*>")
"""Names of code that the compiler puts into a scope of its own and that runs at once."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a cell reads from outside itself."""

    needed: frozenset[str] = frozenset()  # read by top-level code before the cell binds them
    possible: frozenset[str] = frozenset()  # read only in functions, or in the text of magics


@functools.lru_cache(maxsize=4096)
def is_users(name: str) -> bool:
    """Whether a name belongs to the user, not to Python or IPython (`_`, `In`, `__name__`)."""
    return name not in _IPYTHON_NAMES and not _IPYTHON_NAME_PATTERN.fullmatch(name)


@functools.lru_cache(maxsize=512)
def names_of(text: str) -> Names:
    """The names that a cell's code reads. Code that does not compile reads none."""
    try:
        # What there is to warn of, the worker that runs the cell says.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # IPython's `%magic`, `!command` and `name?` as calls; that needs no shell.
            ipython = sys.modules.get("IPython.core.inputtransformer2")
            python = ipython.TransformerManager().transform_cell(text) if ipython else text
            code = compile(
                python, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
    # ValueError: the text contains a null character.
    except (SyntaxError, ValueError):
        return Names()
    needed: set[str] = set()
    possible: set[str] = set()
    if "get_ipython" in python:
        possible.update(_names_in_magics(ast.parse(python)))
    _collect(code, frozenset(), needed, possible)
    names = frozenset(filter(is_users, needed))
    return Names(names, frozenset(filter(is_users, possible)) - names)


@functools.lru_cache(maxsize=4096)
def globals_read(code: CodeType) -> frozenset[str]:
    """The global names that code may read, that of the functions inside it included."""
    names: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READ_GLOBAL or instruction.opname in _READ_NAME:
            names.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= globals_read(constant)
    return frozenset(names)


def _names_in_magics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method)
            ) if method in _RUN_TEXT:
                # The first argument of a magic is its own name.
                for argument in node.args[method.startswith("run_") :]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield from _NAME_IN_TEXT.findall(argument.value)


def _collect(
    code: CodeType,
    outside: frozenset[str],
    needed: set[str],
    possible: set[str],
    *,
    is_class: bool = False,
) -> None:
    """Add what code reads, run where these names are bound, and what its functions may read."""
    for instruction, bound in _paths_through(code, outside):
        # What a class binds is seen by its own body only, not by its methods.
        inside = outside if is_class else bound
        argument = instruction.argval
        if isinstance(argument, CodeType):
            is_body = not argument.co_flags & inspect.CO_NEWLOCALS  # of a class
            if is_body or _OWN_SCOPES.fullmatch(argument.co_name):
                _collect(argument, inside, needed, possible, is_class=is_body)
            else:
                possible |= globals_read(argument) - inside
        elif instruction.opname in _READ_NAME:
            needed |= {argument} - bound
        elif instruction.opname in _READ_GLOBAL:
            needed |= {argument} - inside


def _paths_through(
    code: CodeType, bound: frozenset[str]
) -> Iterator[tuple[dis.Instruction, frozenset[str]]]:
    """Each instruction that can be reached, with the names that every way to it has bound."""
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    positions = {instruction.offset: place for place, instruction in enumerate(instructions)}
    handlers = dict(_handlers(bytecode, instructions, positions))
    deleted = {step.argval for step in instructions if step.opname in _UNBIND}
    bound_at = {0: bound}
    unvisited = [0]
    while unvisited:
        place = unvisited.pop()
        instruction = instructions[place]
        before = after = bound_at[place]
        if instruction.opname in _BIND:
            after = before | {instruction.argval}
        elif instruction.opname in _UNBIND:
            after = before - {instruction.argval}
        steps = []
        if instruction.opname not in _NEVER_GO_ON:
            steps.append((place + 1, after))
        if instruction.opname == _TRY_BLOCK:
            # An exception may occur anywhere in the block, also after a `del` in it.
            steps.append((positions[instruction.argval], before - deleted))
        elif instruction.opcode in _JUMPS and instruction.opname not in _WITH_BLOCKS:
            steps.append((positions[instruction.argval], after))
        if place in handlers:
            steps.append((handlers[place], before))
        for following, names in steps:
            known = bound_at.get(following)
            there = names if known is None else known & names
            if there != known:
                bound_at[following] = there
                unvisited.append(following)
    for place, names in bound_at.items():
        yield instructions[place], names


def _handlers(
    bytecode: dis.Bytecode, instructions: list[dis.Instruction], positions: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """Where an exception at each place leads to, but for the ends of `with` blocks."""
    for entry in getattr(bytecode, "exception_entries", ()):
        handler = positions[entry.target]
        first = instructions[handler : handler + _WITH_HANDLER_INSTRUCTIONS]
        if any(step.opname == "WITH_EXCEPT_START" for step in first):
            continue
        for offset in range(entry.start, entry.end, 2):
            if offset in positions:
                yield positions[offset], handler
