"""The boards: equal in what they answer, and never waiting beyond a deadline."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from holdfast.coordination import BoardLost, LocalBoard, StoreBoard
from holdfast.errors import DeadlineExceeded, HoldfastError


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
    def count():
        return sum(thread.name == "holdfast-board" for thread in threading.enumerate())

    before = count()
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
    while count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == before


def test_a_store_that_never_answers_is_lost_in_time():
    released = threading.Event()

    class Vanished:
        def check(self, _keys):
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
    code = "import sys, holdfast.coordination, holdfast.commit, holdfast.recovery; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
