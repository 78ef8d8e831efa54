"""The shell of this process, asked for by whatever is called while IPython is being imported."""

from __future__ import annotations

import sys

from tests.programs import run_program

ASKED_BY_EACH_IMPORT = """
import sys
from nbaccel.base.frames import running_shell

class Asking:
    found = []

    def find_spec(self, name, path=None, target=None):
        if "IPython" in sys.modules and name.startswith("IPython."):
            self.found.append(running_shell())

sys.meta_path.insert(0, Asking())
import IPython
assert Asking.found
assert set(Asking.found) == {None}, Asking.found
"""


def test_there_is_no_shell_while_ipython_is_being_imported():
    run_program([sys.executable, "-c", ASKED_BY_EACH_IMPORT])
