"""Which names a cell reads that it has not bound itself: they may have to come from the notebook.

The code is walked in the order in which it runs. A name counts as bound after the
statement that binds it on every path; inside a branch, after its statement within that branch.

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

__all__ = [
    "Names",
    "all_arguments",
    "free_names",
    "is_users",
    "names_of",
    "stored_names",
    "type_parameters",
]


_NO_NAMES: frozenset[str] = frozenset()
_IPYTHON_NAMES = frozenset(("In", "Out", "exit", "quit", "get_ipython"))
_IPYTHON_NAME_PATTERN = re.compile(r"__\w+__|_{1,3}|_\d+|_i{1,3}|_i\d+|_[oid]h")
_NAME_IN_TEXT = re.compile(r"[^\W\d]\w*")
# What IPython's transformer calls for magics and commands; their text may name variables.
_RUN_TEXT = frozenset(("run_line_magic", "run_cell_magic", "getoutput", "system"))

_FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSION_NODES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Python 3.10 has no ast.TryStar.
_TryStar: type = getattr(ast, "TryStar", ast.Try)


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
    """The names that a cell's code reads. Code that does not parse reads none."""
    try:
        syntax_tree = ast.parse(_to_python(cell_text))
    # ValueError: the text contains a null character.
    except (SyntaxError, ValueError):
        return Names()
    name_walk = _NameWalk(_postpones_annotations(syntax_tree))
    name_walk.statements(syntax_tree.body)
    names = frozenset(filter(is_users, name_walk.needed))
    return Names(names, frozenset(filter(is_users, name_walk.possible)) - names)


def _to_python(cell_text: str) -> str:
    """IPython's `%magic`, `!command` and `name?` as the calls that they stand for."""
    module = sys.modules.get("IPython.core.inputtransformer2")
    if module is None:
        return cell_text
    # Without a shell: transforming looks at the text only.
    python_text: str = module.TransformerManager().transform_cell(cell_text)
    return python_text


def _postpones_annotations(syntax_tree: ast.Module) -> bool:
    return sys.version_info >= (3, 14) or any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(import_alias.name == "annotations" for import_alias in node.names)
        for node in syntax_tree.body
    )


class _NameWalk:
    """Goes through code that runs at once, in order.

    `bound` is what this code can rely on. Functions in it see `outside` instead where the two
    differ, which is in the body of a class: its names are not seen by its methods.
    """

    def __init__(self, annotations_postponed: bool) -> None:
        self.needed: set[str] = set()
        self.possible: set[str] = set()
        self.bound: set[str] = set()
        self._outside: set[str] | None = None
        self._postponed = annotations_postponed

    @property
    def _seen_by_functions(self) -> set[str]:
        return self.bound if self._outside is None else self._outside

    def statements(self, statement_body: Iterable[ast.stmt]) -> None:
        for statement in statement_body:
            self.visit(statement)

    def visit(self, node: ast.AST | None) -> None:
        """Take one statement or expression, and what is in it in the order of evaluation."""
        if node is None:
            return
        handler = _NODE_HANDLERS.get(type(node))
        if handler is None:
            for child_node in ast.iter_child_nodes(node):
                self.visit(child_node)
        else:
            handler(self, node)

    def _read(self, name: str) -> None:
        if name not in self.bound:
            self.needed.add(name)

    def _branch(self, statement_body: Iterable[ast.stmt], bound_at_start: set[str]) -> set[str]:
        """What is bound at the end of a body that begins with `bound_at_start`."""
        bound_before = self.bound
        self.bound = set(bound_at_start)
        self.statements(statement_body)
        bound_after = self.bound
        self.bound = bound_before
        return bound_after

    # ------------------------------------------------------------------- expressions

    def name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
            return
        self._read(node.id)
        if isinstance(node.ctx, ast.Del):
            self.bound.discard(node.id)

    def walrus(self, node: ast.NamedExpr) -> None:
        # The value is evaluated first; the node lists the target first.
        self.visit(node.value)
        self.visit(node.target)

    def either(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        bound_at_start = set(self.bound)
        bound_at_ends = []
        for child_part in (node.body, node.orelse):
            self.bound = set(bound_at_start)
            self.visit(child_part)
            bound_at_ends.append(self.bound)
        self.bound = bound_at_ends[0] & bound_at_ends[1]

    def short_cut(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        # `a and b` may skip everything but the first operand, so only its names are bound for sure.
        surely_bound = set(self.bound)
        for child_value in node.values[1:]:
            self.visit(child_value)
        self.bound = surely_bound

    def comparison(self, node: ast.Compare) -> None:
        self.visit(node.left)
        self.visit(node.comparators[0])
        surely_bound = set(self.bound)
        # a < b < c does not evaluate c once a < b has failed.
        for child_value in node.comparators[1:]:
            self.visit(child_value)
        self.bound = surely_bound

    def dictionary(self, node: ast.Dict) -> None:
        # The node lists all keys before all values; they are evaluated in pairs.
        for key_node, child_value in zip(node.keys, node.values, strict=True):
            self.visit(key_node)
            self.visit(child_value)

    def call(self, node: ast.Call) -> None:
        if _is_magic(node):
            num_skipped = 1 if node.func.attr.startswith("run_") else 0  # type: ignore[attr-defined]
            for argument_node in node.args[num_skipped:]:
                if isinstance(argument_node, ast.Constant) and isinstance(argument_node.value, str):
                    self.possible.update(_NAME_IN_TEXT.findall(argument_node.value))
        for child_node in ast.iter_child_nodes(node):
            self.visit(child_node)

    def comprehension(self, node: ast.ListComp | ast.DictComp) -> None:
        """The first iterable is this code's; all else runs in a scope of its own, and at once."""
        first_generator, *other_generators = node.generators
        self.visit(first_generator.iter)
        names = {
            name_node
            for comprehension_part in node.generators
            for name_node in stored_names(comprehension_part.target)
        }
        bound_before = self.bound
        outside_before = self._outside
        # In the body of a class it is like a function: it does not see the names of the class.
        self.bound = self._seen_by_functions | names
        self._outside = None
        self.visit(first_generator.target)
        for condition_node in first_generator.ifs:
            self.visit(condition_node)
        for other_generator in other_generators:
            self.visit(other_generator)
        for child_part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(child_part)
        self.bound = bound_before
        self._outside = outside_before

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        # Defaults and decorators run at once; the body runs when the function is called.
        for default_node in [*node.args.defaults, *node.args.kw_defaults]:
            self.visit(default_node)
        if not isinstance(node, ast.Lambda):
            for decorator_node in node.decorator_list:
                self.visit(decorator_node)
            self._annotations(node)
        self.possible |= free_names(node) - self._seen_by_functions
        if not isinstance(node, ast.Lambda):
            self.bound.add(node.name)

    def _annotations(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if self._postponed:
            return
        bound_before = self.bound
        self.bound = bound_before | type_parameters(node)
        for argument_node in all_arguments(node.args):
            self.visit(argument_node.annotation)
        self.visit(node.returns)
        self.bound = bound_before

    # ------------------------------------------------------------------- statements

    def assign(self, node: ast.Assign) -> None:
        # The value is evaluated first; the node lists the targets first.
        self.visit(node.value)
        for target_node in node.targets:
            self.visit(target_node)

    def annotated(self, node: ast.AnnAssign) -> None:
        self.visit(node.value)
        if not self._postponed:
            self.visit(node.annotation)
        # `x: int` without a value binds nothing.
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)

    def augmented(self, node: ast.AugAssign) -> None:
        # `x += 1` reads x, although the target's context says Store.
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def class_(self, node: ast.ClassDef) -> None:
        for decorator_node in node.decorator_list:
            self.visit(decorator_node)
        bound_before = self.bound
        outside_before = self._outside
        self.bound = bound_before | type_parameters(node)
        for base_node in [*node.bases, *node.keywords]:
            self.visit(base_node)
        # A class does not see the names of a class around it either.
        self._outside = self._seen_by_functions | type_parameters(node)
        # Python binds these two names at the start of the body of a class.
        self.bound = self._outside | {"__module__", "__qualname__"}
        self.statements(node.body)
        self.bound = bound_before
        self._outside = outside_before
        self.bound.add(node.name)

    def import_(self, node: ast.Import | ast.ImportFrom) -> None:
        for import_alias in node.names:
            self.bound.add(import_alias.asname or import_alias.name.partition(".")[0])

    def if_(self, node: ast.If) -> None:
        self.visit(node.test)
        self.bound = self._branch(node.body, self.bound) & self._branch(node.orelse, self.bound)

    def for_(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        bound_before = set(self.bound)
        self.visit(node.target)
        targets = self.bound - bound_before | stored_names(node.target)
        # The loop may run no round, so what it binds does not count after it.
        self.bound = self._rounds(node.body, self.bound, rebound=targets) & bound_before
        self.bound &= self._branch(node.orelse, self.bound)

    def while_(self, node: ast.While) -> None:
        self.visit(node.test)
        bound_before = set(self.bound)
        self.bound = self._rounds(node.body, bound_before) & bound_before
        self.bound &= self._branch(node.orelse, self.bound)

    def _rounds(
        self, body: list[ast.stmt], bound: set[str], *, rebound: Iterable[str] = ()
    ) -> set[str]:
        """The body of a loop, whose later rounds begin without what a `del` in it has unbound."""
        bound_at_end = self._branch(body, bound)
        while names := bound - bound_at_end - set(rebound):
            bound = bound - names
            bound_at_end = self._branch(body, bound)
        return bound_at_end

    def try_(self, node: ast.Try) -> None:
        bound_at_start = set(self.bound)
        bound_at_end = self._branch(node.body, bound_at_start)
        # An exception may occur anywhere in the body, also after a `del` in it.
        bound_anywhere = bound_at_start & bound_at_end
        bound_at_end = self._branch(node.orelse, bound_at_end)
        for handler in node.handlers:
            self.bound = set(bound_anywhere)
            self.visit(handler.type)
            # Python deletes the name of the exception at the end of the handler.
            handler_names = {handler.name} if handler.name else set()
            bound_at_end &= self._branch(handler.body, self.bound | handler_names) - handler_names
        self.bound = bound_anywhere & bound_at_end
        # Twice: `finally` also runs when the body has failed, and must not rely on its names.
        added_names = self._branch(node.finalbody, self.bound) - self.bound
        self.bound = self._branch(node.finalbody, bound_at_end) | added_names

    def match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        bound_at_start = set(self.bound)
        bound_at_ends = []
        for match_case in node.cases:
            self.bound = set(bound_at_start)
            self.visit(match_case.pattern)
            self.visit(match_case.guard)
            bound_at_ends.append(self._branch(match_case.body, self.bound))
        last_case = node.cases[-1]
        catches_all = (
            isinstance(last_case.pattern, ast.MatchAs) and last_case.pattern.pattern is None
        )
        # Then no case may match at all.
        if not catches_all or last_case.guard is not None:
            bound_at_ends.append(bound_at_start)
        self.bound = set.intersection(*bound_at_ends)

    def capture(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if isinstance(node, ast.MatchAs):
            self.visit(node.pattern)
        if node.name:
            self.bound.add(node.name)

    def capture_rest(self, node: ast.MatchMapping) -> None:
        for child_node in [*node.keys, *node.patterns]:
            self.visit(child_node)
        if node.rest:
            self.bound.add(node.rest)

    def type_alias(self, node: ast.AST) -> None:
        """`type X = ...` (Python 3.12): its value is evaluated only when it is used."""
        self.possible |= {
            name_node.id for name_node in ast.walk(node) if isinstance(name_node, ast.Name)
        }
        self.visit(getattr(node, "name", None))


_NODE_HANDLERS: dict[type, Callable[[_NameWalk, Any], None]] = {
    ast.Name: _NameWalk.name,
    ast.NamedExpr: _NameWalk.walrus,
    ast.IfExp: _NameWalk.either,
    ast.BoolOp: _NameWalk.short_cut,
    ast.Compare: _NameWalk.comparison,
    ast.Dict: _NameWalk.dictionary,
    ast.Call: _NameWalk.call,
    ast.Assign: _NameWalk.assign,
    ast.AnnAssign: _NameWalk.annotated,
    ast.AugAssign: _NameWalk.augmented,
    ast.ClassDef: _NameWalk.class_,
    ast.Import: _NameWalk.import_,
    ast.ImportFrom: _NameWalk.import_,
    ast.If: _NameWalk.if_,
    ast.For: _NameWalk.for_,
    ast.AsyncFor: _NameWalk.for_,
    ast.While: _NameWalk.while_,
    ast.Try: _NameWalk.try_,
    _TryStar: _NameWalk.try_,
    ast.Match: _NameWalk.match,
    ast.MatchAs: _NameWalk.capture,
    ast.MatchStar: _NameWalk.capture,
    ast.MatchMapping: _NameWalk.capture_rest,
    # Before Python 3.12: ast.Module, which never occurs inside a cell's code.
    getattr(ast, "TypeAlias", ast.Module): _NameWalk.type_alias,
    **dict.fromkeys(_COMPREHENSION_NODES, _NameWalk.comprehension),
    **dict.fromkeys(_FUNCTION_NODES, _NameWalk.function),
}


def _is_magic(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in _RUN_TEXT
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Name)
        and node.func.value.func.id == "get_ipython"
    )


def all_arguments(arguments_node: ast.arguments) -> list[ast.arg]:
    """Every parameter of a function."""
    star_arguments = [
        argument
        for argument in (arguments_node.vararg, arguments_node.kwarg)
        if argument is not None
    ]
    return [
        *arguments_node.posonlyargs,
        *arguments_node.args,
        *arguments_node.kwonlyargs,
        *star_arguments,
    ]


def type_parameters(node: ast.AST) -> set[str]:
    """What stands in brackets behind the name of a function or class: `def first[T](...)`."""
    return {type_parameter.name for type_parameter in getattr(node, "type_params", ())}


def stored_names(target_node: ast.AST) -> set[str]:
    """The names that a target binds."""
    return {
        name_node.id
        for name_node in ast.walk(target_node)
        if isinstance(name_node, ast.Name) and isinstance(name_node.ctx, ast.Store)
    }


def free_names(function_node: ast.AST) -> set[str]:
    """The names that a function's body looks up outside it, whenever it may run."""
    function_scope = _FunctionScope()
    arguments_node = function_node.args  # type: ignore[attr-defined]
    function_scope.local.update(argument.arg for argument in all_arguments(arguments_node))
    statement_body = function_node.body  # type: ignore[attr-defined]
    for node in statement_body if isinstance(statement_body, list) else [statement_body]:
        function_scope.visit(node)
    return function_scope.free() - type_parameters(function_node)


class _FunctionScope(ast.NodeVisitor):
    """The names of one function, where a name bound anywhere is local everywhere."""

    def __init__(self) -> None:
        self.local: set[str] = set()
        self._read: set[str] = set()
        self._declared: set[str] = set()

    def free(self) -> set[str]:
        return self._read - (self.local - self._declared)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) or node.id in self._declared:
            self._read.add(node.id)
        else:
            self.local.add(node.id)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self._declared.update(node.names)

    visit_Nonlocal = visit_Global  # noqa: N815

    def visit_FunctionDef(self, node: ast.AST) -> None:
        inner_scope = free_names(node)
        if not isinstance(node, ast.Lambda):
            self.local.add(node.name)  # type: ignore[attr-defined]
        self._read |= inner_scope
        arguments_node = node.args  # type: ignore[attr-defined]
        outer_scope = [
            *arguments_node.defaults,
            *arguments_node.kw_defaults,
            *getattr(node, "decorator_list", ()),
        ]
        outer_scope += [argument.annotation for argument in all_arguments(arguments_node)] + [
            getattr(node, "returns", None)
        ]
        for child_part in filter(None, outer_scope):
            self.visit(child_part)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Its names are not seen outside, but it may read outer ones before it binds its own."""
        inner_scope = _FunctionScope()
        for child_node in [*node.bases, *node.keywords, *node.decorator_list, *node.body]:
            inner_scope.visit(child_node)
        self._read |= inner_scope._read - type_parameters(node)
        self.local.add(node.name)

    def visit_ListComp(self, node: ast.AST) -> None:
        inner_scope = _FunctionScope()
        inner_scope.generic_visit(node)
        names = {
            name_node
            for comprehension_part in node.generators  # type: ignore[attr-defined]
            for name_node in stored_names(comprehension_part.target)
        }
        self._read |= inner_scope._read - names
        # A walrus in a comprehension binds in the function around it.
        self.local |= inner_scope.local - names

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.local.update(
            import_alias.asname or import_alias.name.partition(".")[0]
            for import_alias in node.names
        )

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.local.add(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.local.add(node.name)
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs  # noqa: N815

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.local.add(node.rest)
        self.generic_visit(node)
