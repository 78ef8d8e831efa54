from __future__ import annotations

import builtins
import dis
import textwrap
from typing import Any

import pytest
from hypothesis import given, strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from nbaccel.transfer.free_names import Names, is_users, names_of

assert TransformerManager  # loaded, so that magics are understood


def needed(text: str) -> set[str]:
    return set(names_of(textwrap.dedent(text)).needed) - set(dir(builtins))


def possible(text: str) -> set[str]:
    return set(names_of(textwrap.dedent(text)).possible) - set(dir(builtins))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = model(y)", "model y"),
        ("x = 1\nprint(x)", ""),
        ("print(x)\nx = 1", "x"),
        ("x += 1", "x"),
        ("x[0] = y.z", "x y"),
        ("del x", "x"),
        ("x = 1\ndel x\nx", "x"),
        ("x = 1\nwhile y:\n    del x", "x y"),
        ("for x in y:\n    del x", "y"),
        ("import a.b as c, d.e\nc, d, a", "a"),
        ("from a import b as c\nb, c", "b"),
        ("if a:\n    x = 1\nx", "a x"),
        ("if a:\n    x = 1\nelse:\n    x = 2\nx", "a"),
        ("if a:\n    x = 1\n    x", "a"),
        ("for i in range(n):\n    i\n    x = i\n    x\ni, x", "n i x"),
        ("while a:\n    x = 1\n    x\nx", "a x"),
        ("try:\n    x = f()\n    x\nexcept E as e:\n    e\nx, e", "f E x e"),
        ("try:\n    x = 1\nexcept E:\n    x = 2\nx", "E"),
        ("try:\n    x = 1\nfinally:\n    y = x\nx, y", "x"),
        ("with a as b:\n    c = b\nb, c", "a"),
        ("(x := a)\nx", "a"),
        ("a and (x := 1)\nx", "a x"),
        ("[i * k for i in xs for j in i if j]\ni", "k xs i"),
        ("{i: j for i, j in xs}", "xs"),
        ("f'{a:{b}}'", "a b"),
        ("match a:\n    case P(x=u, y=[v, *w]) if c:\n        u, v, w\n    case {'k': r, **s}:\n"
         "        r, s\n    case t:\n        t\nt", "a P c t"),
        ("match a:\n    case 1:\n        x = 1\n    case _:\n        x = 2\nx", "a"),
        ("class A(B, metaclass=M):\n    z = q\n    y = z\nA", "B M q"),
        ("class A:\n    z = 1\n    y = [z for _ in xs]", "xs z"),
        ("class A:\n    z = 1\n    class B:\n        y = z", "z"),
        ("@d\ndef f(a: T = v) -> R:\n    pass\nf", "d T v R"),
        ("from __future__ import annotations\ndef f(a: T) -> R:\n    pass", ""),
        ("x: T\nx", "T x"),
        ("await f(x)\nasync for y in z:\n    y", "f x z"),
        ("def f():\n    return a\nf()", ""),
        ("f = lambda a, b=c: a + d", "c"),
        ("get_ipython().system('ls')\nIn[3], _, _12, _private, __name__", "_private"),
        ("this is no python", ""),
        ("a\0b", ""),
    ],
)  # fmt: skip
def test_what_top_level_code_reads_before_it_binds_it_is_needed(text: str, expected: str) -> None:
    assert needed(text) == set(expected.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a, *b, c=1, **d):\n    x = a, b, c, d\n    return x, y", "y"),
        ("lr = 1\ndef f():\n    return lr", ""),
        ("def f():\n    return lr\nlr = 1", "lr"),
        ("def f():\n    global g\n    g += 1", "g"),
        ("def f():\n    def g():\n        return x, y\n    x = 1\n    return g, z", "y z"),
        ("def f():\n    return [i * k for i in xs]", "k xs"),
        ("def f():\n    try:\n        import a\n    except E as e:\n        e, a", "E"),
        ("def f():\n    class A:\n        x = u\n    return A", "u"),
        ("class A:\n    z = 1\n    def f(self):\n        return z, A", "z A"),
        ("lambda: (lambda: x)", "x"),
        ("def f():\n    match a:\n        case [x, *y] | {'k': x, **y}:\n            x, y", "a"),
        ("%timeit step(batch)", "step batch"),
        ("%%time\nloss = model(x)", "loss model x"),
        ("out = !ls $folder", "ls folder"),
    ],
)
def test_what_functions_and_magics_read_is_possible(text: str, expected: str) -> None:
    assert possible(text) == set(expected.split())


def test_a_name_is_needed_or_possible_but_not_both() -> None:
    assert names_of("f = lambda: x\nx") == Names(frozenset({"x"}), frozenset())


def test_python_and_ipython_have_names_of_their_own() -> None:
    own = ["_", "__", "___", "_3", "_i", "_i3", "_oh", "__doc__", "In", "get_ipython"]
    assert not any(is_users(name) for name in own)
    assert all(is_users(name) for name in ["_x", "__private", "i", "_io", "_im", "Input"])


# ------------------------------------------------------------------------- against real execution

NAMES = st.sampled_from("abcdef")


@st.composite
def expressions(draw: st.DrawFn, depth: int = 2) -> str:
    if depth == 0:
        return draw(NAMES)
    part = expressions(depth=depth - 1)
    form = draw(
        st.sampled_from(
            [
                "{n}",
                "({x} or {y})",
                "({x} if {y} else {z})",
                "[{x} for {n} in [{y}]]",
                "[{x} for {n} in [1] for {m} in [{n}] if {y}]",
                "({n} := {x})",
                "(lambda {n}={x}: {y})()",
                "({x} is {y} is {z})",
                "f'{{{x}}}'",
            ]
        )
    )
    return form.format(n=draw(NAMES), m=draw(NAMES), x=draw(part), y=draw(part), z=draw(part))


SIMPLE = [
    "{n} = {x}",
    "{n} = {m} = {x}",
    "{n} = {x}; {n} = [{n}]",
    "del {n}",
    "{x}",
    "import sys as {n}",
    "def {n}({m}={x}): return {y}",
    "{n}: {m} = {x}",
]
COMPOUND = [
    "if {x}:\n{body}\nelse:\n{other}",
    "for {n} in [{x}, {y}][:{k}]:\n{body}\nelse:\n{other}",
    "try:\n{body}\nexcept {x} as {n}:\n{other}\nelse:\n    {m} = {y}",
    "try:\n{body}\nexcept NameError:\n{other}\nfinally:\n    {m} = {n}",
    "class {n}:\n{body}",
    "match {x}:\n    case [{n}]:\n{wide}\n    case {m}:\n        {m}",
    "def {n}():\n{body}\n    return {x}\ntry:\n    {n}()\nexcept UnboundLocalError:\n    pass",
]


@st.composite
def blocks(draw: st.DrawFn, depth: int = 2) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        compound = depth > 0 and draw(st.booleans())
        form = draw(st.sampled_from(COMPOUND if compound else SIMPLE))
        fields: dict[str, Any] = {k: draw(expressions()) for k in "xyz"}
        fields |= {"n": draw(NAMES), "m": draw(NAMES), "k": draw(st.integers(0, 2))}
        if compound:
            body, other = draw(blocks(depth=depth - 1)), draw(blocks(depth=depth - 1))
            fields["body"] = textwrap.indent(body, " " * 4)
            fields["wide"] = textwrap.indent(body, " " * 8)
            fields["other"] = textwrap.indent(other, " " * 4)
        lines.append(form.format(**fields))
    return "\n".join(lines)


class Recording(dict[str, Any]):
    """A namespace that has every name, and knows which it was asked for while it had them not."""

    def __init__(self) -> None:
        super().__init__(__builtins__=builtins)
        self.asked: set[str] = set()

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        self.asked.add(name)
        return 0

    def __delitem__(self, name: str) -> None:
        if name not in self:
            self.asked.add(name)
        else:
            super().__delitem__(name)


@pytest.mark.slow
@given(blocks())
def test_no_read_of_an_unbound_name_is_overlooked(text: str) -> None:
    try:
        code = compile(text, "<cell>", "exec")
    except SyntaxError:  # e.g. a walrus in a comprehension of a class, or onto its target
        return
    space = Recording()
    try:
        exec(code, space)
    except Exception as error:
        # A value of 0 is no exception class and cannot be called; a function's globals are read
        # by the interpreter without asking the namespace. What was asked until then counts.
        if isinstance(error, NameError) and error.name and not _reads_no_namespace(error):
            space.asked.add(error.name)
    names = names_of(text)
    assert space.asked <= names.needed | names.possible, text


def _reads_no_namespace(error: NameError) -> bool:
    """Whether the name is a function's own, or one that a class deletes of its own."""
    if isinstance(error, UnboundLocalError) or "free variable" in str(error):
        return True
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    code, is_of_module = last.tb_frame.f_code, last.tb_frame.f_locals is last.tb_frame.f_globals
    return not is_of_module and code.co_code[last.tb_lasti] == dis.opmap["DELETE_NAME"]


def test_a_name_that_a_class_deletes_is_its_own() -> None:
    text = "def f():\n    class C:\n        del c\nf()"
    with pytest.raises(NameError) as raised:
        exec(compile(text, "<cell>", "exec"), {})
    assert _reads_no_namespace(raised.value)
    with pytest.raises(NameError) as raised:
        exec(compile("del c", "<cell>", "exec"), {})
    assert not _reads_no_namespace(raised.value)
