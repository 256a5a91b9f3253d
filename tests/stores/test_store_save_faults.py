"""Whole saves and loads on real servers by a faulty way: whatever becomes of the n-th request, nothing is lost.

A save and a load are done once without faults to count their requests; then once for each request and each fate.
``HOLDFAST_FAULTS=all`` for every pair; otherwise every `STRIDE`-th of a save, every third of a
load, another one for each fate.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from _faulty_proxy import Proxy
from servers import Server, use

import holdfast
from holdfast.errors import CheckpointNotFound

STRIDE = 1 if os.environ.get("HOLDFAST_FAULTS") == "all" else 24
FATES = ("before", "reset", "busy", "after", "after-503", "late", "cut", "drip", "hang")
DAMAGE = ("damage", "damage-answer")
TIMEOUT_S = 40.0
HANG_S = 9.0
"""Timeout where a request is never answered: it is given up after half of that at most, and sent again."""
NO_LONGER_S = 60.0
SLOW_ON = ("moto",)

Number = Callable[[int], bool]


def state_of(number: int) -> dict[str, object]:
    return {"w": torch.arange(3000.0) + number, "small": [torch.full((7,), float(number))], "step": number}


def assert_is(state: dict[str, object], number: int) -> None:
    wanted = state_of(number)
    assert state["step"] == number
    assert torch.equal(state["w"], wanted["w"])  # type: ignore[arg-type]
    assert torch.equal(state["small"][0], wanted["small"][0])  # type: ignore[index]


def save(number: int, place: str, timeout_s: float = TIMEOUT_S) -> BaseException | None:
    """Save and return the error, which has to be one of Holdfast's."""
    try:
        holdfast.save(state_of(number), place, timeout=timeout_s)
    except holdfast.HoldfastError as error:
        return error
    return None


def load(place: str, timeout_s: float = TIMEOUT_S) -> dict[str, object]:
    state = state_of(-1)
    holdfast.load(state, place, timeout=timeout_s)
    return state


def visible(place: str) -> bool:
    """Whether there is a checkpoint; if so, it is whole."""
    try:
        found = holdfast.open(place)
    except CheckpointNotFound:
        return False
    report = found.verify()
    assert report.ok, report.problems
    return True


def pairs(count: int, fates: tuple[str, ...]) -> list[tuple[int, str]]:
    every = [(number, fate) for fate in fates for number in range(1, count + 1)]
    return every[:: STRIDE if STRIDE == 1 else STRIDE + (count % STRIDE == 0)]


def requests_of(proxy: Proxy, act: Callable[[], object]) -> int:
    proxy.clear()
    act()
    return proxy.clear()


@pytest.mark.timeout(3600)
def test_no_save_is_lost_by_what_becomes_of_a_request(server: Server, faulty: Proxy, tried: Counter[str]) -> None:
    place = server.place()
    faulty.stall_s = 0.3
    holdfast.save(state_of(0), f"{place}/first", timeout=TIMEOUT_S)  # the bucket is proven, the engine runs
    count = requests_of(faulty, lambda: holdfast.save(state_of(0), f"{place}/counted", timeout=TIMEOUT_S))
    assert count >= 8
    for index, (number, fate) in enumerate(pairs(count, FATES), 1):
        where = f"{place}/{number}-{fate}"
        faulty.clear()
        faulty.on_nth(number, fate)
        began = time.monotonic()
        error = save(index, where, HANG_S if fate == "hang" else TIMEOUT_S)
        assert time.monotonic() - began < NO_LONGER_S, (number, fate)
        met = len(faulty.met)
        faulty.clear()
        assert visible(where) is (error is None), (number, fate, error)
        if error is not None:
            assert save(index, where) is None, "as if nothing had happened"
        assert_is(load(where), index)
        tried[f"saves to {server.name} with one request's fate: {'failed by name' if error else 'saved'}"] += met


@pytest.mark.timeout(3600)
def test_no_load_is_wrong_by_what_becomes_of_a_request(server: Server, faulty: Proxy, tried: Counter[str]) -> None:
    where = f"{server.place()}/one"
    faulty.stall_s = 0.3
    holdfast.save(state_of(5), where, timeout=TIMEOUT_S)
    count = requests_of(faulty, lambda: load(where))
    assert count >= 3
    every = [(number, fate) for fate in FATES for number in range(1, count + 1)]
    for number, fate in every[:: 1 if STRIDE == 1 else 3 + (count % 3 == 0)]:
        faulty.on_nth(number, fate)
        began = time.monotonic()
        assert_is(load(where, HANG_S if fate == "hang" else TIMEOUT_S), 5)
        assert time.monotonic() - began < NO_LONGER_S, (number, fate)
        tried[f"loads from {server.name} with one request's fate: loaded"] += len(faulty.met)
        faulty.clear()


@pytest.mark.timeout(3600)
def test_what_is_damaged_on_its_way_is_refused_or_found(server: Server, faulty: Proxy, tried: Counter[str]) -> None:
    """One byte of one request of a save: saved right, or refused, or found by who verifies; of one answer to a load."""
    place = server.place()
    holdfast.save(state_of(0), f"{place}/first", timeout=TIMEOUT_S)
    count = requests_of(faulty, lambda: holdfast.save(state_of(0), f"{place}/counted", timeout=TIMEOUT_S))
    for number in range(1, count + 1):
        where = f"{place}/{number}"
        faulty.clear()
        faulty.on_nth(number, "damage")
        error = save(number, where)
        damaged = sum(request.body_bytes > 0 for request, _ in faulty.met)
        faulty.clear()
        if error is not None:
            became = "refused by name"
        else:
            became = "saved right"
            try:
                assert_is(load(where), number)
            except holdfast.HoldfastError:
                became = "found by who reads it"
        assert became != "found by who reads it" or not server.refuses_damage, number
        tried[f"uploads of a save damaged on the way to {server.name}: {became}"] += damaged
    where = f"{place}/first"
    for number in range(1, requests_of(faulty, lambda: load(where)) + 1):
        faulty.on_nth(number, "damage-answer")
        state = state_of(-1)
        try:
            holdfast.load(state, where, timeout=TIMEOUT_S)
        except holdfast.HoldfastError:
            became = "refused by name"
        else:
            became = "loaded right"
            assert_is(state, 0)
        faulty.clear()
        tried[f"answers to a load damaged on the way from {server.name}: {became}"] += 1


@pytest.mark.timeout(600)
def test_a_server_that_crashes_in_a_save_is_waited_for(
    server: Server, place: str, monkeypatch: pytest.MonkeyPatch, tried: Counter[str]
) -> None:
    if server.durable_after_s is None:
        pytest.skip(f"{server.name} keeps its objects in memory only")
    if server.durable_after_s:
        pytest.skip(f"{server.name} forgets for {server.durable_after_s:g} s what it has acknowledged")
    use(monkeypatch, server)
    for number, pause_s in enumerate((0.0, 0.02, 0.05, 0.1)):
        where = f"{place}/{number}"
        handle = holdfast.async_save({"w": torch.arange(8e6) + number}, where, timeout=90.0)
        time.sleep(pause_s)
        server.kill()
        server.start()
        error = handle.exception(120.0)
        assert error is None or isinstance(error, holdfast.HoldfastError)
        assert visible(where) is (error is None), error
        tried[f"saves to {server.name} while it is killed and started: {'failed by name' if error else 'saved'}"] += 1
