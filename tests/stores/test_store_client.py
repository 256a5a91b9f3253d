"""Calls to real servers: what `ObjectStore` promises holds on each of them, and what a server can't do is known."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import Server, soon

from holdfast.errors import StorageError
from holdfast.storage import object_store
from holdfast.storage.object_store import ObjectStore, Tag

MIB = 1 << 20
LARGE = bytes(range(256)) * (24 * MIB // 256)
HARMLESS = ".holdfast/.step-7.0123456789ab.incomplete"
"""A name as recovery's markers have it: parts of it begin with a dot."""


def create(store: ObjectStore, data: bytes, name: str = "name") -> bool:
    return store.create(name, data, ours=data.__eq__, ends_s=soon())


def test_objects_are_stored_listed_and_removed(server: Server, store: ObjectStore) -> None:
    assert store.names("", ends_s=soon()) == []
    assert store.objects("", ends_s=soon()) == []
    names = ("a/one", "a/b/two", "ab", "c", HARMLESS)
    for name in names:
        store.put(name, name.encode(), ends_s=soon())
    assert store.names("", ends_s=soon()) == [".holdfast", "a", "ab", "c"]
    assert store.names("a", ends_s=soon()) == ["b", "one"]
    rows = store.objects("a", ends_s=soon())
    assert sorted((row.name, row.size) for row in rows) == [("b/two", 7), ("one", 5)]
    assert all(abs(row.modified_s - time.time()) < 600 for row in rows)
    for name in names:
        assert store.size(name, ends_s=soon()) == len(name)
        assert store.get(name, ends_s=soon()) == (name.encode(), len(name))
    store.delete(["a/nothing"], ends_s=soon())
    store.delete(["a/one", "a/nothing", "a/b/two"], ends_s=soon())
    assert store.names("a/b", ends_s=soon()) == []
    assert not store.any_below("a", ends_s=soon())
    assert store.any_below("", ends_s=soon())
    assert store.any_below(".holdfast", ends_s=soon())
    assert store.objects("a", ends_s=soon()) == []
    empty = not server.forgets_empty_prefixes
    assert store.names("", ends_s=soon()) == [".holdfast", *(["a"] if empty else []), "ab", "c"]
    assert store.names("a", ends_s=soon()) == (["b"] if empty else [])
    assert store.size("a/one", ends_s=soon()) is None
    with pytest.raises(StorageError) as error:
        store.get("a/one", ends_s=soon())
    assert error.value.errno == errno.ENOENT


def test_an_endpoint_without_tls_is_taken_from_the_environment(
    server: Server, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{server.endpoint}/devstoreaccount1")
        monkeypatch.delenv("AZURE_STORAGE_USE_EMULATOR")
        monkeypatch.delenv("AZURITE_BLOB_STORAGE_URL")
    else:
        monkeypatch.delenv("AWS_ALLOW_HTTP")
    store = ObjectStore(place)
    store.put("a", b"plain", ends_s=soon())
    assert store.get("a", ends_s=soon()) == (b"plain", 5)


def test_many_objects_are_listed_page_by_page_and_removed_at_once(store: ObjectStore) -> None:
    names = [f"many/{number:04}" for number in range(1_100)]
    threads = [threading.Thread(target=_put_all, args=(store, names[first::8])) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"many/{row.name}" for row in sorted(store.objects("many", ends_s=soon()))] == names
    store.delete(names, ends_s=soon())
    assert store.objects("many", ends_s=soon()) == []


def _put_all(store: ObjectStore, names: list[str]) -> None:
    for name in names:
        store.put(name, b"", ends_s=soon())


@pytest.mark.parametrize("nbytes", [0, 1, 1000])
def test_ranges_are_as_asked_for(store: ObjectStore, nbytes: int) -> None:
    data = LARGE[:nbytes]
    store.put("object", data, ends_s=soon())
    assert store.get("object", ends_s=soon()) == (data, nbytes)
    for start, end in ((0, 1), (0, nbytes), (0, nbytes + 7), (nbytes // 2, nbytes // 2 + 9)):
        if start < nbytes and end > start:
            assert store.get("object", start, end, ends_s=soon()) == (data[start:end], nbytes)
    for end in (1, 16):
        assert store.get("object", 0, end, ends_s=soon()) == (data[:end], nbytes)
    if nbytes:
        assert store.get("object", nbytes - 1, ends_s=soon())[0] == data[-1:]
        with pytest.raises(StorageError) as error:
            store.get("object", nbytes, nbytes + 1, ends_s=soon())
        assert error.value.errno == errno.ERANGE


def test_names_may_have_any_character(store: ObjectStore) -> None:
    names = ["a b", "a+b", "ä/ö", "100%", "a=b&c", "(1)", "a'b", "a~b", "model.layers.0.weight:0,1"]
    for name in names:
        store.put(name, name.encode(), ends_s=soon())
    for name in names:
        assert store.get(name, ends_s=soon())[0] == name.encode()
    assert sorted(row.name for row in store.objects("", ends_s=soon())) == sorted(names)
    store.delete(names, ends_s=soon())
    assert store.objects("", ends_s=soon()) == []


def test_large_objects_go_in_parts(store: ObjectStore, server: Server, place: str) -> None:
    store.put("large", memoryview(LARGE), ends_s=soon(60))
    assert store.size("large", ends_s=soon()) == len(LARGE)
    assert store.get("large", ends_s=soon(60))[0] == LARGE
    for start, end in ((8 * MIB - 5, 8 * MIB + 5), (len(LARGE) - 3, len(LARGE)), (1, 17 * MIB)):
        assert store.get("large", start, end, ends_s=soon())[0] == LARGE[start:end]
    store.put("large", memoryview(LARGE[::-1]), ends_s=soon(60))
    assert store.get("large", ends_s=soon(60))[0] == LARGE[::-1]
    assert server.uploads(place.split("/")[2]) in ([], None)


def test_the_first_to_create_an_object_has_created_it(store: ObjectStore) -> None:
    assert create(store, b"mine")
    assert not create(store, b"yours")
    assert create(store, b"mine"), "asked again, as after an answer that was lost"
    assert store.get("name", ends_s=soon())[0] == b"mine"
    store.delete(["name"], ends_s=soon())
    assert create(store, b"yours"), "a name is free again"


def test_an_object_is_replaced_by_who_has_read_it_last(server: Server, store: ObjectStore) -> None:
    """As a void is by a manifest. By obstore itself: the server has to keep the condition, whatever client asks."""
    import obstore
    from obstore.exceptions import PreconditionError

    client = store._client(5.0)
    obstore.put(client, "name", b"1", mode="create")
    first = obstore.head(client, "name")
    assert first["e_tag"]
    quoted = str(first["e_tag"])
    bare = quoted.strip('"')
    if server.compares_bare_tags:
        with pytest.raises(PreconditionError):
            obstore.put(client, "name", b"2", mode={"e_tag": quoted})
    obstore.put(client, "name", b"2", mode={"e_tag": bare if server.compares_bare_tags else quoted})
    for stale in (quoted, bare, quoted):
        with pytest.raises(PreconditionError):
            obstore.put(client, "name", b"3", mode={"e_tag": stale})
    assert bytes(obstore.get(client, "name").bytes()) == b"2"
    second = obstore.head(client, "name")
    assert second["e_tag"] != first["e_tag"]


def test_of_those_who_replace_what_they_read_one_does(server: Server, store: ObjectStore) -> None:
    """However a server wants the tag; how Ceph does is found out once, without waiting."""
    store.put("name", b"0", ends_s=soon())
    object_store._bare_tags.clear()
    for turn in range(1, 3):
        tag = store.get_tagged("name", ends_s=soon())[2]
        data = [f"{turn} of {number}".encode() for number in range(6)]

        def replace(mine: bytes, tag: Tag = tag) -> bool:
            return store.replace("name", mine, tag, ours=mine.__eq__, ends_s=soon())

        began = time.monotonic()
        with ThreadPoolExecutor(6) as pool:
            told = list(pool.map(replace, data))
        assert told.count(True) == 1, told
        assert store.get("name", ends_s=soon())[0] == data[told.index(True)]
        assert not replace(b"late")
        assert time.monotonic() - began < 15
        assert bool(object_store._bare_tags) == server.compares_bare_tags


def test_wrong_credentials_are_named(server: Server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not server.checks_credentials:
        pytest.skip(f"{server.name} takes any credentials")
    for name, value in server.environment(secret="wrong").items():
        if value is not None:
            monkeypatch.setenv(name, value)
    store = ObjectStore(place)
    asks = {
        "list": lambda: store.names("", ends_s=soon()),
        "look at": lambda: store.size("a", ends_s=soon()),
        "read": lambda: store.get("a", ends_s=soon()),
        "write": lambda: store.put("a", b"", ends_s=soon()),
        "create": lambda: create(store, b""),
        "delete": lambda: store.delete(["a"], ends_s=soon()),
    }
    for doing, ask in asks.items():
        began = time.monotonic()
        with pytest.raises(StorageError, match=f"can't {doing} .*check the credentials") as error:
            ask()
        assert error.value.errno == errno.EACCES, doing
        assert time.monotonic() - began < 5.0, doing


def test_a_missing_bucket_is_named(server: Server, place: str) -> None:
    store = ObjectStore(f"{server.scheme}://nobody-has-made-it/run")
    asks = {
        "list": lambda: store.names("", ends_s=soon()),
        "read": lambda: store.get("a", ends_s=soon()),
        "write": lambda: store.put("a", b"", ends_s=soon()),
        "create": lambda: create(store, b""),
    }
    for ask in asks.values():
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"nobody-has-made-it.*make the bucket") as error:
            ask()
        assert error.value.errno == errno.ENODEV
        assert time.monotonic() - began < 5.0


def test_a_server_that_crashes_and_comes_back_was_only_late(server: Server, store: ObjectStore) -> None:
    """Calls in the middle wait for it; what it had acknowledged, small, large and listed, is there again."""
    if server.durable_after_s is None:
        pytest.skip(f"{server.name} keeps its objects in memory only")
    assert create(store, b"before")
    store.put("large", memoryview(LARGE), ends_s=soon(60))
    time.sleep(server.durable_after_s)
    server.kill()
    asked: list[object] = []
    asks = (
        lambda: asked.append(bytes(store.get("name", ends_s=soon(100))[0])),
        lambda: asked.append(store.put("meanwhile", b"1", ends_s=soon(100))),
        lambda: asked.append(store.create("created", b"1", ours=b"1".__eq__, ends_s=soon(100))),
    )
    threads = [threading.Thread(target=ask) for ask in asks]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    assert not asked
    server.start()
    for thread in threads:
        thread.join(100)
    assert sorted(map(str, asked)) == ["None", "True", "b'before'"]
    assert store.get("large", ends_s=soon(60))[0] == LARGE
    assert store.get("meanwhile", ends_s=soon())[0] == b"1"
    assert not store.create("created", b"2", ours=b"2".__eq__, ends_s=soon())
    assert {row.name for row in store.objects("", ends_s=soon())} == {"created", "large", "meanwhile", "name"}


def test_a_server_that_is_gone_is_given_up_in_time(server: Server, store: ObjectStore) -> None:
    if server.durable_after_s is None:
        pytest.skip(f"{server.name} keeps its objects in memory only: it isn't killed")
    time.sleep(server.durable_after_s)
    server.kill()
    began = time.monotonic()
    with pytest.raises(StorageError, match="check the endpoint") as error:
        store.names("", ends_s=soon(1.0))
    assert error.value.errno == errno.EHOSTUNREACH
    assert time.monotonic() - began < 4.0
    server.start()
