"""Hooks hear everything and disturb nothing; counters only go up."""

from __future__ import annotations

import dataclasses
import logging
import threading

import pytest

from holdfast import events


def test_a_hook_hears_what_happens():
    heard = []
    remove = events.add_hook(heard.append)
    try:
        events.emit("save.published", step=7, rank=1, attempt="a", path="/x", stall_s=0.5)
    finally:
        remove()
    events.emit("save.published", step=8)
    (event,) = heard
    assert (event.kind, event.step, event.rank, event.attempt, event.path) == ("save.published", 7, 1, "a", "/x")
    assert event.fields == {"stall_s": 0.5}
    assert event.time_ns > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 8
    with pytest.raises(TypeError):
        event.fields["more"] = 1


def test_a_hook_that_raises_is_logged_and_the_next_is_told(caplog):
    heard = []

    def broken(_event):
        raise ValueError("broken hook")

    removals = [events.add_hook(broken), events.add_hook(heard.append)]
    try:
        with caplog.at_level(logging.ERROR, logger="holdfast.events"):
            events.emit("save.failed")
    finally:
        for remove in removals:
            remove()
    assert len(heard) == 1
    assert "broken hook" in caplog.text


def test_removal_takes_away_one_registration_and_may_be_repeated():
    heard = []
    first, second = events.add_hook(heard.append), events.add_hook(heard.append)
    first()
    first()
    events.emit("x.y")
    second()
    events.emit("x.y")
    assert len(heard) == 1


def test_a_hook_may_remove_itself():
    heard = []

    def once(event):
        heard.append(event)
        remove()

    remove = events.add_hook(once)
    events.emit("x.y")
    events.emit("x.y")
    assert len(heard) == 1


def test_counters_add_up_over_threads():
    before = events.statistics()

    def work():
        for _ in range(1000):
            events.count("test_things")
            events.count("test_bytes", 3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = events.statistics()
    assert after["test_things"] - before["test_things"] == 4000
    assert after["test_bytes"] - before["test_bytes"] == 12000
    assert after["test_never"] == 0
    assert "test_things" in set(after)
    assert len(after) >= 2
    with pytest.raises(TypeError):
        after.counters["test_things"] = 0
