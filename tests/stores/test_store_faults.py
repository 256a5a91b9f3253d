"""A faulty way to real servers: whatever becomes of the n-th request, calls end in time, and say what is so.

Each case is a small sequence of calls, done once without faults to count its requests, and then once for every request
and every fate. ``HOLDFAST_FAULTS=all`` for every one of them; otherwise every third, from one that differs by fate.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from _faulty_proxy import FATES, Proxy
from servers import Server, soon

from holdfast.errors import StorageError
from holdfast.storage import object_store
from holdfast.storage.object_store import ObjectStore

ALL = os.environ.get("HOLDFAST_FAULTS") == "all"
TRANSIENT = tuple(fate for fate in FATES if fate not in ("denied", "damage", "damage-answer"))
LARGE = bytes(range(256)) * ((12 << 20) // 256)
LIMIT_S = 30.0
SLOW_ON = ("moto",)


def chosen(count: int, fates: Iterable[str]) -> list[tuple[int, str]]:
    """Return (n, fate) for requests 1 to ``count``: all of them, or a third."""
    pairs = [(number, fate, index) for index, fate in enumerate(fates) for number in range(1, count + 1)]
    return [(number, fate) for number, fate, index in pairs if ALL or (number + index) % 3 == 0]


@pytest.fixture
def hasty(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without an answer are given up after a second or so, not 15, so that many can be tried."""
    monkeypatch.setattr(object_store, "REQUEST_S", (server.answers_within_s, 0.5))
    monkeypatch.setattr(object_store, "PART_S", 1.0, raising=False)


def save(store: ObjectStore, below: str, within_s: float = LIMIT_S) -> None:
    """What a save does, at its smallest: data in one part and in several, and a commit."""
    store.put(f"{below}/small", b"small", ends_s=soon(within_s))
    store.put(f"{below}/large", memoryview(LARGE), ends_s=soon(within_s))
    assert store.create(f"{below}/holdfast.json", b"mine", ours=b"mine".__eq__, ends_s=soon(within_s))


def load(store: ObjectStore, below: str) -> None:
    """What a load does, at its smallest."""
    assert store.names(below, ends_s=soon(LIMIT_S)) == ["holdfast.json", "large", "small"]
    assert store.size(f"{below}/holdfast.json", ends_s=soon(LIMIT_S)) == 4
    assert store.get(f"{below}/holdfast.json", 0, 100, ends_s=soon(LIMIT_S))[0] == b"mine"
    assert store.get(f"{below}/large", 5, 9 << 20, ends_s=soon(LIMIT_S))[0] == LARGE[5 : 9 << 20]
    assert store.get(f"{below}/small", ends_s=soon(LIMIT_S))[0] == b"small"


def remove(store: ObjectStore, below: str) -> None:
    store.delete([f"{below}/{name}" for name in ("small", "large", "holdfast.json")], ends_s=soon(LIMIT_S))
    assert store.objects(below, ends_s=soon(LIMIT_S)) == []


def requests_of(proxy: Proxy, act: Callable[[], None]) -> int:
    proxy.clear()
    act()
    return proxy.clear()


@pytest.mark.timeout(1800)
def test_no_lost_late_or_refused_request_is_noticed(
    server: Server, faulty: Proxy, hasty: None, tried: Counter[str]
) -> None:
    """By who stores, reads or removes: every call has its effect and no other, and says so."""
    store = ObjectStore(server.place())
    faulty.stall_s = 0.5
    save(store, "plain")
    counts = {
        save: requests_of(faulty, lambda: save(store, "counted")),
        load: requests_of(faulty, lambda: load(store, "plain")),
        remove: requests_of(faulty, lambda: remove(store, "counted")),
    }
    for act, count in counts.items():
        for number, fate in chosen(count, TRANSIENT):
            below = "plain" if act is load else f"{act.__name__}-{number}-{fate}"
            if act is remove:
                save(store, below)
            faulty.clear()
            faulty.on_nth(number, fate)
            began = time.monotonic()
            try:
                act(store, below)
            except Exception as error:
                raise AssertionError(f"{act.__name__} with {fate} of request {number}: {faulty.met}") from error
            assert time.monotonic() - began < LIMIT_S
            assert len(faulty.met) == 1, (act.__name__, number, fate)
            faulty.clear()
            if act is save:
                load(store, below)
                remove(store, below)
            tried[
                f"requests lost, late, refused or cut on the way to {server.name}, and their calls' answers right"
            ] += 1


@pytest.mark.timeout(600)
def test_a_store_that_fails_for_long_is_named_in_time(
    server: Server, faulty: Proxy, hasty: None, tried: Counter[str]
) -> None:
    """From the n-th request on: a named error within the deadline, and never half an object."""
    store = ObjectStore(server.place())
    count = requests_of(faulty, lambda: save(store, "counted"))
    for number, fate in chosen(count, ("before", "reset", "busy", "hang")):
        below = f"{number}-{fate}"
        faulty.clear()
        faulty.on_nth(number, fate, times=10_000)
        began = time.monotonic()
        with pytest.raises(StorageError) as caught:
            save(store, below, within_s=2.0)
        assert caught.value.errno in object_store.AGAIN, fate
        assert time.monotonic() - began < 12.0, (number, fate)
        faulty.clear()
        for name, data in (("small", b"small"), ("large", LARGE)):
            assert store.size(f"{below}/{name}", ends_s=soon()) in (None, len(data))
        tried[f"outages on the way to {server.name}, named in time"] += 1


@pytest.mark.timeout(600)
def test_who_may_not_is_told_at_once(server: Server, faulty: Proxy) -> None:
    store = ObjectStore(server.place())
    store.put("there", b"1", ends_s=soon())
    for act in (
        lambda: store.put("there", b"2", ends_s=soon()),
        lambda: store.put("large", LARGE, ends_s=soon()),
        lambda: store.create("other", b"2", ours=b"2".__eq__, ends_s=soon()),
        lambda: store.get("there", ends_s=soon()),
        lambda: store.names("", ends_s=soon()),
        lambda: store.delete(["there"], ends_s=soon()),
    ):
        faulty.rule = lambda _method, _path: "denied"
        began = time.monotonic()
        with pytest.raises(StorageError, match="check the credentials") as caught:
            act()
        assert caught.value.errno == errno.EACCES
        assert time.monotonic() - began < 5.0
        faulty.clear()
    assert store.get("there", ends_s=soon())[0] == b"1"


@pytest.mark.timeout(600)
def test_what_is_damaged_on_its_way_up_is_refused_or_found(
    server: Server, faulty: Proxy, hasty: None, tried: Counter[str]
) -> None:
    """One byte of one upload is changed in the proxy: what is stored is right, or what is read back differs."""
    store = ObjectStore(server.place())
    uploads = requests_of(faulty, lambda: store.put("counted", LARGE, ends_s=soon(LIMIT_S)))
    for number in range(1, uploads + 1):
        for data in (LARGE, b"small"):
            name = f"{number}-{len(data)}"
            faulty.clear()
            faulty.on_nth(number, "damage")
            try:
                store.put(name, data, ends_s=soon(4 * server.answers_within_s))
                said = "stored"
            except StorageError as error:
                said = f"refused ({errno.errorcode[error.errno or 0]})"
            damaged = bool(faulty.met) and faulty.met[0][0].body_bytes > 0
            faulty.clear()
            if not damaged:
                assert said == "stored"
                continue
            size = store.size(name, ends_s=soon())
            found = None if size is None else bytes(store.get(name, ends_s=soon())[0])
            if said == "stored" and found == data:
                outcome = "sent again"
            elif said == "stored":
                assert not server.refuses_damage, "accepted, and stored wrong"
                outcome = "accepted: only a checksum of our own finds it"
            else:
                outcome = said
                assert found is None or found == data
            tried[f"uploads damaged on the way to {server.name}: {outcome}"] += 1


def test_what_is_damaged_on_its_way_down_differs(server: Server, faulty: Proxy) -> None:
    """No store's client notices it: that is what the checksums of reports are for."""
    store = ObjectStore(server.place())
    store.put("object", LARGE[:1000], ends_s=soon())
    faulty.on_nth(1, "damage-answer")
    assert store.get("object", ends_s=soon())[0] != LARGE[:1000]
    faulty.clear()
    assert store.get("object", ends_s=soon())[0] == LARGE[:1000]
