"""`%%accelerate` cells with real workers, as a user of the notebook meets them."""

from __future__ import annotations

import re

import pytest

from tests import needs
from tests.kernel.kernel import Kernel
from tests.notebook.asking import START, complete, inspect, paged, shown, told


@pytest.fixture(scope="module")
def live(kernel: Kernel) -> Kernel:
    """Two workers that know their rank, for tests that keep them alive."""
    kernel.run(START).check()
    return kernel


def test_names_go_to_the_workers_and_stay_there_unless_out_asks_for_them(live):
    live.run("offset = 10").check()
    live.run("%%accelerate\nmine = rank + offset").check()
    assert shown(live.run("%%accelerate\nmine")) == ["[0] 10\n[1] 11"]
    assert shown(live.run("%%accelerate --ranks 1\nmine")) == ["11"]
    assert live.run("mine").error == "NameError", "a worker's name is not the notebook's"
    live.run("%%accelerate --out a,b\na, b = rank, 'same'").check()
    assert shown(live.run("a, b")) == ["([0, 1], ['same', 'same'])"]
    live.run("%%accelerate --ranks 1 --out a\na = rank * 7").check()
    assert shown(live.run("a")) == ["7"]


def test_pull_and_push(live):
    live.run("%%accelerate\nhere = [rank]").check()
    assert "Pulled here from ranks 0-1, a list by rank." in live.run("%accelerate pull here").text
    assert shown(live.run("here")) == ["[[0], [1]]"]
    assert shown(live.run("%%accelerate\nhere")) == ["[0] [0]\n[1] [1]"], "pulling sends nothing"
    live.run("%accelerate pull here --ranks 1").check()
    assert shown(live.run("here")) == ["[1]"]

    live.run("there = 'sent'").check()
    assert "Pushed there to rank 0:" in live.run("%accelerate push there --ranks 0").check().stdout
    assert shown(live.run("%%accelerate --ranks 0\nglobals()['there']")) == ["'sent'"]
    text = told(live.run("%accelerate push therre"))
    assert "Did you mean 'there'?" in " ".join(text.split())
    text = told(live.run("%accelerate pull her"))
    assert "her" in text


def test_a_value_in_the_line_magics_above_it_and_config_that_waits_for_a_restart(live):
    live.run("which = 1").check()
    assert shown(live.run("%%accelerate --ranks $which\nrank")) == ["1"]
    cell = live.run("%%time\n%%accelerate --ranks {which}\nrank")
    assert shown(cell) == ["1"]
    assert "Wall time" in cell.stdout

    text = live.run("%accelerate config --precision bf16").check().stdout
    assert "mixed_precision='bf16'" in text
    assert "The workers run with mixed_precision='no' until %accelerate restart." in text
    assert "2 CPU workers" in text
    assert shown(live.run("%%accelerate\n3")) == ["3"], "a cell without options runs as before"
    assert "until" not in live.run("%accelerate config --precision no").check().stdout

    live.run("%%accelerate\nimport warnings\nwarnings.warn('late')").check()
    displays = live.run("%accelerate report").check().displays
    # The board of workers may be shown anew, too.
    (output,) = [data for data in displays if " on 2 workers · " in data["text/plain"]]
    assert "No loop over batches was seen." in output["text/html"]
    assert "UserWarning: late" in output["text/html"]
    live.run("report = %accelerate report").check()
    assert live.run("print(report.facts.warnings[0].ranks)").check().stdout == "{0, 1}\n"


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-n 3", ("num_processes=2: got 3", "%accelerate restart -n 3 ")),
        (
            "-n 3 --precision bf16",
            ("mixed_precision='no': got 'bf16'", "%accelerate restart -n 3 --precision bf16 "),
        ),
        ("--no-share-back", ("share_back=True: got False", "restart --no-share-back ")),
        ("--dist", ("dist=False", "%accelerate restart --dist ")),
        ("--ranks 2", ("ranks are 0-1: got 2",)),
        ("--zero 2", ("zero_stage=None: got 2", "%accelerate restart --zero 2 ")),
    ],
)
def test_options_that_the_workers_do_not_have_are_refused(live, options, said):
    live.run("%%accelerate\nkept = 1").check()
    text = " ".join(told(live.run(f"%%accelerate {options}\nkept = 2")).split())
    for part in (f"1 %%accelerate {options}", *said):
        assert part in text
    assert shown(live.run("%%accelerate\nkept")) == ["1"]


@pytest.mark.parametrize(("above", "line"), [("", 4), ("\n\n", 6), ("%%time\n", 5)])
def test_an_error_shows_the_lines_of_the_cell_as_written(live, above, line):
    cell = live.run(f"{above}%%accelerate\ndef fail():\n    # here\n    return 1 / 0\nfail()")
    assert cell.error == "WorkerFailed[ZeroDivisionError]"
    text = told(cell)
    assert re.search(rf"Cell In\[\d+\], line {line}, in fail", text)
    assert re.search(rf"----> +{line}     return 1 / 0", text)
    assert re.search(rf"Cell In\[\d+\], line {line + 1}", text)
    assert shown(live.run("%%accelerate\nrank")) == ["[0] 0\n[1] 1"], "the workers live on"


def test_stop_ends_the_cell_and_the_workers_live_on(live):
    text = told(live.run("%%accelerate\nx = 1\ny = = 2"))
    assert "SyntaxError: invalid syntax" in text
    assert "line 3" in text
    running = live.begin("%%accelerate\nimport time\nprint('begun')\ntime.sleep(600)")
    live.until(running, "begun")
    live.interrupt()
    cell = live.finish(running)
    assert cell.error == "KeyboardInterrupt"
    assert re.search(r"Cell In\[\d+\], line 4", told(cell))
    assert shown(live.run("%%accelerate\nrank")) == ["[0] 0\n[1] 1"]


def test_names_of_workers_are_offered_and_explained(live):
    live.run(
        """%%accelerate
class Net:
    '''A net of the workers.'''
    depth = 3
worker_net = Net()
"""
    ).check()
    for code, offered in (
        ("%%accelerate\nworker_‸", "worker_net"),
        (
            "%%accelerate --ranks 0\nx = 1\nfor n in worker_net.d‸:\n    pass",
            "for n in worker_net.depth",
        ),
        ("%%time\n%%accelerate\nworker_n‸", "worker_net"),
        ("%accelerate pull wor‸", "%accelerate pull worker_net"),
        ("%%accelerate --out x,wor‸\nx = 1", "%%accelerate --out x,worker_net"),
    ):
        assert complete(live, code) == [offered]
    assert "A net of the workers." in inspect(live, "%%accelerate\nworker_net")["text/plain"]
    assert "A net of the workers." in paged(live, "worker_net?")
    assert inspect(live, "%%accelerate\nnobody_knows") == {}
    live.run("def own():\n    'The notebook has this.'").check()
    assert "The notebook has this." in inspect(live, "%%accelerate\nown")["text/plain"]
    assert "The notebook has this." in paged(live, "own?")
    live.run("worker_of_notebook = 1").check()
    offered = set(complete(live, "%%accelerate\nworker_‸"))
    assert offered >= {"worker_net", "worker_of_notebook"}
    assert complete(live, "worker_‸") == ["worker_of_notebook"]


def test_changed_source_is_loaded_again_on_request(live, tmp_path):
    module = tmp_path / "nb_edited.py"
    module.write_text("value = 1\n")
    live.run(
        "%%accelerate\n%load_ext autoreload\n%autoreload 2\n"
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport nb_edited"
    ).check()
    assert shown(live.run("%%accelerate\nnb_edited.value")) == ["1"]
    module.write_text("value = 1 + 1  # longer\n")
    assert shown(live.run("%%accelerate\nnb_edited.value")) == ["2"]
