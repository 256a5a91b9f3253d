"""Signal handlers of the program's own that save, wait or close in the middle of a save: never a wait for oneself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import events
from holdfast.errors import ConfigError
from holdfast.snapshot import SnapshotTaker
from holdfast.staging.stager import Staging

WAIT_S = 90.0


class Handler:
    """What a program does when SIGUSR2 comes, and what came of it."""

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None
        self.found: list[object] = []

    def __call__(self, *_args: object) -> None:
        act, self.act = self.act, lambda: None
        try:
            self.found.append(act())
        except ConfigError as error:
            self.found.append(error)

    def refused(self) -> str:
        (error,) = self.found
        assert isinstance(error, ConfigError), error
        return str(error)


@pytest.fixture
def handler() -> Iterator[Handler]:
    handler = Handler()
    before = signal.signal(signal.SIGUSR2, handler)
    yield handler
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[holdfast.CheckpointManager]:
    weight = torch.nn.Parameter(torch.ones(1000))
    state = {"w": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}
    config = holdfast.CheckpointConfig(every=None, keep=None, in_flight=1)
    with holdfast.CheckpointManager(tmp_path / "root", state, config=config) as manager:
        yield manager


def come() -> None:
    """The signal, where it interrupts something: on the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGUSR2)


def signalled(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """A signal comes when the main thread has run what ``owner`` has by that name."""
    method = getattr(owner, name)

    def run(*args: Any, **options: Any) -> Any:
        found = method(*args, **options)
        come()
        return found

    monkeypatch.setattr(owner, name, run)


CALLS: dict[str, Callable[[holdfast.CheckpointManager], object]] = {
    "save": lambda manager: manager.save(2),
    "final save": lambda manager: manager.save(2, final=True),
    "wait": lambda manager: manager.wait(),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_in_the_middle_of_a_save_it_is_refused_at_once(
    call: str, manager: holdfast.CheckpointManager, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of the save underneath is the one it would wait for."""
    handler.act = lambda: CALLS[call](manager)
    with monkeypatch.context() as patch:
        signalled(patch, SnapshotTaker, "take")
        handle = manager.save(1)
    assert "only set a flag" in handler.refused()
    assert handle.result(WAIT_S).verify().ok
    assert manager.save(3).result(WAIT_S).step == 3
    assert manager.steps() == [1, 3]


@pytest.mark.parametrize("call", ["save", "before_update", "wait_staged", "result"])
def test_in_the_wait_before_an_update_it_is_refused_at_once(
    call: str, manager: holdfast.CheckpointManager, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = manager.save(1)
    handler.act = {
        "save": lambda: manager.save(2),
        "before_update": manager.before_update,
        "wait_staged": manager.wait_staged,
        "result": handle.result,
    }[call]
    with monkeypatch.context() as patch:
        signalled(patch, Staging, "help_copy")
        manager.before_update()
    assert "only set a flag" in handler.refused()
    assert handle.result(WAIT_S).verify().ok
    assert manager.save(3).result(WAIT_S).step == 3


def test_elsewhere_it_may_save(
    manager: holdfast.CheckpointManager, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this thread is in the middle of something that a save does too: counting."""
    handler.act = lambda: manager.save(1).step
    with monkeypatch.context() as patch:
        signalled(patch, events, "MappingProxyType")
        holdfast.statistics()
    manager.wait(WAIT_S)
    handler.act = lambda: manager.save(2).result(WAIT_S).step
    signal.raise_signal(signal.SIGUSR2)
    assert handler.found == [1, 2]
    assert manager.steps() == [1, 2]
