"""SIGKILL at every request that a small job with its checkpoints in a bucket sends, from its start to its close.

A first run, which nobody disturbs, gives the number of requests. Then the job is run anew for each of them and killed
when it has sent that one: trainer and engine at once, the trainer alone, which its engine outlives for some time, or
the engine alone. The request is then either never seen by the store, or carried out without an answer. After each:

- what is visible is whole, and is the state of its step; what was told published is there, or newer;
- the next start settles all, resumes from the newest, and its save is published.

HOLDFAST_KILL_POINTS says how many points are tried, evenly spread (a few), or ``all``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from processes import engines_of, is_gone

import holdfast
from holdfast.storage.entries import attempt_of, read_manifest
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore

CHOICE = os.environ.get("HOLDFAST_KILL_POINTS", "")
FEW = 6
WHO = ("both", "trainer", "engine")
SEEN = ("before", "after")
END_S = 90.0
ORPHAN_S = 40.0


class Job:
    """One run of `store_job.saves` by the way of ``proxy``; killed at its ``number``-th request, if that is not 0."""

    def __init__(self, proxy: Any, url: str, *, number: int = 0, who: str = "", seen: str = "before") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "holdfast", "holdfast.manager", "store_job"])
        from store_job import saves

        proxy.clear()
        self.struck = threading.Event()
        self.pids: list[int] = []
        self.told: list[Any] = []
        self._who, self._number, self._seen = who, number, seen
        self._proxy = proxy
        self._counting, self._count = threading.Lock(), 0
        proxy.rule = self._rule
        ours, theirs = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(target=saves, args=(url, environment(proxy.options), theirs))
        self.process.start()
        theirs.close()
        deadline = time.monotonic() + END_S
        while ours.poll(max(0.0, deadline - time.monotonic())):
            try:
                self.told.append(ours.recv())
            except EOFError:
                break
        self.process.join(max(0.0, deadline - time.monotonic()))
        assert not self.process.is_alive(), f"it hangs after {self.told}"
        ours.close()

    def _rule(self, _method: str, _path: str) -> str | None:
        """Called under the proxy's lock, so for one request at a time."""
        self._count += 1
        if self._count != self._number:
            return None
        assert self.process.pid is not None
        engines = engines_of(self.process.pid)
        self.pids = [*engines, self.process.pid]
        doomed = {"both": self.pids, "trainer": [self.process.pid], "engine": engines}[self._who]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        self.struck.set()
        return self._seen

    def wait_gone(self) -> None:
        """Wait until its engine has ended, too."""
        deadline = time.monotonic() + ORPHAN_S
        while not all(map(is_gone, self.pids)):
            assert time.monotonic() < deadline, "an engine outlives its trainer for long"
            time.sleep(0.05)


def environment(options: dict[str, str]) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
        "AWS_REGION": options["region"],
    }


@pytest.fixture(scope="module")
def roots(object_server: Any) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment(object_server.options).items():
            patched.setenv(name, value)
        yield f"s3://{object_server.bucket()}"


@pytest.fixture(scope="module")
def way(object_server: Any) -> Iterator[Any]:
    from _object_server import Proxy

    found = Proxy(object_server)
    yield found
    found.close()


@pytest.fixture(scope="module")
def requests(roots: str, way: Any) -> int:
    """How many a job sends that nobody disturbs."""
    job = Job(way, f"{roots}/undisturbed")
    assert job.told == [1, 2, "closed"]
    count: int = way.clear()
    assert count > 60
    return count


def look(storage: ObjectStorage) -> list[int]:
    """Return the visible steps, each of which is whole and the state of its step."""
    from store_job import build, is_of

    steps = []
    for name in storage.list_dir(""):
        if not name.startswith(".") and read_manifest(storage, name) is not None:
            url = storage.path(name)
            report = holdfast.open(url).verify()
            assert report.ok, (name, report.problems)
            step = int(name.rpartition("-")[2])
            state = build(-1)
            holdfast.load(state, url)
            assert is_of(state, step), name
            steps.append(step)
    return sorted(steps)


def go_on(url: str) -> int:
    """Start anew, save once more; returns the step that was resumed from."""
    from store_job import build, fill, is_of, settings

    state = build(-1)
    with holdfast.CheckpointManager(url, state, config=settings()) as manager:
        found = manager.restore() or 0
        assert not found or is_of(state, found)
        fill(state["model"], found + 1)
        (handle,) = manager.step(found + 1)
        handle.result()
    return found


def left_over(storage: ObjectStorage) -> list[str]:
    """Return objects of attempts that are neither published nor void."""
    rows = [row.name for row in storage.list_tree("") if not row.name.startswith(".holdfast/")]
    names = {row.partition("/")[0] for row in rows}
    published = {found.attempt for name in names if (found := read_manifest(storage, name)) is not None}
    strays = [row for row in rows if (of := attempt_of(row)) is not None and of not in published]
    # Voids stay, and so does a lease that is older than the mark of its attempt.
    return [row for row in strays if not row.rpartition("/")[2].startswith(("holdfast.", "lease-coordinator."))]


def points(count: int) -> list[tuple[int, str, str]]:
    every = [(number, who, seen) for number in range(1, count + 1) for who in WHO for seen in SEEN]
    if CHOICE == "all":
        return every
    few = int(CHOICE) if CHOICE.isdecimal() else FEW
    kinds = [(who, seen) for who in WHO for seen in SEEN]
    return [(1 + (2 * at + 1) * count // (2 * few), *kinds[at % len(kinds)]) for at in range(min(few, count))]


@pytest.mark.timeout(100_000 if CHOICE else 600)
def test_nothing_is_lost_or_half_visible(requests: int, roots: str, way: Any, tried: Counter[str]) -> None:
    for index, (number, who, seen) in enumerate(points(requests)):
        url = f"{roots}/killed-{index}"
        storage = ObjectStorage(ObjectStore(url))
        job = Job(way, url, number=number, who=who, seen=seen)
        way.clear()
        where = f"{who} killed at request {number} of {requests}, {seen}; told {job.told}"
        published = max([step for step in job.told if type(step) is int], default=0)
        visible = look(storage)
        assert max(visible, default=0) >= published, (where, visible)
        job.wait_gone()
        resumed = go_on(url)
        assert max(published, *visible, 0) <= resumed <= 2, (where, visible, resumed)
        assert look(storage) == [resumed + 1], where
        assert storage.unsettled() == [], where
        assert left_over(storage) == [], where
        if job.struck.is_set():
            tried[f"requests to a bucket at which a job was killed: {who}"] += 1
