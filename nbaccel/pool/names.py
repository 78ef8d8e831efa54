"""Which names a cell reads that it has not bound itself: they may have to come from the notebook.

The code is walked in the order in which it runs. A name counts as bound from the statement on that
binds it on every way there; inside a branch, from its statement on within that branch.

[Note: with] What a `with` block binds counts as bound behind it, although a manager that swallows
exceptions could skip it: `with torch.no_grad(): out = model(x)` is what people write.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nbaccel.pool.scopes import arguments, free_names, stored, type_parameters

__all__ = ["Names", "is_users", "names_of"]

_NOTHING: frozenset[str] = frozenset()
_OWN = frozenset(("In", "Out", "exit", "quit", "get_ipython"))
_OWN_PATTERN = re.compile(r"__\w+__|_{1,3}|_\d+|_i{1,3}|_i\d+|_[oid]h")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_RUN_TEXT = frozenset(("run_line_magic", "run_cell_magic", "getoutput", "system"))

_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TryStar: type = getattr(ast, "TryStar", ast.Try)


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a cell reads from outside itself."""

    needed: frozenset[str] = _NOTHING
    """Read by top-level code before the cell itself binds them for sure."""
    possible: frozenset[str] = _NOTHING
    """Read only inside functions, or in the text given to magics."""


def is_users(name: str) -> bool:
    """Whether a name belongs to the user, not to Python or IPython (`_`, `In`, `__name__`)."""
    return name not in _OWN and not _OWN_PATTERN.fullmatch(name)


@functools.lru_cache(maxsize=512)
def names_of(text: str) -> Names:
    """The names that a cell's code reads. Code that does not parse reads none."""
    try:
        tree = ast.parse(_to_python(text))
    except (SyntaxError, ValueError):  # ValueError: a null character
        return Names()
    walk = _Walk(_postpones_annotations(tree))
    walk.statements(tree.body)
    needed = frozenset(filter(is_users, walk.needed))
    return Names(needed, frozenset(filter(is_users, walk.possible)) - needed)


def _to_python(text: str) -> str:
    """IPython's `%magic`, `!command` and `name?` as the calls that they stand for."""
    ipython = sys.modules.get("IPython.core.inputtransformer2")
    if ipython is None:
        return text
    python: str = ipython.TransformerManager().transform_cell(text)
    return python


def _postpones_annotations(tree: ast.Module) -> bool:
    return sys.version_info >= (3, 14) or any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in tree.body
    )


class _Walk:
    """Goes through code that runs at once, in order.

    `bound` is what this code can rely on. Functions in it see `outside` instead where the two
    differ, which is in the body of a class: its names are not seen by its methods.
    """

    def __init__(self, postponed: bool) -> None:
        self.needed: set[str] = set()
        self.possible: set[str] = set()
        self.bound: set[str] = set()
        self._outside: set[str] | None = None
        self._postponed = postponed

    @property
    def _seen_by_functions(self) -> set[str]:
        return self.bound if self._outside is None else self._outside

    def statements(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def visit(self, node: ast.AST | None) -> None:
        """Take one statement or expression, and what is in it in the order of evaluation."""
        if node is None:
            return
        handler = _HANDLERS.get(type(node))
        if handler is None:
            for child in ast.iter_child_nodes(node):
                self.visit(child)
        else:
            handler(self, node)

    def _read(self, name: str) -> None:
        if name not in self.bound:
            self.needed.add(name)

    def _branch(self, body: Iterable[ast.stmt], start: set[str]) -> set[str]:
        """What is bound at the end of a body that begins with `start`."""
        before, self.bound = self.bound, set(start)
        self.statements(body)
        after, self.bound = self.bound, before
        return after

    # ------------------------------------------------------------------- expressions

    def name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
            return
        self._read(node.id)
        if isinstance(node.ctx, ast.Del):
            self.bound.discard(node.id)

    def walrus(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def either(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        start, ends = set(self.bound), []
        for part in (node.body, node.orelse):
            self.bound = set(start)
            self.visit(part)
            ends.append(self.bound)
        self.bound = ends[0] & ends[1]

    def short_cut(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        sure = set(self.bound)
        for value in node.values[1:]:
            self.visit(value)
        self.bound = sure

    def comparison(self, node: ast.Compare) -> None:
        self.visit(node.left)
        self.visit(node.comparators[0])
        sure = set(self.bound)
        for value in node.comparators[1:]:  # a < b < c does not look at c once a < b has failed
            self.visit(value)
        self.bound = sure

    def dictionary(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self.visit(key)
            self.visit(value)

    def call(self, node: ast.Call) -> None:
        if _is_magic(node):
            skip = 1 if node.func.attr.startswith("run_") else 0  # type: ignore[attr-defined]
            for argument in node.args[skip:]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    self.possible.update(_IDENTIFIER.findall(argument.value))
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def comprehension(self, node: ast.ListComp | ast.DictComp) -> None:
        """The first iterable is this code's; all else runs in a scope of its own, and at once."""
        first, *others = node.generators
        self.visit(first.iter)
        own = {n for g in node.generators for n in stored(g.target)}
        before, outside = self.bound, self._outside
        # In the body of a class it is like a function: it does not see the names of the class.
        self.bound, self._outside = self._seen_by_functions | own, None
        self.visit(first.target)
        for test in first.ifs:
            self.visit(test)
        for generator in others:
            self.visit(generator)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.bound, self._outside = before, outside

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            self.visit(default)
        if not isinstance(node, ast.Lambda):
            for decorator in node.decorator_list:
                self.visit(decorator)
            self._annotations(node)
        self.possible |= free_names(node) - self._seen_by_functions
        if not isinstance(node, ast.Lambda):
            self.bound.add(node.name)

    def _annotations(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if self._postponed:
            return
        before = self.bound
        self.bound = before | type_parameters(node)
        for argument in arguments(node.args):
            self.visit(argument.annotation)
        self.visit(node.returns)
        self.bound = before

    # ------------------------------------------------------------------- statements

    def assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def annotated(self, node: ast.AnnAssign) -> None:
        self.visit(node.value)
        if not self._postponed:
            self.visit(node.annotation)
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def augmented(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def class_(self, node: ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        before, outside = self.bound, self._outside
        self.bound = before | type_parameters(node)
        for base in [*node.bases, *node.keywords]:
            self.visit(base)
        # A class does not see the names of a class around it either.
        self._outside = self._seen_by_functions | type_parameters(node)
        self.bound = self._outside | {"__module__", "__qualname__"}
        self.statements(node.body)
        self.bound, self._outside = before, outside
        self.bound.add(node.name)

    def import_(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self.bound.add(alias.asname or alias.name.partition(".")[0])

    def if_(self, node: ast.If) -> None:
        self.visit(node.test)
        self.bound = self._branch(node.body, self.bound) & self._branch(node.orelse, self.bound)

    def for_(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        before = set(self.bound)
        self.visit(node.target)
        self.bound = self._branch(node.body, self.bound) & before
        self.bound &= self._branch(node.orelse, self.bound)

    def while_(self, node: ast.While) -> None:
        self.visit(node.test)
        before = set(self.bound)
        self.bound = self._branch(node.body, before) & before
        self.bound &= self._branch(node.orelse, self.bound)

    def try_(self, node: ast.Try) -> None:
        start = set(self.bound)
        end = self._branch(node.body, start)
        # A handler may begin anywhere in the body, also after a `del` in it.
        anywhere = start & end
        end = self._branch(node.orelse, end)
        for handler in node.handlers:
            self.bound = set(anywhere)
            self.visit(handler.type)
            named = {handler.name} if handler.name else set()
            end &= self._branch(handler.body, self.bound | named) - named
        self.bound = anywhere & end
        added = self._branch(node.finalbody, self.bound) - self.bound
        self.bound = self._branch(node.finalbody, end) | added

    def match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        start, ends = set(self.bound), []
        for case in node.cases:
            self.bound = set(start)
            self.visit(case.pattern)
            self.visit(case.guard)
            ends.append(self._branch(case.body, self.bound))
        last = node.cases[-1]
        whole = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        if not whole or last.guard is not None:
            ends.append(start)
        self.bound = set.intersection(*ends)

    def capture(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if isinstance(node, ast.MatchAs):
            self.visit(node.pattern)
        if node.name:
            self.bound.add(node.name)

    def capture_rest(self, node: ast.MatchMapping) -> None:
        for child in [*node.keys, *node.patterns]:
            self.visit(child)
        if node.rest:
            self.bound.add(node.rest)

    def type_alias(self, node: ast.AST) -> None:
        """`type X = ...` (Python 3.12): its value is looked at when somebody asks for it."""
        self.possible |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        self.visit(getattr(node, "name", None))


_HANDLERS: dict[type, Callable[[_Walk, Any], None]] = {
    ast.Name: _Walk.name,
    ast.NamedExpr: _Walk.walrus,
    ast.IfExp: _Walk.either,
    ast.BoolOp: _Walk.short_cut,
    ast.Compare: _Walk.comparison,
    ast.Dict: _Walk.dictionary,
    ast.Call: _Walk.call,
    ast.Assign: _Walk.assign,
    ast.AnnAssign: _Walk.annotated,
    ast.AugAssign: _Walk.augmented,
    ast.ClassDef: _Walk.class_,
    ast.Import: _Walk.import_,
    ast.ImportFrom: _Walk.import_,
    ast.If: _Walk.if_,
    ast.For: _Walk.for_,
    ast.AsyncFor: _Walk.for_,
    ast.While: _Walk.while_,
    ast.Try: _Walk.try_,
    _TryStar: _Walk.try_,
    ast.Match: _Walk.match,
    ast.MatchAs: _Walk.capture,
    ast.MatchStar: _Walk.capture,
    ast.MatchMapping: _Walk.capture_rest,
    getattr(ast, "TypeAlias", ast.Module): _Walk.type_alias,
    **dict.fromkeys(_Comprehension, _Walk.comprehension),
    **dict.fromkeys(_Function, _Walk.function),
}


def _is_magic(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in _RUN_TEXT
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "get_ipython"
    )
