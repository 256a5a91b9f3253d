"""The published suite for storages, run on `ObjectStorage` on real servers, by obstore, by fsspec and by MSC."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore
from holdfast.storage.protocol import Storage
from holdfast.testing.storage_conformance import OBJECT_CHECKS


@pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__)
def test_storage_contract(check: Callable[[Storage], None], store: ObjectStore) -> None:
    check(ObjectStorage(store))


@pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__)
def test_storage_contract_by_other_packages(check: Callable[[Storage], None], away: str) -> None:
    check(open_storage(away))
