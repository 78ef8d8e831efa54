"""`%load_ext nbaccel` costs nothing and can be taken back; workers begin and end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel, wait_for
from tests.notebook.asking import START, complete, shown, told

STATE = """
from IPython import get_ipython
shell = get_ipython()
def state():
    return {
        "line": "accelerate" in shell.magics_manager.magics["line"],
        "cell": "accelerate" in shell.magics_manager.magics["cell"],
        "completions": "completions" in vars(shell.Completer),
        "cleanup": len(shell.input_transformers_cleanup),
        "events": len(shell.events.callbacks["pre_run_cell"]),
        "hidden": sorted({"object_inspect_mime", "_inspect"} & set(vars(shell))),
    }
before = state()
"""


@pytest.fixture(scope="module")
def own() -> Iterator[Kernel]:
    """A kernel that the tests below may spoil."""
    found = Kernel()
    try:
        yield found
    finally:
        found.close()


@pytest.mark.slow
def test_loading_wakes_no_torch_and_unloading_leaves_nothing(own):
    own.run(STATE).check()
    own.run("import nbaccel").check()
    for code, name in (("%%accelerate -n 2\n1", "%%accelerate"), ("%accelerate status", "%acc")):
        cell = own.run(code)
        assert cell.error == "UserMistake"
        text = said(cell.traceback)
        assert name in text
        assert "Run %load_ext nbaccel in a cell of its own, then this cell again." in text
    own.run("%load_ext nbaccel").check()
    assert own.run("import sys; print('torch' in sys.modules)").stdout == "False\n"
    assert len(own.descendants()) == 1, "the template alone"
    assert own.run("print(sum(state()[k] != before[k] for k in before))").stdout == "6\n"

    assert "already loaded" in own.run("%load_ext nbaccel").check().stdout
    own.run("%reload_ext nbaccel").check()
    assert complete(own, "%accelerate rest‸") == ["%accelerate restart"]
    assert "No workers yet" in own.run("%accelerate").check().stdout
    own.run("import nbaccel; nbaccel.load_ipython_extension(shell)").check()
    assert own.run("print(state()['completions'])").stdout == "True\n"

    own.run(START).check()
    assert len(own.workers()) == 2
    own.run("%unload_ext nbaccel").check()
    assert own.run("print(state() == before)").stdout == "True\n"
    assert "not found" in own.run("%%accelerate\n1").stderr
    assert wait_for(lambda: not own.descendants())


def test_workers_from_start_to_end(own):
    own.run("%load_ext nbaccel").check()
    own.run(START).check()
    own.run("%%accelerate\nlost = 1").check()
    own.run("%accelerate restart --dist").check()
    cell = own.run("%%accelerate\nimport torch.distributed as dist\ndist.is_initialized()")
    assert shown(cell) == ["True"]
    assert "NameError" in told(own.run("%%accelerate\nlost"))

    assert own.run("%accelerate stop").check().stdout == "Workers stopped.\n"
    assert own.run("%accelerate stop").check().stdout == "There are no workers to stop.\n"
    assert "No workers yet" in own.run("%accelerate").check().stdout
    own.run(START.replace(" -n 2", "")).check()  # the settings are kept
    assert shown(own.run("%%accelerate\nrank")) == ["[0] 0\n[1] 1"]

    cell = own.run("%%accelerate\nimport signal\nif rank: os.kill(os.getpid(), signal.SIGKILL)")
    assert cell.error == "WorkerDied"
    text = told(own.run("%accelerate pull rank"))
    assert "there are none (rank 1 was killed by SIGKILL" in " ".join(text.split())
    cell = own.run(START.replace("-n 2", "-n 3")).check()
    assert "3 new workers started, because rank 1 was killed by SIGKILL" in cell.stdout

    own.run("%accelerate restart -n 1").check()
    own.run("%%accelerate --out all_of_them\nall_of_them = 5").check()
    own.run("%%accelerate --ranks 0 --out the_first\nthe_first = 6").check()
    assert shown(own.run("all_of_them, the_first")) == ["([5], 6)"]
    own.run("%accelerate pull all_of_them --ranks 0").check()
    assert shown(own.run("all_of_them")) == ["5"]

    left = own.descendants()
    assert len(own.workers()) == 1
    own.client.shutdown()  # as JupyterLab ends a kernel, or begins to start it anew
    assert wait_for(lambda: not any(process.is_running() for process in left))


def said(lines: list[str]) -> str:
    return " ".join("\n".join(lines).split())


@pytest.fixture
def idle(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel of this package, without workers before and after."""
    kernel.run("%accelerate stop").check()
    yield kernel
    kernel.run("%accelerate stop").check()


def test_comments_above_the_magic_names_of_workers_figures_and_whole_tracebacks(idle):
    idle.run("# how many\n\n# two\n%%accelerate -n 2\nkept = 3; losses = [0.5]").check()
    assert "4" in str(idle.run("# once more\n%%accelerate\nkept + 1").check().displays)
    cell = idle.run("# a comment\n%%accelerate\n\n1 / 0")
    assert cell.error.startswith("WorkerFailed")
    assert "line 4, in <module>" in said(cell.traceback)
    idle.run("# no magic of ours\nx = 1").check()

    cell = idle.run("print(losses)")
    assert cell.error == "NameError"
    assert "losses exists in the workers of %%accelerate" in cell.stdout
    assert "%accelerate pull losses" in cell.stdout
    other = idle.run("print(nowhere)")
    assert other.error == "NameError"
    assert "exists in the workers" not in other.stdout

    cell = idle.run(
        "%%accelerate\nimport os\nimport matplotlib.pyplot as plt\n"
        "if os.environ['RANK'] == '0': plt.plot([1, 2])"
    ).check()
    assert any("image/png" in shown for shown in cell.displays)
    again = idle.run("%%accelerate\nlines = plt.get_fignums()\nlines").check()
    assert "[]" in str(again.displays)

    failing = (
        "%%accelerate\n"
        "import os, json\n"
        "def load(text):\n"
        "    return json.loads(text)\n"
        "if os.environ['RANK'] == '1':\n"
        "    load('nothing')\n"
        "import time; time.sleep(60)"
    )
    shown = said(idle.run(failing).traceback)
    assert "The whole traceback: %accelerate traceback" in shown
    assert "%debug cannot enter a worker" in shown
    text = idle.run("%accelerate traceback").check().stdout
    assert text.index("rank 1:") < text.index("rank 0:")
    for part in ("json/decoder.py", "return json.loads(text)", "JSONDecodeError", "time.sleep(60)"):
        assert part in text


def test_a_launch_of_one_worker_can_be_debugged_here(idle):
    idle.run("import nbaccel, sys\ndef train(x):\n    y = x / 0\n    return y").check()
    assert idle.run("nbaccel.notebook_launcher(train, (3,), num_processes=1)").error
    code = (
        "tb = sys.last_traceback\n"
        "while tb.tb_next: tb = tb.tb_next\n"
        "print(tb.tb_frame.f_code.co_name, tb.tb_frame.f_locals)"
    )
    assert idle.run(code).check().stdout == "train {'x': 3}\n"
