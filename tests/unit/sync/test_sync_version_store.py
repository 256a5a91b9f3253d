"""The store of versions in host memory: what it keeps, whom it serves, and how much memory it takes."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from holdfast.boxes import whole
from holdfast.errors import CheckpointNotFound, ConfigError
from holdfast.staging.image import Image
from holdfast.sync.weights import version_store
from holdfast.sync.weights.buckets import Piece
from holdfast.sync.weights.pieces import Local
from holdfast.sync.weights.version_store import StoredVersion, VersionStore

TABLE = (
    Piece("w", "float32", (3, 2), (1, 0), (2, 2)),
    Piece("flag", "bool", (), (), ()),
    Piece("none", "int8", (0, 3), (0, 0), (0, 3)),
    Piece("fp8", "float8_e4m3fn", (300,), (0,), (300,)),
)


def pieces(number: int) -> list[Local]:
    tensors = [
        torch.full((2, 2), float(number)).t(),
        torch.tensor(number % 2 == 0),
        torch.zeros((0, 3), dtype=torch.int8),
        torch.full((300,), float(number % 7)).to(torch.float8_e4m3fn),
    ]
    return [Local(piece.box, tensor) for piece, tensor in zip(TABLE, tensors, strict=True)]


def number_in(stored: StoredVersion) -> int:
    """What `pieces` made it of, if all of it is of one."""
    assert stored.table == TABLE
    number = int(stored.locals[0].tensor[0, 0])
    for kept, given in zip(stored.locals, pieces(number), strict=True):
        assert kept.box == given.box
        assert torch.equal(kept.tensor.float(), given.tensor.float())
    return number


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Image]]:
    """All blocks of memory that the store has asked for."""
    made: list[weakref.ref[Image]] = []

    class Counted(Image):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append(weakref.ref(self))

    monkeypatch.setattr(version_store, "Image", Counted)
    return made


def alive(images: list[weakref.ref[Image]]) -> int:
    return sum(image() is not None for image in images)


def test_versions_are_copies() -> None:
    store = VersionStore()
    given = pieces(5)
    store.stage(1, TABLE, given)
    given[0].tensor.zero_()
    with store.reading(1) as stored:
        assert (stored.version, number_in(stored)) == (1, 5)


def test_the_newest_are_kept_in_memory_that_is_used_again(images: list[weakref.ref[Image]]) -> None:
    store = VersionStore(keep_versions=3)
    for version in range(10):
        store.stage(version, TABLE, pieces(version))
    assert store.versions == (7, 8, 9)
    assert len(images) == 3
    for version in store.versions:
        with store.reading(version) as stored:
            assert number_in(stored) == version


def test_one_version_takes_two_blocks(images: list[weakref.ref[Image]]) -> None:
    store = VersionStore(keep_versions=1)
    for version in range(5):
        store.stage(version, TABLE, pieces(version))
        assert store.versions == (version,)
    assert len(images) == 2


def test_pinned_versions_stay_until_they_are_not(images: list[weakref.ref[Image]]) -> None:
    store = VersionStore(keep_versions=2)
    store.stage(0, TABLE, pieces(0))
    store.pin(0)
    store.pin(0)
    for version in range(1, 6):
        store.stage(version, TABLE, pieces(version))
    assert store.versions == (0, 4, 5)
    assert len(images) == 3
    store.unpin(0)
    assert store.versions == (4, 5)
    store.unpin(0)
    store.stage(6, TABLE, pieces(6))
    assert store.versions == (5, 6)
    assert alive(images) <= 3
    with store.reading(6) as stored:
        assert number_in(stored) == 6


def test_the_newest_is_never_evicted() -> None:
    store = VersionStore(keep_versions=1)
    store.stage(3, TABLE, pieces(3))
    store.pin(3)
    store.unpin(3)
    assert store.versions == (3,)


def test_a_version_that_is_read_outlives_its_eviction(images: list[weakref.ref[Image]]) -> None:
    store = VersionStore(keep_versions=1)
    store.stage(0, TABLE, pieces(0))
    with store.reading(0) as stored, store.reading(0):
        for version in range(1, 4):
            store.stage(version, TABLE, pieces(version))
        assert store.versions == (3,)
        assert number_in(stored) == 0
        with pytest.raises(CheckpointNotFound), store.reading(0):
            pass
    assert len(images) == 3
    for version in range(4, 9):
        store.stage(version, TABLE, pieces(version))
    assert len(images) == 3
    assert alive(images) == 2  # one is enough beside the version that is kept


def test_what_was_evicted_is_not_found_and_what_is_to_come_is_not_there_yet() -> None:
    store = VersionStore(keep_versions=2)
    assert store.find() is None
    assert store.find(4) is None
    for version in (2, 4, 6, 8):
        store.stage(version, TABLE, pieces(version))
    assert (store.find(), store.find(6), store.find(9)) == (8, 6, None)
    assert (store.find(newer_than=6), store.find(newer_than=8)) == (8, None)
    for gone in (1, 2, 5, 7):
        with pytest.raises(CheckpointNotFound, match=rf"version {gone} is not kept: .* has 6, 8,") as caught:
            store.find(gone)
        assert caught.value.step == gone
    with pytest.raises(CheckpointNotFound, match="version 4"):
        store.pin(4)


def test_versions_only_go_up() -> None:
    store = VersionStore()
    store.stage(4, TABLE, pieces(4))
    for version in (4, 3):
        with pytest.raises(ConfigError, match=f"version {version} isn't greater than 4"):
            store.stage(version, TABLE, pieces(0))
        with pytest.raises(ConfigError, match=f"version {version} isn't greater than 4"):
            store.add(version, TABLE, pieces(0), lambda: None)
    with store.reading(4) as stored:
        assert number_in(stored) == 4


def test_staging_that_fails_leaves_no_half_version(images: list[weakref.ref[Image]]) -> None:
    store = VersionStore(keep_versions=2)
    store.stage(1, TABLE, pieces(1))
    wrong = pieces(2)
    wrong[0] = Local(TABLE[0].box, torch.zeros(3, 5))
    with pytest.raises(RuntimeError):
        store.stage(2, TABLE, wrong)
    assert store.versions == (1,)
    store.stage(2, TABLE, pieces(2))
    with store.reading(2) as new, store.reading(1) as old:
        assert (number_in(new), number_in(old)) == (2, 1)
    assert len(images) == 2


def test_another_structure_takes_other_memory(images: list[weakref.ref[Image]]) -> None:
    store = VersionStore(keep_versions=2)
    store.stage(0, TABLE, pieces(0))
    store.stage(1, TABLE, pieces(1))
    large = (Piece("x", "uint8", (10_000,), (0,), (10_000,)),)
    value = torch.arange(10_000).to(torch.uint8)
    for version in range(2, 6):
        store.stage(version, large, [Local(whole((10_000,)), value)])
    with store.reading(5) as stored:
        assert torch.equal(stored.locals[0].tensor, value)
    assert alive(images) == 2
    store.stage(6, (), [])
    with store.reading(6) as stored:
        assert stored.locals == ()


def test_a_version_may_lie_in_memory_of_someone_else() -> None:
    store = VersionStore(keep_versions=1)
    let_go: list[int] = []
    for version in range(3):
        store.add(version, TABLE, pieces(version), lambda version=version: let_go.append(version))
    assert let_go == [0, 1]
    with store.reading(2) as stored:
        store.stage(3, TABLE, pieces(3))
        assert number_in(stored) == 2
        assert let_go == [0, 1]
    assert let_go == [0, 1, 2]
    store.close()
    assert let_go == [0, 1, 2]


def test_a_closed_store_has_nothing_but_what_is_being_read(images: list[weakref.ref[Image]]) -> None:
    store = VersionStore(keep_versions=2)
    for version in range(3):
        store.stage(version, TABLE, pieces(version))
    with store.reading(2) as stored:
        store.close()
        store.close()
        assert store.versions == ()
        assert number_in(stored) == 2
    del stored
    with pytest.raises(ConfigError, match="closed"):
        store.stage(3, TABLE, pieces(3))
    assert alive(images) == 0


def test_no_store_for_no_version() -> None:
    with pytest.raises(ConfigError, match="keep_versions is 0"):
        VersionStore(keep_versions=0)


def test_readers_never_see_another_version_in_the_memory_of_theirs() -> None:
    store = VersionStore(keep_versions=2)
    store.stage(0, TABLE, pieces(0))
    stop, wrong, read = threading.Event(), [], [0]

    def read_on() -> None:
        while not stop.is_set():
            version = store.find()
            assert version is not None
            try:
                with store.reading(version) as stored:
                    if number_in(stored) != version % 1000:
                        wrong.append(version)
                    read[0] += 1
            except CheckpointNotFound:
                pass
            except AssertionError:
                wrong.append(version)
                raise

    threads = [threading.Thread(target=read_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(1, 150):
        store.stage(version, TABLE, pieces(version))
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert read[0] > 0
