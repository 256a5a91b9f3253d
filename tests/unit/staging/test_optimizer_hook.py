"""The one hook: which guards it calls while managers come and go on other threads."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from holdfast.staging.optimizer_hook import before_any_load, guard_updates, unguard_updates


class Counted:
    def __init__(self) -> None:
        self.asked = 0

    def before_update(self, parameters: Callable[[frozenset[int]], bool] | None = None) -> None:
        del parameters
        self.asked += 1

    def before_load(self) -> None:
        self.asked += 1


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_guards_are_called_once_until_they_leave_or_die() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    stays, leaves, dies = Counted(), Counted(), Counted()
    for guard in (stays, leaves, dies, stays):
        guard_updates(guard)
    optimizer.step()
    assert (stays.asked, leaves.asked, dies.asked) == (1, 1, 1)
    unguard_updates(leaves)
    unguard_updates(leaves)
    del guard, dies
    gc.collect()
    optimizer.step()
    before_any_load()
    assert (stays.asked, leaves.asked) == (3, 1)
    unguard_updates(stays)


@pytest.mark.usefixtures("quick_switches")
def test_guards_come_and_go_while_others_step() -> None:
    kept = [Counted() for _ in range(200)]
    for guard in kept:
        guard_updates(guard)
    done = threading.Event()
    calls = 0

    def step() -> None:
        nonlocal calls
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
        while not done.is_set() or calls < 100:
            optimizer.step()
            before_any_load()
            calls += 1

    errors: list[BaseException] = []

    def guarded_step() -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded_step)
    thread.start()
    for _ in range(20):
        passing = [Counted() for _ in range(100)]
        for guard in passing:
            guard_updates(guard)
        for guard in passing:
            unguard_updates(guard)
    done.set()
    thread.join(60)
    for guard in kept:
        unguard_updates(guard)
    assert not thread.is_alive()
    assert errors == []
    assert {guard.asked for guard in kept} == {2 * calls}
