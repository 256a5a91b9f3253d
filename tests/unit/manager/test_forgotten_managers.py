"""Managers that nobody has closed: forgotten ones let go of their root, as do those whose code is run again.

Cells of a notebook are what IPython makes of them: code of the top level, compiled anew, run in one namespace.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import ConfigError, RootLocked
from holdfast.testing.staging import held_copies

SOON_S = 20.0
CONSTRUCT = "manager = holdfast.CheckpointManager(root, state, config=config)"


class Notebook:
    """Runs cells, each once more under a name of its own if ``renamed``: as IPython does, and ipykernel does not."""

    def __init__(self, root: Path, *, renamed: bool = False) -> None:
        self.names: dict[str, Any] = {
            "holdfast": holdfast,
            "root": root,
            "state": {"w": torch.ones(1 << 16), "rng": {}},
            "config": holdfast.CheckpointConfig(every=None),
        }
        self._renamed = renamed
        self._counts = itertools.count()
        self.last_traceback: Any = None

    def run(self, cell: str) -> BaseException | None:
        """What the cell raised; its traceback is kept, as `sys.last_traceback` is."""
        name = f"<cell {next(self._counts)}>" if self._renamed else "<cell>"
        try:
            exec(compile(cell, name, "exec"), self.names)
        except BaseException as error:
            self.last_traceback = sys.last_value = error
            return error
        return None


@pytest.fixture(params=["same name", "new name"])
def notebook(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Notebook]:
    found = Notebook(tmp_path / "root", renamed=request.param == "new name")
    yield found
    found.names.get("manager") and found.names["manager"].close()
    found.names.clear()
    found.last_traceback = None
    sys.last_value = None  # type: ignore[assignment]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]


@contextmanager
def nothing_left() -> Iterator[None]:
    """Threads and descriptors are what they were, soon."""
    gc.collect()
    before = (sorted(threads()), len(os.listdir("/proc/self/fd")))
    yield
    deadline = time.monotonic() + SOON_S
    while (now := (sorted(threads()), len(os.listdir("/proc/self/fd")))) != before:
        gc.collect()
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.02)


def test_a_cell_that_is_run_again(notebook: Notebook, caplog: pytest.LogCaptureFixture) -> None:
    """The name still refers to the manager of the run before while the new one is made."""
    for step in range(1, 6):
        old = notebook.names.get("manager")
        assert notebook.run(f"{CONSTRUCT}\nassert (manager.latest() or 0) == {step - 1}") is None
        assert notebook.run(f"manager.save({step})") is None  # in flight when the cell is run again
        if old is not None:
            with pytest.raises(ConfigError, match=r"replaced by the one made at <cell.*>:1"):
                old.save(step)
            with pytest.raises(ConfigError, match="replaced"):
                old.restore()
            old.close()
    assert caplog.text.count("takes its place") == 4
    assert notebook.run("manager.close()") is None
    assert notebook.names["manager"].steps()[-1] == 5


def test_a_cell_that_raised(notebook: Notebook) -> None:
    """What was raised keeps the frames of the functions that had the manager."""
    cell = f"""
def train():
    {CONSTRUCT}
    manager.save((manager.latest() or 0) + 1)
    1 / 0
train()
"""
    for _ in range(5):
        assert isinstance(notebook.run(cell), ZeroDivisionError)
    assert notebook.run(f"{CONSTRUCT}\nassert manager.latest() == 5") is None


def test_a_cell_that_was_interrupted(notebook: Notebook) -> None:
    cell = f"""
{CONSTRUCT}
manager.save((manager.latest() or 0) + 1)
import _thread, time
_thread.interrupt_main()
time.sleep(20)
"""
    for _ in range(5):
        assert isinstance(notebook.run(cell), KeyboardInterrupt)
    assert notebook.run(CONSTRUCT) is None
    assert notebook.names["manager"].latest() == 5


def test_an_edited_cell(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    for keep in (1, 2, 3):
        cell = f"config = holdfast.CheckpointConfig(keep=holdfast.Keep(last={keep}))\n\n\n{CONSTRUCT}"
        assert notebook.run("\n" * keep + cell) is None
    notebook.names["manager"].close()


def test_a_loop_that_makes_them(tmp_path: Path) -> None:
    """Of a function, too: it is the same line again."""

    def trial(number: int) -> holdfast.CheckpointManager:
        manager = holdfast.CheckpointManager(tmp_path, {"w": torch.full((8,), float(number))})
        manager.save(number)
        return manager

    kept = [trial(number) for number in range(1, 4)]
    kept[-1].close()
    assert kept[-1].steps() == [1, 2, 3]


def test_a_manager_that_nothing_refers_to(tmp_path: Path) -> None:
    """It is let go without anybody waiting; what is in flight is published."""
    state = {"w": torch.ones(1 << 16)}
    with nothing_left():
        manager = holdfast.CheckpointManager(tmp_path, state)
        manager.save(1).result(SOON_S)
        with held_copies():
            manager.save(2)
            began = time.monotonic()
            del manager
            assert time.monotonic() - began < 1.0
        with holdfast.CheckpointManager(tmp_path, state) as manager:
            assert manager.steps() == [1, 2]
        del manager


@pytest.mark.parametrize("on_error", ["raise", "raise_now"])
def test_a_manager_in_a_cycle(tmp_path: Path, on_error: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            config = holdfast.CheckpointConfig(on_error=on_error)
            self.manager = holdfast.CheckpointManager(tmp_path, {"w": torch.ones(8)}, config=config)
            self.me = self

    with nothing_left():
        trainer = Trainer()
        trainer.manager.save(1)
        del trainer
        with holdfast.CheckpointManager(tmp_path, {"w": torch.ones(8)}) as manager:
            assert manager.steps() == [1]
        del manager


def test_an_update_waits_for_the_copies_of_a_forgotten_manager(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 256)).sum().backward()
    before = model.weight.detach().clone()
    manager = holdfast.CheckpointManager(tmp_path, {"model": model})
    with held_copies() as gate:
        manager.save(1)
        del manager
        gc.collect()
        assert gate.wait_arrived()
        time.sleep(0.1)  # for the thread that closes it
        assert gate.passed == 0
        optimizer.step()
        assert gate.passed
    with holdfast.CheckpointManager(tmp_path, {"model": model}) as manager:
        assert manager.steps() == [1]
    assert torch.equal(holdfast.open(tmp_path).read("model.weight"), before)
    assert not torch.equal(model.weight, before)


def test_what_a_forgotten_manager_has_failed_at_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = holdfast.CheckpointManager(tmp_path, {"w": torch.ones(8)})
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "mine").touch()
    manager.save(1).exception(SOON_S)
    with nothing_left():
        pass
    del manager
    deadline = time.monotonic() + SOON_S
    while "forgotten" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "step-1 exists already" in caplog.text


def test_a_manager_in_use_says_where_it_was_made(tmp_path: Path) -> None:
    first = holdfast.CheckpointManager(tmp_path, {"w": torch.ones(8)})
    line = sys._getframe().f_lineno - 1
    with pytest.raises(RootLocked) as caught:
        holdfast.CheckpointManager(tmp_path, {"w": torch.ones(8)})
    assert f"this process, made at {__file__}:{line}" in str(caught.value)
    assert str(os.getpid()) in caught.value.by
    assert "stop it" not in str(caught.value)
    first.save(1).result(SOON_S)  # it has not noticed
    first.close()


def test_a_manager_that_a_with_has_entered_stays(notebook: Notebook) -> None:
    cell = """
def train(depth):
    with holdfast.CheckpointManager(root, state, config=config) as manager:
        if depth:
            train(depth - 1)
        manager.save(1).result()
train(1)
"""
    assert isinstance(notebook.run(cell), RootLocked)
    assert notebook.run(cell.replace("train(1)", "train(0)")) is None


def test_a_forked_child_closes_nothing_of_its_parents(tmp_path: Path) -> None:
    manager = holdfast.CheckpointManager(tmp_path, {"w": torch.ones(8)})
    pid = os.fork()
    if pid == 0:
        del manager
        gc.collect()
        time.sleep(0.2)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert manager.save(1).result(SOON_S).step == 1
    manager.close()
