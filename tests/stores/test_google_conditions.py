"""The commit on ``gs://``, by Google's own fake: a put with a condition has one winner, and a lost answer is found out.

Lists, deletions and uploads in parts aren't in its XML API: checkpoints on ``gs://`` are not tested by this.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from _faulty_proxy import Proxy
from servers import Server, StorageTestbench, soon, use
from test_store_races import FEW_LANES, RACES, WRITERS, run_races

from holdfast.storage.object_store import ObjectStore


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    reason = StorageTestbench.missing()
    if reason is not None:
        pytest.skip(reason)
    with StorageTestbench(tmp_path_factory.mktemp("testbench")) as server:
        yield server


@pytest.fixture
def proxy(bench: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    found = Proxy(bench.port)
    use(monkeypatch, bench, found.endpoint)
    yield found
    found.close()


def create(store: ObjectStore, data: bytes) -> bool:
    return store.create("name", data, ours=data.__eq__, ends_s=soon())


def replace(store: ObjectStore, data: bytes) -> bool:
    return store.replace("name", data, store.get_tagged("name", ends_s=soon())[2], ours=data.__eq__, ends_s=soon())


def test_conditions_hold(bench: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, bench)
    store = ObjectStore(bench.place())
    assert store.size("name", ends_s=soon()) is None
    assert create(store, b"first")
    assert not create(store, b"second")
    assert store.get("name", 1, 3, ends_s=soon()) == (b"ir", 5)
    old = store.get_tagged("name", ends_s=soon())[2]
    assert replace(store, b"third")
    assert not store.replace("name", b"late", old, ours=b"late".__eq__, ends_s=soon())
    assert store.get("name", ends_s=soon()) == (b"third", 5)


@pytest.mark.parametrize("fate", ["after", "after-503", "before", "reset", "busy"])
@pytest.mark.parametrize("act", [create, replace])
def test_a_lost_answer_is_found_out(
    bench: Server, proxy: Proxy, act: Callable[[ObjectStore, bytes], bool], fate: str
) -> None:
    store = ObjectStore(bench.place())
    if act is replace:
        assert create(store, b"before")
    pending = [fate]
    proxy.rule = lambda method, _path: pending.pop() if method == "PUT" and pending else None
    assert act(store, b"mine")
    assert not pending
    assert store.get("name", ends_s=soon())[0] == b"mine"


@pytest.mark.timeout(1800)
def test_eight_writers_have_one_winner(bench: Server, proxy: Proxy, tried: Counter[str]) -> None:
    run_races(bench.place(), RACES, lists=False)
    tried[f"races of {WRITERS} writers on {bench.name}, one winner each"] += RACES
    lock, puts = threading.Lock(), 0

    def lose(method: str, _path: str) -> str | None:
        nonlocal puts
        with lock:
            puts += method == "PUT"
            return ("after", "after-503", None, None, None)[puts % 5] if method == "PUT" else None

    proxy.rule, count = lose, -(-RACES // 4)
    run_races(bench.place(), count, at_a_time=FEW_LANES, lists=False)
    assert len(proxy.met) >= count
    tried[f"races of {WRITERS} writers on {bench.name} with lost answers, one winner each"] += count
