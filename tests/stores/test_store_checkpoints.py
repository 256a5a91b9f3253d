"""The public API with roots on object stores, in memory and below ``file://``: what works on a disk works there."""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from servers import Server
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from two_saves import one_of_two_saves_wins

import holdfast
from holdfast.commit.recovery import recover
from holdfast.dcp import Reader, Writer
from holdfast.errors import CheckpointExists, CheckpointNotFound, StorageError
from holdfast.storage.local import open_storage
from holdfast.storage.object_store import ObjectStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
TIMEOUT_S = 60.0


def config(**fields: object) -> holdfast.CheckpointConfig:
    return holdfast.CheckpointConfig(
        **{"every": 1, "persist_timeout": TIMEOUT_S, "commit_timeout": TIMEOUT_S, **fields}
    )  # type: ignore[arg-type]


def state_of(step: int) -> dict[str, object]:
    """A state whose every value follows from ``step``; 9 MiB of it, so that it goes up in parts."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(768, 1024), nn.Linear(1024, 768))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 768)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": {"step": step, "notes": ["ä", None, 2.5]}}


def leaves(state: dict[str, object]) -> dict[str, torch.Tensor]:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    moments = {f"moment-{number}": row["momentum_buffer"] for number, row in optimizer.state_dict()["state"].items()}
    return {**dict(model.state_dict()), **moments}


def assert_same(found: dict[str, object], wanted: dict[str, object]) -> None:
    assert found["progress"] == wanted["progress"]
    mine, yours = leaves(found), leaves(wanted)
    assert mine.keys() == yours.keys()
    for name, value in mine.items():
        assert torch.equal(value, yours[name]), name


def test_one_call_saves_load_open_and_verify(root: str) -> None:
    place = f"{root}/one"
    saved = holdfast.save(state_of(1), place, step=1, metrics={"loss": 0.5}, files={"a.json": b"{}"}, timeout=TIMEOUT_S)
    assert saved.step == 1
    other = state_of(2)
    holdfast.load(other, place, timeout=TIMEOUT_S)
    assert_same(other, state_of(1))
    found = holdfast.open(place)
    assert (found.step, found.metrics["loss"]) == (1, 0.5)
    assert found.read_file("a.json") == b"{}"
    assert torch.equal(found.read("model.0.weight"), leaves(state_of(1))["0.weight"])
    part = found.read("model.1.weight", (slice(3, 9), slice(0, 5)))
    assert torch.equal(part, leaves(state_of(1))["1.weight"][3:9, 0:5])
    assert found.verify().ok
    only = state_of(3)
    holdfast.load(only, place, include=["progress"], timeout=TIMEOUT_S)
    assert only["progress"] == state_of(1)["progress"]
    assert torch.equal(leaves(only)["0.weight"], leaves(state_of(3))["0.weight"])


def test_async_saves_are_published_in_the_background(root: str) -> None:
    state = state_of(4)
    handle = holdfast.async_save(state, f"{root}/async", step=4, timeout=TIMEOUT_S)
    handle.wait_staged(TIMEOUT_S)
    assert handle.result(TIMEOUT_S).step == 4
    other = state_of(5)
    holdfast.load(other, f"{root}/async", timeout=TIMEOUT_S)
    assert_same(other, state_of(4))


def test_what_is_there_is_replaced_only_when_that_is_asked_for(root: str) -> None:
    place = f"{root}/one"
    holdfast.save(state_of(1), place, timeout=TIMEOUT_S)
    with pytest.raises(CheckpointExists, match="one"):
        holdfast.save(state_of(2), place, timeout=TIMEOUT_S)
    reader = holdfast.open(place)
    found = state_of(9)
    holdfast.load(found, place, timeout=TIMEOUT_S)
    assert_same(found, state_of(1))
    if root.startswith("fsspec+"):
        with pytest.raises(StorageError, match="If-Match"):
            holdfast.save(state_of(2), place, overwrite=True, timeout=TIMEOUT_S)
        assert reader.verify().ok
        return
    holdfast.save(state_of(2), place, overwrite=True, timeout=TIMEOUT_S)
    holdfast.load(found, place, timeout=TIMEOUT_S)
    assert_same(found, state_of(2))
    assert holdfast.open(place).verify().ok
    if root.startswith(("memory:", "file:")):
        return  # what is replaced in a directory is gone
    report = reader.verify()
    assert report.ok or all("replaced by another save" in str(problem) for problem in report.problems), "not corrupt"


def test_dcp_saves_and_loads(root: str) -> None:
    """By `holdfast.dcp`: published like any other, refused where something is, and replaced when that is asked for."""

    def values(fill: float) -> dict[str, object]:
        return {"large": torch.full((1024, 2304), fill), "few": torch.full((3,), -fill), "note": f"{fill}"}

    place = f"{root}/one"
    dcp.save(values(1), storage_writer=Writer(place, step=3), no_dist=True)
    found = values(0)
    dcp.load(found, storage_reader=Reader(place), no_dist=True)
    assert found["note"] == "1"
    assert torch.equal(found["large"], values(1)["large"])  # type: ignore[arg-type]
    assert (holdfast.open(place).step, holdfast.open(place).verify().ok) == (3, True)
    with pytest.raises(CheckpointException) as refused:
        dcp.save(values(2), storage_writer=Writer(place), no_dist=True)
    assert isinstance(refused.value.failures[0][0], CheckpointExists)
    if root.startswith("fsspec+"):  # it has no If-Match
        with pytest.raises(CheckpointException, match="exists, and to overwrite it takes a client"):
            dcp.save(values(2), storage_writer=Writer(place, overwrite=True), no_dist=True)
        assert holdfast.open(place).verify().ok
        return
    dcp.save(values(2), storage_writer=Writer(place, overwrite=True), no_dist=True)
    dcp.load(found, storage_reader=Reader(place), no_dist=True)
    assert torch.equal(found["large"], values(2)["large"])  # type: ignore[arg-type]
    assert holdfast.open(place).verify().ok
    assert open_storage(root).list_dir("one").count("holdfast.json") == 1


def test_what_is_not_there_is_named(root: str) -> None:
    holdfast.save(state_of(1), f"{root}/there", timeout=TIMEOUT_S)
    for ask in (
        lambda: holdfast.open(f"{root}/nothing"),
        lambda: holdfast.load(state_of(1), f"{root}/nothing", timeout=TIMEOUT_S),
    ):
        with pytest.raises(CheckpointNotFound, match="nothing"):
            ask()


def test_a_manager_keeps_pins_recovers_and_resumes(root: str) -> None:
    settings = config(keep=holdfast.Keep(last=2))
    state = state_of(0)
    with holdfast.CheckpointManager(root, state, config=settings) as manager:
        assert manager.restore() is None
        for step in range(1, 6):
            set_to(state, step)
            manager.step(step)
            manager.wait(TIMEOUT_S)
            if step == 2:
                manager.pin(2)
        assert manager.steps() == [2, 4, 5]
        assert manager.latest() == 5
    other = state_of(0)
    with holdfast.CheckpointManager(root, other, config=settings) as manager:
        assert manager.restore(step=2) == 2
        assert_same(other, state_of(2))
        with pytest.raises(CheckpointNotFound):
            manager.restore(step=3)
        assert manager.restore() == 5
        assert_same(other, state_of(5))
        manager.unpin(2)
        set_to(other, 6)
        manager.save(6)
        manager.wait(TIMEOUT_S)
        assert manager.steps() == [5, 6]
    newest = state_of(0)
    holdfast.load(newest, root, timeout=TIMEOUT_S)
    assert_same(newest, state_of(6))


def set_to(state: dict[str, object], step: int) -> None:
    wanted = state_of(step)
    for name in ("model", "optimizer"):
        state[name].load_state_dict(wanted[name].state_dict())  # type: ignore[attr-defined]
    progress = state["progress"]
    assert isinstance(progress, dict)
    progress.update(wanted["progress"])  # type: ignore[call-overload]


def test_of_two_writers_of_one_step_one_wins(server: Server, place: str, tried: Counter[str]) -> None:
    """In threads of one process, as two jobs that know nothing of each other would."""
    for number in range(5):
        one_of_two_saves_wins(f"{place}/race-{number}", timeout_s=TIMEOUT_S)
        tried[f"two saves of one step on {server.name}, one winner each"] += 1


def refuse_to_open(place: str) -> None:
    with pytest.raises(CheckpointNotFound):
        holdfast.open(place)


def test_saves_beside_starts_whose_clock_is_a_day_ahead_are_whole_or_refused(
    server: Server, place: str, monkeypatch: pytest.MonkeyPatch, tried: Counter[str]
) -> None:
    """A start that doesn't wait for live attempts takes them for dead: each is published whole, or can't be any more.

    The clock is Python's: requests that are signed with such a clock are refused by the servers themselves.
    """
    storage, real = open_storage(place), time.time
    storage.make_root()
    for number in range(8):
        where, outcome = f"{place}/step-{number}", []
        monkeypatch.setattr(time, "time", real)

        def write(where: str = where, outcome: list[BaseException | None] = outcome) -> None:
            try:
                holdfast.save({"w": torch.arange(4e6)}, where, timeout=TIMEOUT_S)
                outcome.append(None)
            except BaseException as failure:
                outcome.append(failure)

        saving = threading.Thread(target=write)
        saving.start()
        time.sleep(0.03 * number)
        monkeypatch.setattr(time, "time", lambda: real() + 25 * 3600)
        report = recover(storage, clock=time.monotonic, sleep=time.sleep, timeout_s=0.05, lease_quiet_s=0.0)
        saving.join(2 * TIMEOUT_S)
        error = outcome[0]
        if error is None:
            assert holdfast.open(where).verify().ok
            found = {"w": torch.zeros(4_000_000)}
            holdfast.load(found, where, timeout=TIMEOUT_S)
            assert torch.equal(found["w"], torch.arange(4e6))
        else:
            assert isinstance(error, holdfast.HoldfastError), repr(error)
            assert report.removed, str(error)
            refuse_to_open(where)
        became = "published" if error is None else "refused by name"
        tried[f"saves on {server.name} beside starts whose clock is a day ahead: {became}"] += 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_in_a_bucket_is_one_on_a_disk(server: Server, place: str, tmp_path: Path) -> None:
    """Copied object by object it opens, verifies and loads, with stock DCP too."""
    holdfast.save(state_of(3), f"{place}/one", timeout=TIMEOUT_S)
    store = ObjectStore(f"{place}/one")
    ends_s = time.monotonic() + TIMEOUT_S
    for row in store.objects("", ends_s=ends_s):
        target = tmp_path / "one" / urllib.parse.unquote(row.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(store.get(row.name, ends_s=ends_s)[0])
    assert holdfast.open(tmp_path / "one").verify().ok
    found = state_of(1)
    holdfast.load(found, tmp_path / "one", timeout=TIMEOUT_S)
    assert_same(found, state_of(3))
    stock = {"model.0.weight": torch.zeros(1024, 768)}
    dcp.load(stock, checkpoint_id=tmp_path / "one", no_dist=True)
    assert torch.equal(stock["model.0.weight"], leaves(state_of(3))["0.weight"])
    assert server.uploads(place.split("/")[2]) in ([], None)
