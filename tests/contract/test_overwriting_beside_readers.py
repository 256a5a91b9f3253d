"""Readers beside a writer that overwrites: each sees one generation whole, and never a path that isn't there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp
from holdfast.errors import CheckpointCorrupt, CheckpointReplaced
from holdfast.loader import loader
from holdfast.storage import files as opened
from holdfast.storage import leases as reader_lease
from holdfast.storage import local
from holdfast.storage.entries import hidden_name

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROWS = 40_000
BESIDE_S = 2.0
WRITER = """
import os, sys, time, torch, holdfast
from holdfast.storage import local
import holdfast.dcp
import torch.distributed.checkpoint as dcp
path, how, exchanges = sys.argv[1:]
if exchanges == "False":
    local._renameat2 = lambda: None
state = {"a": torch.zeros(40_000), "b": torch.zeros(40_000), "n": 0}
value = 0
while not os.path.exists(path + ".stop"):
    value += 1
    for name in ("a", "b"):
        state[name].fill_(value)
    state["n"] = value
    if how == "save":
        holdfast.save(state, path, step=value, overwrite=True)
    else:
        dcp.save(state, storage_writer=holdfast.dcp.Writer(path, step=value, overwrite=True), no_dist=True)
print(value)
"""


GENERATIONS = 3


def wait_for_step(path: str, step: int) -> None:
    deadline = time.monotonic() + 80
    while (holdfast.open(path).step or 0) < step:
        assert time.monotonic() < deadline, "the writer doesn't get on"
        time.sleep(0.01)


def state_of(value: float) -> dict[str, Any]:
    return {"a": torch.full((ROWS,), value), "b": torch.full((ROWS,), value), "n": int(value)}


def check_one_generation(state: dict[str, Any]) -> None:
    seen = {*state["a"].unique().tolist(), *state["b"].unique().tolist(), float(state["n"])}
    assert len(seen) == 1, f"two generations in one load: {seen}"


def load_whole(path: str) -> None:
    state = state_of(-1)
    holdfast.load(state, path)
    check_one_generation(state)


def open_and_read(path: str) -> None:
    found = holdfast.open(path)
    state = {"a": found.read("a"), "b": found.read("b"), "n": found.objects["n"]}
    check_one_generation(state)
    assert found.step == state["n"]


def verify(path: str) -> None:
    report = holdfast.open(path).verify()
    assert report.ok, report.problems


def load_by_reader(path: str) -> None:
    state = state_of(-1)
    dcp.load(state, storage_reader=holdfast.dcp.Reader(path), no_dist=True)
    check_one_generation(state)


def stat_all(path: str) -> None:
    """Often: without an exchange, one look in some thousands finds nothing there."""
    for _ in range(3_000):
        os.stat(path)
        os.stat(f"{path}/.metadata")
        os.stat(f"{path}/mine.txt")


LOOKS = [load_whole, open_and_read, verify, load_by_reader, stat_all]


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Callable[..., str]]:
    started = []

    def start(how: str, *, exchanges: bool = True) -> str:
        path = str(tmp_path / "latest")
        holdfast.save(state_of(0), path, step=0)
        Path(path, "mine.txt").write_text("mine")
        command = [sys.executable, "-c", WRITER, path, how, str(exchanges)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        wait_for_step(path, 1)
        return path

    yield start
    Path(tmp_path, "latest.stop").touch()
    for writer in started:
        out, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
        assert int(out) > 3, "too few saves to tell anything"


@pytest.mark.parametrize("how", ["save", pytest.param("dcp", marks=pytest.mark.slow)])
def test_readers_see_one_generation_whole(beside: Callable[..., str], how: str, tmp_path: Path, tried: Any) -> None:
    path = beside(how)
    until, rounds = time.monotonic() + BESIDE_S, 0
    while time.monotonic() < until or not rounds:
        for look in LOOKS:
            look(path)
        rounds += 1
    wait_for_step(path, GENERATIONS)
    tried["looks at what is being overwritten"] += rounds * len(LOOKS)


def test_without_exchange_only_what_looks_by_itself_finds_a_path_missing(beside: Callable[..., str]) -> None:
    path = beside("save", exchanges=False)
    until, seen = time.monotonic() + BESIDE_S, []
    while time.monotonic() < until:
        for look in LOOKS:
            try:
                look(path)
            except FileNotFoundError as error:  # what looks by itself finds the gap
                seen.append(error)
    wait_for_step(path, GENERATIONS)
    print(f"missing {len(seen)} times")


def overwritten(path: Path) -> None:
    holdfast.save(state_of(2), path, step=2, overwrite=True)


def on_another_thread(act: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def test_what_was_opened_stays_readable_until_it_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "a"
    holdfast.save(state_of(1), path, step=1)
    found = on_another_thread(lambda: holdfast.open(path))
    overwritten(path)
    (aside,) = [name for name in os.listdir(tmp_path) if name.startswith(".a.") and name.endswith(".replaced")]
    assert found.read("a")[0] == 1
    assert found.verify().ok
    assert found.objects["n"] == 1
    assert holdfast.open(path).read("a")[0] == 2
    del found
    overwritten(path)
    assert os.listdir(tmp_path) == ["a"], f"{aside} goes with the next save there"


def test_who_overwrites_does_not_wait_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "a"
    holdfast.save(state_of(1), path, step=1)
    found = holdfast.open(path)
    assert found.read("a")[0] == 1
    overwritten(path)
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(CheckpointReplaced):
        found.read("a")


def forget_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that carries no `flock` to other hosts."""
    for module in (opened, reader_lease):
        monkeypatch.setattr(module, "try_lock", lambda *_: None)


def test_what_was_replaced_and_removed_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_locks(monkeypatch)
    path = tmp_path / "a"
    saved = holdfast.save(state_of(1), path, step=1)
    found = holdfast.open(path)
    overwritten(path)
    for stale in (saved, found):
        for act in (lambda stale=stale: stale.read("a"), lambda stale=stale: stale.objects["n"]):
            with pytest.raises(CheckpointReplaced, match="replaced by another save"):
                act()
        report = stale.verify()
        assert not report.ok
        assert [problem.message for problem in report.problems if "replaced" not in problem.message] == []


def test_a_load_goes_on_with_what_has_taken_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_locks(monkeypatch)
    path, fill, replaced = tmp_path / "a", loader._fill, []
    holdfast.save(state_of(1), path, step=1)

    def replace_meanwhile(*args: Any) -> Any:
        if not replaced:
            replaced.append(overwritten(path))
        return fill(*args)

    monkeypatch.setattr(loader, "_fill", replace_meanwhile)
    state = state_of(-1)
    assert holdfast.load(state, path).step == 2
    check_one_generation(state)


@pytest.mark.parametrize("meanwhile", ["_fill", "being_read"])
def test_a_load_waits_for_what_is_missing_between_two_renames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    path, act, moved = tmp_path / "a", getattr(loader, meanwhile), []
    holdfast.save(state_of(1), path, step=1)
    holdfast.save(state_of(2), tmp_path / "b", step=2)
    in_place = threading.Timer(0.1, os.rename, (tmp_path / "b", path))

    def move_aside_meanwhile(*args: Any) -> Any:
        if not moved:
            moved.append(os.rename(path, tmp_path / hidden_name("a", "1" * 12, "replaced")))
            in_place.start()
            if meanwhile == "_fill":  # what was opened stays readable
                raise CheckpointCorrupt("found nothing at its path", path=str(path))
        return act(*args)

    monkeypatch.setattr(loader, meanwhile, move_aside_meanwhile)
    state = state_of(-1)
    assert holdfast.load(state, path).step == 2
    check_one_generation(state)
    in_place.join()


def test_damage_is_still_damage(tmp_path: Path) -> None:
    path = tmp_path / "a"
    holdfast.save(state_of(1), path, step=1)
    data = path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(holdfast.CheckpointCorrupt, match="checksum"):
        holdfast.load(state_of(-1), path)
    assert not holdfast.open(path).verify().ok


def test_the_only_export_is_never_missing_behind_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``hf-latest`` dangles for no instant, also where there is no other export to name."""
    config = holdfast.CheckpointConfig(every=None, keep=None, nice=0)

    def manager() -> holdfast.CheckpointManager:
        exports = [holdfast.HFExport(tmp_path / "hf", every=1, nice=0)]
        return holdfast.CheckpointManager(
            tmp_path / "run", {"model": torch.nn.Linear(3, 2)}, config=config, exports=exports
        )

    with manager() as first:
        first.save(1).result(30)
        first.step(2)[0].result(30)
    looks = []
    rename, exchange = os.rename, local._renameat2()
    assert exchange is not None

    def look(act: Callable[..., Any]) -> Callable[..., Any]:
        def acted(*args: Any, **options: Any) -> Any:
            done = act(*args, **options)
            looks.append((tmp_path / "hf" / "hf-latest" / "model.safetensors").is_file())
            return done

        return acted

    monkeypatch.setattr(os, "rename", look(rename))
    monkeypatch.setattr(local, "_renameat2", lambda: look(exchange))
    with manager() as second:
        assert second.restore() == 1
        second.step(2)[0].result(30)
    assert len(looks) >= 2
    assert all(looks)


def test_a_run_that_went_back_keeps_what_was_put_beside_the_step_it_replaces(tmp_path: Path) -> None:
    config = holdfast.CheckpointConfig(every=None, keep=None)
    state = state_of(1)
    with holdfast.CheckpointManager(tmp_path, state, config=config) as manager:
        for step in (1, 2):
            manager.save(step).result()
        (tmp_path / "step-2" / "trainer_state.json").write_text("{}")
        assert manager.restore(1) == 1
        state["a"].fill_(7)
        manager.save(2).result()
        assert (tmp_path / "step-2" / "trainer_state.json").read_text() == "{}"
    assert holdfast.open(tmp_path / "step-2").read("a")[0] == 7
    assert holdfast.open(tmp_path / "step-2").verify().ok


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_call_that_overwrites_keeps_what_others_put_there(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    (path / "step-1").mkdir(parents=True)
    (path / "step-1" / "x").write_text("mine")
    (path / "train.log").write_text("mine")
    for value in (1, 2):
        done = getattr(holdfast, how)(state_of(value), path, step=value, overwrite=True)
        assert (done if how == "save" else done.result()).read("a")[0] == value
        assert {(path / name).read_text() for name in ("step-1/x", "train.log")} == {"mine"}
    assert holdfast.open(path).verify().ok
