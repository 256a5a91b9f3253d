"""What is added to a journal, by position and not by time: put aside, torn, cut, and on an object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.catalog import journal as journals
from holdfast.catalog.journal import FILE, OLD_FILE, RUNS, FileSink, JournalTail, ObjectSink, render
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from _object_server import Server


def line(step: int, t: float = 1.0, kind: str = "mark") -> bytes:
    return render({"v": 1, "t": t, "run": "a", "kind": kind, "step": step, "pad": "x" * (60 + step * step % 41)})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".holdfast").mkdir()
    return tmp_path


def write(root: Path, *lines: bytes) -> None:
    sink = FileSink(str(root))
    for one in lines:
        sink.add(one)
        sink.flush(last=False)


def steps(tail: JournalTail) -> list[int]:
    return [row["step"] for row in tail.added()]


def test_each_line_is_told_once_whatever_its_time(root: Path) -> None:
    tail = JournalTail(open_storage(root))
    assert steps(tail) == [], "there is no journal yet"
    write(root, line(1, t=500.0))
    assert steps(tail) == [1]
    write(root, line(2, t=100.0), line(3, t=500.0))
    assert steps(tail) == [2, 3]
    assert steps(tail) == []


def test_what_is_there_at_first_is_not_told(root: Path) -> None:
    write(root, line(1), line(2))
    with (root / FILE).open("ab") as file:
        file.write(line(3)[:-20])
    tail = JournalTail(open_storage(root))
    assert steps(tail) == []
    with (root / FILE).open("ab") as file:
        file.write(line(3)[-20:])
    assert steps(tail) == [3], "it wasn't whole"
    with (root / FILE).open("ab") as file:
        file.write(line(4)[:-20])
    assert steps(tail) == []
    write(root, line(5))
    assert steps(tail) == [5], "the next writer ends the torn line"


def test_a_file_that_is_put_aside_is_read_to_its_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FILE_BYTES_MAX", 1000)
    write(root, line(1))
    tail = JournalTail(open_storage(root))
    told = steps(tail)
    for first in range(2, 60, 4):
        write(root, *(line(step) for step in range(first, first + 4)))
        told += steps(tail)
    assert (root / OLD_FILE).exists()
    assert told == list(range(2, 62))


def test_a_look_between_putting_aside_and_the_new_file_loses_nothing(root: Path) -> None:
    write(root, line(1))
    tail = JournalTail(open_storage(root))
    assert steps(tail) == []
    write(root, line(2))
    (root / FILE).rename(root / OLD_FILE)
    assert steps(tail) == [2]
    write(root, line(3))
    assert steps(tail) == [3]


def test_a_journal_that_is_removed_begins_anew(root: Path) -> None:
    write(root, line(7))
    (root / FILE).rename(root / OLD_FILE)
    write(root, line(1, t=5.0), line(2))
    tail = JournalTail(open_storage(root))
    assert steps(tail) == []
    (root / FILE).unlink()
    assert steps(tail) == [], "the older file is another one"
    write(root, line(3))
    assert steps(tail) == [3]


@pytest.mark.parametrize("kind", ["a store", "a copy of one in a directory"])
def test_the_lines_of_each_run_are_told_once(
    root: Path, object_server: Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also while the oldest are dropped from its object, which is put again as a whole."""
    monkeypatch.setattr(journals, "OBJECT_BYTES_MAX", 3000)
    storage = ObjectStorage(ObjectStore(f"s3://{object_server.bucket()}/run", object_server.options))
    if kind != "a store":
        (root / RUNS).mkdir()
        storage = open_storage(root)
    other = ObjectSink(storage, "b")
    sink = ObjectSink(storage, "a")
    sink.add(line(0, kind="run.started"))
    sink.flush(last=True)
    tail = JournalTail(storage)
    assert steps(tail) == []
    told: list[int] = []
    for first in range(1, 61, 3):
        for step in range(first, first + 3):
            sink.add(line(step, t=1000.0 - step))
        sink.flush(last=True)
        told += steps(tail)
    assert b"journal.cut" in storage.read_file(f"{RUNS}/a.jsonl", max_bytes=1 << 20)
    assert told == list(range(1, 61))
    other.add(line(99, kind="run.started"))
    other.flush(last=True)
    assert steps(tail) == [99]
    assert steps(tail) == []
