"""`SaveHandle` by itself: a future that is awaitable, keeps its deadlines, and runs callbacks elsewhere."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from typing import Any, cast

import pytest

from holdfast.errors import CallbackFailed, DeadlineExceeded, SaveFailed
from holdfast.loader.checkpoint import Checkpoint
from holdfast.saver.handle import Callbacks, SaveHandle, SaveStats

CHECKPOINT = cast("Checkpoint", object())


class Session:
    """Stands for a saver, as its handles use it."""

    def __init__(self) -> None:
        self.callbacks = Callbacks()
        self.waits: list[tuple[str, float | None]] = []

    def handle(self, step: int | None = 7) -> SaveHandle:
        return SaveHandle(
            step=step,
            path="/runs/a/step-7",
            default_timeout_s=20.0,
            wait_staged=lambda _, timeout: self.waits.append((threading.current_thread().name, timeout)),
            callbacks=self.callbacks,
        )


@pytest.fixture
def session() -> Session:
    return Session()


def failed() -> SaveFailed:
    return SaveFailed("the disk is full", step=7, rank=3, path="/runs/a", errno=28)


def end_soon(handle: SaveHandle, outcome: Any, stage: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: handle.finish(outcome, stage=stage))
    thread.start()
    return thread


def test_a_published_save(session: Session) -> None:
    handle = session.handle()
    assert not handle.done()
    assert handle.stage == "staging"
    thread = end_soon(handle, CHECKPOINT, "published")
    assert handle.result() is CHECKPOINT
    assert handle.exception() is None
    assert handle.done()
    assert handle.stage == "published"
    thread.join()


def test_a_failed_save_raises_the_same_error_every_time(session: Session) -> None:
    handle, error = session.handle(), failed()
    handle.finish(error, stage="failed")
    for _ in range(2):
        with pytest.raises(SaveFailed, match="the disk is full") as caught:
            handle.result()
        assert caught.value is error
    assert handle.exception() is error
    assert handle.stage == "failed"


def test_only_the_first_outcome_counts(session: Session) -> None:
    handle = session.handle()
    handle.finish(CHECKPOINT, stage="published")
    handle.finish(failed(), stage="failed")
    assert handle.result() is CHECKPOINT
    assert handle.stage == "published"


@pytest.mark.parametrize("timeout", [0, 0.02])
def test_deadline_errors_say_what_continues(timeout: float, session: Session) -> None:
    handle = session.handle()
    handle.advance("persisting")
    for wait in (handle.result, handle.exception):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"step 7 to /runs/a/step-7 .* \(it is persisting\)") as caught:
            wait(timeout)
        assert time.monotonic() - began < 5
        assert caught.value.timeout_s == timeout
        assert isinstance(caught.value, TimeoutError)


def test_only_the_training_thread_confirms_the_state_unchanged(session: Session) -> None:
    handle = session.handle()
    with pytest.raises(DeadlineExceeded):
        handle.result(0)
    assert session.waits == [(threading.current_thread().name, 0)]

    def wait() -> None:
        with pytest.raises(DeadlineExceeded):
            handle.result(0)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert len(session.waits) == 1
    handle.finish(CHECKPOINT, stage="published")
    handle.result()
    assert len(session.waits) == 1


def test_stats_add_up_and_are_snapshots(session: Session) -> None:
    handle = session.handle()
    before = handle.stats
    handle.add_stats(bytes=100, stall_s=0.5)
    handle.add_stats(stall_s=0.25)
    assert before == SaveStats()
    assert handle.stats == SaveStats(bytes=100, stall_s=0.75)


def test_repr_names_step_stage_and_path(session: Session) -> None:
    assert repr(session.handle()) == "<SaveHandle step=7 stage=staging path='/runs/a/step-7' attempt=None>"


# await -----------------------------------------------------------------------------------------------------------


def test_it_can_be_awaited(session: Session) -> None:
    async def main() -> tuple[Any, Any]:
        good, bad = session.handle(), session.handle()
        threads = [end_soon(good, CHECKPOINT, "published"), end_soon(bad, failed(), "failed")]
        found = await asyncio.wait_for(asyncio.gather(good, bad, return_exceptions=True), 20)
        for thread in threads:
            thread.join()
        return found[0], found[1]

    result, error = asyncio.run(main())
    assert result is CHECKPOINT
    assert isinstance(error, SaveFailed)


def test_a_cancelled_await_cancels_no_save(session: Session) -> None:
    handle = session.handle()

    async def main() -> None:
        async def wait() -> None:
            await handle

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not handle.done()
    handle.finish(CHECKPOINT, stage="published")
    assert handle.result() is CHECKPOINT


# callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_run_in_order_on_a_thread_of_their_own(session: Session) -> None:
    seen: list[tuple[int | None, int, str]] = []
    handles = [session.handle(step) for step in range(3)]
    for handle in handles:
        for number in range(2):
            handle.add_done_callback(
                lambda done, number=number: seen.append((done.step, number, threading.current_thread().name))
            )
    for handle in handles:
        assert not seen or seen[-1][0] != handle.step
        handle.finish(CHECKPOINT, stage="published")
    assert session.callbacks.wait_idle(20)
    assert seen == [(step, number, "holdfast-callbacks") for step in range(3) for number in range(2)]


def test_a_callback_sees_a_save_that_has_ended(session: Session) -> None:
    seen: list[tuple[bool, str, Any]] = []
    for outcome, stage in ((CHECKPOINT, "published"), (failed(), "failed")):
        handle = session.handle()
        handle.add_done_callback(lambda done: seen.append((done.done(), done.stage, done.exception(0))))
        handle.finish(outcome, stage=stage)  # type: ignore[arg-type]
    assert session.callbacks.wait_idle(20)
    assert [(done, stage) for done, stage, _ in seen] == [(True, "published"), (True, "failed")]
    assert isinstance(seen[1][2], SaveFailed)


def test_a_callback_added_late_runs_at_once(session: Session) -> None:
    handle = session.handle()
    handle.finish(CHECKPOINT, stage="published")
    seen: list[str] = []
    handle.add_done_callback(lambda _: seen.append(threading.current_thread().name))
    assert seen == [threading.current_thread().name]


@pytest.mark.parametrize("late", [False, True])
def test_what_a_callback_raises_is_kept_and_reported_once(
    late: bool, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    handle = session.handle()
    if late:
        handle.finish(CHECKPOINT, stage="published")
    with caplog.at_level(logging.WARNING, "holdfast"):
        handle.add_done_callback(lambda _: 1 / 0)
        handle.add_done_callback(lambda _: None)
        handle.finish(CHECKPOINT, stage="published")
        assert session.callbacks.wait_idle(20)
    (error,) = session.callbacks.take_failures()
    assert isinstance(error, CallbackFailed)
    assert "ZeroDivisionError" in str(error)
    assert "/runs/a/step-7 stands" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert session.callbacks.take_failures() == []
    assert "ZeroDivisionError" in caplog.text


def test_the_callback_error_of_a_failed_save_claims_no_checkpoint(session: Session) -> None:
    handle = session.handle()
    handle.add_done_callback(lambda _: 1 / 0)
    handle.finish(failed(), stage="failed")
    assert session.callbacks.wait_idle(20)
    (error,) = session.callbacks.take_failures()
    assert "had not been published" in str(error)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_system_exit_propagates_only_on_the_calling_thread(kind: type[BaseException], session: Session) -> None:
    def leave(_: SaveHandle) -> None:
        raise kind

    handle = session.handle()
    handle.add_done_callback(leave)
    handle.finish(CHECKPOINT, stage="published")
    assert session.callbacks.wait_idle(20)
    assert len(session.callbacks.take_failures()) == 1
    with pytest.raises(kind):
        handle.add_done_callback(leave)


def test_a_callback_may_wait_for_another_save_and_delays_none(session: Session) -> None:
    first, second = session.handle(1), session.handle(2)
    seen: list[Any] = []
    first.add_done_callback(lambda _: seen.append(second.result(20)))
    first.finish(CHECKPOINT, stage="published")
    assert not session.callbacks.wait_idle(0.01)
    second.finish(CHECKPOINT, stage="published")
    assert session.callbacks.wait_idle(20)
    assert seen == [CHECKPOINT]


def test_woken_waiters_see_the_callbacks_as_due(session: Session) -> None:
    for _ in range(200):
        handle = session.handle()
        seen: list[int] = []
        handle.add_done_callback(lambda _, seen=seen: seen.append(1))
        thread = end_soon(handle, CHECKPOINT, "published")
        handle.result(20)
        assert session.callbacks.wait_idle(20)
        assert seen == [1]
        thread.join()


def test_the_thread_of_callbacks_ends_with_the_last_of_them(session: Session) -> None:
    handle = session.handle()
    handle.add_done_callback(lambda _: None)
    handle.finish(CHECKPOINT, stage="published")
    assert session.callbacks.wait_idle(20)
    for thread in threading.enumerate():
        if thread.name == "holdfast-callbacks":
            thread.join(20)
    assert "holdfast-callbacks" not in [thread.name for thread in threading.enumerate()]


def test_an_ended_handle_holds_no_callback(session: Session) -> None:
    class Listener:
        def __call__(self, _: SaveHandle) -> None:
            pass

    handle, listener = session.handle(), Listener()
    gone = weakref.ref(listener)
    handle.add_done_callback(listener)
    del listener
    handle.finish(CHECKPOINT, stage="published")
    assert session.callbacks.wait_idle(20)
    gc.collect()
    assert gone() is None
