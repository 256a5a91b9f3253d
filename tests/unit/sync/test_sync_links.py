"""Links between publisher ranks and receivers, and where both find one another."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.coordination.deadline import Deadline
from holdfast.errors import ConfigError, DeadlineExceeded, HoldfastError, StorageError
from holdfast.sync.session import messages
from holdfast.sync.session.futures import BlockingCall
from holdfast.sync.session.links import Ended, EventLoop, Link, connect, listener
from holdfast.sync.session.rendezvous import open_rendezvous


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link, EventLoop]]:
    """Two ends of a link, and the hub of the second."""
    one, other = socket.socketpair()
    hub = EventLoop()
    far = Link(other, "who sends", messages.ToPublisher)
    hub.add(far)
    near = Link(one, "who hears", messages.ToReceiver)
    yield near, far, hub
    near.close()
    hub.close()


def heard(hub: EventLoop, timeout_s: float = 5.0) -> list[Any]:
    return [item[1] for item in hub.hear(timeout_s) if isinstance(item, tuple)]


def test_what_was_said_is_heard_in_order_and_then_that_the_peer_is_gone(pair: tuple[Link, Link, EventLoop]) -> None:
    near, far, hub = pair
    said = [messages.Hello("r", "t", b"a"), messages.Taken(3, 1), messages.Beat()]
    for message in said:
        near.send(message)
    near.close()
    found: list[Any] = []
    while not far.ended:
        found += heard(hub)
    assert found[:-1] == said
    assert isinstance(found[-1], Ended)
    assert far.receive() == []


def test_a_message_that_the_other_end_is_slow_to_take_is_sent_bit_by_bit(pair: tuple[Link, Link, EventLoop]) -> None:
    near, _, hub = pair
    large = messages.Hello("r", "t", bytes(4 << 20))
    near.send(large)
    assert near.has_more  # a socket's buffer holds less
    mine = EventLoop()
    mine.add(near)
    found: list[Any] = []
    while not found:
        list(mine.hear(0.0))
        found += heard(hub, 0.1)
    assert found == [large]
    assert not near.has_more
    mine.close()


def test_nonsense_ends_a_link(pair: tuple[Link, Link, EventLoop]) -> None:
    near, far, hub = pair
    near.sock.send(b"\x05\x00\x00\x00hello")
    (said,) = heard(hub)
    assert isinstance(said, Ended)
    assert "no message" in said.why
    assert far.ended == said.why


def test_to_speak_to_a_peer_that_is_gone_raises_nothing(pair: tuple[Link, Link, EventLoop]) -> None:
    near, far, hub = pair
    hub.drop(far)
    for _ in range(3):
        near.send(messages.Beat())
    assert [type(said) for said in near.receive()] == [Ended]
    near.send(messages.Beat())
    hub.close()


def test_a_hub_hears_of_who_connects_and_wakes_when_it_is_rung() -> None:
    hub = EventLoop()
    sock = listener("127.0.0.1")
    hub.listen(sock)
    client = connect(("127.0.0.1",), sock.getsockname()[1], Deadline.after(5.0))
    (accepted,) = hub.hear(5.0)
    assert isinstance(accepted, socket.socket)
    began = time.monotonic()
    threading.Timer(0.05, hub.wake).start()
    assert list(hub.hear(20.0)) == []
    assert time.monotonic() - began < 10
    for end in (client, accepted, sock):
        end.close()
    hub.close()
    hub.wake()


def test_nobody_listens_where_nobody_listens() -> None:
    sock = listener("127.0.0.1")
    port = sock.getsockname()[1]
    sock.close()
    with pytest.raises(OSError, match="refused"):
        connect(("127.0.0.1",), port, Deadline.after(5.0))


def test_a_call_that_blocks_runs_aside_and_its_error_is_its_callers() -> None:
    rung = threading.Event()

    def fail() -> None:
        raise ValueError("so it goes")

    call = BlockingCall(fail, rung.set)
    assert rung.wait(5.0)
    assert call.done
    with pytest.raises(ValueError, match="so it goes"):
        call.result()


def test_a_deadline_says_what_was_waited_for() -> None:
    deadline = Deadline.after(0.0)
    assert deadline.passed()
    error = deadline.exceeded("the sun to rise", "get up later")
    assert isinstance(error, DeadlineExceeded)
    assert "the sun to rise" in str(error)


# where both sides meet -------------------------------------------------------------------------------------------


def rendezvous_at(kind: str, place: Path) -> Any:
    if kind == "directory":
        return place / "made on demand"
    if kind == "store":
        return dist.FileStore(str(place / "store"), 1)
    sock = listener("127.0.0.1")
    port = sock.getsockname()[1]
    sock.close()
    return f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("kind", ["directory", "store", "tcp"])
def test_a_rendezvous_keeps_values(kind: str, tmp_path: Path) -> None:
    where = rendezvous_at(kind, tmp_path)
    host, guest = open_rendezvous(where, hosting=True), open_rendezvous(where, hosting=False)
    assert guest.get("name") is None
    for value in (b"one", b"another"):
        host.put("name", value)
        assert guest.get("name") == value
    host.delete("name")
    host.delete("name")
    assert guest.get("name") is None
    guest.close()
    host.close()


@pytest.mark.parametrize("where", ["tcp://nowhere", "tcp://:80", "tcp://host:0", 7, "s3://bucket/x"])
def test_what_is_no_rendezvous_is_refused(where: Any) -> None:
    with pytest.raises(ConfigError):
        open_rendezvous(where, hosting=False)


def test_a_rendezvous_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = open_rendezvous(tmp_path / "file" / "below", hosting=False)
    with pytest.raises(StorageError, match="can't be used"):
        found.put("name", b"value")
    with pytest.raises(HoldfastError, match="nothing answers"):
        open_rendezvous(rendezvous_at("tcp", tmp_path), hosting=False).get("name")


def test_a_rendezvous_that_lacks_descriptors_says_so(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    meeting = open_rendezvous(tmp_path, hosting=True)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(StorageError, match="Too many open files; raise `ulimit -n`"):
            meeting.put("name", b"value")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    meeting.put("name", b"value")
    assert meeting.get("name") == b"value"
