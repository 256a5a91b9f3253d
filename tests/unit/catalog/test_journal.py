"""The journal of a root: lines as they are written, bounds, damage, and storages that fail or hang."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast import events
from holdfast.catalog import journal as journals
from holdfast.catalog.journal import FILE, LINE_BYTES_MAX, OLD_FILE, Journal, parse_lines, read_journal, render
from holdfast.catalog.retention import Keep
from holdfast.errors import StorageError
from holdfast.storage.local import open_storage

CONFIG = SimpleNamespace(every=10, mode="async", staging="lazy", in_flight=2, keep=Keep())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / ".holdfast").mkdir()
    return tmp_path


def begin(root: Path) -> Journal:
    journal = Journal(open_storage(root), CONFIG, world=1)
    journal.start()
    return journal


def rows(root: Path) -> list[dict]:
    return read_journal(open_storage(root))


def kinds(root: Path) -> list[str]:
    return [row["kind"] for row in rows(root)]


def test_what_is_noted_is_there_in_order_while_the_run_goes_on(root: Path) -> None:
    journal = begin(root)
    try:
        for step in range(5):
            journal.note("mark", step=step)
        deadline = time.monotonic() + 10.0
        while len(rows(root)) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        journal.close()
    found = rows(root)
    assert [row["kind"] for row in found] == ["run.started", *["mark"] * 5, "run.ended"]
    assert [row["step"] for row in found[1:-1]] == list(range(5))
    assert {(row["v"], row["run"]) for row in found} == {(1, journal.run)}
    assert found[0]["world"] == 1
    assert found[0]["pid"] == os.getpid()
    assert found[0]["config"] == {
        "every": 10,
        "mode": "async",
        "staging": "lazy",
        "in_flight": 2,
        "keep": {"last": 3, "every": None, "minutes": None, "best": None},
    }
    assert all(row["t"] == pytest.approx(time.time(), abs=60.0) for row in found)


def test_events_of_this_root_become_lines_and_no_others(root: Path) -> None:
    journal = begin(root)
    ranks = ((0, 5.0, 0.1, 0.2, 0.3, 10), (1, 5.1, None, 0.2, 0.3, 20))
    events.emit("save.started", step=1, rank=0, path=f"{root}/step-1")
    events.emit("save.started", step=1, rank=1, path=f"{root}/step-1")  # another rank's process tells it there
    events.emit("save.started", step=1, rank=0, path=f"{root}-2/step-1")
    events.emit("save.published", step=1, rank=0, attempt="a1", path=f"{root}/step-1", nbytes=10, ranks=ranks)
    events.emit("save.failed", step=2, rank=0, path=f"{root}/step-2", error="OSError(28)", message="x" * 5000)
    events.emit("no.such", step=2, rank=0, path=f"{root}/step-2")
    journal.close()
    events.emit("save.started", step=9, rank=0, path=f"{root}/step-9")
    started, published, failed = rows(root)[1:-1]
    assert (started["kind"], started["step"], started["name"]) == ("save.started", 1, "step-1")
    assert (published["attempt"], published["kind_of"], published["nbytes"]) == ("a1", "checkpoint", 30)
    assert published["ranks"] == [list(row) for row in ranks]
    assert (failed["error"], len(failed["message"])) == ("OSError", 1000)


def test_a_torn_last_line_harms_neither_readers_nor_the_next_writer(root: Path) -> None:
    begin(root).close()
    with (root / FILE).open("ab") as file:
        file.write(b'{"v":1,"t":17')
    assert kinds(root) == ["run.started", "run.ended"]
    begin(root).close()
    assert kinds(root) == ["run.started", "run.ended"] * 2


def test_lines_that_are_none_are_skipped() -> None:
    good = render({"v": 1, "t": 1.0, "run": "a", "kind": "mark"})
    bad = [b"[1]", b"{", b"\xff\xfe", b'{"kind":1,"t":1,"run":"a"}', b'{"kind":"x","t":true,"run":"a"}', b"{" * 70_000]
    bad += [b'{"kind":"x","t":NaN,"run":"a"}', b'{"a":' * 20_000, b"{" + b" " * LINE_BYTES_MAX + b"}"]
    assert parse_lines(b"\n".join([*bad, good.strip(), *bad])) == ([json.loads(good)], 2 * len(bad))


def test_a_large_journal_is_put_aside_and_both_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FILE_BYTES_MAX", 20_000)
    for number in range(40):
        journal = begin(root)
        journal.note("mark", step=number, text="x" * 1000)
        journal.close()
    size = (root / FILE).stat().st_size + (root / OLD_FILE).stat().st_size
    assert 20_000 < size < 45_000
    steps = [row["step"] for row in rows(root) if row["kind"] == "mark"]
    assert steps == list(range(steps[0], 40))
    assert len(steps) > 15


def test_a_line_is_shortened_to_fit_or_dropped(root: Path) -> None:
    journal = begin(root)
    many = tuple((rank, 5.0, 0.1, 0.1, 1.0 if rank == 700 else 0.1, 1) for rank in range(4000))
    events.emit("save.published", step=1, rank=0, path=f"{root}/step-1", ranks=many)
    before = events.statistics()["journal_dropped"]
    journal.note("mark", ranks=["x" * LINE_BYTES_MAX], step=2)
    journal.note("mark", text="x" * LINE_BYTES_MAX)
    journal.note("mark", loss=float("nan"))
    journal.close()
    published, short, plain = rows(root)[1:-1]
    assert len(published["ranks"]) == journals.RANKS_MAX
    assert 700 in [row[0] for row in published["ranks"]], "the slowest is told of"
    assert (short["step"], short["ranks"]) == (2, None)
    assert plain["loss"] is None
    assert events.statistics()["journal_dropped"] == before + 1


def test_steps_are_heartbeats_and_the_last_is_exact(root: Path) -> None:
    journal = begin(root)
    for step in range(1, 1001):
        journal.step(step)
    journal.close()
    assert [row["step"] for row in rows(root) if row["kind"] == "step"] == [1, 1000]


@pytest.mark.parametrize("obstacle", ["none", "a file", "a directory", "a fifo", "a link"])
def test_what_is_in_the_way_costs_lines_and_nothing_else(tmp_path: Path, obstacle: str) -> None:
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    if obstacle == "a file":
        (tmp_path / ".holdfast").write_bytes(b"")
    elif obstacle != "none":
        (tmp_path / ".holdfast").mkdir()
    if obstacle == "a directory":
        (tmp_path / FILE).mkdir()
    elif obstacle == "a fifo":
        os.mkfifo(tmp_path / FILE)
    elif obstacle == "a link":
        (tmp_path / FILE).symlink_to(elsewhere)
    before = events.statistics()["journal_dropped"]
    journal = begin(tmp_path)
    journal.note("mark")
    journal.close()
    assert events.statistics()["journal_dropped"] == before + 3
    assert not elsewhere.exists()


def test_a_full_disk_tears_a_line_and_later_ones_are_whole(root: Path) -> None:
    """By a limit on the size of files, which is not that of this process for the other tests."""
    program = f"""
import resource, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_journal import *
root = Path({str(root)!r})
journal = begin(root)
journal.note("before"); journal.close()
size = (root / FILE).stat().st_size
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
journal = begin(root)
journal.note("lost"); journal.close()
assert (root / FILE).stat().st_size == size + 50, "the limit tears a line"
assert events.statistics()["journal_dropped"] == 3
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
journal = begin(root)
journal.note("after"); journal.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert kinds(root) == ["run.started", "before", "run.ended", "run.started", "after", "run.ended"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_storage_that_hangs_drops_lines_and_holds_nobody(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, hangs = threading.Event(), threading.Event()
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if threading.current_thread().name == "holdfast-journal":
            hangs.set()
            let_go.wait(60.0)
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(journals, "CLOSE_S", 0.2)
    before = events.statistics()["journal_dropped"]
    journal = begin(root)
    assert hangs.wait(10.0)
    began = time.monotonic()
    for _ in range(journals.QUEUED_MAX + 100):
        journal.note("mark")
    journal.close()
    assert time.monotonic() - began < 5.0
    assert events.statistics()["journal_dropped"] >= before + 100
    let_go.set()
    assert journal._ended.wait(30.0)


def test_a_thread_that_cannot_start_is_no_journal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        journal = begin(root)
    journal.note("mark")
    journal.close()
    assert rows(root) == []


class Bucket:
    """As much of an object store as a journal uses. ``refuses``: puts raise."""

    root = "s3://bucket/run"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts = 0
        self.refuses = False

    def replace_file(self, name: str, data: bytes, *, by: str) -> None:
        del by
        self.puts += 1
        if self.refuses:
            raise OSError(errno.EIO, "no")
        self.objects[name] = data

    def list_dir(self, name: str) -> list[str]:
        return sorted(key.rpartition("/")[2] for key in self.objects if key.startswith(f"{name}/"))

    def size(self, name: str) -> int | None:
        return len(self.objects[name]) if name in self.objects else None

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        return self.objects[name][offset : offset + nbytes]

    def read_head(self, name: str, nbytes: int) -> tuple[bytes, int] | None:
        raise AssertionError

    def unlink(self, name: str) -> None:
        del self.objects[name]


def test_on_a_store_a_run_is_one_object_put_seldom_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "OBJECT_BYTES_MAX", 10_000)
    bucket = Bucket()
    journal = Journal(bucket, CONFIG, world=2)
    journal.start()
    for step in range(500):
        journal.note("mark", step=step, text="x" * 100)
    journal.close()
    assert bucket.puts == 1
    (data,) = bucket.objects.values()
    assert len(data) <= 10_000
    found = read_journal(bucket)
    assert found[0]["kind"] == "run.started", "what run it is stays"
    dropped = found[1]["lines"]
    assert (found[1]["kind"], found[1]["t"] <= found[2]["t"]) == ("journal.cut", True)
    assert [row["step"] for row in found[2:-1]] == list(range(dropped, 500))
    assert len(data) > 9_500, "as much stays as there is room for"
    assert found[-1]["kind"] == "run.ended"


def test_on_a_store_ranks_of_older_saves_go_first_and_how_the_run_began_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "OBJECT_BYTES_MAX", 20_000)
    bucket = Bucket()
    journal = Journal(bucket, CONFIG, world=8)
    journal.start()
    journal.note("load.finished", step=7)
    journal.note("run.resumed", step=7)
    journal.step(8)
    ranks = [[rank, 1.0, 0.1, 0.2, 0.3, 5] for rank in range(64)]
    for step in range(8, 200):
        journal.note("save.published", step=step, stall_s=0.1, ranks=ranks)
    journal.close()
    (data,) = bucket.objects.values()
    assert 18_000 < len(data) <= 20_000
    found = read_journal(bucket)
    assert [row["kind"] for row in found[:4]] == ["run.started", "run.resumed", "step", "journal.cut"]
    saves = [row for row in found if row["kind"] == "save.published"]
    assert [row["step"] for row in saves] == list(range(saves[0]["step"], 200))
    with_ranks = [row["step"] for row in saves if row["ranks"]]
    assert with_ranks == list(range(with_ranks[0], 200))
    assert 4 < len(with_ranks) < len(saves) // 2
    assert found[3]["lines"] == 1 + saves[0]["step"] - 8, "load.finished, too"


def test_what_can_not_be_read_is_told_and_the_rest_is_read(root: Path) -> None:
    begin(root).close()
    (root / journals.RUNS).write_bytes(b"no directory")
    with (root / FILE).open("ab") as file:
        file.write(b"torn")
    found = journals.scan_journal(open_storage(root))
    assert [row["kind"] for row in found.lines] == ["run.started", "run.ended"]
    assert (found.skipped, len(found.errors)) == (1, 1)
    with pytest.raises(StorageError):
        read_journal(open_storage(root))


def test_on_a_store_lines_are_put_while_the_run_goes_on_and_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journals, "PUT_EVERY_S", 0.05)
    bucket = Bucket()
    bucket.refuses = True
    journal = Journal(bucket, CONFIG, world=1)
    journal.start()
    deadline = time.monotonic() + 10.0
    while bucket.puts < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bucket.refuses = False
    while not bucket.objects:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [row["kind"] for row in read_journal(bucket)] == ["run.started"]
    journal.close()
    assert [row["kind"] for row in read_journal(bucket)] == ["run.started", "run.ended"]


def test_on_a_store_the_oldest_runs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "OBJECTS_MAX", 3)
    monkeypatch.setattr(journals, "PUT_EVERY_S", 0.01)
    bucket = Bucket()
    runs = []
    for _ in range(6):
        journal = Journal(bucket, CONFIG, world=1)
        journal.start()
        deadline = time.monotonic() + 10.0
        while f"{journals.RUNS}/{journal.run}.jsonl" not in bucket.objects:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        journal.close()
        runs.append(journal.run)
    assert [row["run"] for row in read_journal(bucket)] == [run for run in runs[3:] for _ in range(2)]


def test_a_journal_that_has_nothing_to_write_has_no_thread(root: Path) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "holdfast-journal"]

    journal = begin(root)
    for number in range(3):
        journal.note("mark", step=number)
        deadline = time.monotonic() + 10.0
        while threads() or len(rows(root)) < 2 + number:
            assert time.monotonic() < deadline, threads()
            time.sleep(0.002)
    writers = [threading.Thread(target=lambda: [journal.note("many") for _ in range(200)]) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    journal.close()
    kinds = [row["kind"] for row in rows(root)]
    assert kinds == ["run.started", *["mark"] * 3, *["many"] * 800, "run.ended"]
    deadline = time.monotonic() + 10.0
    while threads():
        assert time.monotonic() < deadline
        time.sleep(0.002)
