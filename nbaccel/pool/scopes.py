"""What a function's body looks up outside itself, and the words of syntax trees for it."""

from __future__ import annotations

import ast

__all__ = ["arguments", "free_names", "stored", "type_parameters"]


def arguments(args: ast.arguments) -> list[ast.arg]:
    """Every parameter of a function."""
    stars = [a for a in (args.vararg, args.kwarg) if a is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *stars]


def type_parameters(node: ast.AST) -> set[str]:
    """What stands in brackets behind the name of a function or class: `def first[T](...)`."""
    return {parameter.name for parameter in getattr(node, "type_params", ())}


def stored(target: ast.AST) -> set[str]:
    """The names that a target binds."""
    return {
        n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def free_names(function: ast.AST) -> set[str]:
    """The names that a function's body looks up outside it, whenever it may run."""
    scope = _Scope()
    args = function.args  # type: ignore[attr-defined]
    scope.local.update(a.arg for a in arguments(args))
    body = function.body  # type: ignore[attr-defined]
    for node in body if isinstance(body, list) else [body]:
        scope.visit(node)
    return scope.free() - type_parameters(function)


class _Scope(ast.NodeVisitor):
    """The names of one function: in it, order does not matter to what is local."""

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
        inside = free_names(node)
        if not isinstance(node, ast.Lambda):
            self.local.add(node.name)  # type: ignore[attr-defined]
        self._read |= inside
        args = node.args  # type: ignore[attr-defined]
        outer = [*args.defaults, *args.kw_defaults, *getattr(node, "decorator_list", ())]
        outer += [a.annotation for a in arguments(args)] + [getattr(node, "returns", None)]
        for part in filter(None, outer):
            self.visit(part)

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Its names are its own, but may also be read outside before they are bound."""
        inside = _Scope()
        for child in [*node.bases, *node.keywords, *node.decorator_list, *node.body]:
            inside.visit(child)
        self._read |= inside._read - type_parameters(node)
        self.local.add(node.name)

    def visit_ListComp(self, node: ast.AST) -> None:
        inside = _Scope()
        inside.generic_visit(node)
        own = {n for g in node.generators for n in stored(g.target)}  # type: ignore[attr-defined]
        self._read |= inside._read - own
        self.local |= inside.local - own  # a walrus binds outside

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp  # noqa: N815

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.local.update(a.asname or a.name.partition(".")[0] for a in node.names)

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
