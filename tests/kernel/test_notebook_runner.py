"""`notebooks/run.py`, which `make demo` uses: it prints what a person at the notebook would see."""

from __future__ import annotations

import sys

import nbformat
import pytest

from tests.house.source import ROOT
from tests.programs import run_program


@pytest.mark.slow
def test_everything_a_cell_shows_is_printed_and_saved_where_asked(tmp_path):
    path = tmp_path / "test.ipynb"

    def run(*sources, options=()):
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        command = [sys.executable, "notebooks/run.py", str(path), "--label", "try", *options]
        return run_program(command, cwd=ROOT, check=False)

    done = run(
        "print('printed')\n'returned'",
        "handle = display('first', display_id=True)\nhandle.update('second')",
    )
    assert done.stdout.splitlines()[:4] == ["printed", "'returned'", "'first'", "'second'"]
    assert done.stdout.splitlines()[-1].startswith("try: ok in ")
    assert done.returncode == 0
    assert not nbformat.read(path, 4).cells[0].outputs
    assert run("print(6 * 7)", options=["--save"]).returncode == 0
    assert nbformat.read(path, 4).cells[0].outputs[0].text == "42\n"

    # A cell that raises ends the run.
    done = run("1 / 0", "print('after')")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "after" not in done.stdout
    assert done.stderr.splitlines()[-1] == "try: failed"
