"""The kernel that tests speak to does what they ask."""

from __future__ import annotations

import pytest

from tests.kernel.kernel import Kernel

pytestmark = pytest.mark.slow


def test_a_cell_right_after_an_error_is_run(kernel: Kernel) -> None:
    kernel.run("count = 0").check()
    for _ in range(50):
        assert kernel.run("1 / 0").error == "ZeroDivisionError"
        kernel.run("count += 1").check()
    assert kernel.run("print(count)").stdout == "50\n"
