"""What several test files of managers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import events


@pytest.fixture
def heard() -> Iterator[list[events.Event]]:
    """Every event from here on, as it comes."""
    found: list[events.Event] = []
    remove = events.add_hook(found.append)
    yield found
    remove()
