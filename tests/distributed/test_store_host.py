"""The host of the group's Store is stopped, or gone, before anybody of ours has connected to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from store_host import Host

import holdfast
from holdfast import errors
from holdfast.coordination import store as store_client
from holdfast.coordination.board import StoreBoard
from holdfast.coordination.group import open_group
from holdfast.coordination.store import BoardLost
from holdfast.errors import HoldfastError
from holdfast.sync import DirectoryTransport, Publisher

ANSWERED_S = 4.0
"""More than a deadline itself that an answer may take here."""


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="made anew with torch 2.8 and later")
def test_a_stopped_host_costs_no_more_than_one_request_may_take(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "CONNECT_S_MIN", 1.0)
    store = host.store()
    host.stop()
    began = time.monotonic()
    board = StoreBoard(store, 0, 1, "p", call_timeout_s=1.0)
    with pytest.raises(BoardLost, match="has not answered for 1 s"):
        board.try_get("key")
    assert time.monotonic() - began < 1.0 + ANSWERED_S
    with pytest.raises(BoardLost):
        board.set("key", b"1")
    assert time.monotonic() - began < 1.0 + ANSWERED_S
    host.go_on()
    time.sleep(0.5)  # far less than a Store that was lost stays lost: this one was only late
    board.set("key", b"2")
    assert board.try_get("key") == b"2"
    assert StoreBoard(store, 0, 1, "p").try_get("key") == b"2"
    board.close()


def test_a_host_that_is_gone_is_noticed_at_once(host: Host) -> None:
    store = host.store()
    host.kill()
    began = time.monotonic()
    board = StoreBoard(store, 0, 1, "p", call_timeout_s=30.0)
    for _ in range(2):
        with pytest.raises(BoardLost):
            board.try_get("key")
    assert time.monotonic() - began < ANSWERED_S
    board.close()


PUBLIC = {error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, HoldfastError)}


@pytest.mark.filterwarnings("ignore")
def test_users_are_told_of_a_store_that_is_gone_by_errors_that_they_know(host: Host, tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    holdfast.save(state, tmp_path / "before")
    dist.init_process_group("gloo", store=host.store(), rank=0, world_size=1)
    try:
        manager = holdfast.CheckpointManager(tmp_path / "run", state)
        manager.save(1).result()
        host.kill()
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: holdfast.save(state, tmp_path / "c", timeout=20),
            "async_save": lambda: holdfast.async_save(state, tmp_path / "d", timeout=20).result(),
            "load": lambda: holdfast.load(state, tmp_path / "before", timeout=20),
            "manager.save": lambda: manager.save(2).result(60),
            "manager.restore": manager.restore,
            "manager": lambda: holdfast.CheckpointManager(tmp_path / "other", state),
            "export_hf": lambda: holdfast.export_hf(torch.nn.Linear(1, 1), tmp_path / "e", timeout=20),
            "publish": lambda: Publisher(DirectoryTransport(tmp_path / "v")).publish(state, 1, 20),
            "close": manager.close,
        }
        for what, call in calls.items():
            try:
                call()
            except HoldfastError as error:
                found = type(error)
                assert found in PUBLIC, f"{what}: {found.__name__}: {error}"  # noqa: PT017
                assert str(error), what  # noqa: PT017
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("timeout", "found_s"), [(1, 8.0), (20.0, 20.0), (10**400, 30.0), (None, 30.0), ("x", 30.0)])
def test_who_has_little_time_gives_up_sooner(
    host: Host, monkeypatch: pytest.MonkeyPatch, timeout: Any, found_s: float
) -> None:
    dist.init_process_group("gloo", store=host.store(), rank=0, world_size=1)
    try:
        board = open_group(None, purpose="test", timeout=timeout).board
        assert isinstance(board, StoreBoard)
        assert board._client.call_timeout_s == found_s
        board.close()
    finally:
        dist.destroy_process_group()
