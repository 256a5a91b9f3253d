"""Trash goes, with everything in it and nothing beside it."""

import errno
import os
import threading

import pytest

from holdfast.engine.process import _Remover
from holdfast.engine.removal import remove_tree_at


@pytest.fixture
def root(tmp_path, descriptors):
    fd = os.open(tmp_path, os.O_RDONLY)
    before = descriptors()
    yield fd
    assert not descriptors() - before
    os.close(fd)


def test_a_tree_goes_and_what_its_links_point_to_stays(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"1")
    trash = tmp_path / "trash"
    (trash / "a" / "b").mkdir(parents=True)
    (trash / "a" / "b" / "file").write_bytes(b"2")
    (trash / "a" / "to_dir").symlink_to(outside)
    (trash / "to_file").symlink_to(outside / "kept")
    os.mkfifo(trash / "pipe")
    remove_tree_at(root, "trash")
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (outside / "kept").read_bytes() == b"1"


def test_a_link_in_its_place_is_removed_itself(root, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "trash").symlink_to("outside")
    remove_tree_at(root, "trash")
    assert os.listdir(tmp_path) == ["outside"]


def test_absent_is_fine_and_a_file_goes(root, tmp_path):
    remove_tree_at(root, "nothing")
    (tmp_path / "file").write_bytes(b"")
    remove_tree_at(root, "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../x", ""])
def test_only_plain_names(root, name):
    with pytest.raises(OSError, match="no plain file name") as caught:
        remove_tree_at(root, name)
    assert caught.value.errno == errno.EINVAL


def test_stopping_leaves_the_rest(root, tmp_path):
    (tmp_path / "trash").mkdir()
    for number in range(5):
        (tmp_path / "trash" / str(number)).write_bytes(b"")
    left = iter([False, False, True])
    remove_tree_at(root, "trash", stopped=lambda: next(left))
    assert len(os.listdir(tmp_path / "trash")) == 3


def test_an_error_does_not_keep_the_rest(root, tmp_path, monkeypatch):
    trash = tmp_path / "trash"
    trash.mkdir()
    for name in ("a", "b", "c"):
        (trash / name).write_bytes(b"")
    unlink = os.unlink

    def refuse(name, *, dir_fd):
        if name == "b":
            raise PermissionError(errno.EACCES, "no")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError):
        remove_tree_at(root, "trash")
    assert os.listdir(trash) == ["b"]


def test_whoever_hears_of_the_last_removal_finds_nothing_under_way(tmp_path):
    """The engine sleeps until it hears, and leaves only then: it must not look too early and sleep on."""
    heard = []
    over = threading.Event()

    def post(message):
        heard.append(remover.busy)
        if message.name == "b":
            over.set()

    remover = _Remover(post)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        remover.add(os.open(tmp_path, os.O_RDONLY), name)
    assert over.wait(10)
    assert heard[-1] is False
    assert os.listdir(tmp_path) == []
