"""The boards: equal in what they answer, and never waiting beyond a deadline."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from _protocol import run_ranks

from holdfast.coordination.board import BoardLost, LocalBoard, StoreBoard
from holdfast.coordination.store import RECONNECT_S, Outage, StoreClient
from holdfast.errors import DeadlineExceeded, HoldfastError
from holdfast.saver.agreement import Agreement, PlanProposal

clones = pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="made anew with torch 2.8 and later")


@pytest.fixture(params=["local", "tcp", "prefixed", "hash", "file"])
def boards(request, tmp_path):
    """Two ranks' boards over the same keys."""
    if request.param == "local":
        made = LocalBoard.of_world(2)
    else:
        if request.param == "file":
            stores = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
        elif request.param == "hash":
            stores = [dist.HashStore()] * 2
        else:
            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            stores = [dist.PrefixStore("job", store) if request.param == "prefixed" else store] * 2
        made = [StoreBoard(stores[rank], rank, 2, "test") for rank in range(2)]
    yield made
    for board in made:
        board.close()


def test_what_one_sets_the_other_gets(boards):
    one, other = boards
    assert other.try_get("a") is None
    one.set("a", b"\x00\xff")
    assert other.try_get("a") == b"\x00\xff"
    assert other.get("a", timeout_s=1, waiting_for="a") == b"\x00\xff"
    one.set("a", b"")
    assert other.get("a", timeout_s=1, waiting_for="a") == b""
    other.delete("a")
    other.delete("never")
    assert one.try_get("a") is None


def test_the_first_of_compare_set_wins(boards):
    one, other = boards
    assert one.compare_set("a", b"\xfe\x00") == b"\xfe\x00"
    assert other.compare_set("a", b"second") == b"\xfe\x00"


def test_add_counts(boards):
    one, other = boards
    assert one.add("n") == 1
    assert other.add("n", 4) == 5


def test_gather_is_in_order_and_waits(boards):
    one, other = boards
    one.set("b", b"2")
    timer = threading.Timer(0.05, other.set, ("a", b"1"))
    timer.start()
    assert one.gather(["a", "b"], timeout_s=5, waiting_for="both") == [b"1", b"2"]
    timer.join()
    assert one.gather([], timeout_s=0, waiting_for="nothing") == []


def test_a_wait_ends_at_its_deadline_and_says_for_what(boards):
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="the end of time") as caught:
        boards[0].get("a", timeout_s=0.05, waiting_for="the end of time")
    assert caught.value.timeout_s == 0.05
    boards[0].set("there", b"")
    with pytest.raises(DeadlineExceeded, match="1 of 2 missing: a"):
        boards[0].gather(["there", "a"], timeout_s=0.05, waiting_for="both")
    assert time.monotonic() - began < 2


def test_what_is_appended_is_read_whole_once_all_is_in(boards):
    one, other = boards
    assert one.try_entries("l") == []
    other.append("l", b"")
    timer = threading.Timer(0.05, one.append, ("l", b"\x00" * 300))
    timer.start()
    found = other.wait_entries("l", 2, timeout_s=5, waiting_for="both")
    assert sorted(found) == [b"", b"\x00" * 300]
    timer.join()
    assert sorted(one.try_entries("l")) == sorted(found)
    one.delete_list("l")
    one.delete_list("never")
    assert one.try_entries("l") == []


def test_a_wait_for_entries_ends_at_its_deadline_or_with_another_key(boards):
    one, other = boards
    one.append("l", b"1")
    with pytest.raises(DeadlineExceeded, match=r"the rest \(1 of 2 are there\)") as caught:
        one.wait_entries("l", 2, timeout_s=0.05, waiting_for="the rest")
    assert caught.value.waited_for == "the rest"
    timer = threading.Timer(0.05, other.set, ("stop", b""))
    timer.start()
    assert one.wait_entries("l", 2, timeout_s=30, waiting_for="the rest", unless="stop") is None
    timer.join()


def test_ten_thousand_entries_from_many_threads_arrive_whole(boards):
    def tell(number):
        for entry in range(2500):
            boards[number % 2].append("l", b"%d" % (number * 2500 + entry))

    count = 10000
    threads = [threading.Thread(target=tell, args=(number,)) for number in range(count // 2500)]
    for thread in threads:
        thread.start()
    found = boards[0].wait_entries("l", count, timeout_s=60, waiting_for="all")
    for thread in threads:
        thread.join()
    assert sorted(map(int, found)) == list(range(count))


def test_all_clones_share_one_thread_and_connection():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    board = StoreBoard(store, 0, 1, "p")
    clones = [board.clone() for _ in range(3)]
    for number, clone in enumerate(clones):
        clone.set(f"k{number}", b"1")
    assert len({id(each._client) for each in [board, *clones]}) == 1
    board.close()
    assert clones[0].try_get("k2") == b"1"
    for clone in clones:
        clone.close()
    with pytest.raises(BoardLost, match="closed"):
        clones[0].clone()


def test_a_look_is_one_request_and_ranks_look_the_rarer_the_more_they_are():
    looks = []

    class Counting(dist.HashStore):
        def compare_set(self, key, expected, desired):
            looks.append(time.monotonic())
            return super().compare_set(key, expected, desired)

    store = Counting()
    for world, most in ((2, 200), (16384, 8)):
        board = StoreBoard(None, 1, world, "p", _client=StoreClient(store, 30.0, Outage()))
        looks.clear()
        with pytest.raises(DeadlineExceeded):
            board.get("never", timeout_s=0.5, waiting_for="nothing")
        assert 3 <= len(looks) <= most
        looks.clear()
        store.set("p/there", b"1")
        assert board.get("there", timeout_s=5, waiting_for="it") == b"1"
        assert len(looks) == 1
        board.close()


def test_a_clone_sees_the_same_keys_and_closes_alone(boards):
    clone = boards[0].clone()
    assert (clone.rank, clone.world) == (0, 2)
    clone.set("a", b"1")
    clone.close()
    clone.close()
    assert boards[0].try_get("a") == b"1"
    with pytest.raises(BoardLost):
        clone.try_get("a")


def test_closing_ends_a_wait(boards):
    clone = boards[0].clone()
    timer = threading.Timer(0.05, clone.close)
    timer.start()
    began = time.monotonic()
    with pytest.raises(BoardLost):
        clone.get("never", timeout_s=30, waiting_for="nothing")
    assert time.monotonic() - began < 5
    timer.join()


def test_many_threads_share_a_board(boards):
    def work(number):
        boards[number % 2].add("n")
        boards[number % 2].set(f"k{number}", b"%d" % number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    keys = [f"k{number}" for number in range(8)]
    assert boards[0].gather(keys, timeout_s=10, waiting_for="all") == [b"%d" % number for number in range(8)]
    for thread in threads:
        thread.join()
    assert boards[0].add("n", 0) == 8


def test_a_board_leaves_no_thread_behind():
    others = set(threading.enumerate())  # of boards before, which may end while this looks

    def count():
        return sum(thread.name == "holdfast-board" and thread not in others for thread in threading.enumerate())

    store = dist.HashStore()
    for _ in range(5):
        board = StoreBoard(store, 0, 1, "p")
        board.set("a", b"1")
        clone = board.clone()
        clone.set("a", b"1")
        clone.close()
        del board, clone
    gc.collect()
    deadline = time.monotonic() + 5
    while count() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == 0


def test_a_store_that_never_answers_is_lost_in_time():
    released = threading.Event()

    class Vanished:
        def compare_set(self, _key, _expected, _desired):
            released.wait(20)

        def set(self, _key, _value):
            released.wait(20)

    board = StoreBoard(Vanished(), 0, 2, "p", call_timeout_s=0.05)
    began = time.monotonic()
    with pytest.raises(BoardLost, match="has not answered"):
        board.get("a", timeout_s=10, waiting_for="a")
    with pytest.raises(BoardLost):
        board.set("b", b"1")  # at once: it is not tried again
    assert time.monotonic() - began < 2
    released.set()


def test_a_store_whose_host_dies_is_lost():
    code = (
        "import sys, time, torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, 2, is_master=True, wait_for_workers=False)\n"
        "print(s.port, flush=True); time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        port = int(host.stdout.readline())
        board = StoreBoard(dist.TCPStore("127.0.0.1", port, 2, is_master=False), 1, 2, "p")
        board.set("a", b"1")
        threading.Timer(0.1, host.kill).start()
        began = time.monotonic()
        with pytest.raises(BoardLost) as caught:
            board.get("never", timeout_s=30, waiting_for="nothing")
        assert time.monotonic() - began < 10
        assert isinstance(caught.value, (HoldfastError, OSError))
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()


def test_the_module_needs_no_torch():
    modules = "holdfast.coordination.board, holdfast.commit.attempt, holdfast.commit.recovery"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


class Proxy:
    """Between a Store and its clients: can drop every connection, or stall them, as what lies on the way does."""

    def __init__(self, port):
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends = []
        self._stalled = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._to)
                self._ends += [client, server]
                for one, other in ((client, server), (server, client)):
                    threading.Thread(target=self._loop, args=(one, other), daemon=True).start()

    def _loop(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if one not in self._stalled:
                    other.sendall(data)

    def drop(self):
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stall(self):
        """Those that are there now, for ever and without a word."""
        self._stalled |= set(self._ends)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # `close` alone leaves its thread accepting
        self._listener.close()
        self.drop()
        for end in self._ends:
            end.close()


@pytest.fixture
def far():
    """A rank's board whose way to the Store leads through a proxy, one of another rank, and the proxy."""
    host = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    proxy = Proxy(host.port)
    store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", proxy.port, 2, is_master=False))
    boards = [
        StoreBoard(store, 1, 2, "p", call_timeout_s=0.5),
        StoreBoard(dist.PrefixStore("group", host), 0, 2, "p"),
    ]
    yield (*boards, proxy)
    for board in boards:
        board.close()
    proxy.close()


@clones
@pytest.mark.parametrize("way", ["drop", "stall"])
def test_a_connection_that_was_lost_is_made_anew(far, way):
    mine, other, proxy = far
    clone = mine.clone()
    clone.set("before", b"1")
    for round_ in range(3):
        getattr(proxy, way)()
        clone.set(f"a{round_}", b"1")
        assert other.get(f"a{round_}", timeout_s=5, waiting_for="a") == b"1"
        assert clone.add("n") == round_ + 1
    other.set("late", b"2")
    proxy.drop()
    assert clone.clone().get("late", timeout_s=5, waiting_for="late") == b"2"


@clones
def test_what_may_have_been_counted_is_not_counted_again(far):
    mine, other, proxy = far
    assert mine.add("n") == 1
    proxy.drop()
    with pytest.raises(BoardLost):
        mine.add("n")
    assert mine.add("n", 0) == other.add("n", 0)


def test_a_host_that_is_gone_is_not_waited_for_twice(far):
    mine, _, proxy = far
    clones = [mine.clone() for _ in range(3)]
    proxy.close()
    began = time.monotonic()
    for board in (mine, *clones, mine):
        with pytest.raises(BoardLost):
            board.set("a", b"1")
    assert time.monotonic() - began < RECONNECT_S


@clones
@pytest.mark.parametrize("way", ["drop", "stall"])
def test_ranks_go_on_voting_after_a_connection_was_lost(far, way):
    mine, other, proxy = far
    ranks = [Agreement(other), Agreement(mine)]

    def agree(rank, step):
        ranks[rank].cast(PlanProposal(step, "/path", f"digest-{step // 2}"), b"structure")
        return ranks[rank].wait_verdict(timeout_s=10)

    for step in range(4):
        verdicts = run_ranks(lambda rank, step=step: agree(rank, step), 2)
        assert [verdict.kind for verdict in verdicts] == ["same" if step % 2 else "replan"] * 2
        getattr(proxy, way)()


@clones
def test_a_proposal_that_could_not_be_posted_leaves_ranks_in_step(far):
    """The answer to its arrival is lost: this rank learns the verdict all the same, and the next one."""
    mine, other, proxy = far
    ranks = [Agreement(other), Agreement(mine)]

    def agree(rank, step):
        if (rank, step) == (1, 1):
            ranks[1]._round._board = Dropping(mine, proxy)
        number = ranks[rank].cast(PlanProposal(step, "/path", "digest"), b"structure")
        ranks[1]._round._board = mine
        return number, ranks[rank].wait_verdict(timeout_s=1)

    kinds = []
    for step in range(3):
        verdicts = run_ranks(lambda rank, step=step: agree(rank, step), 2)
        assert [number for number, _ in verdicts] == [step] * 2
        assert verdicts[0] == verdicts[1]
        kinds.append(verdicts[0][1].kind)
    assert kinds == ["replan", "refused", "same"]


@clones
@pytest.mark.parametrize("way", ["drop", "stall"])
def test_what_was_told_over_a_connection_that_ends_is_told_once(far, way):
    mine, other, proxy = far
    mine.append("l", b"first")
    for round_ in range(3):
        getattr(proxy, way)()
        mine.append("l", b"%d" % round_)
        mine.append("l", b"%d" % round_)  # as a call that is repeated without need
    with pytest.raises(DeadlineExceeded, match="4 of 5"):
        other.wait_entries("l", 5, timeout_s=0.1, waiting_for="one more")
    other.append("l", b"last")
    assert set(other.wait_entries("l", 5, timeout_s=5, waiting_for="all")) == {b"first", b"0", b"1", b"2", b"last"}


class Dropping:
    """A board whose connection ends for good whenever something is to be told."""

    def __init__(self, board, proxy):
        self.board, self.proxy = board, proxy

    def __getattr__(self, name):
        if name == "append":
            self.proxy.drop()
            return self._lost
        return getattr(self.board, name)

    def _lost(self, _key, _value):
        raise BoardLost("the connection ended, and again when it was told anew")
