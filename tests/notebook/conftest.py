"""A kernel with the extension, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.kernel import Kernel


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    found = Kernel()
    try:
        found.run("%load_ext nbaccel").check()
        yield found
    finally:
        found.close()
