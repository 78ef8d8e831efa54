"""`%load_ext nbaccel` costs nothing and can be taken back; workers begin and end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel, wait_for
from tests.notebook.asking import START, complete, inspect, shown, told

STATE = """
from IPython import get_ipython
shell = get_ipython()
def state():
    return {
        "line": "accelerate" in shell.magics_manager.magics["line"],
        "cell": "accelerate" in shell.magics_manager.magics["cell"],
        "matchers": len(shell.Completer.custom_matchers) + ("_complete" in vars(shell.Completer)),
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
def test_loading_wakes_no_torch_and_unloading_leaves_nothing(own: Kernel) -> None:
    own.run(STATE).check()
    own.run("%load_ext nbaccel").check()
    assert own.run("import sys; print('torch' in sys.modules)").stdout == "False\n"
    assert len(own.descendants()) == 1, "the template alone"
    assert own.run("print(sum(state()[k] != before[k] for k in before))").stdout == "6\n"

    assert "already loaded" in own.run("%load_ext nbaccel").check().stdout
    own.run("%reload_ext nbaccel").check()
    assert complete(own, "%accelerate rest‸") == ["%accelerate restart"]
    assert "No workers yet" in own.run("%accelerate").check().stdout
    assert "Docstring" in inspect(own, "%%accelerate")["text/plain"]
    own.run("import nbaccel; nbaccel.load_ipython_extension(shell)").check()
    assert own.run("print(state()['matchers'] - before['matchers'])").stdout == "1\n"

    own.run(START).check()
    assert len(own.workers()) == 2
    own.run("%unload_ext nbaccel").check()
    assert own.run("print(state() == before)").stdout == "True\n"
    assert "not found" in own.run("%%accelerate\n1").stderr
    assert wait_for(lambda: not own.descendants())


def test_workers_from_start_to_end(own: Kernel) -> None:
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


@pytest.mark.slow
def test_what_starts_workers_is_imported_once_the_notebook_has_torch() -> None:
    asks = "import sys; print('torch' in sys.modules, 'nbaccel.calls.pool' in sys.modules)"
    fresh = Kernel()
    try:
        fresh.run("%load_ext nbaccel").check()
        assert fresh.run(asks).stdout == "False False\n"
        fresh.run("import torch").check()
        assert fresh.run(asks).stdout == "True True\n"
        ours = (
            "print(*sorted(c.__module__.rpartition('.')[2] + '.' + c.__qualname__ "
            "for c in get_ipython().events.callbacks['post_run_cell']))"
        )
        # That of the extension, which waited for torch, has had its turn.
        assert fresh.run(ours).stdout.split() == [
            *("changed_packages._after_cell", "extension.hint_after_cells.<locals>.on_cell_end"),
            "template._after_cell",
        ]
    finally:
        fresh.close()
