"""An exception out of a signal's handler, such as Ctrl-C, may land between any two instructions: what follows works."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from holdfast.engine.wire import Outbox
from holdfast.sync import ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.session.links import Link
from holdfast.sync.versions import deltas, receiving, watch
from holdfast.sync.versions.receiving import RankConnections

KINDS = pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessGroupTransport])
TIMEOUT_S = 8.0
USES = {
    function.__code__
    for function in (
        *(getattr(RankConnections, name) for name in ("take", "let_go", "_say", "_send", "_hear", "tell_committed")),
        Link.send,
        Outbox.put,
        Outbox.flush,
    )
}


IsPlace = Callable[[FrameType], bool]


def is_use(frame: FrameType) -> bool:
    """Return True where connections are used."""
    return frame.f_code in USES


def takes_a_condition(frame: FrameType) -> bool:
    """Return True where deltas or a watcher take the lock of a condition."""
    caller = frame.f_back
    return (
        frame.f_code is threading.Condition.__enter__.__code__
        and caller is not None
        and caller.f_code.co_filename in (deltas.__file__, watch.__file__)
    )


class Interrupted(BaseException):
    """What a handler raises."""


def interrupted(call: Callable[[], object], at: int, *, opcodes: bool, is_place: IsPlace = is_use) -> bool:
    """Call it, and raise `Interrupted` at that one of the places; False if it passes fewer.

    opcodes: between two instructions, else between two lines. is_place: where; by default, where connections are used.
    """
    passed = 0

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if not is_place(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = opcodes, not opcodes
        if event in ("line", "opcode"):
            passed += 1
            if passed == at + 1:
                raise Interrupted
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        call()
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return passed > at


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), float(version))}


@KINDS
@pytest.mark.parametrize("step", ["fetch", "commit"])
def test_an_interrupt_anywhere_while_connections_are_used_leaves_a_receiver_that_receives(
    tmp_path: Path, kind: Any, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "_TAKE_S", 0.05)
    into = weights(0)
    with Publisher(kind(tmp_path), keep_versions=2) as publisher, Receiver(kind(tmp_path), into) as receiver:
        publisher.publish(weights(1), 1)
        receiver.receive(timeout=TIMEOUT_S)
        calls: dict[str, Callable[[], int]] = {"fetch": lambda: receiver.fetch(timeout=5), "commit": receiver.commit}
        version, at, was_interrupted = 1, 0, True
        while was_interrupted:
            version += 1
            publisher.publish(weights(version), version)
            if step == "commit":
                receiver.fetch(timeout=TIMEOUT_S)
            was_interrupted = interrupted(calls[step], at, opcodes=step == "commit")
            assert receiver.version in (version - 1, version)
            assert not receiver.dirty
            assert torch.equal(into["weight"], weights(receiver.version)["weight"])
            version += 1
            publisher.publish(weights(version), version)
            assert receiver.receive(timeout=TIMEOUT_S) == version
            assert torch.equal(into["weight"], weights(version)["weight"])
            at += 1
        assert at > 20


@KINDS
def test_connections_that_an_interrupted_commit_has_left_taken_are_made_anew_within_the_deadline(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = weights(0)
    with Publisher(kind(tmp_path)) as publisher, Receiver(kind(tmp_path), into) as receiver:
        publisher.publish(weights(1), 1)
        receiver.fetch(timeout=TIMEOUT_S)

        def let_go(_: RankConnections) -> None:
            raise Interrupted

        with monkeypatch.context() as patched:
            patched.setattr(RankConnections, "let_go", let_go)
            with pytest.raises(Interrupted):
                receiver.commit()
        assert (receiver.version, receiver.dirty) == (1, False)
        publisher.publish(weights(2), 2)
        began_s = time.monotonic()
        assert receiver.receive(timeout=3) == 2
        assert time.monotonic() - began_s < 3
        assert torch.equal(into["weight"], weights(2)["weight"])


@KINDS
def test_an_interrupt_as_a_lock_is_taken_leaves_it_free_for_the_threads_that_need_it(tmp_path: Path, kind: Any) -> None:
    into = weights(0)
    publisher, receiver = Publisher(kind(tmp_path), delta="sparse"), Receiver(kind(tmp_path), into)

    def publish_and_receive() -> None:
        publisher.publish(weights(version), version)
        receiver.receive(timeout=TIMEOUT_S)

    version, at, was_interrupted = 1, 0, True
    while was_interrupted:
        was_interrupted = interrupted(publish_and_receive, at, opcodes=True, is_place=takes_a_condition)
        version, at = version + 1, at + 1
    publish_and_receive()
    assert torch.equal(into["weight"], weights(version)["weight"])
    began_s = time.monotonic()
    receiver.close()
    publisher.close()
    assert time.monotonic() - began_s < 4


def test_an_interrupt_as_a_receiver_takes_its_turn_leaves_it_free_for_the_next_call(tmp_path: Path) -> None:
    into = weights(0)
    taking = Receiver._take_writing.__code__
    transport = SharedMemoryTransport(tmp_path)
    with Publisher(transport) as publisher, Receiver(transport, into) as receiver:
        version, at, was_interrupted = 1, 0, True
        while was_interrupted:
            publisher.publish(weights(version), version)
            receiver.fetch(timeout=TIMEOUT_S)
            was_interrupted = interrupted(
                receiver.commit, at, opcodes=False, is_place=lambda frame: frame.f_code is taking
            )
            if was_interrupted:
                assert receiver.commit() == version
            version, at = version + 1, at + 1
        assert at > 2
