"""`%load_ext nbaccel` costs nothing and can be taken back."""

from __future__ import annotations

from tests.kernel.kernel import Kernel, wait_for
from tests.notebook.asking import complete, inspect

STATE = """
from IPython import get_ipython
shell = get_ipython()
def state():
    return {
        "line": "accelerate" in shell.magics_manager.magics["line"],
        "cell": "accelerate" in shell.magics_manager.magics["cell"],
        "matchers": len(shell.Completer.custom_matchers),
        "cleanup": len(shell.input_transformers_cleanup),
        "events": len(shell.events.callbacks["pre_run_cell"]),
        "hidden": sorted({"object_inspect_mime", "_inspect"} & set(vars(shell))),
    }
before = state()
"""


def test_loading_wakes_no_torch_and_unloading_leaves_nothing() -> None:
    kernel = Kernel()
    try:
        kernel.run(STATE).check()
        kernel.run("%load_ext nbaccel").check()
        assert kernel.run("import sys; print('torch' in sys.modules)").stdout == "False\n"
        assert len(kernel.descendants()) == 1, "the template alone"
        assert kernel.run("print(sum(state()[k] != before[k] for k in before))").stdout == "6\n"

        assert "already loaded" in kernel.run("%load_ext nbaccel").check().stdout
        kernel.run("%reload_ext nbaccel").check()
        assert complete(kernel, "%accelerate rest‸") == ["%accelerate restart"]
        assert "No workers yet" in kernel.run("%accelerate").check().stdout
        assert "Docstring" in inspect(kernel, "%%accelerate")["text/plain"]
        kernel.run("import nbaccel; nbaccel.load_ipython_extension(shell)").check()
        assert kernel.run("print(state()['matchers'] - before['matchers'])").stdout == "1\n"

        kernel.run("%unload_ext nbaccel").check()
        assert kernel.run("print(state() == before)").stdout == "True\n"
        assert "not found" in kernel.run("%%accelerate\n1").stderr
        assert wait_for(lambda: not kernel.descendants())
    finally:
        kernel.close()
