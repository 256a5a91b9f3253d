"""The host of the group's Store is stopped, or gone, before anybody of ours has connected to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from store_host import Host

from holdfast import store_client
from holdfast.coordination import StoreBoard
from holdfast.group import open_group
from holdfast.store_client import BoardLost

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
