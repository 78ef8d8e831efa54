"""Cells in a worker's shell: what they mean, what they show, and what their errors say."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import IPython
import pytest

from nbaccel.calls.pool_planning import CellSource
from nbaccel.calls.pool_worker import make_shell
from nbaccel.errors import MissingBackend
from tests.calls.shell_cells import Cells, filename


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    found = Cells(MPLBACKEND="module://matplotlib_inline.backend_inline")
    yield found
    found.close()


def test_the_last_expression_is_the_value_in_all_its_forms(cells):
    done = cells.run("x = 20\nx + 22").check()
    assert done.value == {"data": {"text/plain": "42"}, "metadata": {}}
    assert (done.out, done.err, done.sent) == ("", "", [])
    done = cells.run(
        "class Table:\n"
        "    def _repr_html_(self): return '<b>1</b>'\n"
        "    def __repr__(self): return 'one'\n"
        "Table()"
    ).check()
    assert done.value["data"] == {"text/plain": "one", "text/html": "<b>1</b>"}


@pytest.mark.parametrize("text", ["x = 1", "None", "42;", "42;  # said", "", "  \n\n", "# nothing"])
def test_a_cell_without_a_value_has_none(cells, text):
    assert cells.run(text).check().value is None


def test_the_last_three_values_are_kept_and_no_more(cells):
    for value in ("first", "second", "third"):
        cells.run(f"{value!r}").check()
    assert cells.run("_, __, ___").check().plain == "('third', 'second', 'first')"
    cells.run("import gc, weakref\nclass Big: pass\nkept = weakref.ref(Big())").check()
    cells.run("big = Big(); kept = weakref.ref(big); big").check()
    cells.run("del big").check()
    for value in range(3):
        cells.run(f"{value}").check()
    assert cells.run("gc.collect(); kept() is None").check().plain == "True"
    cells.run("_ = 'mine'").check()
    cells.run("1").check()
    assert cells.run("_").check().plain == "'mine'"
    cells.run("del _").check()


def test_magics_and_the_shell_s_commands_work_and_what_is_captured_is_not_shown(cells):
    assert cells.run("!echo hello").check().out.split() == ["hello"]
    assert cells.run("said = !echo one; echo two\nsaid[1]").check().plain == "'two'"
    assert cells.run("!exit 3\n_exit_code").check().plain == "3"
    assert "loop" in cells.run("%timeit -n1 -r1 1 + 1").check().out
    timed = cells.run("%%time\ny = 5\ny + 1").check()
    assert timed.plain == "6"
    assert "Wall time" in timed.out
    assert cells.run("y").check().plain == "5"
    assert cells.run("%env NBACCEL_TRY=1\nimport os\nos.environ['NBACCEL_TRY']").plain == "'1'"
    assert cells.run("%cd -q /\nos.getcwd()").check().plain == "'/'"
    cells.run("%cd -q -").check()
    assert cells.run("%%bash\necho from bash").check().out == "from bash\n"

    done = cells.run("%%capture caught\nprint('text')\ndisplay(5)\n7").check()
    assert (done.out, done.sent, done.value) == ("", [], None)
    done = cells.run("caught.stdout, [o.data['text/plain'] for o in caught.outputs]").check()
    assert done.plain == "('text\\n', ['5', '7'])"


@pytest.mark.parametrize("ask", ["len?", "?len", "%pinfo len"])
def test_help_is_shown_without_a_pager(cells, ask):
    done = cells.run(ask).check()
    (message,) = done.sent
    assert "number of items in a container" in message["content"]["data"]["text/plain"]


@pytest.mark.parametrize("text", ["%debug", "%%debug\n1", "%pdb on"])
def test_a_debugger_is_refused(cells, text):
    done = cells.run(text)
    assert done.error == "InputRefused"
    assert "worker 3 has no keyboard" in done.text


def test_names_live_in_the_main_module_and_await_works_at_the_top_and_in_loops(cells):
    done = cells.run(
        "import sys, pickle\n"
        "class Mine: pass\n"
        "Mine.__module__, globals() is vars(sys.modules['__main__']), __name__,"
        " type(pickle.loads(pickle.dumps(Mine()))) is Mine"
    ).check()
    assert done.plain == "('__main__', True, '__main__', True)"

    done = cells.run(
        "import asyncio\n"
        "async def twice(x):\n"
        "    await asyncio.sleep(0)\n"
        "    return 2 * x\n"
        "found = []\n"
        "for i in range(3):\n"
        "    found.append(await twice(i))\n"
        "later = asyncio.create_task(twice(21))\n"
        "found"
    ).check()
    assert done.plain == "[0, 2, 4]"
    assert cells.run("await later").check().plain == "42"
    assert cells.run("asyncio.run(twice(4))").check().plain == "8"


@pytest.mark.skipif(IPython.version_info < (9,), reason="IPython 8 makes its folders")
def test_no_thread_and_no_file_is_made(tmp_path):
    fresh = Cells(IPYTHONDIR=str(tmp_path / "none"))
    try:
        assert fresh.run("1").check().plain == "1"
        done = fresh.run("import threading, sqlite3\nlen(threading.enumerate())").check()
        assert done.plain == "1"
        assert not (tmp_path / "none").exists() or not list((tmp_path / "none").rglob("*"))
    finally:
        fresh.close()


def test_an_error_is_raised_from_the_line_that_the_user_sees(cells):
    cells.run("def divide():\n    return 1 / 0").check()
    inside = filename(cells.number)
    done = cells.run("\n\nx = 1\ndivide()")
    assert done.error == "ZeroDivisionError"
    assert done.frames == [[filename(cells.number), 5], [inside, 3]]
    assert done.out == done.err == "", "the notebook tells it, not the worker"
    assert cells.run("1 / 0", header="").frames == [[filename(cells.number), 1]]


@pytest.mark.parametrize(
    "text", ["%%time\nx = 1\n1 / 0", "%%capture\nx = 1\n1 / 0", "!echo \\\n hi\n1 / 0"]
)
def test_magics_do_not_shift_lines(cells, text):
    done = cells.run(text)
    assert done.error == "ZeroDivisionError"
    assert done.frames[-1] == [filename(cells.number), 4]


@pytest.mark.parametrize(
    ("text", "line", "code"),
    [
        ("x = 1\ny = (", 3, "y = ("),
        ("x = 1\nreturn 5", 3, "return 5"),
        ("if True:\nx", 3, "x"),
        ("\n\nx ==== 1", 4, "x ==== 1"),
    ],
)
def test_a_syntax_error_names_its_line(cells, text, line, code):
    done = cells.run(text)
    assert done.error in {"SyntaxError", "IndentationError"}
    assert (done.line, done.code.strip(), done.frames) == (line, code, [])
    assert done.out == done.err == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise SystemExit(3)", "SystemExit"),
        ("exit", "SystemExit"),
        ("quit()", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("%no_such_magic", "UsageError"),
        ("raise ExceptionGroup('two', [ValueError(1)])", "ExceptionGroup"),
    ],
)
def test_what_a_cell_raises_is_raised_as_it_is(cells, text, error):
    if error == "ExceptionGroup" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no exception groups")
    done = cells.run(text)
    assert (done.error, done.out, done.err) == (error, "", "")
    assert cells.run("'alive'").check().plain == "'alive'"


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.sleep(30)",
        "import asyncio\nawait asyncio.sleep(30)",
        "import asyncio\nawait asyncio.gather(asyncio.sleep(30), asyncio.sleep(30))",
    ],
)
def test_an_interrupt_ends_the_cell(cells, text):
    cells.number += 1
    done = cells.ask("interrupted", after=0.3, text=text, count=cells.number, header="")
    assert (done.error, done.out, done.err) == ("KeyboardInterrupt", "", "")
    assert cells.run("import asyncio\nawait asyncio.sleep(0, 'alive')").check().plain == "'alive'"


def test_a_failed_cell_keeps_nothing_alive(cells):
    cells.run(
        "import gc, weakref\n"
        "class Big: pass\n"
        "def fail():\n"
        "    global watched\n"
        "    big = Big()\n"
        "    watched = weakref.ref(big)\n"
        "    raise ValueError(1)\n"
        "gc.disable()"
    ).check()
    try:
        assert cells.run("fail()").error == "ValueError"
        assert cells.run("watched() is None").check().plain == "True"
    finally:
        cells.run("gc.enable()")


def test_warnings_name_the_cell_and_come_once_per_place_and_cell(cells):
    text = "import warnings\nfor _ in range(3):\n    warnings.warn('careful')"
    for _ in range(2):
        done = cells.run(text).check()
        assert done.err == (
            f"Cell In[{cells.number}], line 4: UserWarning: careful\n  warnings.warn('careful')\n"
        )


def test_displays_are_sent_and_figures_shown_at_the_end_of_the_cell(cells):
    done = cells.run(
        "from IPython.display import display, clear_output\n"
        "h = display('a', display_id='one')\nh.update('b')\nclear_output(wait=True)"
    ).check()
    first, second, third = done.sent
    assert first["content"]["transient"] == {"display_id": "one"}
    assert second["content"]["update"] is True
    assert third == {"kind": "ClearOutput", "wait": True}

    assert cells.run("import sys\n'matplotlib' in sys.modules").check().plain == "False"
    done = cells.run("import matplotlib.pyplot as plt\nplt.plot([1, 2]);").check()
    (message,) = done.sent
    assert "image/png" in message["content"]["data"]
    assert cells.run("1").check().sent == []


def test_widgets_and_bars_are_text(cells):
    done = cells.run("import ipywidgets\ndisplay(ipywidgets.IntSlider(7))\nipywidgets.IntText(8)")
    (message,) = done.check().sent
    assert list(message["content"]["data"]) == ["text/plain"]
    assert "IntSlider(value=7" in message["content"]["data"]["text/plain"]
    assert done.value["data"] == {"text/plain": "IntText(value=8)"}
    done = cells.run(
        "import tqdm.notebook\nfrom tqdm.auto import tqdm as auto\n"
        "for _ in tqdm.notebook.tqdm(range(3)): pass\n"
        "for _ in auto(range(2)): pass"
    ).check()
    assert "3/3" in done.err
    assert "2/2" in done.err
    assert done.sent == []


def test_names_attributes_keys_and_magics_are_completed(cells):
    cells.run(
        "from torch import nn\nmodel = nn.Sequential(nn.Linear(2, 2))\nkeys = {'alpha': 1}"
    ).check()
    codes = ["mod|el", "print(model.forw|ard", "keys['al|pha", "%time|it"]
    if IPython.version_info >= (9,):  # IPython 8 mistrusts `__getattr__`
        codes.append("model[0].weight.sha|pe")
    for code, _, rest in (code.partition("|") for code in codes):
        matches, start, end, types = cells.ask("complete", code=code).value
        assert any(code[:start] + match == code + rest for match in matches), code
        assert end == len(code)
        assert len(types) == len(matches)
    assert cells.ask("complete", code="nothing_of_this_na").value == [[], 18, 18, []]


def test_completing_runs_no_code_of_the_user_and_names_are_explained(cells):
    cells.run(
        "class Loud:\n"
        "    def __getattr__(self, name):\n"
        "        print('asked')\n"
        "        raise AttributeError(name)\n"
        "loud = Loud()\n"
        "def make():\n    print('called')"
    ).check()
    for code in ("loud.x.y", "make().x"):
        assert cells.ask("complete", code=code).out == ""

    cells.run("def explained():\n    '''Says what it is.'''\n    return 'source'").check()
    found = cells.ask("inspect", name="explained", detail=0).value
    assert "Says what it is." in found["text/plain"]
    found = cells.ask("inspect", name="explained", detail=1).value
    assert "return" in found["text/plain"]
    assert cells.ask("inspect", name="no_such_thing", detail=0).value is None


def test_without_ipython_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    with pytest.raises(MissingBackend, match="needs IPython"):
        make_shell(print, rank=0)


def in_a_child(act: Callable[[], str]) -> str:
    """What a forked child says: making a shell changes the process it is made in."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = "failed"
        try:
            told = act()
        finally:
            os.write(write, told.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return told


def test_a_kernel_s_shell_that_came_by_fork_is_replaced():
    def act() -> str:
        from ipykernel.zmqshell import ZMQInteractiveShell
        from IPython.core.interactiveshell import InteractiveShell

        old = ZMQInteractiveShell.__new__(ZMQInteractiveShell)
        InteractiveShell._instance = ZMQInteractiveShell._instance = old
        shell = make_shell(lambda message: None, rank=0)
        assert not ZMQInteractiveShell.initialized() or ZMQInteractiveShell._instance is not old
        value = shell.run(CellSource(text="get_ipython()", filename="a.py", cell=()))
        assert value is not None
        assert IPython.get_ipython() is not old
        return str(value["data"]["text/plain"])

    assert "WorkerShell" in in_a_child(act)


def test_figures_go_on_in_a_fork_of_a_process_that_has_drawn():
    def act() -> str:
        import matplotlib as mpl

        mpl.use("module://matplotlib_inline.backend_inline")
        mpl.interactive(True)  # as a kernel does
        from matplotlib import pyplot as plt

        plt.close(plt.figure())
        sent: list[Any] = []
        shell = make_shell(sent.append, rank=0)
        text = "from matplotlib import pyplot as p\np.plot([1]);"
        shell.run(CellSource(text=text, filename="a", cell=()))
        return ",".join(sent[0].content["data"])

    assert "image/png" in in_a_child(act)
