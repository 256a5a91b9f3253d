"""Both storages keep the contract; what only the local one has is checked beside it."""

from __future__ import annotations

import errno
import os
import pickle

import pytest

from holdfast.errors import ConfigError, StorageError
from holdfast.storage.entries import is_occupied
from holdfast.storage.files import create_root
from holdfast.storage.local import LocalStorage
from holdfast.testing.memory_storage import MemoryStorage
from holdfast.testing.storage_conformance import CHECKS, STORAGE_CHECKS, directories_are_exchanged


@pytest.mark.parametrize("check", [*CHECKS, *STORAGE_CHECKS], ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_contract(check, kind, tmp_path):
    check(LocalStorage(tmp_path) if kind == "local" else MemoryStorage())


def test_a_storage_without_exchange_keeps_the_contract():
    directories_are_exchanged(MemoryStorage(exchanges=False))


def two_directories(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    return LocalStorage(tmp_path)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, None])
def test_where_nothing_is_exchanged_that_is_an_answer(code, tmp_path, monkeypatch):
    from holdfast.storage import local

    storage = two_directories(tmp_path)
    monkeypatch.setattr(local, "_renameat2", lambda: code and (lambda *_: code))
    assert not storage.exchange("new", "old")
    assert storage.list_dir("old") == ["old"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EXDEV, errno.EBUSY])
def test_what_else_the_system_says_to_an_exchange_is_an_error(code, tmp_path, monkeypatch):
    from holdfast.storage import local

    storage = two_directories(tmp_path)
    monkeypatch.setattr(local, "_renameat2", lambda: lambda *_: code)
    with pytest.raises(StorageError) as caught:
        storage.exchange("new", "old")
    assert (caught.value.errno, caught.value.path) == (code, str(tmp_path / "new"))


def test_a_local_file_system_exchanges(tmp_path):
    storage = two_directories(tmp_path)
    assert storage.exchange("new", "old"), "tests of overwriting would show nothing here"


def test_create_root_makes_ancestors(tmp_path):
    root = create_root(tmp_path / "a" / "b" / "c")
    assert root == str(tmp_path / "a" / "b" / "c")
    assert os.path.isdir(root)
    assert create_root(root) == root


def test_create_root_syncs_every_new_ancestor(tmp_path, monkeypatch):
    from holdfast.storage import files

    synced = []
    monkeypatch.setattr(files, "sync_path", synced.append)
    create_root(tmp_path / "a" / "b")
    assert synced == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a")]


@pytest.mark.parametrize("left", ["a", "a/b"])
def test_create_root_syncs_what_may_have_been_made_by_one_who_died_before_it_did(tmp_path, monkeypatch, left):
    from holdfast.storage import files

    (tmp_path / left).mkdir(parents=True)
    synced = []
    monkeypatch.setattr(files, "sync_path", synced.append)
    create_root(tmp_path / "a" / "b")
    assert str((tmp_path / left).parent) in synced


def test_create_root_needs_no_access_to_what_it_has_not_made(tmp_path, monkeypatch):
    from holdfast.storage import files

    sync = files.sync_path

    def refuse(path):
        if path == str(tmp_path.parent):
            raise StorageError("no access", path=path, errno=errno.EACCES)
        sync(path)

    monkeypatch.setattr(files, "sync_path", refuse)
    assert os.path.isdir(create_root(tmp_path / "a"))


@pytest.mark.parametrize("below", ["", "x/y"])
def test_create_root_refuses_a_file(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        create_root(tmp_path / "file" / below)


def test_create_root_refuses_a_dangling_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a directory"):
        create_root(tmp_path / "link" / "a")


@pytest.mark.parametrize("name", ["..", "a/../b", "/etc", "a//b", "."])
def test_names_stay_below_the_root(tmp_path, name):
    with pytest.raises(AssertionError):
        LocalStorage(tmp_path).exists(name)


def test_links_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "to_file").symlink_to(outside / "precious")
    storage = LocalStorage(root)
    storage.remove_tree("link")
    assert (outside / "precious").exists()
    assert not storage.exists("link")
    assert storage.size("to_file") is None
    for read in (
        lambda: storage.read_file("to_file", max_bytes=9),
        lambda: storage.read_range("to_file", 0, 1),
        lambda: list(storage.read_pieces("to_file", 9)),
    ):
        with pytest.raises(StorageError):
            read()
    with pytest.raises(StorageError):
        storage.write_file("to_file", b"y")
    assert (outside / "precious").read_text() == "x"


def test_errors_say_what_to_do(tmp_path, monkeypatch):
    storage = LocalStorage(tmp_path)

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match=r"ENOSPC.*free space") as caught:
        storage.write_file("a", b"1")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.path == str(tmp_path / "a")
    assert isinstance(caught.value.__cause__, OSError)


def test_write_file_goes_on_after_a_short_write(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    LocalStorage(tmp_path).write_file("a", b"0123456789")
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_no_descriptor_is_left_behind(tmp_path, descriptors):
    storage = LocalStorage(tmp_path)
    before = descriptors()
    storage.write_file("a", b"1")
    for act in (lambda: storage.write_file("a", b""), lambda: storage.read_file("a", max_bytes=0)):
        with pytest.raises(StorageError):
            act()
    storage.sync_dir("")
    storage.read_range("a", 0, 1)
    os.close(storage.open_dir(""))
    assert not descriptors() - before


def test_the_root_may_be_a_link_and_nothing_below_it(tmp_path):
    (tmp_path / "real" / "d").mkdir(parents=True)
    (tmp_path / "root").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "link").symlink_to(tmp_path / "real" / "d")
    storage = LocalStorage(tmp_path / "root")
    for name in ("", "d"):
        os.close(storage.open_dir(name))
    with pytest.raises(StorageError):
        storage.open_dir("link")


def test_storage_errors_survive_pickling(tmp_path):
    with pytest.raises(StorageError) as caught:
        LocalStorage(tmp_path).read_file("a", max_bytes=1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.path, again.errno, str(again)) == (caught.value.path, errno.ENOENT, str(caught.value))


def test_a_link_is_no_directory_and_its_name_is_taken(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link-to-root").symlink_to(tmp_path / "root")
    storage = LocalStorage(tmp_path / "link-to-root")
    assert storage.list_dir("") == ["link"]
    with pytest.raises(StorageError) as caught:
        storage.list_dir("link")
    assert caught.value.errno == errno.ENOTDIR
    assert is_occupied(storage, "link")  # by something that a directory can't be renamed over


def test_memory_storage_loses_what_was_not_synced():
    storage = MemoryStorage()
    storage.make_dir("d")
    storage.write_file("d/a", b"1")
    storage.sync_dir("d")
    storage.write_file("d/b", b"2")
    storage.rename("d", "e")
    storage.lose_unsynced(lambda _pending: 0)
    assert storage.list_dir("") == ["d"]
    assert storage.list_dir("d") == ["a"]
