"""What two ranks agree on: finalizing in one call, and failing together. Each scenario says that it has passed.

nvrx_ranks.py DIRECTORY SCENARIO...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nvrx_functions as functions
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import leave
from torch.distributed.checkpoint import CheckpointException

from holdfast.errors import DeadlineExceeded, SaveFailed
from holdfast.integrations.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    CheckpointMetadataCache,
    FileSystemWriterAsync,
    TorchAsyncCheckpoint,
    abort_nvrx_checkpoint,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

out = Path(sys.argv[1])


def train_step(step: int) -> None:
    """A collective of the training group, which must not meet one of a finalize function."""
    total = torch.tensor([step, dist.get_rank()])
    dist.all_reduce(total)
    assert total.tolist() == [2 * step, 1], total


def finalizers_meet_between_training_steps(rank: int) -> None:
    queue = AsyncCallsQueue(timeout=60)
    finalized: list[tuple[int, int]] = []
    step = 0

    def finalize(number: int) -> None:
        total = torch.tensor([100 + number, step])
        dist.all_reduce(total)  # would meet a training step of another rank if it came one call later there
        assert total.tolist() == [2 * (100 + number), 2 * step]
        finalized.append((number, step))

    for step in range(400):
        if step in (3, 5, 90, 200):
            number = len(finalized) + queue.get_num_unfinalized_calls()
            seconds = 0.15 if rank == number % 2 else 0.0
            queue.schedule_async_request(
                AsyncRequest(functions.sleep, (seconds,), [lambda number=number: finalize(number)])
            )
        queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        train_step(step)
        time.sleep(0.01 if (step // 7 + rank) % 2 else 0.002)
    queue.maybe_finalize_async_calls(blocking=True)
    assert [number for number, _ in finalized] == [0, 1, 2, 3], finalized
    assert all(step < 399 for _, step in finalized), finalized  # none waited for the blocking call
    started = time.perf_counter()
    for _ in range(10_000):
        queue.maybe_finalize_async_calls()
    assert time.perf_counter() - started < 1.0  # nothing is due
    queue.close()


def call_until_it_raises(queue: AsyncCallsQueue) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert queue.maybe_finalize_async_calls() == []
        time.sleep(0.001)


def a_failure_of_one_rank_is_everyones(rank: int) -> None:
    queue = AsyncCallsQueue(timeout=60)
    called: list[int] = []
    for function, words in ((functions.fail, "no such place"), (functions.die, "exit code -9")):
        fails = rank == 1
        arguments = (("no such place",) if function is functions.fail else ()) if fails else (0.0,)
        request = AsyncRequest(function if fails else functions.sleep, arguments, [lambda: called.append(1)])
        queue.schedule_async_request(request)
        with pytest.raises(SaveFailed, match=r"rank 1") as raised:
            call_until_it_raises(queue)
        assert words in str(raised.value)
        assert not called
    queue.schedule_async_request(AsyncRequest(functions.sleep, (0.0,), [lambda: called.append(2)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    assert called == [2]
    queue.close()


def a_function_that_hangs_on_one_rank_ends_in_time(rank: int) -> None:
    queue = AsyncCallsQueue(timeout=60, sigterm_timeout=5)
    queue.schedule_async_request(AsyncRequest(functions.sleep, (0.0,), []))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]  # the worker has started
    queue._timeout_s = queue._appointments._timeout_s = 3
    queue.schedule_async_request(AsyncRequest(functions.sleep, (60.0 * rank,), []))
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"rank(\(s\))? 1"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert time.monotonic() - started < 20
    queue.close(abort=True)


def a_rank_that_gives_up_says_so(rank: int) -> None:
    queue = AsyncCallsQueue(timeout=60)
    queue.schedule_async_request(AsyncRequest(functions.sleep, (30.0 * rank,), []))
    assert queue.maybe_finalize_async_calls() == []
    if rank == 1:
        queue.close(abort=True)
    else:
        with pytest.raises(SaveFailed, match="rank 1 has given up the request"):
            queue.maybe_finalize_async_calls(blocking=True)
        queue.close()


def an_abort_leaves_nothing_behind(rank: int) -> None:
    queue = AsyncCallsQueue(timeout=60)
    called: list[int] = []
    queue.schedule_async_request(AsyncRequest(functions.sleep, (30.0 * rank,), [lambda: called.append(1)]))
    queue.maybe_finalize_async_calls()
    time.sleep(0.5)
    abort_nvrx_checkpoint()
    dist.barrier()
    queue.schedule_async_request(AsyncRequest(functions.sleep, (0.5,), [lambda: called.append(2)]))
    assert queue.maybe_finalize_async_calls() == []
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert called == [2]
    queue.close()


def plan_and_schedule(queue: AsyncCallsQueue, target: Path, state: dict[str, object], **planning: object) -> None:
    writer = FileSystemWriterAsync(target)
    planned = save_state_dict_async_plan(state, writer, **planning)
    function, preload, arguments = writer.get_save_function_and_args()
    queue.schedule_async_request(
        AsyncRequest(function, arguments, [lambda: save_state_dict_async_finalize(*planned)], preload_fn=preload)
    )


def read(target: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.full_like(tensor, -1) for name, tensor in like.items()}
    dcp.load(found, checkpoint_id=target, no_dist=True)
    return found


def two_queues_are_aborted_and_go_on(rank: int) -> None:
    """One of all ranks and one of rank 0 alone, as a restart in-process finds them: in the middle of saves."""
    sharded, alone = AsyncCallsQueue(timeout=60), TorchAsyncCheckpoint(timeout=60)
    state = {"x": torch.full((1000,), 1.0), f"mine_{rank}": torch.full((3,), float(rank))}
    for value in (1.0, 2.0, 3.0):
        state["x"].fill_(value)
        plan_and_schedule(sharded, out / "sharded", state)
        if rank == 0:
            alone.async_save(state, out / "alone.pt")
        if value == 2.0:
            abort_nvrx_checkpoint()
            dist.barrier()
            assert sharded.get_num_unfinalized_calls() == 0
            assert alone._get_async_calls_queue()._get_async_caller() is None
            continue
        sharded.maybe_finalize_async_calls(blocking=True, no_dist=False)
        alone.finalize_async_save(blocking=True, no_dist=True)
        assert bool((read(out / "sharded", state)["x"] == value).all())
        assert float(read(out / "sharded", state)[f"mine_{rank}"][0]) == rank
        assert rank != 0 or float(torch.load(out / "alone.pt")["x"][0]) == value
        dist.barrier()
    assert not list(out.glob(".sharded*incomplete"))
    plan_and_schedule(sharded, out / "sharded", state)
    abort_nvrx_checkpoint()  # and the program ends
    alone.close()


def parts_move_between_ranks(rank: int) -> None:
    """The plans of some ranks change, and those of others don't: what was cached holds for none."""
    queue, cache = AsyncCallsQueue(timeout=60), CheckpointMetadataCache()
    reused = []
    for step in range(4):
        state = {"both": torch.full((4,), float(step))}
        if rank == (0 if step < 2 else 1):
            state["moves"] = torch.full((5,), float(step))
        if rank == 0 and step == 3:
            state["new"] = torch.full((2,), float(step))
        target = out / f"moving-{step}"
        plan_and_schedule(queue, target, state, enable_cache=True, metadata_cache=cache)
        queue.maybe_finalize_async_calls(blocking=True)
        reused.append(cache.get_metadata_caching_status()[0])
        expected = {"both": torch.zeros(4), "moves": torch.zeros(5)} | ({"new": torch.zeros(2)} if step == 3 else {})
        assert all(bool((tensor == step).all()) for tensor in read(target, expected).values())
    assert reused == [False, True, False, False]
    queue.close()


def a_share_that_cannot_be_written_fails_everywhere(rank: int) -> None:
    queue = AsyncCallsQueue(timeout=60)
    target = out / "share"
    state = {"x": torch.arange(8.0), "mine": {f"rank_{rank}": torch.full((4,), rank)}}

    def save(break_it: bool) -> None:
        writer = FileSystemWriterAsync(target)
        planned = save_state_dict_async_plan(state, writer)
        if break_it and rank == 1:
            writer._staged.image.close()
        request = AsyncRequest(
            writer.get_save_function_and_args()[0], (), [lambda: save_state_dict_async_finalize(*planned)]
        )
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)

    save(break_it=False)
    before = (target / "holdfast.json").read_bytes()
    state["x"] += 1
    with pytest.raises(CheckpointException) as raised:
        save(break_it=True)
    assert list(raised.value.failures) == [1]
    assert (target / "holdfast.json").read_bytes() == before
    dist.barrier()
    assert not list(out.glob(".*incomplete"))
    save(break_it=False)
    assert (target / "holdfast.json").read_bytes() != before
    if rank == 1:
        state["mine"]["rank_1"] = threading_lock()
    with pytest.raises(CheckpointException):
        save(break_it=False)
    queue.close()


def threading_lock() -> object:
    import threading

    return threading.Lock()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    AsyncCallsQueue.warmup_persistent_caller(rank)
    for name in sys.argv[2:]:
        began = time.monotonic()
        globals()[name](rank)
        dist.barrier()
        if rank == 0:
            print(f"passed {name} {time.monotonic() - began:.1f} s", flush=True)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
