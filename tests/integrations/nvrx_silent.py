"""One rank of two falls silent: the other hears of it in time, and says how.

nvrx_silent.py DIRECTORY stays|killed RANK     RANK: the one that falls silent
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import nvrx_functions as functions
import torch
import torch.distributed as dist
from jobs import leave

from holdfast.integrations.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

out, how, silent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
PATIENCE_S = 3.0
GROUP_S = 10.0
TARGET = out / "checkpoint"
is_silent = int(os.environ["RANK"]) == silent


def schedule(queue: AsyncCallsQueue, seconds: float | None = None) -> None:
    function = None if seconds is None else functions.sleep
    queue.schedule_async_request(AsyncRequest(function, () if seconds is None else (seconds,), []))


def schedule_checkpoint(queue: AsyncCallsQueue) -> None:
    writer = FileSystemWriterAsync(TARGET)
    planned = save_state_dict_async_plan({f"mine_{dist.get_rank()}": torch.ones(3)}, writer)
    function, _, arguments = writer.get_save_function_and_args()
    queue.schedule_async_request(AsyncRequest(function, arguments, [lambda: save_state_dict_async_finalize(*planned)]))


def make_calls(queue: AsyncCallsQueue) -> None:
    while True:
        began = time.monotonic()
        assert queue.maybe_finalize_async_calls() == []
        assert time.monotonic() - began < PATIENCE_S / 2, "it waits in a call that doesn't block"
        time.sleep(0.01)


def in_a_call_that_blocks(queue: AsyncCallsQueue) -> Callable[[], object]:
    schedule(queue)
    queue.maybe_finalize_async_calls(blocking=True)
    schedule(queue)
    return lambda: queue.maybe_finalize_async_calls(blocking=True)


def in_calls_that_do_not_block(queue: AsyncCallsQueue) -> Callable[[], object]:
    schedule(queue)
    queue.maybe_finalize_async_calls(blocking=True)
    schedule(queue)
    return lambda: make_calls(queue)


def before_a_checkpoint_is_published(queue: AsyncCallsQueue) -> Callable[[], object]:
    schedule_checkpoint(queue)
    return lambda: queue.maybe_finalize_async_calls(blocking=True)


def while_one_is_published(queue: AsyncCallsQueue) -> Callable[[], object]:
    """All have agreed on a call, and one doesn't make it: the others are in collectives of the process group."""
    schedule_checkpoint(queue)
    queue.maybe_finalize_async_calls()
    while queue._appointments._noted == -1:
        time.sleep(0.01)
    return lambda: queue.maybe_finalize_async_calls(blocking=True)


def with_a_function_at_work(queue: AsyncCallsQueue) -> Callable[[], object]:
    schedule(queue, 0.0)
    queue.maybe_finalize_async_calls(blocking=True)
    schedule(queue, 60.0)
    queue.maybe_finalize_async_calls()
    time.sleep(1.0)
    return lambda: queue.maybe_finalize_async_calls(blocking=True)


def meet(name: str) -> None:
    """Wait for the other rank, without a collective."""
    (out / f"{name}.{is_silent}").write_text("")
    while not (out / f"{name}.{not is_silent}").exists():
        time.sleep(0.01)


def play(scene: Callable[[AsyncCallsQueue], Callable[[], object]], queue: AsyncCallsQueue) -> None:
    go_on = scene(queue)
    meet(f"{scene.__name__}-begins")
    if is_silent:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        began = time.monotonic()
        try:
            go_on()
        except Exception as error:
            print(f"{scene.__name__}: {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}", flush=True)
        assert not TARGET.exists()
    queue.close(abort=True)
    if how == "stays":
        meet(f"{scene.__name__}-ends")


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_S))
    queue = AsyncCallsQueue(timeout=100, patience=PATIENCE_S, sigterm_timeout=2)
    if how == "killed":
        play(with_a_function_at_work, queue)
        leave()
    # What takes longer than patience lasts isn't silence.
    schedule(queue, PATIENCE_S + 2 if is_silent else 0.0)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    print("a long function was waited for", flush=True)
    play(in_a_call_that_blocks, queue)
    play(in_calls_that_do_not_block, queue)
    play(before_a_checkpoint_is_published, queue)
    play(while_one_is_published, queue)
    leave()


if __name__ == "__main__":
    main()
