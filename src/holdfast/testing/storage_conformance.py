"""Check that a storage behaves as required; runs against any implementation. Torch-free, for tests.

    @pytest.mark.parametrize("check", storage_conformance.STORAGE_CHECKS, ids=lambda check: check.__name__)
    def test_my_storage(check, tmp_path):
        check(MyStorage(tmp_path))

`STORAGE_CHECKS` are for a `Storage` that has directories and locks; `OBJECT_CHECKS` for one without either, where all
attempts at a name share its prefix and are fenced; `CHECKS` for a `DirectoryTree`, from which `RenamingStorage` makes a
`Storage`. Each check takes a storage on an empty root and raises `AssertionError` on a violation.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from holdfast.errors import CheckpointExists, RootLocked, StorageError
from holdfast.format.manifest import FORMAT, MANIFEST_NAME, Manifest, ManifestReport, encode_manifest, report_name
from holdfast.storage.entries import attempt_at
from holdfast.storage.leases import lease_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from holdfast.storage.protocol import DirectoryTree, PublishOutcome, Storage, StorageLock

_NAME: Final = "step-7"
_FIRST: Final = "0123456789ab"
_SECOND: Final = "ba9876543210"


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


def absence_is_an_answer(storage: DirectoryTree) -> None:
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


def rename_moves_all(storage: DirectoryTree) -> None:
    storage.make_dir("d")
    storage.write_file("d/a", b"1")
    storage.rename("d", "e")
    assert not storage.exists("d")
    assert storage.read_file("e/a", max_bytes=1) == b"1"
    storage.write_file("e/b", b"2")
    storage.rename("e/b", "e/a")
    assert storage.read_file("e/a", max_bytes=1) == b"2"
    assert storage.list_dir("e") == ["a"]


def rename_replaces_no_directory_with_content(storage: DirectoryTree) -> None:
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


def directories_are_exchanged(storage: DirectoryTree) -> None:
    for name in ("old", "new"):
        storage.make_dir(name)
        storage.write_file(f"{name}/{name}", name.encode())
    if not storage.exchange("new", "old"):
        assert storage.list_dir("old") == ["old"], "a storage that can't has changed nothing"
        assert storage.list_dir("new") == ["new"]
        return
    assert storage.list_dir("old") == ["new"]
    assert storage.read_file("new/old", max_bytes=3) == b"old"
    storage.sync_dir("")
    assert storage.exchange("new", "old")
    assert storage.list_dir("old") == ["old"]
    for first, second in (("old", "none"), ("none", "old")):
        assert _refusal(lambda first=first, second=second: storage.exchange(first, second)).errno == errno.ENOENT  # type: ignore[misc]
    assert storage.list_dir("") == ["new", "old"]


def file_may_have_two_names(storage: DirectoryTree) -> None:
    for name in ("a", "b"):
        storage.make_dir(name)
    storage.write_file("a/file", b"1")
    storage.write_file("b/other", b"1")
    storage.link("a/file", "b/file")
    assert storage.same_file("a/file", "b/file")
    assert not storage.same_file("a/file", "b/other")
    assert not storage.same_file("a/file", "a/none")
    assert _refusal(lambda: storage.link("a/file", "b/other")).errno == errno.EEXIST
    assert _refusal(lambda: storage.link("a/none", "b/none")).errno == errno.ENOENT
    assert _refusal(lambda: storage.link("a", "c")).errno is not None
    storage.remove_tree("a")
    assert storage.read_file("b/file", max_bytes=1) == b"1"


def rename_moves_to_another_directory(storage: DirectoryTree) -> None:
    for name in ("a", "b", "a/below"):
        storage.make_dir(name)
    storage.write_file("a/below/file", b"1")
    storage.rename("a/below", "b/below")
    assert storage.list_dir("a") == []
    assert storage.read_file("b/below/file", max_bytes=1) == b"1"


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


def file_is_put_in_the_place_of_another(storage: Storage) -> None:
    for data in (b"old", b"new", b"newer"):
        storage.replace_file("a", data, by="a.new")
        assert storage.read_file("a", max_bytes=9) == data
    assert storage.list_dir("") == ["a"]


def replaced_file_is_whole(storage: Storage) -> None:
    """Without a rename: who reads meanwhile finds the old or the new, and the temporary name is never seen."""
    for data in (b"old", b"newer"):
        storage.replace_file("d/a", data, by="d/a.new")
        assert storage.read_file("d/a", max_bytes=9) == data
        assert storage.list_dir("d") == ["a"]


def _manifest(attempt: str) -> bytes:
    return encode_manifest(
        Manifest(
            format=FORMAT,
            name=_NAME,
            attempt=attempt,
            step=7,
            world=1,
            created="2026-01-01T00:00:00+00:00",
            metrics={},
            resumable=True,
            versions={},
            reports=(ManifestReport(0, report_name(0), 1, "0" * 32, len(attempt)),),
            files=(),
        )
    )


def _data(attempt: str) -> str:
    """Name of the file that an attempt writes: its own, since attempts at one name may share a directory."""
    return f"__0_0.{attempt}.distcp"


def _begun(storage: Storage, attempt: str, *, recoverable: bool = False) -> str:
    """Return the directory of an attempt whose data are written."""
    storage.begin(_NAME, attempt, recoverable=recoverable)
    directory = storage.directory_of(_NAME, attempt)
    storage.write_file(f"{directory}/{_data(attempt)}", attempt.encode())
    storage.sync_dir(directory)
    return directory


def _published(storage: Storage, attempt: str, *, overwrite: bool = False) -> PublishOutcome:
    directory, manifest = _begun(storage, attempt), _manifest(attempt)
    storage.seal(directory, manifest)
    return storage.publish(directory, _NAME, attempt, manifest, overwrite=overwrite)


def _is_at(storage: Storage, attempt: str) -> None:
    assert attempt_at(storage, _NAME) == attempt
    assert storage.read_file(f"{_NAME}/{_data(attempt)}", max_bytes=99) == attempt.encode()
    assert _NAME in storage.list_dir("")


def _clean(storage: Storage, trash: tuple[str, ...]) -> None:
    for entry in trash:
        storage.remove_tree(entry)
    assert storage.unsettled() == [], "nothing of an attempt is left once its trash is removed"


def attempt_is_published(storage: Storage) -> None:
    directory, manifest = _begun(storage, _FIRST), _manifest(_FIRST)
    assert attempt_at(storage, _NAME) is None, "nothing is visible before"
    storage.seal(directory, manifest)
    assert attempt_at(storage, _NAME) is None, "sealed is not published"
    outcome = storage.publish(directory, _NAME, _FIRST, manifest, overwrite=False)
    assert (outcome.kind, outcome.error) == ("published", None)
    _is_at(storage, _FIRST)
    assert sorted(storage.list_dir(_NAME)) == [_data(_FIRST), MANIFEST_NAME]
    _clean(storage, outcome.trash)


def published_name_is_refused_to_another(storage: Storage) -> None:
    assert _published(storage, _FIRST).kind == "published"
    outcome = _published(storage, _SECOND)
    assert outcome.kind == "refused"
    assert isinstance(outcome.error, CheckpointExists)
    _is_at(storage, _FIRST)
    withdrawn = storage.withdraw(storage.directory_of(_NAME, _SECOND), _NAME, _SECOND)
    assert withdrawn.certain
    _is_at(storage, _FIRST)
    _clean(storage, withdrawn.trash)


def overwriting_replaces_or_is_refused(storage: Storage) -> None:
    assert _published(storage, _FIRST).kind == "published"
    outcome = _published(storage, _SECOND, overwrite=True)
    assert outcome.kind in {"published", "refused"}
    _is_at(storage, _SECOND if outcome.kind == "published" else _FIRST)
    trash = outcome.trash
    if outcome.kind == "refused":
        trash = storage.withdraw(storage.directory_of(_NAME, _SECOND), _NAME, _SECOND).trash
    _clean(storage, trash)


def withdrawn_attempt_leaves_nothing(storage: Storage) -> None:
    directory, manifest = _begun(storage, _FIRST, recoverable=True), _manifest(_FIRST)
    storage.seal(directory, manifest)
    outcome = storage.withdraw(directory, _NAME, _FIRST)
    assert outcome.certain
    assert not storage.exists(_NAME)
    assert all(entry.kind == "trash" for entry in storage.unsettled()), "nobody may publish it any more"
    late = storage.publish(directory, _NAME, _FIRST, manifest, overwrite=False)
    assert late.kind == "refused", "who had not heard of it comes too late"
    _clean(storage, outcome.trash)


def published_attempt_is_not_withdrawn(storage: Storage) -> None:
    assert _published(storage, _FIRST).kind == "published"
    outcome = storage.withdraw(storage.directory_of(_NAME, _FIRST), _NAME, _FIRST)
    assert not outcome.certain
    assert outcome.why
    _is_at(storage, _FIRST)


def attempt_left_behind_is_taken_over(storage: Storage) -> None:
    before, manifest = _begun(storage, _FIRST, recoverable=True), _manifest(_FIRST)
    (entry,) = storage.unsettled()
    assert (entry.name, entry.attempt, entry.kind) == (_NAME, _FIRST, "incomplete")
    directory = storage.take_over(entry)
    late = storage.publish(before, _NAME, _FIRST, manifest, overwrite=False)
    assert late.kind == "refused", "who began it must not publish it meanwhile"
    (entry,) = storage.unsettled()
    assert (entry.name, entry.attempt, entry.kind) == (_NAME, _FIRST, "recovering")
    assert storage.take_over(entry) == directory, "a recovery that was interrupted goes on"
    for _ in range(2):
        storage.seal(directory, manifest, again=True)
    outcome = storage.publish(directory, _NAME, _FIRST, manifest, overwrite=False)
    assert outcome.kind == "published"
    _is_at(storage, _FIRST)
    _clean(storage, outcome.trash)


def prefix_is_removed_whole(storage: Storage) -> None:
    """Objects below a name go with it, those of names that begin alike don't."""
    names = ("d/a", "d/e/a", "d/.b", "da", "d.a")
    for name in names:
        storage.write_file(name, name.encode())
    storage.remove_tree("d")
    storage.remove_tree("nothing")
    for name in names:
        assert storage.size(name) == (None if name.startswith("d/") else len(name))
    assert not storage.exists("d")
    storage.unlink("da")
    storage.unlink("da")
    assert not storage.exists("da")
    assert _refusal(lambda: storage.read_file("d/a", max_bytes=9)).errno == errno.ENOENT


def attempts_share_a_name(storage: Storage) -> None:
    """Check that of two attempts at one name each sees its own files, by the names it gave them."""
    places = [storage.directory_of(_NAME, attempt) for attempt in (_FIRST, _SECOND)]
    for place, attempt in zip(places, (_FIRST, _SECOND), strict=True):
        storage.begin(_NAME, attempt, recoverable=True)
        storage.write_file(f"{place}/{report_name(0)}", attempt.encode())
    for place, attempt in zip(places, (_FIRST, _SECOND), strict=True):
        stored = storage.stored_as(report_name(0), attempt)
        assert storage.list_dir(place) == [stored]
        assert storage.stored_as(stored, attempt) == stored, "an object isn't named twice"
        for name in (report_name(0), stored):
            assert storage.read_file(f"{place}/{name}", max_bytes=99) == attempt.encode()
            assert storage.size(f"{place}/{name}") == len(attempt)
    assert {(entry.name, entry.attempt) for entry in storage.unsettled()} == {(_NAME, _FIRST), (_NAME, _SECOND)}
    assert _NAME not in {entry.name for entry in storage.unsettled() if attempt_at(storage, entry.name)}
    _clean(
        storage, storage.withdraw(places[0], _NAME, _FIRST).trash + storage.withdraw(places[1], _NAME, _SECOND).trash
    )


def given_up_attempt_is_fenced(storage: Storage) -> None:
    """Whoever gives an attempt up, the process that began it can't publish it any more, however late it comes."""
    directory, manifest = _begun(storage, _FIRST, recoverable=True), _manifest(_FIRST)
    outcome = storage.withdraw(directory, _NAME, _FIRST)
    assert outcome.certain
    _refusal(lambda: storage.seal(directory, manifest))
    assert attempt_at(storage, _NAME) is None
    _clean(storage, outcome.trash)
    assert storage.size(f"{directory}/{_data(_FIRST)}") is None
    _refusal(lambda: storage.seal(directory, manifest))
    assert storage.withdraw(directory, _NAME, _FIRST).certain, "asked again, as by a start after a crash"
    assert _published(storage, _SECOND).kind == "published", "the name is free"
    _is_at(storage, _SECOND)


def attempt_left_behind_is_finished(storage: Storage) -> None:
    """A recovery publishes what has all its parts; the process that began it, and another recovery, change nothing."""
    directory, manifest = _begun(storage, _FIRST, recoverable=True), _manifest(_FIRST)
    (entry,) = storage.unsettled()
    assert (entry.name, entry.attempt, entry.kind) == (_NAME, _FIRST, "incomplete")
    for _ in range(2):
        assert storage.take_over(entry) == directory
        storage.seal(directory, manifest, again=True)
    for _ in range(2):
        outcome = storage.publish(directory, _NAME, _FIRST, manifest, overwrite=False)
        assert outcome.kind == "published"
        _is_at(storage, _FIRST)
    assert not storage.withdraw(directory, _NAME, _FIRST).certain, "it is published"
    _is_at(storage, _FIRST)
    _clean(storage, outcome.trash)


def hidden_is_invisible(storage: Storage) -> None:
    assert _published(storage, _FIRST).kind == "published"
    trash = storage.hide(_NAME)
    assert trash is not None, "nobody reads it"
    assert attempt_at(storage, _NAME) is None
    assert all(entry.kind == "trash" for entry in storage.unsettled())
    _clean(storage, trash)
    assert not storage.exists(_NAME)
    assert _published(storage, _SECOND).kind == "published"
    _is_at(storage, _SECOND)


def lock_has_one_holder(storage: Storage) -> None:
    takes: tuple[Callable[[], StorageLock], ...] = (storage.lock, lambda: storage.lock_path(_NAME))
    for take in takes:
        held = take()
        refused = False
        try:
            take().release()
        except RootLocked:
            refused = True
        assert refused, "somebody holds it"
        held.renew()
        held.release()
        held.release()
        with take():
            pass
    storage.sweep_locks()
    assert not storage.exists(_NAME)


def lease_is_seen(storage: Storage) -> None:
    directory, name = _begun(storage, _FIRST, recoverable=True), lease_name(3)
    assert storage.observe_lease(directory, name) is None
    held = storage.hold_lease(directory, name, rank=3)
    seen = storage.observe_lease(directory, name)
    assert seen is not None
    assert seen.record is not None
    assert seen.record.rank == 3
    assert seen.flock_free is not True, "its holder lives"
    assert storage.stored_as(name, _FIRST) in storage.list_dir(directory), "a recovery looks for it there"
    held.stop(wait_s=5.0)
    assert storage.observe_lease(directory, name) is None


CHECKS: Final = (
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
    rename_moves_to_another_directory,
    directories_are_exchanged,
    file_may_have_two_names,
    tree_is_removed_whole,
    file_is_unlinked,
)

STORAGE_CHECKS: Final = (
    file_is_read_back,
    range_is_read_back,
    pieces_are_read_back,
    file_is_never_replaced,
    file_larger_than_expected_is_refused,
    file_is_put_in_the_place_of_another,
    tree_is_removed_whole,
    attempt_is_published,
    published_name_is_refused_to_another,
    overwriting_replaces_or_is_refused,
    withdrawn_attempt_leaves_nothing,
    published_attempt_is_not_withdrawn,
    attempt_left_behind_is_taken_over,
    hidden_is_invisible,
    lock_has_one_holder,
    lease_is_seen,
)

OBJECT_CHECKS: Final = (
    file_is_read_back,
    range_is_read_back,
    pieces_are_read_back,
    file_is_never_replaced,
    file_larger_than_expected_is_refused,
    prefix_is_removed_whole,
    attempts_share_a_name,
    attempt_is_published,
    published_name_is_refused_to_another,
    overwriting_replaces_or_is_refused,
    given_up_attempt_is_fenced,
    published_attempt_is_not_withdrawn,
    attempt_left_behind_is_finished,
    hidden_is_invisible,
    lease_is_seen,
    replaced_file_is_whole,
)
