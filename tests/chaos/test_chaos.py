"""Some moments of chaos; `python -m tests.chaos` lives through hundreds of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.harness import chaos, faults

pytestmark = pytest.mark.slow

MOMENTS = 14


def test_nothing_is_torn_and_nothing_is_silent(tmp_path: Path) -> None:
    with chaos(tmp_path, seed=13) as found:
        found.run(MOMENTS)
    assert len(found.moments) == MOMENTS
    assert not faults(found.moments), "\n".join(faults(found.moments))
