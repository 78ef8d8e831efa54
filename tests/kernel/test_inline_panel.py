"""One process, in the notebook itself: loops are rows of the panel, not bars among the prints."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel

BARS = """
import contextlib, io, logging, os, sys, time, warnings
import torch
from tqdm import tqdm
from nbaccel import Accelerator, notebook_launcher

def train_with_bars(num_epochs=4, fails=False, seconds=0.03):
    for epoch in tqdm(range(num_epochs), desc="epochs"):
        for step in tqdm(range(20), leave=False):
            time.sleep(seconds)
            if fails and step == 10:
                raise ValueError("no labels")

def stream_state():
    write = vars(sys.stderr).get("write")  # others keep what changes with each text
    return sys.stderr, write, sys.stderr.isatty(), sys.stderr.encoding
"""
ENDS = re.compile(r"epoch (\d) of 4, ([\d.]+) s left")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as found:
        found.run(BARS).check()
        yield found


def test_bars_of_tqdm_are_in_the_panel_and_leave_no_stderr(kernel):
    cell = kernel.run(
        """
        before = stream_state()
        notebook_launcher(train_with_bars, (4, False, 0.06), num_processes=1)
        print(stream_state() == before)
        """
    ).check()
    assert (cell.stderr, cell.stdout) == ("", "True\n")
    assert not any(cell.displays[0].values()), "the place is kept before anything is printed"
    *live, summary = [display["text/plain"] for display in cell.displays if any(display.values())]
    told = [(int(found[1]), float(found[2])) for text in live if (found := ENDS.search(text))]
    assert len(told) >= 2, live
    assert told == sorted(told, key=lambda seen: (seen[0], -seen[1]))
    assert "epochs, 25 % (1 of 4)" in "".join(live)
    assert "epochs, 4 of 4" in cell.displays[-1]["text/html"]
    assert "1 rank" in summary


def test_other_text_on_stderr_comes_through_in_order(kernel):
    kernel.run(
        """
        logger = logging.Logger("mine")
        logger.addHandler(logging.StreamHandler())  # it holds the stream of before the launch
        held_stream = sys.stderr
        def speak():
            with tqdm(total=3, mininterval=0) as bar:
                for step in range(3):
                    bar.update()
                    print("printed", step, file=sys.stderr)
                    logger.error("logged %d", step)
                    held_stream.write(f"held {step}\\n")
                    tqdm.write(f"said {step}", file=sys.stderr)
                    warnings.warn(f"warned {step}")
                    with contextlib.redirect_stderr(io.StringIO()) as other_stream:
                        print("not seen", file=sys.stderr)
                    assert other_stream.getvalue() == "not seen\\n"
        """
    ).check()
    cell = kernel.run("notebook_launcher(speak, num_processes=1)").check()
    words = re.findall(r"(printed|logged|held|said|warned) (\d)", cell.stderr)
    kinds = ("printed", "logged", "held", "said", "warned")
    # The text of a warning has its line of code, which is the cell's.
    in_order = [(kind, str(step)) for step in range(3) for kind in kinds]
    assert [found for found in words if found[1].isdigit()] == in_order, cell.stderr
    assert "it/s" not in cell.stderr
    assert "%|" not in cell.stderr
    assert "\r" not in cell.stderr


@pytest.mark.parametrize("ending", ["failed", "stopped"])
def test_a_launch_that_ends_early_restores_the_stream(kernel, ending):
    arguments = "(1, True)" if ending == "failed" else "(1, False, 60)"
    running = kernel.begin(
        f"""
        before = stream_state()
        try:
            notebook_launcher(train_with_bars, {arguments}, num_processes=1)
        finally:
            print(stream_state() == before)
        """
    )
    if ending == "stopped":
        while not running[1].displays:
            kernel.look(running)
        kernel.interrupt()
    cell = kernel.finish(running)
    assert cell.error == {"failed": "ValueError", "stopped": "KeyboardInterrupt"}[ending]
    assert cell.stdout == "True\n"
    assert cell.stderr == ""
    assert f"{ending} after" in cell.displays[-1]["text/plain"]
    assert "epochs, 0 of 1" in cell.displays[-1]["text/html"]
    assert kernel.run("print('as ever', file=sys.stderr)").check().stderr == "as ever\n"
    # With the next error the last traceback goes, and the bars that it has kept alive.
    assert kernel.run("import gc; 1 / 0").stderr == ""
    assert kernel.run("gc.collect()").check().stderr == ""


def test_widgets_stay_the_users_own_and_tell_what_is_left(kernel):
    cell = kernel.run(
        """
        def train_with_widgets():
            from tqdm.notebook import tqdm
            accelerator = Accelerator()
            for epoch in tqdm(range(4), desc="epochs"):
                for step in tqdm(range(20), leave=False):
                    time.sleep(0.03)
                    accelerator.log({"loss": 1 / (1 + step)})
        notebook_launcher(train_with_widgets, num_processes=1)
        """
    ).check()
    assert (cell.stderr, cell.stdout) == ("", "")
    view = "application/vnd.jupyter.widget-view+json"
    assert len([display for display in cell.displays if view in display]) == 5
    assert not any(cell.displays[0].values()), "the panel's place is above them"
    panels = [display for display in cell.displays if "1 rank" in display.get("text/plain", "")]
    told = [ENDS.search(display["text/plain"]) for display in panels[:-1]]
    assert len(told) >= 2, panels
    assert all(told), panels
    assert not any("epochs" in display["text/html"] for display in panels), "a bar is drawn once"


def test_processes_of_a_loader_write_to_the_cell(kernel):
    """They are forked, and have the stream, but not the panel."""
    kernel.run(
        """
        class Rows(torch.utils.data.Dataset):
            def __len__(self): return 2
            def __getitem__(self, row):
                list(tqdm(range(3), desc=f"row {row}"))
                return row
        def load():
            loader = torch.utils.data.DataLoader(
                Rows(), num_workers=1, multiprocessing_context="fork"
            )
            for row in tqdm(loader, desc="loop"):
                pass
            return os.getpid()
        """
    ).check()
    cell = kernel.run("print(notebook_launcher(load, num_processes=1) == [os.getpid()])").check()
    assert cell.stdout == "True\n"
    assert "row 0: 100%" in cell.stderr
    assert "row 1: 100%" in cell.stderr
    assert "loop" not in cell.stderr
    assert "loop, 2 of 2" in cell.displays[-1]["text/html"]


def test_without_a_panel_bars_are_drawn_as_ever_and_captured_the_panel_has_them(kernel):
    cell = kernel.run("notebook_launcher(print, ('hello',), num_processes=1);")
    assert (cell.stdout, cell.displays) == ("hello\n", [])
    cell = kernel.run(
        """
        os.environ["NBACCEL_DASHBOARD"] = "0"
        before = stream_state()
        def look():
            list(tqdm(range(3), desc="plain"))
            assert stream_state() == before
        notebook_launcher(look, num_processes=1)
        del os.environ["NBACCEL_DASHBOARD"]
        """
    ).check()
    assert "plain: 100%" in cell.stderr
    assert cell.displays == []
    kernel.run(
        """\
        %%capture captured
        def talk():
            for step in tqdm(range(3), desc="loop"):
                print("printed", step, file=sys.stderr)
        notebook_launcher(talk, num_processes=1)
        """
    ).check()
    told = kernel.run(
        "print(captured.stderr, [o.data['text/html'] for o in captured.outputs[:-1]][-1])"
    ).check()
    assert told.stdout.startswith("printed 0\nprinted 1\nprinted 2\n ")
    assert "loop, 3 of 3" in told.stdout
