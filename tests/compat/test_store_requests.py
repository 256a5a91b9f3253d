"""How many requests a manager makes on an object store, beside the data: each costs 20 to 50 ms there, and money."""

from __future__ import annotations

import pytest
import torch
from _object_server import Proxy, Server

import holdfast
from holdfast.storage.object_storage import ObjectStorage
from holdfast.storage.object_store import ObjectStore

STEPS = 5
SEARCHES = 3
"""Requests of a restore beside one for each step: the list, and the manifest of what is loaded, as it is opened."""


@pytest.fixture
def storage(object_server: Server, proxy: Proxy) -> ObjectStorage:
    """A root with `STEPS` steps; what comes now goes by way of ``proxy``."""
    url = f"s3://{object_server.bucket()}/run"
    direct = ObjectStorage(ObjectStore(url, object_server.options))
    with holdfast.CheckpointManager(direct, state(), config=config()) as manager:
        for step in range(1, STEPS + 1):
            manager.save(step).result()
    found = ObjectStorage(ObjectStore(url, proxy.options))
    found.make_root()  # which proves the conditions, once a process
    proxy.clear()
    return found


def state() -> dict[str, torch.nn.Module]:
    return {"model": torch.nn.Linear(8, 8)}


def config(last: int | None = 2 * STEPS) -> holdfast.CheckpointConfig:
    return holdfast.CheckpointConfig(keep=holdfast.Keep(last=last))


def asked(proxy: Proxy) -> list[str]:
    """The requests since the last call, as ``PUT .plan``: a file without its attempt, ``LIST`` and ``DELETE``."""
    rows = []
    for request in list(proxy.requests):
        if "list-type" in request.query:
            rows.append("LIST")
        elif request.method == "POST" and "delete" in request.query:
            rows.append("DELETE")
        else:
            parts = request.path.rpartition("/")[2].split(".")
            plain = ".".join(part for part in parts if not (len(part) == 12 and set(part) <= set("0123456789abcdef")))
            rows.append(f"{request.method} {plain}")
    proxy.clear()
    return rows


def test_a_start_lists_and_looks_at_no_step(storage: ObjectStorage, proxy: Proxy) -> None:
    with holdfast.CheckpointManager(storage, state(), config=config()):
        assert asked(proxy) == ["LIST", "LIST"]  # what was begun, and the root


def test_a_restore_reads_each_manifest_once(storage: ObjectStorage, proxy: Proxy) -> None:
    with holdfast.CheckpointManager(storage, state(), config=config()) as manager:
        proxy.clear()
        assert manager.restore() == STEPS
    rows = asked(proxy)
    assert [row for row in rows[-1:] if row.startswith("PUT ") and row.endswith(".jsonl")], "the journal, at the end"
    del rows[-1]
    looks = [row for row in rows if row in ("LIST", "GET holdfast.json", "HEAD holdfast.json")]
    assert len(looks) <= STEPS + SEARCHES, rows
    assert len(rows) - len(looks) <= 4, rows  # .metadata, the report, two files of data


def test_what_a_save_asks_for(storage: ObjectStorage, proxy: Proxy) -> None:
    with holdfast.CheckpointManager(storage, state(), config=config()) as manager:
        manager.restore()
        manager.save(STEPS + 1).result()
        proxy.clear()
        manager.save(STEPS + 2).result()
        rows = asked(proxy)
    data = [at for at, row in enumerate(rows) if row.endswith(".distcp")]
    before, after = rows[: data[0]], rows[data[-1] + 1 :]
    # Is the name free, when the save is called and when it begins; a lease of the coordinator, one of the engine.
    assert sorted(before) == sorted(
        [
            *["LIST", "HEAD step-7"] * 2,
            *["PUT lease-coordinator", "PUT .step-7.incomplete", "PUT .plan", "PUT .metadata", "PUT lease-00000"],
        ]
    ), rows
    published = [at for at, row in enumerate(after) if row == "PUT holdfast.json"]
    seal, commit = published  # both have this name without the attempt
    engine = [row for row in after[:commit] if row in ("DELETE", "GET holdfast.json")]  # beside, by another process
    assert len(engine) <= 2, rows
    assert [row for row in after[: commit + 1] if row not in engine] == [
        "PUT rank-00000.report",
        "PUT holdfast.json",  # sealed
        "LIST",  # is all of it there
        "PUT holdfast.json",  # published
    ], rows
    assert seal < commit
    # The face of .metadata, is it still ours, tidying, opening it, the lease; retention lists, and reads the new one.
    assert len(after[commit + 1 :]) + len(engine) <= 9, rows


def test_retention_that_deletes_nothing_looks_at_no_known_step(storage: ObjectStorage, proxy: Proxy) -> None:
    with holdfast.CheckpointManager(storage, state(), config=config()) as manager:
        manager.restore()
        manager.save(STEPS + 1).result()
        proxy.clear()
        manager.save(STEPS + 2).result()
        old = [row for row in proxy.requests if f"/step-{STEPS}/" in row.path or "/step-1/" in row.path]
    assert old == []


def test_objects_of_others_that_come_while_a_save_uploads_refuse_it(
    storage: ObjectStorage, proxy: Proxy, object_server: Server
) -> None:
    """The list that looks for the save's own objects shows them too."""
    bucket = storage.root.split("/")[2]
    name = f"step-{STEPS + 1}"

    def meanwhile(method: str, path: str) -> None:
        if method == "PUT" and path.rpartition("/")[2].startswith("rank-00000."):
            object_server.request("PUT", f"/{bucket}/run/{name}/.metadata", b"of another tool")

    with holdfast.CheckpointManager(storage, state(), config=config()) as manager:
        proxy.rule = meanwhile
        with pytest.raises(holdfast.CheckpointExists, match=r"\.metadata"):
            manager.save(STEPS + 1).result()
        proxy.clear()
        assert manager.latest() == STEPS
    assert object_server.request("GET", f"/{bucket}/run/{name}/.metadata")[1] == b"of another tool"
    left = [key for key in object_server.keys(bucket) if f"/{name}/" in key]
    assert f"run/{name}/holdfast.json" not in left
