"""What tests of several adapters share: a store, SeaweedFS where ``weed`` is installed, else moto."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from servers import S3Server


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    sys.path.append(str(Path(__file__).parents[1] / "stores"))
    from servers import Moto, SeaweedFS

    kind = Moto if SeaweedFS.missing() else SeaweedFS
    with kind(tmp_path_factory.mktemp("store")) as running:
        yield running


@pytest.fixture
def place(bucket_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a prefix in a new bucket; the environment leads to it."""
    from servers import use

    use(monkeypatch, bucket_server)
    return bucket_server.place()
