from __future__ import annotations

import builtins
import textwrap

import pytest
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
def test_what_top_level_code_reads_before_it_binds_it_is_needed(text, expected):
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
def test_what_functions_and_magics_read_is_possible(text, expected):
    assert possible(text) == set(expected.split())


def test_a_name_is_needed_or_possible_but_not_both_and_the_shell_has_its_own():
    assert names_of("f = lambda: x\nx") == Names(frozenset({"x"}), frozenset())

    own = ["_", "__", "___", "_3", "_i", "_i3", "_oh", "__doc__", "In", "get_ipython"]
    assert not any(is_users(name) for name in own)
    assert all(is_users(name) for name in ["_x", "__private", "i", "_io", "_im", "Input"])
