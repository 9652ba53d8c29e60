"""Pools of processes, each started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.process_pool import ProcessPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[ProcessPool]:
    pool = ProcessPool(4)
    yield pool
    pool.stop()


@pytest.fixture
def two_ranks_with_store() -> Iterator[ProcessPool]:
    """The store lives in rank 0 and dies with it."""
    pool = ProcessPool(2, rank_0_hosts_store=True)
    yield pool
    pool.stop()
