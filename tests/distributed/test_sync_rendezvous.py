"""A rendezvous whose host has stopped: receivers and fleets keep their own deadlines, and go on when it is back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from store_host import Host

from holdfast.coordination.store import BoardLost
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.sync import Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.session.futures import CloseSignal
from holdfast.sync.session.rendezvous import RendezvousClient, open_rendezvous

ANSWERED_S = 4.0
"""More than a deadline itself that an answer may take here."""


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.mark.parametrize("named", ["by address", "as a Store"])
def test_a_stopped_rendezvous_costs_a_receiver_no_more_than_its_deadline(host: Host, named: str) -> None:
    where = f"tcp://127.0.0.1:{host.port}" if named == "by address" else host.store()
    with Receiver(SharedMemoryTransport(where)) as receiver:
        host.stop()
        for timeout_s in (0.5, 1.0):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"did not answer|doesn't answer"):
                receiver.receive({"w": torch.zeros(2)}, timeout=timeout_s)
            assert time.monotonic() - began < timeout_s + ANSWERED_S
        host.go_on()
        with Publisher(SharedMemoryTransport(host.store()), bypass_cpu=False) as publisher:
            publisher.publish({"w": torch.ones(2)}, 1)
            into = {"w": torch.zeros(2)}
            assert receiver.receive(into, timeout=30) == 1
    assert into["w"].tolist() == [1, 1]


def test_closing_a_receiver_that_looks_at_a_stopped_rendezvous_ends_it(host: Host) -> None:
    receiver = Receiver(SharedMemoryTransport(host.store()))
    host.stop()
    found: list[BaseException] = []

    def receive() -> None:
        try:
            receiver.receive({"w": torch.zeros(2)}, timeout=60)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    receiver.close()
    thread.join(20)
    assert time.monotonic() - began < 10
    assert [type(error) for error in found] == [ConfigError]


def test_a_call_that_comes_back_late_is_not_taken_for_the_next_ones_answer(tmp_path: Any) -> None:
    rendezvous = open_rendezvous(tmp_path, hosting=False)
    rendezvous.put("a", b"of a")
    rendezvous.put("b", b"of b")
    may_go, real = threading.Event(), rendezvous.get

    def slow(key: str) -> bytes | None:
        may_go.wait(20)
        return real(key)

    rendezvous.get = slow  # type: ignore[method-assign]
    asking = RendezvousClient(rendezvous, CloseSignal())
    with pytest.raises(BoardLost, match=os.path.basename(tmp_path)):
        asking.get("a", 0.1)
    threading.Timer(0.2, may_go.set).start()
    assert asking.get("b", 10.0) == b"of b"
