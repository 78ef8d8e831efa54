"""Pools for tests: one that many share, and fresh ones for tests that break theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbaccel import Pool


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Pool, dict[str, Any]]]:
    """Two live workers, and the notebook's names that they serve."""
    names: dict[str, Any] = {}
    with Pool(2, namespace=names, dist=True) as pool:  # its ports are there from the start
        yield pool, names


@pytest.fixture
def pool(shared: tuple[Pool, dict[str, Any]]) -> Pool:
    return shared[0]


@pytest.fixture
def names(shared: tuple[Pool, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The notebook's names; emptied afterwards."""
    yield shared[1]
    shared[1].clear()


@pytest.fixture
def fresh() -> Iterator[Pool]:
    """Two workers of a pool that nobody else uses."""
    with Pool(2, namespace={}) as found:
        yield found
