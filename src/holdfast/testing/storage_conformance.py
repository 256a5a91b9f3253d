"""What every storage must do, as checks that any implementation can be run through. Torch-free, for tests.

    @pytest.mark.parametrize("check", storage_conformance.CHECKS, ids=lambda check: check.__name__)
    def test_my_storage(check, tmp_path):
        check(MyStorage(tmp_path))

Each check wants a storage on an empty root and raises `AssertionError` where it falls short.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from holdfast.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.storage.protocol import Storage


def _refusal(act: Callable[[], object]) -> StorageError:
    caught: StorageError | None = None
    try:
        act()
    except StorageError as error:
        caught = error
    assert caught is not None, "it should have been refused"
    assert caught.path, "an error names its path"
    assert caught.path in str(caught), "and says it"
    return caught


def file_is_read_back(storage: Storage) -> None:
    data = bytes(range(256)) * 5
    storage.write_file("a", data)
    assert storage.read_file("a", max_bytes=len(data)) == data
    assert storage.size("a") == len(data)
    assert storage.exists("a")
    storage.write_file("empty", b"")
    assert storage.read_file("empty", max_bytes=0) == b""
    assert storage.size("empty") == 0


def range_is_read_back(storage: Storage) -> None:
    storage.write_file("a", b"0123456789")
    assert storage.read_range("a", 2, 3) == b"234"
    assert storage.read_range("a", 8, 5) == b"89"
    assert storage.read_range("a", 20, 5) == b""
    assert _refusal(lambda: storage.read_range("b", 0, 1)).errno == errno.ENOENT


def pieces_are_read_back(storage: Storage) -> None:
    storage.write_file("a", b"0123456789")
    assert list(storage.read_pieces("a", 4)) == [b"0123", b"4567", b"89"]
    assert list(storage.read_pieces("a", 5)) == [b"01234", b"56789"]
    storage.write_file("empty", b"")
    assert list(storage.read_pieces("empty", 4)) == []
    assert _refusal(lambda: list(storage.read_pieces("b", 1))).errno == errno.ENOENT
    some = storage.read_pieces("a", 1)
    assert next(some) == b"0"
    some.close()


def file_is_never_replaced(storage: Storage) -> None:
    storage.write_file("a", b"old")
    assert _refusal(lambda: storage.write_file("a", b"new")).errno == errno.EEXIST
    assert storage.read_file("a", max_bytes=3) == b"old"


def file_larger_than_expected_is_refused(storage: Storage) -> None:
    storage.write_file("a", b"1234")
    assert _refusal(lambda: storage.read_file("a", max_bytes=3)).errno == errno.EFBIG


def absence_is_an_answer(storage: Storage) -> None:
    assert not storage.exists("a")
    assert not storage.exists("a/b")
    assert storage.size("a") is None
    assert storage.size("a/b") is None
    assert storage.list_dir("a") == []
    storage.unlink("a")
    storage.remove_tree("a")
    assert _refusal(lambda: storage.read_file("a", max_bytes=1)).errno == errno.ENOENT
    assert _refusal(lambda: storage.rename("a", "b")).errno == errno.ENOENT
    assert _refusal(lambda: storage.sync_dir("a")).errno == errno.ENOENT
    assert _refusal(lambda: storage.write_file("a/b", b"")).errno == errno.ENOENT


def directory_is_made_once(storage: Storage) -> None:
    storage.make_dir("d")
    assert storage.exists("d")
    assert storage.size("d") is None
    assert storage.list_dir("d") == []
    assert _refusal(lambda: storage.make_dir("d")).errno == errno.EEXIST
    assert _refusal(lambda: storage.make_dir("x/y")).errno == errno.ENOENT


def entries_are_listed_sorted(storage: Storage) -> None:
    storage.make_dir("d")
    for name in ("b", ".a", "c"):
        storage.write_file(f"d/{name}", b"")
    storage.make_dir("d/e")
    storage.sync_dir("d")
    storage.sync_dir("")
    assert storage.list_dir("d") == [".a", "b", "c", "e"]
    assert storage.list_dir("") == ["d"]
    assert _refusal(lambda: storage.list_dir("d/b")).errno == errno.ENOTDIR


def rename_moves_all(storage: Storage) -> None:
    storage.make_dir("d")
    storage.write_file("d/a", b"1")
    storage.rename("d", "e")
    assert not storage.exists("d")
    assert storage.read_file("e/a", max_bytes=1) == b"1"
    storage.write_file("e/b", b"2")
    storage.rename("e/b", "e/a")
    assert storage.read_file("e/a", max_bytes=1) == b"2"
    assert storage.list_dir("e") == ["a"]


def rename_replaces_no_directory_with_content(storage: Storage) -> None:
    for name in ("old", "new", "empty"):
        storage.make_dir(name)
    storage.write_file("old/a", b"old")
    storage.write_file("new/a", b"new")
    assert _refusal(lambda: storage.rename("new", "old")).errno in {errno.EEXIST, errno.ENOTEMPTY}
    assert storage.read_file("old/a", max_bytes=3) == b"old"
    assert storage.read_file("new/a", max_bytes=3) == b"new"
    storage.rename("new", "empty")
    assert storage.list_dir("empty") == ["a"]
    storage.write_file("file", b"")
    assert _refusal(lambda: storage.rename("empty", "file")).errno == errno.ENOTDIR


def tree_is_removed_whole(storage: Storage) -> None:
    storage.make_dir("d")
    storage.make_dir("d/e")
    storage.write_file("d/e/a", b"")
    storage.write_file("d/b", b"")
    storage.remove_tree("d")
    assert not storage.exists("d")
    storage.write_file("file", b"")
    storage.remove_tree("file")
    assert storage.list_dir("") == []


def file_is_unlinked(storage: Storage) -> None:
    storage.write_file("a", b"")
    storage.unlink("a")
    assert not storage.exists("a")
    storage.make_dir("d")
    assert _refusal(lambda: storage.unlink("d")).errno in {errno.EISDIR, errno.EPERM}


CHECKS: Final[tuple[Callable[[Storage], None], ...]] = (
    file_is_read_back,
    range_is_read_back,
    pieces_are_read_back,
    file_is_never_replaced,
    file_larger_than_expected_is_refused,
    absence_is_an_answer,
    directory_is_made_once,
    entries_are_listed_sorted,
    rename_moves_all,
    rename_replaces_no_directory_with_content,
    tree_is_removed_whole,
    file_is_unlinked,
)
