"""`holdfast.integrations.nvrx`, one rank: what its queue, its worker process and `TorchAsyncCheckpoint` promise."""

from __future__ import annotations

import ast
import functools
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import nvrx_functions as functions
import psutil
import pytest
import torch

from holdfast.errors import ConfigError, DeadlineExceeded, SaveFailed
from holdfast.integrations.nvrx import AsyncCallsQueue, AsyncRequest, TorchAsyncCheckpoint, abort_nvrx_checkpoint

PRELUDE = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"


@pytest.fixture(scope="module")
def shared_queue() -> Iterator[AsyncCallsQueue]:
    """A queue whose worker, that takes seconds to start, serves all tests that don't end it."""
    made = AsyncCallsQueue(timeout=100, sigterm_timeout=5)
    yield made
    made.close(abort=True)


@pytest.fixture
def queue(shared_queue: AsyncCallsQueue) -> Iterator[AsyncCallsQueue]:
    yield shared_queue
    if shared_queue.get_num_unfinalized_calls():
        shared_queue.close(abort=True)
    shared_queue.call_idx = -1


def wait_for(path: Path, timeout_s: float = 30.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.read_text()


def test_a_function_runs_in_another_process_and_finalizers_here_in_order(
    queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    told: list[tuple[str, int]] = []
    numbers = []
    for name in ("a", "b"):
        finalize = functools.partial(lambda name: told.append((name, threading.get_ident())), name)
        request = AsyncRequest(functions.note, (str(tmp_path / name),), [finalize], {"text": name})
        request.add_finalize_fn(functools.partial(lambda name: told.append((name + "2", 0)), name))
        numbers.append(queue.schedule_async_request(request))
    assert numbers == [0, 1]
    assert queue.get_num_unfinalized_calls() == 2
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    here = threading.get_ident()
    assert told == [("a", here), ("a2", 0), ("b", here), ("b2", 0)]
    text, pid = (tmp_path / "a").read_text().split()
    assert (text, (tmp_path / "b").read_text().split()[1]) == ("a", pid)  # one process for both
    assert int(pid) != os.getpid()
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls() == []


def test_without_blocking_it_returns_what_has_ended(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    queue.schedule_async_request(AsyncRequest(functions.sleep, (1.0,), []))
    assert queue.maybe_finalize_async_calls() == []
    deadline = time.monotonic() + 30
    while not (found := queue.maybe_finalize_async_calls()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == [0]


def test_what_changes_after_scheduling_does_not_reach_the_file(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx sends CPU tensors by handle: it saved 7.0 here, and called that a success."""
    state = {"weight": torch.full((1000, 100), 3.0), "counts": [1, 2]}
    queue.schedule_async_request(AsyncRequest(functions.save_slowly, (state, str(tmp_path / "s.pt"), 1.0), []))
    state["weight"].fill_(7.0)
    state["counts"].append(3)
    queue.maybe_finalize_async_calls(blocking=True)
    loaded = torch.load(tmp_path / "s.pt")
    assert bool((loaded["weight"] == 3.0).all())
    assert loaded["counts"] == [1, 2]


def test_a_preload_function_replaces_the_second_argument(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    preload = functools.partial(functions.doubled, tensor)
    queue.schedule_async_request(
        AsyncRequest(functions.save_second, (str(tmp_path / "s.pt"), None), [], preload_fn=preload)
    )
    tensor.zero_()
    queue.maybe_finalize_async_calls(blocking=True)
    assert torch.load(tmp_path / "s.pt").tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (AsyncRequest(functions.fail, ("no such place",), []), ("fail", "ValueError", "no such place")),
        (AsyncRequest(functions.note, ("x", ""), [], preload_fn=functions.preload_fails), ("nothing to preload",)),
        (AsyncRequest(functions.note, (), [], {"wrong": 1}), ("TypeError",)),
        (AsyncRequest(functions.die, (), []), ("exit code -9", "die")),
    ],
    ids=["function", "preload", "arguments", "killed"],
)
def test_a_failure_is_an_error_and_the_queue_goes_on(
    queue: AsyncCallsQueue, tmp_path: Path, request_: AsyncRequest, words: tuple[str, ...]
) -> None:
    """NVRx waits for ever in each of these cases: its worker ends, and nobody looks."""
    told: list[int] = []
    queue.schedule_async_request(request_._replace(finalize_fns=[lambda: told.append(1)]))
    started = time.monotonic()
    with pytest.raises(SaveFailed) as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    assert time.monotonic() - started < 30
    assert all(word in str(raised.value) for word in (*words, "rank 0"))
    assert not told
    queue.schedule_async_request(AsyncRequest(functions.note, (str(tmp_path / "next"),), [lambda: told.append(2)]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert told == [2]


class Payload:
    """Something that a request refers to."""


@pytest.mark.parametrize("place", ["async_fn", "async_fn_args", "async_fn_kwargs", "preload_fn"])
def test_a_request_that_is_scheduled_keeps_nothing_alive_that_its_function_needs(
    queue: AsyncCallsQueue, tmp_path: Path, place: str
) -> None:
    payload = Payload()
    gone = weakref.ref(payload)
    request = AsyncRequest(functions.swallow, (str(tmp_path / "x"), None), [lambda: told.append(place)])
    told: list[str] = []
    found: dict[str, object] = {
        "async_fn": functools.partial(functions.swallow, also=payload),
        "async_fn_args": (str(tmp_path / "x"), payload),
        "async_fn_kwargs": {"also": payload},
        "preload_fn": functools.partial(functions.same, payload),
    }
    queue.schedule_async_request(request._replace(**{place: found[place]}))
    del payload, found
    assert gone() is None
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert told == [place]


class OlderRequest(NamedTuple):
    async_fn: Callable[..., object] | None
    async_fn_args: tuple[object, ...]
    finalize_fns: list[Callable[[], object]]


def test_requests_of_older_releases_have_fewer_fields(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    told: list[int] = []
    older = OlderRequest(functions.note, (str(tmp_path / "x"),), [lambda: told.append(1)])
    queue.schedule_async_request(older)  # type: ignore[arg-type]
    queue.schedule_async_request(OlderRequest(None, (), [lambda: told.append(2)]))  # type: ignore[arg-type]
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert told == [1, 2]
    assert (tmp_path / "x").exists()


def test_a_worker_killed_between_two_requests_is_replaced(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    queue.schedule_async_request(AsyncRequest(functions.note, (str(tmp_path / "a"),), []))
    queue.maybe_finalize_async_calls(blocking=True)
    pid = int((tmp_path / "a").read_text().split()[1])
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    time.sleep(0.1)
    queue.schedule_async_request(AsyncRequest(functions.note, (str(tmp_path / "b"),), []))
    queue.maybe_finalize_async_calls(blocking=True)
    assert int((tmp_path / "b").read_text().split()[1]) != pid


def test_what_cannot_be_sent_is_refused_when_it_is_scheduled(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx pickles on a thread of its own, whose error nobody sees: then it waits for ever."""
    with pytest.raises(ConfigError, match="imported by name"):
        queue.schedule_async_request(AsyncRequest(lambda: None, (), []))
    with pytest.raises(ConfigError, match="note"):
        queue.schedule_async_request(AsyncRequest(functions.note, (threading.Lock(),), []))
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.schedule_async_request(AsyncRequest(functions.note, (str(tmp_path / "x"),), [])) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_two_requests_in_flight_keep_their_own_values_and_a_third_waits(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20)
    queue.schedule_async_request(AsyncRequest(functions.sleep, (0.0,), []))
    queue.maybe_finalize_async_calls(blocking=True)  # the worker has started
    started = time.monotonic()
    for number in range(3):
        tensor.fill_(number)
        if number == 2:
            assert time.monotonic() - started < 1.0  # two were scheduled without waiting
        path = str(tmp_path / f"{number}.pt")
        queue.schedule_async_request(AsyncRequest(functions.save_slowly, (tensor, path, 1.0), []))
    assert time.monotonic() - started >= 0.9  # the third has waited for the end of the first
    tensor.fill_(-1)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1, 2, 3]
    assert [float(torch.load(tmp_path / f"{number}.pt")[0]) for number in range(3)] == [0.0, 1.0, 2.0]


def test_a_function_that_hangs_is_an_error_in_time(tmp_path: Path) -> None:
    queue = AsyncCallsQueue(timeout=60, sigterm_timeout=5)
    queue.schedule_async_request(AsyncRequest(functions.sleep, (0.0,), []))
    queue.maybe_finalize_async_calls(blocking=True)
    queue._timeout_s = 2
    queue.schedule_async_request(AsyncRequest(functions.sleep, (600.0, str(tmp_path / "pid")), []))
    with pytest.raises(DeadlineExceeded, match="request 1 had not ended after 2 s"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert not psutil.pid_exists(int(wait_for(tmp_path / "pid")))
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


def test_a_request_without_a_function_is_finalized(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """With a worker alive, NVRx waits for ever for what it has not sent."""
    told: list[str] = []
    queue.schedule_async_request(AsyncRequest(functions.note, (str(tmp_path / "x"),), [lambda: told.append("a")]))
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: told.append("b")]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert told == ["a", "b"]


def test_what_was_aborted_is_not_taken_for_a_later_request(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx: an aborted request's end stays in its queue, where the next one finds it before it has begun."""
    told: list[int] = []
    queue.schedule_async_request(AsyncRequest(functions.sleep, (0.0,), [lambda: told.append(0)]))
    queue.schedule_async_request(
        AsyncRequest(functions.clean_up_when_ended, (str(tmp_path / "mark"),), [lambda: told.append(1)])
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "mark.begun").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    started = time.monotonic()
    abort_nvrx_checkpoint()
    assert time.monotonic() - started < 5
    assert wait_for(tmp_path / "mark") == "cleaned"  # it got the chance to
    assert queue.get_num_unfinalized_calls() == 0
    assert queue._get_async_caller() is None
    state = torch.ones(1000)
    target = tmp_path / "after.pt"
    number = queue.schedule_async_request(
        AsyncRequest(functions.save_slowly, (state, str(target), 0.5), [lambda: told.append(2)])
    )
    assert number == 0
    assert queue.maybe_finalize_async_calls() == []
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert told == [2]
    assert torch.equal(torch.load(target), state)


def test_many_tensors_take_no_descriptors(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx opens a descriptor for each CPU tensor: it hangs at 25,000 of them."""
    tensors = [torch.full((3,), float(number)) for number in range(25_000)]
    before = len(os.listdir("/proc/self/fd"))
    started = time.monotonic()
    queue.schedule_async_request(AsyncRequest(functions.count_descriptors, (tensors, str(tmp_path / "count")), []))
    assert len(os.listdir("/proc/self/fd")) < before + 12
    queue.maybe_finalize_async_calls(blocking=True)
    assert time.monotonic() - started < 30
    assert int((tmp_path / "count").read_text()) < 40


def test_what_a_function_keeps_is_not_overwritten_by_later_requests(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    queue.schedule_async_request(AsyncRequest(functions.stash, (torch.full((1000,), 5.0),), []))
    queue.maybe_finalize_async_calls(blocking=True)
    for number in range(4):
        other = torch.full((1000,), float(number))
        queue.schedule_async_request(AsyncRequest(functions.save_stashed, (str(tmp_path / "s.pt"), other), []))
        queue.maybe_finalize_async_calls(blocking=True)
    assert bool((torch.load(tmp_path / "s.pt") == 5.0).all())


def test_tensors_arrive_as_they_were(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    base = torch.arange(24.0)
    tied = torch.nn.Parameter(torch.randn(3, 2))
    state = {
        "view": base.view(2, 3, 4).transpose(0, 2),
        "slice": base[3:7],
        "tied": [tied, tied],
        "bf16": torch.randn(5).bfloat16(),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "complex": torch.randn(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "object": {1: ("a", None)},
    }
    queue.schedule_async_request(AsyncRequest(functions.save_slowly, (state, str(tmp_path / "s.pt")), []))
    queue.maybe_finalize_async_calls(blocking=True)
    loaded = torch.load(tmp_path / "s.pt")
    for name in ("view", "slice", "bf16", "bool", "empty", "scalar", "complex"):
        assert torch.equal(loaded[name], state[name]), name
        assert loaded[name].stride() == state[name].stride()
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert loaded["tied"][0] is loaded["tied"][1]
    assert loaded["tied"][0].requires_grad
    assert loaded["view"].untyped_storage().data_ptr() == loaded["slice"].untyped_storage().data_ptr()
    assert loaded["object"] == {1: ("a", None)}


def test_a_frozen_request_takes_no_more_finalizers_and_can_be_executed_here(tmp_path: Path) -> None:
    told: list[int] = []
    request = AsyncRequest(functions.note, (str(tmp_path / "x"),), [lambda: told.append(1)])
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(print)
    request.execute_sync()
    assert (tmp_path / "x").read_text().split()[1] == str(os.getpid())
    assert told == [1]


def test_the_worker_has_its_priority_and_cores_and_a_launchers_signals_do_not_reach_it(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=15, cores=mine[-1:])
    queue = AsyncCallsQueue(timeout=60)
    queue.schedule_async_request(AsyncRequest(functions.tell_cores, (str(tmp_path / "cores"),), []))
    queue.maybe_finalize_async_calls(blocking=True)
    threads = ast.literal_eval((tmp_path / "cores").read_text())
    assert len(threads) >= 2
    assert all(cores == mine[-1:] for cores in threads)
    assert os.sched_getaffinity(0) == set(mine)
    with pytest.raises(ConfigError, match="cores: this process may not use 8191"):
        AsyncCallsQueue(cores=[8191])
    queue.schedule_async_request(AsyncRequest(functions.tell_nice, (str(tmp_path / "nice"),), []))
    queue.schedule_async_request(AsyncRequest(functions.sleep, (1.0, str(tmp_path / "pid")), []))
    pid = int(wait_for(tmp_path / "pid"))
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1, 2]
    assert int((tmp_path / "nice").read_text()) == max(15, os.nice(0))
    queue.close()
    assert not psutil.pid_exists(pid)


def test_functions_may_start_processes_where_the_worker_is_no_daemon(tmp_path: Path) -> None:
    for is_daemon in (False, True):
        queue = AsyncCallsQueue(is_daemon=is_daemon, timeout=60)
        target = tmp_path / str(is_daemon)
        queue.schedule_async_request(AsyncRequest(functions.start_process, (str(target),), []))
        if is_daemon:
            with pytest.raises(SaveFailed, match="daemonic processes are not allowed"):
                queue.maybe_finalize_async_calls(blocking=True)
        else:
            queue.maybe_finalize_async_calls(blocking=True)
            assert target.exists()
        queue.close()


def test_a_queue_that_is_not_persistent_keeps_no_process(tmp_path: Path) -> None:
    queue = AsyncCallsQueue(persistent=False, timeout=60)
    pids = set()
    for name in ("a", "b"):
        queue.schedule_async_request(AsyncRequest(functions.note, (str(tmp_path / name),), []))
        queue.maybe_finalize_async_calls(blocking=True)
        pids.add(int((tmp_path / name).read_text().split()[1]))
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    queue.close()


TRAINER = (
    PRELUDE
    + """
import os, time, torch
import nvrx_functions as functions
from holdfast.integrations.nvrx import AsyncCallsQueue, AsyncRequest, TorchAsyncCheckpoint
if __name__ == "__main__":
"""
)


def start_trainer(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER + "".join(f"    {line}\n" for line in body.splitlines()))
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen([sys.executable, str(script)], cwd=tmp_path, text=True, env=environment)


def test_no_process_outlives_a_killed_trainer(tmp_path: Path) -> None:
    """NVRx leaves two of 275 MB each, for ever."""
    trainer = start_trainer(
        tmp_path,
        "queue = AsyncCallsQueue()\n"
        "queue.schedule_async_request(AsyncRequest(functions.sleep, (600.0, 'pid'), []))\n"
        "time.sleep(600)",
    )
    wait_for(tmp_path / "pid", 60)
    children = psutil.Process(trainer.pid).children(recursive=True)
    assert children
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(children, timeout=8)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "ending", ["", "del ckpt; import gc; gc.collect(); time.sleep(0.2)"], ids=["exit", "forgotten"]
)
def test_a_save_that_nobody_waits_for_ends_with_the_program(tmp_path: Path, ending: str) -> None:
    trainer = start_trainer(
        tmp_path,
        "ckpt = TorchAsyncCheckpoint()\nckpt.async_save({'x': torch.arange(1_000_000.0)}, 'x.pt')\n" + ending,
    )
    children = []
    while trainer.poll() is None:
        children = psutil.Process(trainer.pid).children(recursive=True) or children
        time.sleep(0.05)
    assert trainer.returncode == 0
    assert torch.equal(torch.load(tmp_path / "x.pt")["x"], torch.arange(1_000_000.0))
    assert not psutil.wait_procs(children, timeout=8)[1]


# `TorchAsyncCheckpoint` --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[TorchAsyncCheckpoint]:
    made = TorchAsyncCheckpoint(timeout=100)
    yield made
    made.close()


def test_an_asynchronous_save_is_the_same_as_torch_save(checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    (tmp_path / "async.pt").write_text("older")
    state = model.state_dict()
    checkpoint.save(state, tmp_path / "sync.pt")
    checkpoint.async_save(state, tmp_path / "async.pt")
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint.finalize_async_save(blocking=True)
    found, expected = torch.load(tmp_path / "async.pt"), torch.load(tmp_path / "sync.pt")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["async.pt", "sync.pt"]


def test_what_a_killed_save_has_left_is_removed_and_another_ones_is_not(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    import fcntl

    (tmp_path / ".x.pt.0badc0de.incomplete").write_bytes(b"half")
    held = os.open(tmp_path / ".x.pt.12345678.incomplete", os.O_CREAT | os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    checkpoint.async_save({"x": 1}, tmp_path / "x.pt")
    checkpoint.finalize_async_save(blocking=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.pt.12345678.incomplete", "x.pt"]
    os.close(held)


def test_a_save_that_cannot_be_written_is_an_error(checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
    checkpoint.async_save({"x": 1}, tmp_path / "absent" / "x.pt")
    with pytest.raises(SaveFailed, match="FileNotFoundError"):
        checkpoint.finalize_async_save(blocking=True)
    with open(tmp_path / "y", "wb") as file, pytest.raises(ConfigError, match="path"):
        checkpoint.async_save({"x": 1}, file)


def test_a_save_goes_on_after_an_abort_and_the_file_before_it_stays(
    checkpoint: TorchAsyncCheckpoint, tmp_path: Path
) -> None:
    target = tmp_path / "x.pt"
    checkpoint.async_save(torch.ones(10), target)
    checkpoint.finalize_async_save(blocking=True)
    for _ in range(2):
        checkpoint.async_save(torch.zeros(20_000_000), target)
        abort_nvrx_checkpoint()  # in the middle of it, or before it has begun
        assert torch.load(target).numel() in (10, 20_000_000)
    checkpoint.async_save(torch.full((7,), 2.0), target)
    checkpoint.finalize_async_save(blocking=True)
    assert torch.load(target).tolist() == [2.0] * 7
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
