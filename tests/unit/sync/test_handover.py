"""`holdfast.sync.handover`: a state offered, fetched by several, damaged, given up, and cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, DeadlineExceeded, PeerLost
from holdfast.sync import handover
from holdfast.sync.handover import Address, HandoverServer, fetch_state

BUCKET = 4096


def state(fill: int = 0) -> dict[str, Any]:
    return {"w": torch.arange(5000.0) + fill, "b": torch.ones(3) * fill, "state": {0: {"step": torch.tensor(fill)}}}


def same(one: Any, other: Any) -> bool:
    return torch.equal(one["w"], other["w"]) and torch.equal(one["b"], other["b"]) and one["state"] == other["state"]


@pytest.fixture
def server() -> Iterator[HandoverServer]:
    made = HandoverServer(bucket_bytes=BUCKET)
    yield made
    made.close()


@pytest.fixture
def fast() -> Iterator[HandoverServer]:
    made = HandoverServer()
    yield made
    made.close()


def test_many_fetch_what_was_offered_even_if_it_has_changed_since(server: HandoverServer) -> None:
    live = state(1)
    server.offer(7, live, timeout_s=20)
    live["w"].zero_()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: fetch_state(server.address, 7, timeout_s=20), range(4)))
    assert all(same(each, state(1)) for each in found)


def test_who_asks_before_there_is_an_offer_waits_for_it(server: HandoverServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetch_state, server.address, 3, timeout_s=20)
        time.sleep(0.2)
        assert not asked.done()
        server.offer(3, state(2), timeout_s=20)
        assert same(asked.result(20), state(2))
    server.withdraw()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="timeout"):
        fetch_state(server.address, 3, timeout_s=0.3)
    assert time.monotonic() - began < 5


def test_who_is_ahead_of_the_sender_waits_for_it(server: HandoverServer) -> None:
    server.offer(3, state(2), timeout_s=20)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetch_state, server.address, 4, timeout_s=20)
        receivers(server, 1)
        time.sleep(0.2)
        assert not asked.done()
        server.withdraw()
        server.offer(4, state(3), timeout_s=20)
        assert same(asked.result(20), state(3))


def test_a_later_step_is_refused_at_once(server: HandoverServer) -> None:
    server.offer(2345, state(), timeout_s=20)
    began = time.monotonic()
    with pytest.raises(CheckpointNotFound, match="serving step 2345, and was asked for step 1234"):
        fetch_state(server.address, 1234, timeout_s=20)
    assert time.monotonic() - began < 5


def test_who_asks_is_told_why_a_state_can_not_be_sent(server: HandoverServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetch_state, server.address, 1, timeout_s=20)
        with pytest.raises(ConfigError, match=r"\['x'\]"):
            server.offer(1, {"x": object()}, timeout_s=20)
        with pytest.raises(CheckpointNotFound, match=r"\['x'\]"):
            asked.result(20)
    server.offer(1, state(), timeout_s=20)
    assert same(fetch_state(server.address, 1, timeout_s=20), state())


def test_it_is_received_in_place_after_what_must_come_before(server: HandoverServer) -> None:
    server.offer(1, state(5), timeout_s=20)
    own, order = state(0), []
    before = own["w"]

    def first() -> None:
        order.append(own["w"][1].item())

    found = fetch_state(server.address, 1, timeout_s=20, own=own, before_write=first)
    assert found["w"] is before
    assert same(own, state(5))
    assert order == [1.0]


class Between:
    """A connection to a server that a test watches and changes: ``change(bytes so far, chunk)`` -> what goes on."""

    def __init__(self, address: str, change: Callable[[int, bytes], bytes | None]) -> None:
        self.place = msgspec.json.decode(address, type=Address)
        self._change = change
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = msgspec.json.encode(
            msgspec.structs.replace(self.place, hosts=("127.0.0.1",), port=self._sock.getsockname()[1])
        ).decode()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._sock:
            here, _ = self._sock.accept()
        with here, socket.create_connection(("127.0.0.1", self.place.port)) as there:
            back = threading.Thread(target=self._pass_on, args=(here, there), daemon=True)
            back.start()
            done = 0
            with contextlib.suppress(OSError):  # one of the two has gone
                while chunk := there.recv(1 << 10):
                    changed = self._change(done, chunk)
                    if changed is None:
                        break
                    done += len(chunk)
                    here.sendall(changed)
            for sock in (here, there):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            back.join(10)

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := here.recv(1 << 16):
                there.sendall(chunk)
            there.shutdown(socket.SHUT_RDWR)


def flipped(at: int) -> Callable[[int, bytes], bytes]:
    def change(done: int, chunk: bytes) -> bytes:
        if done <= at < done + len(chunk):
            where = at - done
            return chunk[:where] + bytes([chunk[where] ^ 1]) + chunk[where + 1 :]
        return chunk

    return change


def test_a_damaged_byte_is_an_error_wherever_it_is(server: HandoverServer) -> None:
    server.offer(1, state(1), timeout_s=20)
    seen = [0]

    def count(done: int, chunk: bytes) -> bytes:
        seen[0] = done + len(chunk)
        return chunk

    assert same(fetch_state(Between(server.address, count).address, 1, timeout_s=20), state(1))
    buckets = 0
    for at in range(0, seen[0], seen[0] // 40):
        own = {"w": torch.zeros(5000)}
        with pytest.raises(CheckpointCorrupt) as error:
            fetch_state(Between(server.address, flipped(at)).address, 1, timeout_s=20, own=own)
        buckets += bool("bucket" in str(error.value) and "['w']" in str(error.value))
        kept = own["w"].ne(0)
        assert torch.equal(own["w"][kept], state(1)["w"][kept])  # nothing of a damaged bucket was put into place
    assert buckets > 30


def test_a_sender_that_dies_is_an_error_at_once(server: HandoverServer) -> None:
    server.offer(1, state(1), timeout_s=20)
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"receiving bucket \d+ of"):
        fetch_state(
            Between(server.address, lambda done, chunk: chunk if done < 9000 else None).address, 1, timeout_s=60
        )
    address = server.address
    server.close()
    with pytest.raises((PeerLost, DeadlineExceeded)):
        fetch_state(address, 1, timeout_s=5)
    assert time.monotonic() - began < 20


SENDER = """
import os, sys, time
from holdfast.sync.handover import HandoverServer

server = HandoverServer()
print(server.address, flush=True)
sys.stdin.readline()
child = os.fork()
if not child:  # as a data loader's worker does, that outlives it for a while
    os.close(1)
    time.sleep(20)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_killed_sender_is_an_error_at_once_though_its_child_lives() -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SENDER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    address = process.stdout.readline()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetch_state, address, 1, timeout_s=60)
        time.sleep(0.3)
        process.stdin.write("\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=20)
        try:
            with pytest.raises(PeerLost, match="waiting for the state at step 1"):
                asked.result(10)
        finally:
            os.kill(child, signal.SIGKILL)


def hanging(server: HandoverServer, timeout_s: float) -> socket.socket:
    """Ask for step 1, and read nothing."""
    place = msgspec.json.decode(server.address, type=Address)
    sock = socket.create_connection(("127.0.0.1", place.port))
    ask = handover.AskState(handover._PROTOCOL, place.token, 1, timeout_s)
    handover._Wire(sock, handover.Deadline.after(5), "server", "test").say(ask)
    return sock


def receivers(server: HandoverServer, count: int) -> None:
    until = time.monotonic() + 10
    while len(server._receivers) != count:
        assert time.monotonic() < until, server._receivers
        time.sleep(0.02)


def test_a_receiver_that_hangs_holds_nobody_and_is_given_up_at_its_deadline(fast: HandoverServer) -> None:
    large = {"w": torch.ones(16 << 20)}
    fast.offer(1, large, timeout_s=60)
    sock = hanging(fast, 1.5)
    receivers(fast, 1)
    began = time.monotonic()
    assert torch.equal(fetch_state(fast.address, 1, timeout_s=20)["w"], large["w"])
    fast.withdraw()
    assert time.monotonic() - began < 5
    receivers(fast, 0)
    sock.close()


def test_a_new_offer_cuts_off_those_of_the_old_one_and_closing_all(fast: HandoverServer) -> None:
    fast.offer(1, {"w": torch.ones(16 << 20)}, timeout_s=60)
    old = hanging(fast, 60)
    receivers(fast, 1)
    fast.offer(1, state(9), timeout_s=60)
    receivers(fast, 0)
    assert same(fetch_state(fast.address, 1, timeout_s=20), state(9))
    fast.withdraw()
    waiting = hanging(fast, 60)
    receivers(fast, 1)
    began = time.monotonic()
    fast.close()
    assert time.monotonic() - began < 4
    receivers(fast, 0)
    fast.close()
    with pytest.raises(ConfigError, match="closed"):
        fast.offer(2, state(), timeout_s=1)
    for sock in (old, waiting):
        sock.close()


def test_strangers_are_not_served(server: HandoverServer) -> None:
    server.offer(1, state(), timeout_s=20)
    place = msgspec.json.decode(server.address, type=Address)
    wrong = msgspec.json.encode(msgspec.structs.replace(place, token="guessed")).decode()
    with pytest.raises(PeerLost):
        fetch_state(wrong, 1, timeout_s=5)
    with pytest.raises(ConfigError, match="not the address"):
        fetch_state("http://host:1/checkpoint/", 1, timeout_s=5)
    with socket.create_connection(("127.0.0.1", place.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(10) == b""
    with pytest.raises(ConfigError, match="bucket_bytes"):
        HandoverServer(bucket_bytes=12)
    assert same(fetch_state(server.address, 1, timeout_s=20), state())


def test_a_state_without_tensors(server: HandoverServer) -> None:
    server.offer(1, {"step": 3, 0: (), "empty": torch.empty(0, 2)}, timeout_s=20)
    found = fetch_state(server.address, 1, timeout_s=20)
    assert (found["step"], found[0], found["empty"].shape) == (3, (), (0, 2))


def test_nothing_is_kept_of_what_was_handed_over(fast: HandoverServer) -> None:
    threads = threading.active_count()
    for step in range(5):
        fast.offer(step, {"w": torch.ones(4 << 20)}, timeout_s=20)
        offer = weakref.ref(fast._offer)
        fetch_state(fast.address, step, timeout_s=20)
        fast.withdraw()
        receivers(fast, 0)
        until = time.monotonic() + 10
        while offer() is not None or threading.active_count() > threads:
            assert time.monotonic() < until, (offer(), threading.enumerate())
            time.sleep(0.02)
    assert not fast._threads
