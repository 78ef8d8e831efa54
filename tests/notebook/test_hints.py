"""Where a notebook's error has a way out that lies in a magic, the way is shown: a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel


def said(lines: list[str]) -> str:
    return " ".join("\n".join(lines).split())


@pytest.fixture
def own(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel of this package, without workers before and after."""
    kernel.run("%accelerate stop").check()
    yield kernel
    kernel.run("%accelerate stop").check()


@pytest.mark.slow
def test_the_magics_before_the_extension_say_how_to_load_it() -> None:
    own = Kernel()
    try:
        _before_and_after_the_extension(own)
    finally:
        own.close()


def _before_and_after_the_extension(own: Kernel) -> None:
    own.run("import nbaccel").check()
    for code, name in (("%%accelerate -n 2\n1", "%%accelerate"), ("%accelerate status", "%acc")):
        cell = own.run(code)
        assert cell.error == "UserMistake"
        text = said(cell.traceback)
        assert f"{name}" in text
        assert "Run %load_ext nbaccel in a cell of its own, then this cell again." in text
    told = said(own.run("nbaccel.notebook_launcher(lambda: 1 / 0, num_processes=2)").traceback)
    assert "%accelerate traceback" not in told
    own.run("%load_ext nbaccel").check()
    assert "No workers yet" in own.run("%accelerate status").check().stdout


def test_a_comment_may_stand_above_the_magic(own: Kernel) -> None:
    own.run("# how many\n\n# two\n%%accelerate -n 2\nkept = 3").check()
    assert "4" in str(own.run("# once more\n%%accelerate\nkept + 1").check().displays)
    cell = own.run("# a comment\n%%accelerate\n\n1 / 0")
    assert cell.error.startswith("WorkerFailed")
    assert "line 4, in <module>" in said(cell.traceback)
    own.run("# no magic of ours\nx = 1").check()


def test_a_name_that_only_workers_have(own: Kernel) -> None:
    own.run("%%accelerate -n 2\nlosses = [0.5]").check()
    cell = own.run("print(losses)")
    assert cell.error == "NameError"
    assert "losses exists in the workers of %%accelerate" in cell.stdout
    assert "%accelerate pull losses" in cell.stdout
    other = own.run("print(nowhere)")
    assert other.error == "NameError"
    assert "exists in the workers" not in other.stdout


def test_help_is_a_word_too(own: Kernel) -> None:
    text = own.run("%accelerate help").check().stdout
    for word in ("status", "restart", "pull NAME...", "traceback", "--ranks"):
        assert word in text


def test_the_whole_traceback_of_all_ranks(own: Kernel) -> None:
    failing = (
        "%%accelerate -n 2\n"
        "import os, json\n"
        "def load(text):\n"
        "    return json.loads(text)\n"
        "if os.environ['RANK'] == '1':\n"
        "    load('nothing')\n"
        "import time; time.sleep(60)"
    )
    shown = said(own.run(failing).traceback)
    assert "The whole traceback: %accelerate traceback" in shown
    assert "%debug cannot enter a worker" in shown
    text = own.run("%accelerate traceback").check().stdout
    assert text.index("rank 1:") < text.index("rank 0:")
    for part in ("json/decoder.py", "return json.loads(text)", "JSONDecodeError", "time.sleep(60)"):
        assert part in text
    assert "\x1b[" in text, "coloured"


def test_the_traceback_of_a_launch_that_took_too_long(own: Kernel) -> None:
    own.run("import nbaccel\ndef slow():\n    import time\n    time.sleep(600)").check()
    assert own.run("nbaccel.notebook_launcher(slow, (), 2, timeout=2)").error == "LaunchTimeout"
    text = own.run("%accelerate traceback").check().stdout
    assert text.count("time.sleep(600)") == 2


def test_a_launch_of_one_worker_can_be_debugged_here(own: Kernel) -> None:
    own.run("import nbaccel, sys\ndef train(x):\n    y = x / 0\n    return y").check()
    assert own.run("nbaccel.notebook_launcher(train, (3,), num_processes=1)").error
    code = (
        "tb = sys.last_traceback\n"
        "while tb.tb_next: tb = tb.tb_next\n"
        "print(tb.tb_frame.f_code.co_name, tb.tb_frame.f_locals)"
    )
    assert own.run(code).check().stdout == "train {'x': 3}\n"


def test_figures_of_a_live_cell_are_shown_at_its_end(own: Kernel) -> None:
    cell = own.run(
        "%%accelerate -n 2\nimport os\nimport matplotlib.pyplot as plt\n"
        "if os.environ['RANK'] == '0': plt.plot([1, 2])"
    ).check()
    assert any("image/png" in shown for shown in cell.displays)
    again = own.run("%%accelerate\nlines = plt.get_fignums()\nlines").check()
    assert "[]" in str(again.displays)
