"""A publisher that is interrupted, short of descriptors, or without its directory goes on, or `publish` says why."""

from __future__ import annotations

import contextlib
import dis
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from typing_extensions import Self

from holdfast.errors import HoldfastError, PeerLost, StorageError
from holdfast.sync import ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.versions import block, books, deltas, publishing, serving
from holdfast.sync.versions.books import Books
from holdfast.sync.versions.serving import BlockServer

TIMEOUT_S = 20.0
KINDS = pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessGroupTransport])
INTERRUPTED = {module.__file__ for module in (block, books, deltas, publishing, serving, threading)}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(version))}


def receives(receiver: Receiver, into: dict[str, torch.Tensor], version: int) -> bool:
    return receiver.receive(timeout=TIMEOUT_S) == version and torch.equal(into["weight"], weights(version)["weight"])


# descriptors -------------------------------------------------------------------------------------------------------

SHORT_OF_DESCRIPTORS = """
import os, resource, sys, time, torch
from holdfast.sync import Publisher, SharedMemoryTransport

publisher = Publisher(SharedMemoryTransport(sys.argv[1]))
publisher.publish({"weight": torch.full((1000,), 1.0)}, 1)
print("published", flush=True)
sys.stdin.readline()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
names = os.listdir("/proc/self/fd")
used = {int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")}
one_free = next(limit for limit in range(1, 1 << 20) if limit - 1 not in used)
resource.setrlimit(resource.RLIMIT_NOFILE, (one_free - 1 + int(sys.argv[2]), hard))
print("short", flush=True)
sys.stdin.readline()
began_s = time.process_time()
time.sleep(1)
print(time.process_time() - began_s, flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
publisher.publish({"weight": torch.full((1000,), 2.0)}, 2)
print("published", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def running(script: str, *args: object) -> Iterator[Callable[[], str]]:
    """Yield a function that lets the program go on, and returns the next line that it says."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, args)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def go_on() -> str:
            child.stdin.write("\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        try:
            assert child.stdout.readline() == "published\n"
            yield go_on
        finally:
            child.kill()


def test_a_first_lease_needs_no_descriptor_but_that_of_its_connection(tmp_path: Path) -> None:
    into, late = weights(0), weights(0)
    transport = SharedMemoryTransport(tmp_path)
    with running(SHORT_OF_DESCRIPTORS, tmp_path, 1) as go_on, Receiver(transport, into) as receiver:
        while receiver.poll() is None:  # what hears of news is connected
            time.sleep(0.01)
        assert go_on() == "short"
        assert receives(receiver, into, 1)
        go_on()
        assert go_on() == "published"
        assert receives(receiver, into, 2)
        with Receiver(SharedMemoryTransport(tmp_path), late) as another:
            assert receives(another, late, 2)


def test_connections_that_cannot_be_taken_yet_cost_no_time(tmp_path: Path) -> None:
    into = weights(0)
    transport = SharedMemoryTransport(tmp_path)
    with running(SHORT_OF_DESCRIPTORS, tmp_path, 0) as go_on, Receiver(transport, into) as receiver:
        assert go_on() == "short"
        assert receiver.poll() is None  # it waits to be let in
        assert float(go_on()) < 0.5
        assert go_on() == "published"
        assert receives(receiver, into, 2)


def test_a_request_that_fails_ends_the_connection_of_its_receiver_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lease, failures = Books.lease, [OSError(24, "Too many open files")]

    def fails_once(self: Books, *args: Any) -> Any:
        found = lease(self, *args)
        if failures:
            raise failures.pop()
        return found

    into, other = weights(0), weights(0)
    transport = SharedMemoryTransport(tmp_path)
    with Publisher(transport) as publisher, Receiver(transport, into) as receiver, Receiver(transport, other) as second:
        publisher.publish(weights(1), 1)
        assert receives(second, other, 1)
        monkeypatch.setattr(Books, "lease", fails_once)
        with caplog.at_level(logging.WARNING, "holdfast"), pytest.raises(PeerLost, match="Receive again"):
            receiver.receive(timeout=TIMEOUT_S)
        assert "Too many open files" in caplog.text
        assert receives(receiver, into, 1)
        for version in range(2, 10):  # the lease that it was about to get holds nothing up
            publisher.publish(weights(version), version)
            assert receives(second, other, version)
        assert not any("takes back" in said.message for said in caplog.records)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@KINDS
def test_publish_fails_where_nobody_is_served_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    with Publisher(kind(tmp_path)) as publisher:
        publisher.publish(weights(1), 1)
        server = publisher._half._server  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(BlockServer, "_tell_news", lambda _self: 1 // 0)
            server.tell()
            server._thread.join(TIMEOUT_S)
        with pytest.raises(HoldfastError, match=r"publisher rank 0 .*division.*make a new one") as caught:
            publisher.publish(weights(2), 2)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    into = weights(0)
    with Publisher(kind(tmp_path)) as publisher, Receiver(kind(tmp_path), into) as receiver:
        publisher.publish(weights(2), 2)
        assert receives(receiver, into, 2)


# interrupts --------------------------------------------------------------------------------------------------------


class Interrupts:
    """Raises KeyboardInterrupt where Python looks for signals, in what decides on blocks: after some of its calls."""

    def __init__(self, *after: int) -> None:
        self.calls = 0
        self.left = set(after)
        self._last: dict[FrameType, str] = {}

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        callers = (frame, frame.f_back)
        if frame.f_code.co_filename not in INTERRUPTED or any(
            one and one.f_code.co_name == "__del__" for one in callers
        ):
            return None  # an interrupt in a destructor is printed, and goes no further
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith("CALL"):
                self.calls += 1
                if self.calls in self.left:
                    self.left.discard(self.calls)
                    raise KeyboardInterrupt
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("kind", "delta"), [(SharedMemoryTransport, None), (ProcessGroupTransport, None), (ProcessGroupTransport, "sparse")]
)
def test_an_interrupted_publish_leaves_the_publisher_usable(
    tmp_path: Path, kind: Any, delta: Any, twice: bool, caplog: pytest.LogCaptureFixture
) -> None:
    into = weights(0)
    with Publisher(kind(tmp_path), delta=delta) as publisher, Receiver(kind(tmp_path), into) as receiver:
        half: Any = publisher._half
        with Interrupts() as interrupts:
            publisher.publish(weights(1), 1)
        assert interrupts.calls > 50
        most, version, cut_off = interrupts.calls + 20, 1, 0
        for call in range(1, most):
            version += 1
            with contextlib.suppress(KeyboardInterrupt), Interrupts(call, call + 1 + call % 9 if twice else 0) as once:
                publisher.publish(weights(version), version)
            cut_off += call not in once.left
            version += 1
            publisher.publish(weights(version), version)
            assert receives(receiver, into, version), call
            assert len(half._served.memory) <= 4
            assert half._served.memory.keys() >= half._served.books._blocks.keys(), call
        assert cut_off > 50
        if delta is None:  # else who makes deltas may hold a block for longer than it needs it
            assert not any("takes back" in said.message for said in caplog.records)


def test_blocks_that_an_interrupt_left_of_another_size_are_freed(tmp_path: Path) -> None:
    with Publisher(SharedMemoryTransport(tmp_path)) as publisher:
        half: Any = publisher._half
        version = 0
        for call in range(1, 60):
            for rows in (1000, 3_000_000 // 100):
                version += 1
                given = {"weight": torch.zeros(rows * (1 + call % 2 * 7))}
                with contextlib.suppress(KeyboardInterrupt), Interrupts(call):
                    publisher.publish(given, version)
        for number in range(1, 4):
            publisher.publish(weights(version + number), version + number)
        assert half._served.memory.keys() == half._served.books._blocks.keys()


def test_nothing_to_fill_is_said() -> None:
    made = Books(keep=1, max_blocks=2, where="publisher rank 3")
    for version in (1, 2):
        made.begin(version, 100)
        made.staged(version, b"")
        made.publish(version)
        made.pin(version)
    made._max_blocks = 1
    with pytest.raises(HoldfastError, match="publisher rank 3 has no memory for version 3"):
        made.begin(3, 100)


# the directory -----------------------------------------------------------------------------------------------------


@KINDS
def test_new_receivers_find_a_publisher_whose_directory_was_removed(tmp_path: Path, kind: Any) -> None:
    place, into = tmp_path / "rendezvous", weights(0)
    with Publisher(kind(place)) as publisher, Receiver(kind(place), into) as receiver:
        publisher.publish(weights(1), 1)
        assert receives(receiver, into, 1)
        for version in (2, 3, 4):
            shutil.rmtree(place)
            publisher.publish(weights(version), version)
            assert receives(receiver, into, version)
            late = weights(0)
            with Receiver(kind(place), late) as another:
                assert receives(another, late, version)
    assert os.listdir(place) == ["holdfast-newest"]


def test_a_socket_that_was_removed_from_a_directory_of_its_own_is_bound_again(
    tmp_path: Path, descriptors: Callable[..., frozenset[tuple[str, str]]]
) -> None:
    place, sockets = tmp_path / "rendezvous", tmp_path / "sockets"

    def transport() -> SharedMemoryTransport:
        return SharedMemoryTransport(place, directory=sockets)

    with Publisher(transport()) as publisher:
        for version in (1, 2, 3, 4):
            publisher.publish(weights(version), version)
        before = len(descriptors())
        for version in range(5, 10):
            shutil.rmtree(sockets)
            publisher.publish(weights(version), version)
            late = weights(0)
            with Receiver(transport(), late) as another:
                assert receives(another, late, version)
        shutil.rmtree(sockets)
        sockets.write_text("no directory")
        with pytest.raises(StorageError, match="receivers can't be let in"):
            publisher.publish(weights(10), 10)
        sockets.unlink()
        publisher.publish(weights(10), 10)
        late = weights(0)
        with Receiver(transport(), late) as another:
            assert receives(another, late, 10)
        assert len(descriptors()) <= before
    assert os.listdir(sockets) == []
