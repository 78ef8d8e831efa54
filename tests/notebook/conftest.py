"""A kernel with the extension, for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel


@pytest.fixture(scope="package")
def kernel() -> Iterator[Kernel]:
    found = Kernel()
    try:
        found.run("%load_ext nbaccel").check()
        yield found
    finally:
        found.close()
