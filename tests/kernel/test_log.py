"""Warnings of workers, as a notebook shows them."""

from __future__ import annotations

import pytest

from tests.kernel.kernel import Kernel

pytestmark = pytest.mark.slow


def test_a_warning_of_all_ranks_is_seen_once_in_a_notebook(kernel: Kernel) -> None:
    cell = kernel.run(
        "from nbaccel import notebook_launcher\n"
        "def warn():\n"
        "    from nbaccel.base.log import get_logger\n"
        "    get_logger('nbaccel.x').warning('of all ranks')\n"
        "notebook_launcher(warn, num_processes=2)\n"
    )
    assert cell.error == ""
    assert cell.stdout.count("nbaccel: of all ranks") == 1, cell.stdout
    assert cell.stderr == ""
