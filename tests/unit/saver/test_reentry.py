"""The program's own signal handlers that save, wait or close in the middle of a save: no thread waits for itself."""

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
from holdfast.saver.snapshot import SnapshotTaker
from holdfast.staging.copy_job import Staging

WAIT_S = 90.0


class Handler:
    """A program's action on SIGUSR2, and its result."""

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
    """Raise the signal on the main thread, which it interrupts."""
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGUSR2)


def signalled(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Raise a signal after the main thread has run this method of ``owner``."""
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
def test_a_save_inside_a_save_is_refused_at_once(
    call: str, manager: holdfast.CheckpointManager, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the slot of the interrupted save."""
    handler.act = lambda: CALLS[call](manager)
    with monkeypatch.context() as patch:
        signalled(patch, SnapshotTaker, "take")
        handle = manager.save(1)
    assert "only set a flag" in handler.refused()
    assert handle.result(WAIT_S).verify().ok
    assert manager.save(3).result(WAIT_S).step == 3
    assert manager.steps() == [1, 3]


@pytest.mark.parametrize("call", ["save", "before_update", "wait_staged", "result"])
def test_a_save_inside_the_wait_before_an_update_is_refused_at_once(
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


def test_a_handler_may_save_elsewhere(
    manager: holdfast.CheckpointManager, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in the middle of something that a save also does: counting."""
    handler.act = lambda: manager.save(1).step
    with monkeypatch.context() as patch:
        signalled(patch, events, "Statistics")  # made while the counters are locked
        holdfast.statistics()
    manager.wait(WAIT_S)
    handler.act = lambda: manager.save(2).result(WAIT_S).step
    signal.raise_signal(signal.SIGUSR2)
    assert handler.found == [1, 2]
    assert manager.steps() == [1, 2]
