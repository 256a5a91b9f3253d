"""Poll, fetch, commit and cancel: a version is brought aside while the weights are in use. On threads."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from slots import SlotTransport
from torch import nn

import holdfast
from holdfast.errors import (
    CheckpointCorrupt,
    ConfigError,
    DeadlineExceeded,
    FetchCancelled,
    RootLocked,
    StateMismatch,
    WeightsDirty,
)
from holdfast.sync import DirectoryTransport, ProcessGroupTransport, Publisher, Receiver, SharedMemoryTransport
from holdfast.sync.session.sender import Sender, SendSession
from holdfast.sync.transports import stored_receiving as stored
from holdfast.sync.watcher import Sighting, Watcher

TIMEOUT_S = 60.0
Start = Callable[..., "Future[Any]"]
STORED_AND_LINKED = pytest.mark.parametrize("kind", [SharedMemoryTransport, DirectoryTransport])


@pytest.fixture
def start() -> Iterator[Start]:
    with ThreadPoolExecutor(8) as pool:
        yield pool.submit


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), float(version)), "b": torch.full((7,), version)}


def holds(into: dict[str, torch.Tensor], version: int) -> bool:
    return all(torch.equal(into[name], tensor) for name, tensor in weights(version).items())


def publisher_on(kind: Any, place: Path, **options: Any) -> Publisher:
    return Publisher(kind(place), **({} if kind is DirectoryTransport else {"bypass_cpu": False}), **options)


def polled(receiver: Receiver, within_s: float = 10.0) -> int | None:
    """What `poll` says once it says something."""
    ends = time.monotonic() + within_s
    while (found := receiver.poll()) is None and time.monotonic() < ends:
        time.sleep(0.005)
    return found


def stays(receiver: Receiver, expected: int | None, seconds: float = 0.7) -> bool:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if receiver.poll() != expected:
            return False
        time.sleep(0.02)
    return True


# fetch and commit -------------------------------------------------------------------------------------------------


@STORED_AND_LINKED
def test_a_fetched_version_changes_nothing_until_it_is_committed(tmp_path: Path, kind: Any) -> None:
    into = weights(0)
    with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), into) as receiver:
        publisher.publish(weights(1), 1, meta={"step": 10})
        assert (receiver.fetched, receiver.version, receiver.stats) == (None, None, None)
        assert receiver.fetch(timeout=TIMEOUT_S) == receiver.fetched == 1
        assert (receiver.version, dict(receiver.meta), receiver.dirty) == (None, {}, False)
        assert holds(into, 0)
        assert receiver.stats is not None
        assert receiver.stats.commit_s is None
        assert receiver.commit() == receiver.version == 1
        assert (receiver.fetched, dict(receiver.meta), receiver.dirty) == (None, {"step": 10}, False)
        assert holds(into, 1)
        stats = receiver.stats
        assert stats is not None
        assert stats.version == 1
        assert stats.commit_s is not None
        assert 0 < stats.phases["wait"] + stats.phases["transfer"] <= stats.fetch_s
        with pytest.raises(ConfigError, match="no fetched version to commit"):
            receiver.commit()


@STORED_AND_LINKED
def test_a_held_version_outlives_its_publisher_and_a_fetch_that_fails(tmp_path: Path, kind: Any) -> None:
    into = weights(0)
    with Receiver(kind(tmp_path), into) as receiver:
        with publisher_on(kind, tmp_path) as publisher:
            publisher.publish(weights(1), 1)
            assert receiver.fetch(timeout=TIMEOUT_S) == 1
            publisher.publish({"other": torch.ones(2)}, 2)
            with pytest.raises(StateMismatch):
                receiver.fetch(timeout=TIMEOUT_S)
            assert receiver.fetched == 1
        with pytest.raises(ConfigError, match="nothing says where the version is to go"):
            Receiver(kind(tmp_path)).fetch()
        assert receiver.commit() == 1
        assert holds(into, 1)


@STORED_AND_LINKED
def test_another_fetched_version_replaces_it_and_goes_where_it_was_told(tmp_path: Path, kind: Any) -> None:
    into, other = weights(0), weights(0)
    with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), into) as receiver:
        for version in (1, 2, 3):
            publisher.publish(weights(version), version)
            assert receiver.fetch(into=other if version == 2 else None, timeout=TIMEOUT_S) == version
            if version == 2:
                assert receiver.commit() == 2
                assert holds(other, 2)
                assert holds(into, 0)
        assert receiver.fetch(2, timeout=TIMEOUT_S) == receiver.fetched == 2  # an older one, by its number
        assert receiver.commit() == 2
        assert holds(into, 2)
        assert receiver.receive(timeout=TIMEOUT_S) == 3
        assert holds(into, 3)


def test_receive_brings_what_is_newer_than_the_committed_version(tmp_path: Path) -> None:
    into = weights(0)
    with (
        publisher_on(SharedMemoryTransport, tmp_path) as publisher,
        Receiver(SharedMemoryTransport(tmp_path), into) as receiver,
    ):
        publisher.publish(weights(1), 1)
        assert receiver.fetch(timeout=TIMEOUT_S) == 1
        with pytest.raises(DeadlineExceeded):
            receiver.fetch(timeout=0.1)
        assert receiver.receive(timeout=TIMEOUT_S) == 1
        assert receiver.fetched is None


def test_a_direct_publish_does_not_wait_for_the_commit(tmp_path: Path, start: Start) -> None:
    into = weights(0)
    with Publisher(SlotTransport(tmp_path)) as publisher, Receiver(SlotTransport(tmp_path)) as receiver:
        trained = weights(1)
        fetched = start(receiver.fetch, None, into=into, timeout=TIMEOUT_S)
        assert publisher.publish(trained, 1, TIMEOUT_S, meta={"a": [1, None]}).receivers == 1
        trained["a"].zero_()  # the publisher's tensors are free again
        assert fetched.result() == 1
        assert receiver.commit() == 1
        assert holds(into, 1)
        assert receiver.meta == {"a": [1, None]}


@STORED_AND_LINKED
def test_a_function_is_called_by_commit_and_again_only_for_what_it_did_not_take(tmp_path: Path, kind: Any) -> None:
    taken: list[str] = []

    def take(name: str, tensor: torch.Tensor) -> None:
        if name == "b" and "refused" not in taken:
            taken.append("refused")
            raise OSError("no room")
        taken.append(name)

    with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), take) as receiver:
        publisher.publish(weights(1), 1)
        assert receiver.fetch(timeout=TIMEOUT_S) == 1
        assert taken == []
        with pytest.raises(OSError, match="no room"):
            receiver.commit()
        assert (receiver.dirty, receiver.fetched, receiver.version) == (True, 1, None)
        assert stays(receiver, None, 0.2)  # what could not be committed is no news
        assert receiver.commit() == 1
        assert sorted(taken) == ["a", "b", "refused"]
        assert (receiver.dirty, receiver.fetched) == (False, None)


def test_what_failed_to_commit_can_be_fetched_again(tmp_path: Path) -> None:
    wants = [False]

    def take(name: str, tensor: torch.Tensor) -> None:
        if not wants[0]:
            raise OSError("no room")

    with publisher_on(DirectoryTransport, tmp_path) as publisher, Receiver(DirectoryTransport(tmp_path), take) as it:
        publisher.publish(weights(1), 1)
        it.fetch(timeout=TIMEOUT_S)
        with pytest.raises(OSError, match="no room"):
            it.commit()
        wants[0] = True
        assert it.fetch(timeout=TIMEOUT_S) == 1
        assert it.commit() == 1
        assert not it.dirty


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tensor_that_was_replaced_since_the_fetch_is_noticed(tmp_path: Path, streaming: bool) -> None:
    trained, served = nn.Linear(4, 2), nn.Linear(4, 2)
    with publisher_on(DirectoryTransport, tmp_path) as publisher, Receiver(DirectoryTransport(tmp_path), served) as it:
        publisher.publish(trained.state_dict(), 1)
        assert it.fetch(streaming=streaming, timeout=TIMEOUT_S) == 1
        served.weight = nn.Parameter(torch.zeros(2, 4))
        with pytest.raises(StateMismatch, match=r"`weight` was replaced by another tensor since .* Fetch it again"):
            it.commit()
        assert (it.dirty, it.version, it.fetched) == (streaming, None, 1)
        assert not served.weight.any()
        assert it.receive(timeout=TIMEOUT_S) == 1
        assert torch.equal(served.weight, trained.weight)
        into = weights(0)
        with Receiver(DirectoryTransport(tmp_path), into) as other:
            publisher.publish(weights(2), 2)
            other.fetch(timeout=TIMEOUT_S)
            into["a"] = torch.zeros(3, 4)
            with pytest.raises(StateMismatch, match="`a` was replaced"):
                other.commit()


def test_the_rest_of_a_module_may_change_between_fetch_and_commit(tmp_path: Path) -> None:
    trained, served = nn.Linear(4, 2), nn.Linear(4, 2)
    served.register_buffer("cache", torch.zeros(3), persistent=False)
    with publisher_on(DirectoryTransport, tmp_path) as publisher, Receiver(DirectoryTransport(tmp_path), served) as it:
        publisher.publish(trained.state_dict(), 1)
        it.fetch(timeout=TIMEOUT_S)
        served.cache = torch.ones(5)
        assert it.commit() == 1


def test_a_streaming_fetch_is_dirty_until_its_commit_and_keeps_commits_out(tmp_path: Path, start: Start) -> None:
    trained, served = nn.Linear(4, 2), nn.Linear(4, 2)
    with publisher_on(DirectoryTransport, tmp_path) as publisher, Receiver(DirectoryTransport(tmp_path), served) as it:
        publisher.publish(trained.state_dict(), 1)
        assert it.fetch(streaming=True, timeout=TIMEOUT_S) == 1
        assert (it.dirty, it.fetched, it.version) == (True, 1, None)
        with pytest.raises(WeightsDirty):
            served(torch.ones(1, 4))
        assert it.commit() == 1
        assert not it.dirty
        served(torch.ones(1, 4))
        publisher.publish(trained.state_dict(), 2)
        assert it.fetch(timeout=TIMEOUT_S) == 2
        waiting = start(it.fetch, streaming=True, timeout=TIMEOUT_S)  # for version 3
        while it._writer is None:
            time.sleep(0.005)
        with pytest.raises(ConfigError, match="the weights are being written to"):
            it.commit()
        publisher.publish(trained.state_dict(), 3)
        assert waiting.result() == 3
        assert it.commit() == 3


def test_versions_are_fetched_while_others_are_committed(tmp_path: Path, start: Start) -> None:
    """Two shadows: what is held is not overwritten by the next fetch, and after that both are used in turn."""
    into = {"w": torch.zeros(1 << 18)}
    wrong: list[str] = []
    over = threading.Event()

    def look(receiver: Receiver) -> None:
        while not over.is_set():
            version, fetched = receiver.version, receiver.fetched
            if version is not None and fetched is not None and fetched < version:
                wrong.append(f"{fetched} is fetched, {version} is there")

    def commit(receiver: Receiver) -> None:
        while not over.is_set() or receiver.fetched is not None:
            if receiver.fetched is None:
                time.sleep(0.001)
                continue
            version = receiver.commit()
            if not into["w"].eq(version).all():
                wrong.append(f"version {version} is mixed")

    with (
        publisher_on(SharedMemoryTransport, tmp_path, delta=True) as publisher,
        Receiver(SharedMemoryTransport(tmp_path), into) as receiver,
    ):
        sides = [start(look, receiver), start(commit, receiver)]
        for version in range(1, 31):
            publisher.publish({"w": torch.full((1 << 18,), float(version))}, version)
            assert receiver.fetch(timeout=TIMEOUT_S) == version
        over.set()
        for side in sides:
            side.result(TIMEOUT_S)
        assert receiver.version == 30
    assert not wrong


def test_what_another_publisher_sent_is_no_base_for_a_delta_though_its_commit_comes_later(tmp_path: Path) -> None:
    into = {"w": torch.zeros(3 << 18)}
    transport = SharedMemoryTransport(tmp_path)
    old, new = torch.ones(3 << 18), torch.full((3 << 18,), 2.0)
    with Receiver(transport, into) as receiver:
        with publisher_on(SharedMemoryTransport, tmp_path, delta=True) as publisher:
            publisher.publish({"w": old}, 5)
            assert receiver.fetch(timeout=TIMEOUT_S) == 5
        with publisher_on(SharedMemoryTransport, tmp_path, delta=True) as publisher:
            publisher.publish({"wrong": new}, 6)
            with pytest.raises(StateMismatch):
                receiver.fetch(timeout=TIMEOUT_S)
            assert receiver.commit() == 5  # of the first
            part = new.clone()
            part[0] = 3.0
            publisher.publish({"w": new}, 7)
            publisher.publish({"w": part}, 8)
            assert receiver.receive(timeout=TIMEOUT_S) == 8
            assert torch.equal(into["w"], part)


# poll ---------------------------------------------------------------------------------------------------------------


@STORED_AND_LINKED
def test_poll_tells_of_what_is_newer_than_what_was_fetched(tmp_path: Path, kind: Any) -> None:
    into = weights(0)
    with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), into) as receiver:
        assert receiver.poll() is None
        publisher.publish(weights(1), 1)
        assert polled(receiver) == 1
        assert receiver.fetch(1, timeout=TIMEOUT_S) == 1
        assert stays(receiver, None)
        publisher.publish(weights(2), 2)
        assert polled(receiver) == 2
        assert receiver.commit() == 1
        assert stays(receiver, 2, 0.2)
        assert receiver.receive(timeout=TIMEOUT_S) == 2
        assert stays(receiver, None)
    with pytest.raises(ConfigError, match="this receiver is closed"):
        receiver.poll()


def test_poll_over_links_knows_of_a_version_at_once_and_costs_nothing(tmp_path: Path) -> None:
    with (
        publisher_on(SharedMemoryTransport, tmp_path) as publisher,
        Receiver(SharedMemoryTransport(tmp_path), weights(0)) as receiver,
    ):
        publisher.publish(weights(0), 0)
        assert polled(receiver) == 0
        delays = []
        for version in range(1, 12):
            publisher.publish(weights(version), version)
            began = time.monotonic()
            while receiver.poll() != version:
                assert time.monotonic() - began < 10
            delays.append(time.monotonic() - began)
        assert sorted(delays)[len(delays) // 2] < 0.05
        began = time.perf_counter()
        for _ in range(1000):
            receiver.poll()
        assert time.perf_counter() - began < 0.5


def test_a_direct_version_is_polled_while_it_is_published(tmp_path: Path, start: Start) -> None:
    into = weights(0)
    with Publisher(SlotTransport(tmp_path)) as publisher:
        receiver = Receiver(SlotTransport(tmp_path), into)
        assert receiver.poll() is None
        published = start(publisher.publish, weights(3), 3, TIMEOUT_S)
        assert polled(receiver) == 3
        assert receiver.receive(version=3, timeout=TIMEOUT_S) == 3
        assert published.result().receivers == 1
        assert stays(receiver, None, 0.2)
        receiver.close()


def test_what_a_restarted_publisher_has_is_news_whatever_its_number(tmp_path: Path) -> None:
    into = weights(0)
    with Receiver(SharedMemoryTransport(tmp_path), into) as receiver:
        with publisher_on(SharedMemoryTransport, tmp_path) as publisher:
            publisher.publish(weights(9), 9)
            assert polled(receiver) == 9
            receiver.receive(timeout=TIMEOUT_S)
        for version in (4, 3):
            with (
                publisher_on(SharedMemoryTransport, tmp_path) as publisher,
                pytest.raises(ConfigError, match="rewind=True"),
            ):
                publisher.publish(weights(version), version)
            with publisher_on(SharedMemoryTransport, tmp_path, rewind=True) as publisher:
                publisher.publish(weights(version), version)
                assert polled(receiver) == version
                assert receiver.receive(version=version, timeout=TIMEOUT_S) == version
                assert holds(into, version)
                assert stays(receiver, None, 0.2)


@pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessGroupTransport])
def test_a_publisher_whose_place_another_has_taken_publishes_no_more(tmp_path: Path, kind: Any) -> None:
    """As one that was stopped, and thought dead: old receivers would follow it, new ones the other."""
    into = weights(0)
    with publisher_on(kind, tmp_path) as stopped, Receiver(kind(tmp_path), into) as receiver:
        stopped.publish(weights(1), 1)
        receiver.receive(timeout=TIMEOUT_S)
        with publisher_on(kind, tmp_path) as later:
            later.publish(weights(2), 2)
            for version in (3, 4):
                with pytest.raises(RootLocked, match="another publisher has taken the place of this one"):
                    stopped.publish(weights(version), version)
            later.publish(weights(3), 3)
            assert receiver.receive(version=3, timeout=TIMEOUT_S) == 3
            assert holds(into, 3)
        with pytest.raises(RootLocked):
            stopped.publish(weights(4), 4)


@pytest.mark.parametrize("kind", [SharedMemoryTransport, ProcessGroupTransport])
def test_a_publisher_whose_record_was_removed_is_found_again(tmp_path: Path, kind: Any) -> None:
    with publisher_on(kind, tmp_path) as publisher:
        publisher.publish(weights(1), 1)
        for record in tmp_path.glob("holdfast-*"):
            if record.is_file():
                record.unlink()
        publisher.publish(weights(2), 2)
        into = weights(0)
        with Receiver(kind(tmp_path), into) as receiver:
            assert receiver.receive(timeout=TIMEOUT_S) == 2
            assert holds(into, 2)


def test_what_is_published_anew_under_an_old_number_in_a_directory_is_news(tmp_path: Path) -> None:
    with Receiver(DirectoryTransport(tmp_path / "v"), weights(0)) as receiver:
        for version in (9, 9, 4):
            with publisher_on(DirectoryTransport, tmp_path / "v") as publisher:
                publisher.publish(weights(version), version)
            assert polled(receiver) == version
            assert receiver.receive(version=version, timeout=TIMEOUT_S) == version
            assert stays(receiver, None)
            os.rename(tmp_path / "v", tmp_path / f"old-{time.monotonic_ns()}")


def test_poll_raises_what_its_thread_met_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        looks = 0

        def look(self) -> Sighting | None:
            Failing.looks += 1
            if Failing.looks in (1, 2, 4):
                raise OSError("the network is away") if Failing.looks < 4 else CheckpointCorrupt("torn", path="here")
            return Sighting(Failing.looks, "x")

        def wake(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr("holdfast.sync.watcher._PAUSE_S_MIN", 0.05)
    watcher = Watcher(Failing, every_s=0.05)
    raised: list[str] = []
    ends = time.monotonic() + 10
    while time.monotonic() < ends and (Failing.looks < 6):
        try:
            watcher.newest()
        except holdfast.HoldfastError as error:
            raised.append(f"{type(error).__name__}: {error}")
        time.sleep(0.005)
    assert raised == [
        "HoldfastError: looking for new versions failed: OSError: the network is away",
        "CheckpointCorrupt: torn",
    ]
    found = watcher.newest()
    assert found is not None
    assert found.version >= 5
    watcher.close()
    assert not watching()


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-sync-watch"]


@STORED_AND_LINKED
def test_a_forgotten_receiver_ends_its_thread(tmp_path: Path, kind: Any) -> None:
    with publisher_on(kind, tmp_path) as publisher:
        publisher.publish(weights(1), 1)
        receiver = Receiver(kind(tmp_path), weights(0))
        assert polled(receiver) == 1
        receiver.fetch(timeout=TIMEOUT_S)
        assert watching()
        gone = weakref.ref(receiver)
        del receiver
        gc.collect()
        assert gone() is None
        ends = time.monotonic() + 10
        while watching() and time.monotonic() < ends:
            time.sleep(0.01)
        assert not watching()


@STORED_AND_LINKED
def test_an_exiting_interpreter_ends_the_thread(tmp_path: Path, kind: Any) -> None:
    program = (
        "import sys, time, torch, holdfast\n"
        f"receiver = holdfast.sync.Receiver(holdfast.sync.{kind.__name__}(sys.argv[1]), {{'a': torch.zeros(2)}})\n"
        "receiver.poll(); time.sleep(0.2); receiver.poll(); print('done')\n"
    )
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
    assert time.monotonic() - began < 40


def _child(receiver: Receiver, answers: Any) -> None:
    answers.put((len(watching()), polled(receiver, 20.0)))
    del receiver
    gc.collect()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@STORED_AND_LINKED
def test_a_forked_child_has_a_thread_of_its_own(tmp_path: Path, kind: Any) -> None:
    into = weights(0)
    with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), into) as receiver:
        publisher.publish(weights(1), 1)
        assert polled(receiver) == 1
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_child, args=(receiver, answers))
        child.start()
        assert answers.get(timeout=40) == (0, 1)
        child.join(20)
        assert child.exitcode == 0
        publisher.publish(weights(2), 2)  # the parent's goes on
        assert polled_is(receiver, 2)


def polled_is(receiver: Receiver, version: int) -> bool:
    ends = time.monotonic() + 10
    while receiver.poll() != version and time.monotonic() < ends:
        time.sleep(0.01)
    return receiver.poll() == version


# cancel ---------------------------------------------------------------------------------------------------------


@STORED_AND_LINKED
def test_cancel_ends_a_fetch_that_waits_and_no_other(tmp_path: Path, start: Start, kind: Any) -> None:
    into = weights(0)
    with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), into) as receiver:
        receiver.cancel()  # nothing to cancel
        publisher.publish(weights(1), 1)
        assert receiver.receive(timeout=TIMEOUT_S) == 1
        for _ in range(3):
            fetched = start(receiver.fetch, timeout=TIMEOUT_S)
            while receiver._thread is None:
                time.sleep(0.001)
            receiver.cancel()
            with pytest.raises(FetchCancelled, match="nothing was committed"):
                fetched.result(5.0)
        receiver.cancel()
        publisher.publish(weights(2), 2)
        assert receiver.fetch(timeout=TIMEOUT_S) == 2
        receiver._half.cancel()  # one that came just after the fetch had ended
        publisher.publish(weights(3), 3)
        assert receiver.receive(timeout=TIMEOUT_S) == 3
        assert holds(into, 3)


def test_cancel_ends_a_transfer(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher goes on with others; and the receiver, with the version it had."""
    into = {f"w{place}": torch.zeros(1 << 16) for place in range(8)}
    monkeypatch.setattr(stored, "SHADOW_BATCH_BYTES", 1 << 18)
    reading = threading.Event()
    on = threading.Event()
    fill = stored.fill_tensors

    def slow(*given: Any, **named: Any) -> Any:
        reading.set()
        on.wait(TIMEOUT_S)
        return fill(*given, **named)

    monkeypatch.setattr(stored, "fill_tensors", slow)
    with publisher_on(DirectoryTransport, tmp_path) as publisher, Receiver(DirectoryTransport(tmp_path), into) as it:
        publisher.publish({name: torch.ones_like(tensor) for name, tensor in into.items()}, 1)
        fetched = start(it.fetch, timeout=TIMEOUT_S)
        assert reading.wait(TIMEOUT_S)
        it.cancel()
        on.set()
        with pytest.raises(FetchCancelled):
            fetched.result(10.0)
        assert not any(tensor.any() for tensor in into.values())
        assert it.receive(timeout=TIMEOUT_S) == 1


# short timeouts -----------------------------------------------------------------------------------------------------


def test_who_polls_with_a_short_timeout_gets_versions_and_makes_nobody_begin_again(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer takes longer than the timeout here."""
    send = Sender._send_bucket
    sessions: list[int] = []

    def slowly(self: Any, session: SendSession, *given: Any) -> None:
        if session.number not in sessions:
            sessions.append(session.number)
        time.sleep(0.02)
        send(self, session, *given)

    monkeypatch.setattr(Sender, "_send_bucket", slowly)
    tensors = {f"w{place}": torch.full((64, 64), float(place)) for place in range(16)}
    transport = SlotTransport(tmp_path)
    tries = [0]

    def poll(receiver: Receiver, into: dict[str, torch.Tensor]) -> int:
        while True:
            tries[0] += 1
            try:
                return receiver.receive(into, timeout=0.05)
            except DeadlineExceeded:
                assert tries[0] < 400

    with (
        Publisher(transport, 1 << 14, receivers=2) as publisher,
        Receiver(transport) as one,
        Receiver(transport) as two,
    ):
        for version in (1, 2):
            intos = [{name: torch.zeros(64, 64) for name in tensors} for _ in range(2)]
            received = start(one.receive, intos[0], None, TIMEOUT_S), start(poll, two, intos[1])
            published = publisher.publish(tensors, version, TIMEOUT_S)
            assert [one.result(TIMEOUT_S) for one in received] == [version, version]
            assert (published.receivers, published.lost) == (2, 0)
            for into in intos:
                assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    assert len(sessions) <= 4, "hardly any session had to begin again"


# meta -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SlotTransport, ProcessGroupTransport, DirectoryTransport])
def test_meta_travels_with_its_version(tmp_path: Path, start: Start, kind: Any) -> None:
    meta = {"step": 7, "loss": math.inf, "tags": ("a", b"\0\xff", None), "deep": {"x": [1.5, True, -(2**63)]}}
    with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), weights(0)) as receiver:
        publisher.publish(weights(1), 1, meta=meta)
        meta["step"] = 8
        assert receiver.receive(timeout=TIMEOUT_S) == 1
        assert receiver.meta == {**meta, "step": 7, "tags": ["a", b"\0\xff", None]}
        publisher.publish(weights(2), 2)
        assert receiver.fetch(timeout=TIMEOUT_S) == 2
        assert receiver.meta["step"] == 7
        receiver.commit()
        assert receiver.meta == {}
        with pytest.raises(TypeError):
            receiver.meta["step"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("meta", "found"),
    [
        ({"a": {"b": [torch.ones(1)]}}, r"meta\['a'\]\['b'\]\[0\] is a Tensor"),
        ({"a": {1: 2}}, r"meta\['a'\] has the key 1"),
        ({"a": 2**70}, "meta can't be encoded"),
        ({"a": "\udc80"}, "meta can't be encoded"),
        ({"a": bytes(70_000)}, r"meta takes 70,0\d\d bytes, at most 65,536"),
        ([1], "meta must be a mapping"),
    ],
)
@STORED_AND_LINKED
def test_meta_that_is_not_small_and_plain_is_named(tmp_path: Path, kind: Any, meta: Any, found: str) -> None:
    with publisher_on(kind, tmp_path) as publisher:
        with pytest.raises(ConfigError, match=found) as caught:
            publisher.publish(weights(1), 1, meta=meta)
        assert caught.value.field == "meta"
        publisher.publish(weights(1), 1, meta={})
        assert publisher.versions == (1,)


# events, and the end -----------------------------------------------------------------------------------------------


@STORED_AND_LINKED
def test_events_have_the_seconds_of_each_phase(tmp_path: Path, kind: Any) -> None:
    seen: list[holdfast.events.Event] = []
    remove = holdfast.add_hook(lambda event: seen.append(event) if event.kind.startswith("sync.") else None)
    try:
        with publisher_on(kind, tmp_path) as publisher, Receiver(kind(tmp_path), weights(0)) as receiver:
            publisher.publish(weights(1), 1)
            receiver.receive(timeout=TIMEOUT_S)
    finally:
        remove()
    assert [(event.kind, event.step) for event in seen] == [("sync.fetched", 1), ("sync.committed", 1)]
    assert sorted(seen[0].fields) == ["fetch_s", "transfer_s", "wait_s"]
    assert sorted(seen[1].fields) == ["commit_s", "fetch_s"]
    assert all(seconds > 0 for event in seen for seconds in event.fields.values())


def test_closing_waits_for_a_commit_on_another_thread_and_gives_up_what_is_held(tmp_path: Path, start: Start) -> None:
    inside, on = threading.Event(), threading.Event()

    def take(name: str, tensor: torch.Tensor) -> None:
        inside.set()
        on.wait(TIMEOUT_S)

    with publisher_on(DirectoryTransport, tmp_path) as publisher:
        publisher.publish(weights(1), 1)
        receiver = Receiver(DirectoryTransport(tmp_path), take)
        receiver.fetch(timeout=TIMEOUT_S)
        committed = start(receiver.commit)
        assert inside.wait(TIMEOUT_S)
        with pytest.raises(ConfigError, match="the weights are being written to"):
            receiver.commit()
        assert receiver.fetched == 1
        closed = start(receiver.close)
        time.sleep(0.1)
        assert not closed.done()
        on.set()
        closed.result(TIMEOUT_S)
        assert committed.result() == receiver.version == 1
        held = Receiver(DirectoryTransport(tmp_path), weights(0))
        held.fetch(timeout=TIMEOUT_S)
        held.close()
        assert held.fetched is None
        with pytest.raises(ConfigError, match="this receiver is closed"):
            held.commit()


def test_a_function_may_close_its_receiver(tmp_path: Path) -> None:
    with publisher_on(DirectoryTransport, tmp_path) as publisher:
        publisher.publish(weights(1), 1)
        receiver = Receiver(DirectoryTransport(tmp_path), lambda name, tensor: receiver.close())
        receiver.fetch(timeout=TIMEOUT_S)
        assert receiver.commit() == 1


def test_statistics_travel_to_other_processes(tmp_path: Path) -> None:
    with Publisher(DirectoryTransport(tmp_path)) as publisher, Receiver(DirectoryTransport(tmp_path)) as receiver:
        publisher.publish({"a": torch.ones(3)}, 1)
        receiver.receive({"a": torch.zeros(3)})
        assert receiver.stats is not None
        assert pickle.loads(pickle.dumps(receiver.stats)) == receiver.stats
