"""Calls to an object store: what is there is whole, who put it first is known, and nothing waits for ever."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
from _object_server import KEYS, Proxy, Server

from holdfast.errors import ConfigError, OutcomeUnknown, StorageError
from holdfast.storage import object_store
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore, PutInDoubt, Tag
from holdfast.testing import storage_conformance

LONG_S = 30.0
PLAIN = [
    "file_is_read_back",
    "range_is_read_back",
    "pieces_are_read_back",
    "file_is_never_replaced",
    "file_larger_than_expected_is_refused",
    "file_is_put_in_the_place_of_another",
    "attempt_is_published",
    "published_name_is_refused_to_another",
    "overwriting_replaces_or_is_refused",
    "published_attempt_is_not_withdrawn",
    "hidden_is_invisible",
]
"""Of the contract of storages, what speaks of no directories, no locks, and nothing that a start would finish."""


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def store(object_server: Server, proxy: Proxy) -> ObjectStore:
    """A place in a bucket of its own, by way of the proxy."""
    return ObjectStore(f"s3://{object_server.bucket()}/some/where", proxy.options)


# what is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", ["s3", "file"])
def test_what_is_no_directory_is_as_on_any_storage(name: str, kind: str, object_server: Server, tmp_path: Path) -> None:
    check = next(check for check in storage_conformance.STORAGE_CHECKS if check.__name__ == name)
    url = f"s3://{object_server.bucket()}/deep/below" if kind == "s3" else f"file://{tmp_path}/below"
    storage = ObjectStorage(ObjectStore(url, object_server.options if kind == "s3" else None))
    storage.until(soon())
    check(storage)


def test_objects_are_listed_and_removed(store: ObjectStore) -> None:
    storage = ObjectStorage(store)
    storage.until(soon())
    assert storage.list_dir("") == []
    for name in ("a/one", "a/b/two", "ab", "c"):
        store.put(name, name.encode(), ends_s=soon())
    assert storage.list_dir("") == ["a", "ab", "c"]
    assert storage.list_dir("a") == ["b", "one"]
    assert sorted((row.name, row.size) for row in storage.list_tree("a")) == [("b/two", 7), ("one", 5)]
    assert all(abs(row.modified_s - time.time()) < 600 for row in storage.list_tree("a"))
    assert storage.exists("a")
    assert not storage.exists("b")
    storage.unlink("a/nothing")
    storage.remove_tree("a")
    assert storage.list_dir("") == ["ab", "c"]


def test_a_large_object_goes_in_parts_and_comes_in_ranges(store: ObjectStore, proxy: Proxy, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)  # the least that S3 takes
    data = bytes(range(256)) * (8 << 12)
    store.put("large", memoryview(data), ends_s=soon())
    assert [method for method, _ in proxy.seen].count("PUT") == 2
    assert bytes(store.get("large", 5_000_000, 7_000_001, ends_s=soon())[0]) == data[5_000_000:7_000_001]
    assert store.get("large", ends_s=soon()) == (data, len(data))
    proxy.rule = lambda method, _path: "before" if method == "PUT" and len(proxy.seen) % 2 else None
    store.put("large", memoryview(data[::-1]), ends_s=soon())
    assert store.get("large", ends_s=soon())[0] == data[::-1]


def test_an_upload_that_ends_half_way_leaves_nothing(store: ObjectStore, proxy: Proxy, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    proxy.rule = lambda method, _path: "denied" if [m for m, _ in proxy.seen].count("PUT") > 1 else None
    with pytest.raises(StorageError, match="some/where/large") as error:
        store.put("large", bytes(11 << 20), ends_s=soon())
    assert error.value.errno == errno.EACCES
    proxy.rule = lambda _method, _path: None
    assert store.size("large", ends_s=soon()) is None


# who was first ---------------------------------------------------------------------------------------------------


def create(store: ObjectStore, data: bytes, seconds: float = LONG_S) -> bool:
    return store.create("name", data, ours=data.__eq__, ends_s=soon(seconds))


def test_the_first_to_create_an_object_has_created_it(store: ObjectStore) -> None:
    assert create(store, b"mine")
    assert not create(store, b"yours")
    assert create(store, b"mine"), "asked again, as after an answer that was lost"
    assert store.get("name", ends_s=soon())[0] == b"mine"


@pytest.mark.parametrize("fate", ["before", "after", "busy"])
@pytest.mark.parametrize("first", [True, False])
def test_a_lost_answer_is_found_out(store: ObjectStore, proxy: Proxy, fate: str, first: bool) -> None:
    if not first:
        assert create(store, b"yours")
    puts = []

    def rule(method: str, _path: str) -> str | None:
        if method == "PUT":
            puts.append(fate)
        return fate if method == "PUT" and len(puts) == 1 else None

    proxy.rule = rule
    assert create(store, b"mine") is first
    assert len(puts) > 0
    assert store.get("name", ends_s=soon())[0] == (b"mine" if first else b"yours")


def test_what_was_sent_and_never_answered_for_is_in_doubt(store: ObjectStore, proxy: Proxy) -> None:
    proxy.rule = lambda method, _path: "after" if method == "PUT" else "busy"
    with pytest.raises(PutInDoubt, match="can't be told"):
        create(store, b"mine", 1.0)
    proxy.rule = lambda _method, _path: None
    assert store.get("name", ends_s=soon())[0] == b"mine"


def test_what_was_refused_is_not_in_doubt(store: ObjectStore, proxy: Proxy) -> None:
    proxy.rule = lambda method, _path: "denied" if method == "PUT" else None
    with pytest.raises(StorageError, match="credentials") as error:
        create(store, b"mine")
    assert not isinstance(error.value, PutInDoubt)
    assert error.value.errno == errno.EACCES
    assert error.value.path == f"{store.url}/name"


@pytest.mark.parametrize("fate", ["after", "denied"])
def test_a_manifest_that_may_come_yet_is_neither_published_nor_refused(
    store: ObjectStore, proxy: Proxy, fate: str
) -> None:
    storage = ObjectStorage(store)
    storage.until(soon(1.0))
    proxy.rule = lambda method, _path: fate if method == "PUT" else "busy"
    outcome = storage.publish("step-7", "step-7", "0123456789ab", b"{}", overwrite=False)
    if fate == "after":
        assert outcome.kind == "unknown"
        assert isinstance(outcome.error, OutcomeUnknown)
        assert "may be published later" in str(outcome.error)
    else:
        assert outcome.kind == "refused"
        assert isinstance(outcome.error, StorageError)


# what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", ["before", "busy", "hang"])
def test_a_store_that_answers_again_was_only_late(store: ObjectStore, proxy: Proxy, fate: str) -> None:
    store.put("there", b"1", ends_s=soon())
    before = len(proxy.seen)
    proxy.rule = lambda _method, _path: fate if len(proxy.seen) <= before + 2 else None
    seconds = 3.0 if fate == "hang" else LONG_S
    assert store.get("there", ends_s=soon(seconds))[0] == b"1"
    assert len(proxy.seen) > before + 2


@pytest.mark.parametrize(("fate", "code"), [("busy", errno.EAGAIN), ("hang", None), ("before", None)])
def test_a_store_that_answers_nothing_is_given_up_in_time(store: ObjectStore, proxy: Proxy, fate, code) -> None:
    proxy.rule = lambda _method, _path: fate
    asks = {
        "busy": lambda: store.names("", ends_s=soon(0.4)),
        "hang": lambda: store.size("there", ends_s=soon(0.4)),
        "before": lambda: store.put("there", b"", ends_s=soon(0.4)),
    }
    began = time.monotonic()
    with pytest.raises(StorageError, match="s3://") as error:
        asks[fate]()
    assert error.value.errno in ({code} if code else object_store.AGAIN)
    assert time.monotonic() - began < 4.0


def test_nobody_listens_there(object_server: Server) -> None:
    with pytest.raises(StorageError, match="check the endpoint") as error:
        ObjectStore("s3://b/c", {**KEYS, "endpoint": "http://127.0.0.1:1"}).names("", ends_s=soon(0.5))
    assert error.value.errno == errno.EHOSTUNREACH


def test_no_bucket_no_rights_no_credentials(object_server: Server, proxy: Proxy, monkeypatch) -> None:
    with pytest.raises(StorageError, match="make the bucket") as error:
        ObjectStore("s3://nobody-has-made-it/a", object_server.options).names("", ends_s=soon())
    assert error.value.errno == errno.ENODEV
    proxy.rule = lambda _method, _path: "denied"
    with pytest.raises(StorageError, match="check the credentials") as error:
        ObjectStore("s3://b/a", proxy.options).names("", ends_s=soon())
    assert error.value.errno == errno.EACCES
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    began = time.monotonic()
    nobody = ObjectStore("s3://b/a", {"endpoint": object_server.endpoint, "metadata_endpoint": "http://127.0.0.1:1"})
    with pytest.raises(StorageError, match="check the credentials"):
        nobody.names("", ends_s=soon(1.0))
    assert time.monotonic() - began < 4.0


def test_urls_and_options_are_checked() -> None:
    for url in (
        "s3://",
        "s3:///a",
        "ftp://host/a",
        "://a",
        "s3://b/../c",
        "s3://b/a?x=1",
        "http://somewhere/a",
        "az://",
    ):
        with pytest.raises(ConfigError, match="URL") as error:
            ObjectStore(url)
        assert error.value.field == "root"
    with pytest.raises(ConfigError, match="not an object store"):
        ObjectStore("https://example.org/a")
    with pytest.raises(ConfigError, match="nonsense"):
        ObjectStore("s3://b/c", {"nonsense": "1"})
    for options in ({"endpoint": 3}, {"allow_http": "perhaps"}):
        with pytest.raises(ConfigError, match="store_options"):
            ObjectStore("s3://b/c", options)  # type: ignore[arg-type]


def test_a_server_without_tls_in_place_of_googles_is_taken_from_the_environment(
    object_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = object_server.options["endpoint"]
    assert endpoint.startswith("http://")
    for name, value in {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "any"}.items():
        monkeypatch.setenv(name, value)
    store = ObjectStore("gs://there-is-none/run")
    with pytest.raises(StorageError, match="404") as error:
        store.get("name", ends_s=soon())
    assert error.value.errno == errno.ENODEV


def test_other_stores_are_known_by_their_urls() -> None:
    key = "c2VjcmV0"
    options = {"account_name": "somebody", "account_key": key}
    assert ObjectStore("az://container/a/", options).url == "az://container/a"
    with pytest.raises(ConfigError, match="Account must be specified"):
        ObjectStore("az://container/a")
    assert ObjectStore("gs://bucket/a", {"skip_signature": "true"}).url_of("b") == "gs://bucket/a/b"


# replacing ---------------------------------------------------------------------------------------------------------


def test_a_server_that_compares_tags_without_quotes(
    store: ObjectStore, object_server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ceph's gateway does: the second way is tried only where the object is unchanged, and remembered."""
    import obstore
    from obstore.exceptions import PreconditionError

    put, tags = obstore.put, []

    def compares_bare(client: object, name: str, data: bytes, *, mode: object, use_multipart: bool) -> object:
        if isinstance(mode, dict):
            tags.append(mode["e_tag"])
            if mode["e_tag"].startswith('"'):
                raise PreconditionError("412 Precondition Failed")
            mode = {**mode, "e_tag": f'"{mode["e_tag"]}"'}
        return put(client, name, data, mode=mode, use_multipart=use_multipart)

    monkeypatch.setattr(object_store, "_bare_tags", set())
    monkeypatch.setattr(obstore, "put", compares_bare)

    def replace(data: bytes, tag: Tag, within: ObjectStore = store) -> bool:
        return within.replace("name", data, tag, ours=data.__eq__, ends_s=soon())

    def tag() -> Tag:
        return store.get_tagged("name", ends_s=soon())[2]

    store.put("name", b"1", ends_s=soon())
    first = tag()
    store.put("name", b"2", ends_s=soon())
    assert not replace(b"3", first), "another is there: that it was refused was right"
    assert [text[0] for text in tags] == ['"']
    began, second = time.monotonic(), tag()
    assert replace(b"3", second)
    assert time.monotonic() - began < 5
    assert [text[0] == '"' for text in tags] == [True, True, False]
    tags.clear()
    assert not replace(b"4", second)
    assert replace(b"4", tag())
    assert not any('"' in text for text in tags), "it is known now"
    other = ObjectStore(f"s3://{object_server.bucket()}/some/where", proxy.options)
    other.put("name", b"1", ends_s=soon())
    tags.clear()
    assert replace(b"2", other.get_tagged("name", ends_s=soon())[2], other)
    assert tags[0].startswith('"'), "of another bucket it isn't"


def test_a_server_that_refuses_what_is_unchanged_in_every_way(
    store: ObjectStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore
    from obstore.exceptions import PreconditionError

    def refuse(*_: object, **__: object) -> None:
        raise PreconditionError("412 Precondition Failed")

    store.put("name", b"1", ends_s=soon())
    tag = store.get_tagged("name", ends_s=soon())[2]
    monkeypatch.setattr(object_store, "_bare_tags", set())
    monkeypatch.setattr(obstore, "put", refuse)
    with pytest.raises(PutInDoubt, match="412"):
        store.replace("name", b"2", tag, ours=b"2".__eq__, ends_s=soon(3.0))
    assert object_store._bare_tags == set()
