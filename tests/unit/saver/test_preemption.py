"""Saving on a signal, in one process: handlers, their restoration, and how ranks agree on a step."""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import validation
from holdfast.coordination.board import LocalBoard
from holdfast.errors import ConfigError, StorageError
from holdfast.saver import preemption, signals
from holdfast.saver.preemption import Preemption
from holdfast.testing.staging import Gate, held_copies

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """Check after each test that every signal is as before, and no thread of ours is left."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    yield
    found = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    left = signal.set_wakeup_fd(wakeup)
    assert found == before
    assert left == wakeup
    assert not [
        thread for thread in threading.enumerate() if thread.name in ("holdfast-signals", "holdfast-preemption")
    ]


class Run:
    """Trains and saves a model; ``at``: functions to call right before the `step` call of given steps."""

    def __init__(self, root: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(32, 32)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        fields = {"every": None, "save_on_signal": SIGNALS, "signal_timeout": 30.0, "keep": None, **options}
        state = {"model": self.model, "optimizer": self.optimizer}
        self.manager = holdfast.CheckpointManager(root, state, config=holdfast.CheckpointConfig(**fields))
        self.steps = 0

    def train(self) -> None:
        self.model(torch.randn(4, 32)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def until(self, last: int, at: dict[int, Callable[[], object]]) -> None:
        for step in range(self.steps + 1, last + 1):
            self.train()
            if step in at:
                at[step]()
            self.steps = step
            self.manager.step(step, metrics={"loss": float(step)})

    def send(self, number: int = signal.SIGTERM, times: int = 1) -> None:
        """Send the signal and wait until it is known, so that the next step is the one saved."""
        for _ in range(times):
            signal.raise_signal(number)
            time.sleep(2 * signals.BURST_S)
        known = self.manager._preemption
        assert known is not None
        deadline = time.monotonic() + WAIT_S
        while known._target is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def check_saved(root: Path, run: Run, step: int) -> None:
    checkpoint = holdfast.open(root)
    assert checkpoint.step == step
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.resumable
    assert checkpoint.metrics == {"loss": float(step)}
    assert checkpoint.verify().ok
    assert torch.equal(checkpoint.read("model.weight"), run.model.weight)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_step_after_a_signal_is_saved_and_the_program_ends(number: int, tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(SystemExit) as ended, run.manager:
        run.until(9, {4: lambda: run.send(number)})
    assert ended.value.code == 128 + number
    assert run.steps == 4
    check_saved(tmp_path, run, 4)
    assert run.manager.steps() == [4]


def test_the_last_save_options_do_not_apply(tmp_path: Path) -> None:
    """The run is to be resumed."""
    run = Run(tmp_path, last_model_only=True, last_dtype="bfloat16")
    with pytest.raises(SystemExit), run.manager:
        run.until(9, {2: run.send})
    check_saved(tmp_path, run, 2)


def test_a_signal_before_the_first_step_saves_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.send()
    with pytest.raises(SystemExit), run.manager:
        run.until(9, {})
    check_saved(tmp_path, run, 1)


@pytest.mark.parametrize("options", [{"when_busy": "skip", "in_flight": 1}, {"mode": "sync"}, {"staging": "eager"}, {}])
def test_a_signal_during_a_save(options: dict[str, Any], tmp_path: Path) -> None:
    run = Run(tmp_path, every=3, io_limit_bytes_per_s=1 << 20, **options)
    with pytest.raises(SystemExit) as ended, run.manager:
        run.until(9, {4: run.send})
    assert ended.value.code == 143
    assert run.manager.steps() == [3, 4]
    check_saved(tmp_path, run, 4)


def test_a_step_that_is_due_anyway_is_saved_once(tmp_path: Path) -> None:
    run = Run(tmp_path, every=2)
    with pytest.raises(SystemExit), run.manager:
        run.until(9, {4: run.send})
    assert run.manager.steps() == [2, 4]
    check_saved(tmp_path, run, 4)


def test_a_step_just_saved_is_not_saved_again(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def save_and_send() -> None:
        run.manager.save(3, metrics={"loss": 3.0})
        run.send()

    with pytest.raises(SystemExit) as ended, run.manager:
        run.until(9, {3: save_and_send})
    assert ended.value.code == 143
    check_saved(tmp_path, run, 3)


def test_a_step_whose_save_was_skipped_just_now_is_saved_for_the_signal(tmp_path: Path) -> None:
    """A save requested by `save` may be skipped when busy, one requested by a signal may not."""
    run = Run(tmp_path, when_busy="skip", in_flight=1, io_limit_bytes_per_s=1 << 20)
    run.manager.save(1)

    def save_and_send() -> None:
        assert run.manager.save(3, metrics={"loss": 3.0}).exception() is not None, "not skipped"
        run.send()

    with pytest.raises(SystemExit) as ended, run.manager, held_copies():
        run.until(9, {3: save_and_send})
    assert ended.value.code == 143
    check_saved(tmp_path, run, 3)


def test_a_signal_while_an_update_waits_for_copies(tmp_path: Path) -> None:
    run = Run(tmp_path, every=3)

    def send_and_open(gate: Gate) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        gate.open()

    def train_and_save() -> None:
        with run.manager, held_copies(opens_for_updates=False) as gate:
            run.until(3, {})
            helper = threading.Thread(target=send_and_open, args=(gate,))
            helper.start()
            run.train()  # waits for the copies of step 3, and is interrupted there
            helper.join()
            run.manager.step(4, metrics={"loss": 4.0})

    with pytest.raises(SystemExit):
        train_and_save()
    assert run.manager.steps() == [3, 4]
    assert torch.equal(holdfast.open(tmp_path / "step-4").read("model.weight"), run.model.weight)


def test_a_second_signal_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    with pytest.raises(SystemExit) as ended, run.manager:
        run.until(9, {4: lambda: run.send(times=2)})
    assert ended.value.code == 143
    check_saved(tmp_path, run, 4)
    assert "SIGTERM again; the save for the first continues, another signal ends this process at once" in caplog.text


def test_signals_that_come_together_count_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(preemption, "end_process", lambda number, _why: ended.append(number))
    run = Run(tmp_path)

    def send_many() -> None:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGTERM)
        run.send()

    with pytest.raises(SystemExit), run.manager:
        run.until(9, {4: send_many})
    assert ended == []
    check_saved(tmp_path, run, 4)


def test_a_third_signal_and_the_deadline_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, int]] = []
    monkeypatch.setattr(preemption, "end_process", lambda number, _: ended.append(("third", number)))
    monkeypatch.setattr(signals, "end_process", lambda number, _: ended.append(("late", number)))
    run = Run(tmp_path / "a")
    run.send(times=3)
    run.manager._preemption._leaving = True  # type: ignore[union-attr]
    run.manager.close()
    assert ended == [("third", signal.SIGTERM)]
    run = Run(tmp_path / "b", signal_timeout=0.1)
    signal.raise_signal(signal.SIGUSR1)
    deadline = time.monotonic() + WAIT_S
    while ended[-1] != ("late", signal.SIGUSR1):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.manager._preemption._leaving = True  # type: ignore[union-attr]
    run.manager.close()


# what was there before -------------------------------------------------------------------------------------------


def test_a_previous_handler_is_called_after_the_save_and_training_continues(tmp_path: Path) -> None:
    called: list[tuple[int, bool]] = []
    signal.signal(signal.SIGTERM, lambda number, frame: called.append((number, frame is not None)))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        run = Run(tmp_path)
        with run.manager:
            run.until(9, {3: run.send, 6: lambda: run.send(times=2), 8: lambda: run.send(signal.SIGTERM)})
        assert called == [(signal.SIGTERM, True)] * 3
        assert run.steps == 9
        assert run.manager.steps() == [3, 6, 8]
        assert signal.getsignal(signal.SIGTERM) == mine
        signal.raise_signal(signal.SIGTERM)
        assert len(called) == 4
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_python_s_own_handler_of_an_interrupt(tmp_path: Path) -> None:
    run = Run(tmp_path, save_on_signal="SIGINT")
    with pytest.raises(KeyboardInterrupt), run.manager:
        run.until(9, {2: lambda: run.send(signal.SIGINT)})
    check_saved(tmp_path, run, 2)


def test_training_continues_if_the_signal_was_ignored(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        run = Run(tmp_path)
        with run.manager:
            run.until(4, {2: lambda: run.send(signal.SIGUSR1)})
        assert run.manager.steps() == [2]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_signal_without_a_further_step_takes_effect_after_close(tmp_path: Path) -> None:
    run = Run(tmp_path, every=3, io_limit_bytes_per_s=1 << 20)
    run.until(3, {})
    timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(SystemExit) as ended:
        run.manager.close()
    timer.join()
    assert ended.value.code == 143
    assert run.manager.steps() == [3]
    run.manager.close()  # says it once


def test_the_error_that_ended_training_is_not_masked(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def fail() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), run.manager:
        run.until(3, {3: fail})


def test_the_program_ends_even_if_the_save_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path)
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "mine").touch()
    with pytest.raises(SystemExit) as ended, run.manager:
        run.until(9, {4: run.send})
    assert ended.value.code == 143
    assert "SIGTERM: step 4 could not be saved" in caplog.text
    assert "step-4" in caplog.text


def test_a_failed_save_is_raised_if_training_continues(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        run = Run(tmp_path)
        (tmp_path / "step-4").mkdir()
        (tmp_path / "step-4" / "mine").touch()
        with run.manager:
            with pytest.raises(holdfast.HoldfastError, match="step-4"):
                run.until(9, {4: lambda: run.send(signal.SIGUSR1)})
            run.until(6, {5: lambda: run.send(signal.SIGUSR1)})
        assert run.manager.steps() == [5]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_failed_start_gives_the_signals_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_manager: object) -> None:
        raise StorageError("no", path="", errno=None)

    monkeypatch.setattr(holdfast.CheckpointManager, "_prepare_root", refuse)
    with pytest.raises(StorageError):
        Run(tmp_path)


def test_only_the_main_thread_may_take_signals(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    def make() -> None:
        try:
            Run(tmp_path)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=make, name="worker-7")
    thread.start()
    thread.join()
    assert isinstance(caught[0], ConfigError)
    assert caught[0].field == "save_on_signal"
    assert "main thread" in str(caught[0])
    assert "worker-7" in str(caught[0])
    run = Run(tmp_path)  # nothing is left of it: not the root's lock either
    run.manager.close()


def test_after_close_on_another_thread_the_handler_acts_like_the_previous_one(tmp_path: Path) -> None:
    """Python gives handlers back on the main thread only."""
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: called.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        run = Run(tmp_path)
        thread = threading.Thread(target=run.manager.close)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) != mine
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM]
        run.manager.close()
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_load_only_manager_takes_no_signals(tmp_path: Path) -> None:
    with Run(tmp_path, load_only=True).manager as manager:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert manager._preemption is None


@pytest.mark.parametrize("first", [0, 1])
def test_two_managers_save_one_after_the_other(first: int, tmp_path: Path) -> None:
    """The handler of the first is what was there before the second's."""
    runs = [Run(tmp_path / "a"), Run(tmp_path / "b")]

    def train() -> None:
        for step in range(1, 99):
            if step == 3:
                runs[1].send()
            for run in runs:
                run.train()
                run.manager.step(step, metrics={"loss": float(step)})
            time.sleep(0.02)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 143
    for run in (runs[first], runs[1 - first]):
        run.manager.close()
    assert runs[1].manager.steps() == [3]
    assert len(runs[0].manager.steps()) == 1


def test_the_previous_wakeup_descriptor_is_still_fed(tmp_path: Path) -> None:
    out, into = os.pipe()
    for fd in (out, into):
        os.set_blocking(fd, False)
    before = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    try:
        run = Run(tmp_path)
        with pytest.raises(SystemExit), run.manager:
            run.until(9, {2: run.send})
        assert select.select([out], [], [], 5)[0]
        assert signal.SIGTERM in os.read(out, 100)
        # Taken away, as asyncio does: handlers tell all the same.
        run = Run(tmp_path / "b")
        assert signal.set_wakeup_fd(into, warn_on_full_buffer=False) not in (-1, into)
        with pytest.raises(SystemExit), run.manager:
            run.until(9, {2: run.send})
        check_saved(tmp_path / "b", run, 2)
    finally:
        assert signal.set_wakeup_fd(before) == into
        os.close(out)
        os.close(into)


def test_a_forked_child_gets_the_previous_handlers_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    with run.manager:
        run.until(3, {})
    assert run.manager.steps() == []


# how ranks agree -------------------------------------------------------------------------------------------------


class Ranks:
    """Ranks of one process, each a thread that calls `is_due` again and again, at its own pace."""

    def __init__(self, world: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ranks = [Preemption(board, SIGNALS, timeout_s=WAIT_S) for board in LocalBoard.of_world(world)]
        self.board = LocalBoard.of_world(1)[0]
        self.due: list[list[int]] = [[] for _ in self.ranks]
        self.errors: list[BaseException] = []
        for rank in self.ranks:
            rank._catcher.end_at = lambda *_args: None  # type: ignore[method-assign]
            rank._thread.start()

    def train(self, rank: int, calls: int, pauses: list[float]) -> None:
        try:
            for call in range(1, calls + 1):
                time.sleep(pauses[call % len(pauses)])
                if self.ranks[rank].is_due():
                    self.due[rank].append(call)
                    self.ranks[rank]._begin_round()
            self.ranks[rank].retire()
        except BaseException as error:
            self.errors.append(error)

    def run(self, calls: list[int], signalled: list[tuple[int, float]]) -> None:
        rng = self.rng
        threads = [
            threading.Thread(
                target=self.train, args=(rank, count, [rng.choice((0.0, 0.0, 0.001, 0.004)) for _ in range(7)])
            )
            for rank, count in enumerate(calls)
        ]
        for thread in threads:
            thread.start()
        for rank, pause_s in signalled:
            time.sleep(pause_s)
            self.ranks[rank]._arrived(signal.SIGTERM, 1)
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a rank waits for ever"
        for rank in self.ranks:
            rank.close()
        assert self.errors == []


@pytest.mark.parametrize("seed", range(12))
def test_ranks_save_at_the_same_call_for_any_signal_timing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LOOK_S", 0.01)
    rng = random.Random(seed)
    world = rng.choice((1, 2, 3, 5))
    ranks = Ranks(world, seed)
    signalled = [(rng.randrange(world), rng.choice((0.0, 0.005, 0.05))) for _ in range(rng.choice((1, 1, 2, 5)))]
    ranks.run([200] * world, signalled)
    assert all(due == ranks.due[0] for due in ranks.due)
    assert 1 <= len(ranks.due[0]) <= len(signalled)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_has_left_is_not_waited_for(gone: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LOOK_S", 0.01)
    ranks = Ranks(3, 1)
    calls = [60, 60, 60]
    calls[gone] = 2
    began = time.monotonic()
    ranks.run(calls, [(2, 0.05)])
    assert ranks.due == [[], [], []]
    assert time.monotonic() - began < WAIT_S / 2


def test_nothing_is_left_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LOOK_S", 0.01)
    ranks = Ranks(3, 1)
    memory = ranks.ranks[0]._board.clone()  # type: ignore[attr-defined]
    ranks.run([100, 100, 100], [(1, 0.01), (0, 0.1)])
    assert ranks.due[0]
    assert memory.keys() == []


def test_without_a_signal_a_step_costs_next_to_nothing() -> None:
    """Prints the cost; the limit, 20 us, is a hundred times that and a thousandth of a short training step."""
    (rank,) = (Preemption(board, SIGNALS, timeout_s=1.0) for board in LocalBoard.of_world(1))
    count = 20_000
    began = time.perf_counter()
    for _ in range(count):
        rank.is_due()
    each_us = (time.perf_counter() - began) / count * 1e6
    print(f"save_on_signal: {each_us:.2f} us a step")
    rank.close()
    assert each_us < 20


def test_a_save_that_is_too_slow_for_a_signal_is_said_in_advance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = holdfast.SaveStats(bytes=10, staging_s=1.0, persist_s=30.0, commit_s=0.5)
    run = Run(tmp_path, signal_timeout=60.0, every=1)
    known = run.manager._preemption
    assert known is not None
    known.note_saved(slow)
    assert "would be lost" not in caplog.text  # 60 s are enough
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    known.note_saved(slow)
    assert (
        "a save took 31.5 s (10 bytes a rank), and torchrun's time between SIGTERM and SIGKILL is 30 s" in caplog.text
    )
    known.note_saved(slow)
    assert caplog.text.count("would be lost") == 1
    run.manager.close()
    caplog.clear()
    monkeypatch.setattr(preemption, "TORCHELASTIC_GRACE_S", 1e-9)  # any real save is slower
    run = Run(tmp_path / "real", every=1)
    run.until(3, {})
    run.manager.wait()
    run.manager.close()
    assert caplog.text.count("would be lost") == 1


def test_names_of_signals() -> None:
    assert validation.checked_signals("TERM") == validation.checked_signals(15) == (signal.SIGTERM,)
    assert validation.checked_signals([signal.SIGUSR1, "SIGUSR1", "INT"]) == (signal.SIGUSR1, signal.SIGINT)
    assert validation.checked_signals(()) == ()
    number = signal.SIGRTMIN + 1
    assert validation.checked_signals(int(number)) == (number,)
    assert validation.name_of(int(number)) == f"signal {int(number)}"
