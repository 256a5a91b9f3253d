"""Trash is removed with all its contents, and nothing else."""

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


def test_a_tree_is_removed_but_not_the_targets_of_its_links(root, tmp_path):
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


def test_a_link_in_place_of_the_tree_is_removed_itself(root, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "trash").symlink_to("outside")
    remove_tree_at(root, "trash")
    assert os.listdir(tmp_path) == ["outside"]


def test_a_missing_entry_is_fine_and_a_file_is_removed(root, tmp_path):
    remove_tree_at(root, "nothing")
    (tmp_path / "file").write_bytes(b"")
    remove_tree_at(root, "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../x", ""])
def test_only_plain_names_are_accepted(root, name):
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


def test_removal_continues_after_an_error(root, tmp_path, monkeypatch):
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


def test_after_the_last_removal_is_reported_none_is_in_progress(tmp_path):
    """The engine sleeps until then, and only then leaves: checking too early, it would sleep on."""
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


def test_a_file_made_during_the_removal_is_removed_too(tmp_path, monkeypatch):
    """An attempt that was cancelled may be making its last file."""
    (tmp_path / "trash").mkdir()
    rmdir, made, answers = os.rmdir, [], []
    over = threading.Event()

    def late(name, *, dir_fd):
        if len(made) < 2:
            made.append(name)
            (tmp_path / "trash" / f"late{len(made)}").write_bytes(b"")
        rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", late)
    remover = _Remover(lambda message: (answers.append(message.errno), over.set()))
    remover.add(os.open(tmp_path, os.O_RDONLY), "trash")
    assert over.wait(10)
    assert (answers, os.listdir(tmp_path)) == ([None], [])
