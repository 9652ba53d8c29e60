"""Groups of tests that share a worker, and how much hypothesis may try."""

from __future__ import annotations

import os

import hypothesis
import pytest

# No deadline: on a machine shared with other work, a slow example says nothing about the code.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
# In CI the same examples every time, so that a red run can be repeated.
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

ONE_WORKER_MARKERS = ("multiprocess", "browser")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that start processes of their own on one worker each, so they do not compete."""
    for item in items:
        for name in ONE_WORKER_MARKERS:
            if item.get_closest_marker(name) and not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(name))
