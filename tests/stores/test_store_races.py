"""Eight writers create one object at once, over and over: one of them has, all know who, and it is there whole.

``HOLDFAST_RACES`` says how often, on each server. A quarter of the races is run by way of a proxy on which answers get
lost, so that the losers include some who had won and weren't told.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from _faulty_proxy import Proxy
from servers import Server, soon

from holdfast.storage.object_store import ObjectStore

RACES = int(os.environ.get("HOLDFAST_RACES", "100"))
WRITERS, LANES, FEW_LANES = 8, 20, 5
LONG_S = 120.0
"""No race is about time: a store that shares a core with other suites may need tens of seconds for what comes again."""


def race(stores: list[ObjectStore], name: str) -> None:
    """Let all writers create ``name`` at once, and compare what they were told with what is there."""
    told: list[bool | BaseException] = [False] * len(stores)
    barrier = threading.Barrier(len(stores))

    def write(number: int) -> None:
        mine = b"%02d" % number * (number + 1)
        barrier.wait(30)
        try:
            told[number] = stores[number].create(name, mine, ours=mine.__eq__, ends_s=soon(LONG_S))
        except BaseException as error:
            told[number] = error

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S + 30)
    assert sorted(map(str, told)) == ["False"] * (len(stores) - 1) + ["True"], f"{name}: {told}"
    winner = told.index(True)
    assert stores[0].get(name, ends_s=soon())[0] == b"%02d" % winner * (winner + 1)


def run_races(place: str, count: int, *, at_a_time: int = LANES, lists: bool = True) -> None:
    """Run ``count`` races, some at a time: SeaweedFS lets those sleep a second or more that come second."""
    lanes = [[ObjectStore(place) for _ in range(WRITERS)] for _ in range(at_a_time)]

    def run(lane: int) -> None:
        for number in range(lane, count, at_a_time):
            race(lanes[lane], f"race-{number}")

    with ThreadPoolExecutor(at_a_time) as pool:
        for done in [pool.submit(run, lane) for lane in range(at_a_time)]:
            done.result()
    assert not lists or len(lanes[0][0].objects("", ends_s=soon())) == count


@pytest.mark.timeout(1800)
def test_eight_writers_have_one_winner(server: Server, place: str, tried: Counter[str]) -> None:
    run_races(place, RACES)
    tried[f"races of {WRITERS} writers on {server.name}, one winner each"] += RACES


@pytest.mark.timeout(1800)
def test_eight_writers_have_one_winner_though_answers_get_lost(
    server: Server, faulty: Proxy, tried: Counter[str]
) -> None:
    place, count, lock, puts = server.place(), -(-RACES // 4), threading.Lock(), 0

    def lose(method: str, _path: str) -> str | None:
        nonlocal puts
        if method != "PUT":
            return None
        with lock:
            puts += 1
            return ("after", "after-503", None, None, None)[puts % 5]

    faulty.rule = lose
    # Each lost answer brings more requests: with many at a time, a server that is short of time never gets through.
    run_races(place, count, at_a_time=FEW_LANES)
    assert len(faulty.met) >= count
    tried[f"races of {WRITERS} writers on {server.name} with lost answers, one winner each"] += count
