"""Stores reached by fsspec and by MSC, on SeaweedFS: races, jobs killed in a save, failures on the way, the commands.

`test_store_checkpoints`, `test_store_storage` and `test_hf_exports` run by way of both as well.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _faulty_proxy import Proxy
from jobs import run_script
from servers import Azurite, Server, soon, use
from two_saves import one_of_two_saves_wins

import holdfast
from holdfast.errors import ConfigError, StorageError
from holdfast.storage.fsspec_store import CallStore
from holdfast.storage.local import open_storage
from holdfast.storage.protocol import Storage
from holdfast.testing.storage_conformance import OBJECT_CHECKS

NAMES = os.environ.get("HOLDFAST_STORES", "seaweedfs,azurite,moto").split(",")
RACES = min(100, int(os.environ.get("HOLDFAST_RACES", "10")))
"""One after another; SeaweedFS takes two seconds for each."""
WRITERS = 8
TIMEOUT_S = 60.0
JOB = Path(__file__).with_name("store_job.py")
STEPS, KILL_AT = 7, 6


@pytest.fixture
def seaweed(started: Callable[[str], Server], away: str) -> Server:
    """The server that ``away`` is on."""
    del away
    return started("seaweedfs")


@pytest.mark.timeout(1800)
def test_eight_writers_have_one_winner(away: str, package: str, tried: Counter[str]) -> None:
    stores = [CallStore(away) for _ in range(WRITERS)]
    for number in range(RACES):
        told: dict[int, object] = {}
        barrier = threading.Barrier(WRITERS)

        def write(
            writer: int,
            name: str = f"race-{number}",
            told: dict[int, object] = told,
            barrier: threading.Barrier = barrier,
        ) -> None:
            mine = b"%02d" % writer * (writer + 1)
            barrier.wait(30)
            try:
                told[writer] = stores[writer].create(name, mine, ours=mine.__eq__, ends_s=soon())
            except BaseException as error:
                told[writer] = error

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        winners = [writer for writer, what in told.items() if what is True]
        assert len(winners) == 1, told
        assert sorted(map(str, told.values())) == ["False"] * (WRITERS - 1) + ["True"], told
        found = bytes(stores[0].get(f"race-{number}", ends_s=soon())[0])
        assert found == b"%02d" % winners[0] * (winners[0] + 1)
    assert len(stores[0].objects("", ends_s=soon())) == RACES
    tried[f"races of {WRITERS} writers by {package} on seaweedfs, one winner each"] += RACES


def test_of_two_saves_of_one_step_one_wins(away: str) -> None:
    one_of_two_saves_wins(f"{away}/one", timeout_s=TIMEOUT_S)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_killed_in_a_save_resumes_bit_for_bit(
    away: str, seaweed: Server, package: str, world: int, tmp_path: Path, tried: Counter[str]
) -> None:
    """By SIGKILL of all its ranks, while the save of a step is under way."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_script(JOB, f"{away}/whole", whole, STEPS, 0, nproc=world)
    run_script(JOB, f"{away}/killed", killed, STEPS, KILL_AT, nproc=world, killed=True)
    run_script(JOB, f"{away}/killed", killed, STEPS, 0, nproc=world)
    resumed, expected = (
        [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(world)] for out in (killed, whole)
    )
    assert [found["digest"] for found in resumed] == [wanted["digest"] for wanted in expected]
    assert {found["first"] for found in resumed} <= {2, 4, 6}, "resumed, not begun anew"
    settings = holdfast.CheckpointConfig(load_only=True)
    steps = holdfast.CheckpointManager(f"{away}/killed", {"x": torch.zeros(1)}, config=settings).steps()
    assert len(steps) == 2
    for step in steps:
        assert holdfast.open(f"{away}/killed/step-{step}").verify().ok
    keys = seaweed.keys(bucket_of(away))
    assert any("/killed/" in key for key in keys)
    assert not [key for key in keys if "/killed/" in key and ("/attempts/" in key or "lease-" in key)]
    tried[f"jobs of {world} rank(s) by {package} on seaweedfs, killed in a save and resumed bit for bit"] += 1


def bucket_of(url: str) -> str:
    if url.startswith("fsspec+"):
        return url.split("/")[2]
    profile = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())["profiles"]["here"]
    return str(profile["storage_provider"]["options"]["base_path"])


def test_the_commands_list_and_verify(away: str) -> None:
    for step in (1, 2):
        holdfast.save({"w": torch.full((10,), float(step))}, f"{away}/step-{step}", step=step, timeout=TIMEOUT_S)
    listed = command("ls", away)
    assert listed.returncode == 0, listed.stderr
    assert "step-1" in listed.stdout
    assert "step-2" in listed.stdout
    verified = command("verify", f"{away}/step-2")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    storage = open_storage(away)
    data = next(row.name for row in storage.list_tree("step-2") if row.name.endswith(".distcp"))
    storage.unlink(f"step-2/{data}")
    broken = command("verify", f"{away}/step-2")
    assert broken.returncode != 0
    assert data in broken.stdout + broken.stderr


def command(*words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "holdfast", *words]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def on_the_way(away: str, seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[Proxy, str]:
    """A proxy before the server, to which the environment leads, and the URL of ``away``."""
    proxy = Proxy(seaweed.port)
    use(monkeypatch, seaweed, proxy.endpoint)
    return proxy, away


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["busy", "reset", "after", "after-503"])
def test_a_save_and_a_load_survive_failures(on_the_way: tuple[Proxy, str], fault: str) -> None:
    """Every seventh request is refused, or its answer is lost; creates are told from others' by what is there."""
    proxy, url = on_the_way
    requests = 0

    def rule(_method: str, _path: str) -> str | None:
        nonlocal requests
        requests += 1
        return fault if requests % 7 == 0 else None

    proxy.rule = rule
    wanted = {"w": torch.arange(3e6)}
    holdfast.save(wanted, f"{url}/one", timeout=TIMEOUT_S)
    found = {"w": torch.zeros(3_000_000)}
    holdfast.load(found, f"{url}/one", timeout=TIMEOUT_S)
    assert torch.equal(found["w"], wanted["w"])
    assert proxy.met, "nothing has failed"
    proxy.close()


@pytest.mark.timeout(300)
def test_a_server_that_does_not_answer_ends_a_call_in_time(on_the_way: tuple[Proxy, str]) -> None:
    proxy, url = on_the_way
    proxy.rule = lambda _method, _path: "hang"
    store = CallStore(url)
    for ask in (
        lambda: store.get("a", ends_s=soon(3.0)),
        lambda: store.names("", ends_s=soon(3.0)),
        lambda: store.put("a", b"1", ends_s=soon(3.0)),
        lambda: store.create("a", b"1", ours=b"1".__eq__, ends_s=soon(3.0)),
        lambda: store.put("a", b"1" * (20 << 20), ends_s=soon(3.0)),
    ):
        begun_s = time.monotonic()
        with pytest.raises(StorageError) as caught:
            ask()
        assert time.monotonic() - begun_s < 20.0  # of 60
        assert caught.value.errno == errno.ETIMEDOUT, caught.value
    proxy.close()


def test_what_is_there_is_not_overwritten_by_fsspec(away: str, package: str) -> None:
    """Refused before anything is changed; MSC has If-Match."""
    holdfast.save({"w": torch.ones(10)}, f"{away}/one", timeout=TIMEOUT_S)
    before = open_storage(away).list_tree("one")
    if package == "fsspec":
        with pytest.raises(StorageError, match="If-Match"):
            holdfast.save({"w": torch.zeros(10)}, f"{away}/one", overwrite=True, timeout=TIMEOUT_S)
        assert open_storage(away).list_tree("one") == before
    found = {"w": torch.zeros(10)}
    holdfast.load(found, f"{away}/one", timeout=TIMEOUT_S)
    assert torch.equal(found["w"], torch.ones(10))


def test_wrong_keys_and_missing_buckets_are_named(away: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(1)}
    if package == "fsspec":
        with pytest.raises(StorageError, match="make the bucket") as missing:
            holdfast.save(state, "fsspec+s3://no-such-bucket/run/one", timeout=TIMEOUT_S)
        assert missing.value.errno == errno.ENODEV
    else:
        with pytest.raises(ConfigError, match="no-such-profile"):
            holdfast.save(state, "msc://no-such-profile/run/one", timeout=TIMEOUT_S)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match="credentials") as refused:
        holdfast.save(state, f"{away}/one", timeout=TIMEOUT_S)
    assert refused.value.errno == errno.EACCES


@pytest.fixture
def azure(started: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a prefix in a new container of Azurite, reached by adlfs."""
    pytest.importorskip("adlfs")
    server = started("azurite")
    assert isinstance(server, Azurite)
    keys = {"AccountName": server.account, "AccountKey": server.key}
    said = {**keys, "DefaultEndpointsProtocol": "http", "BlobEndpoint": f"{server.endpoint}/{server.account}"}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", ";".join(f"{key}={value}" for key, value in said.items()))
    return f"fsspec+az://{server.bucket()}/run"


@pytest.mark.skipif("azurite" not in NAMES, reason="without Azurite")
@pytest.mark.parametrize("check", OBJECT_CHECKS, ids=lambda check: check.__name__)
def test_storage_contract_by_adlfs(check: Callable[[Storage], None], azure: str) -> None:
    check(open_storage(azure))


@pytest.mark.skipif("azurite" not in NAMES, reason="without Azurite")
def test_a_save_by_adlfs_is_loaded_and_not_overwritten(azure: str) -> None:
    wanted, found = {"w": torch.arange(5e6)}, {"w": torch.zeros(5_000_000)}
    holdfast.save(wanted, f"{azure}/one", timeout=TIMEOUT_S)
    holdfast.load(found, f"{azure}/one", timeout=TIMEOUT_S)
    assert torch.equal(found["w"], wanted["w"])
    assert holdfast.open(f"{azure}/one").verify().ok
    with pytest.raises(StorageError, match="If-Match"):
        holdfast.save(found, f"{azure}/one", overwrite=True, timeout=TIMEOUT_S)
