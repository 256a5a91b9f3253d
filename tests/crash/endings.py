"""Every way a training script can end: the programs that test_endings.py starts. Each ends by itself or is signalled.

A program notes "ending" when it begins to end. Then a save of step 1 is in flight, and slow enough to stay so for a
while, unless it says otherwise.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from saving_job import config, note, start
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import holdfast
from holdfast.engine.client import EngineClient

MIB = 1 << 20


def build(world: int = 1) -> dict[str, Any]:
    """Build a state of 3 MB, a second's work for an engine of these tests; ``value_of`` identifies it."""
    model = torch.nn.Linear(1024, 768, bias=False)
    if world > 1:
        fully_shard(model)
    torch.nn.init.constant_(model.weight, 1.0)
    return {"model": model, "progress": {"step": 1}}


def begin(root: str, log: str, **options: Any) -> holdfast.CheckpointManager:
    """Return a manager whose engine is persisting the save of step 1."""
    _, world = start(log)
    settings = config(io_limit_bytes_per_s=3 * MIB // world, **options)
    manager = holdfast.CheckpointManager(root, build(world), config=settings)
    handle = manager.save(1)
    deadline = time.monotonic() + 30
    while handle.stage != "persisting":
        assert time.monotonic() < deadline, handle
        time.sleep(0.005)
    note("saving")
    return manager


def sleep() -> NoReturn:
    """Be interrupted soon: a signal that comes just before a long `time.sleep` is only handled after it."""
    note("ending")
    for _ in range(1200):
        time.sleep(0.05)
    raise AssertionError("it was to be signalled")


def just_end(root: str, log: str) -> None:
    begin(root, log)
    note("ending")


def end_without_a_save(root: str, log: str) -> None:
    start(log)
    holdfast.CheckpointManager(root, build(), config=config())
    note("ending")


def close(root: str, log: str) -> None:
    manager = begin(root, log)
    note("ending")
    manager.close()


def close_at_last(root: str, log: str) -> None:
    """Save once more, then close."""
    with begin(root, log) as manager:
        note("ending")
        manager.save(2, final=True)


def sys_exit(root: str, log: str) -> None:
    begin(root, log)
    note("ending")
    sys.exit(3)


def raise_an_exception(root: str, log: str) -> None:
    begin(root, log)
    note("ending")
    raise ValueError("the loss is not a number")


def raise_an_exception_in_a_with(root: str, log: str) -> None:
    with begin(root, log):
        note("ending")
        raise ValueError("the loss is not a number")


def os_exit(root: str, log: str) -> None:
    begin(root, log)
    note("ending")
    os._exit(5)


def be_signalled(root: str, log: str) -> None:
    begin(root, log)
    sleep()


def be_signalled_in_a_with(root: str, log: str) -> None:
    with begin(root, log):
        sleep()


def be_signalled_while_closing(root: str, log: str) -> None:
    manager = begin(root, log)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    note("ending")
    manager.close()


def be_killed_when_staging_is_verified(root: str, log: str) -> None:
    """The engine alone decides what follows."""
    verified = EngineClient.staging_verified

    def then_die(self: EngineClient, attempt: str) -> None:
        deadline = time.monotonic() + 30
        while not self.progress(attempt)[0]:  # whoever starts next must find it at work
            assert time.monotonic() < deadline
            time.sleep(0.01)
        verified(self, attempt)
        note("ending")
        os.kill(os.getpid(), signal.SIGKILL)

    EngineClient.staging_verified = then_die  # type: ignore[method-assign]
    begin(root, log).wait()


def be_killed_before_staging_is_verified(root: str, log: str) -> None:
    def die(self: EngineClient, attempt: str) -> None:
        note("ending")
        os.kill(os.getpid(), signal.SIGKILL)

    EngineClient.staging_verified = die  # type: ignore[method-assign]
    begin(root, log).wait()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def end_with_workers_alive(root: str, log: str) -> None:
    """Forked while a save is in flight."""
    begin(root, log)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    batches = iter(loader)
    assert next(batches).tolist() == [0.0, 1.0]
    note("ending")


def be_killed_with_workers_alive(root: str, log: str) -> None:
    """Workers outlive their parent for some seconds: they must not keep it alive for its engine, nor its lock held."""
    begin(root, log)
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    assert next(batches).tolist() == [0.0, 1.0]
    note("ending")
    os.kill(os.getpid(), signal.SIGKILL)


def fork_a_child_that_exits(root: str, log: str) -> None:
    """A child that runs the exit handlers it inherited, as one made by `os.fork` does."""
    begin(root, log)
    began = time.monotonic()
    _reap_child(os.fork(), began, within_s=5)


def fork_a_child_that_closes(root: str, log: str) -> None:
    """A child that leaves the ``with`` that it was forked in."""
    began = time.monotonic()
    with begin(root, log):
        pid = os.fork()
    _reap_child(pid, began, within_s=10)


def _reap_child(pid: int, began: float, *, within_s: float) -> None:
    """In the child: exit. In the parent: check that it ends soon."""
    if pid == 0:
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert time.monotonic() - began < within_s, "the child waited for a save that isn't its own"
    note("ending")


def end_after_async_save(root: str, log: str) -> None:
    start(log)
    holdfast.async_save(build(), Path(root) / "step-1", step=1)
    note("ending")


def leave_the_group_before_closing(root: str, log: str) -> None:
    manager = begin(root, log)
    dist.destroy_process_group()
    note("ending")
    manager.close()
    assert manager.steps() == [1]


def leave_the_group_and_end(root: str, log: str) -> None:
    begin(root, log)
    dist.destroy_process_group()
    note("ending")


def _resources(like: list[Any] | None) -> list[Any]:
    """Descriptors, threads and their names; a thread that has been told to end, such as a board's, has a while to."""
    until = time.monotonic() + 5.0
    while True:
        threads = sorted(thread.name for thread in threading.enumerate())
        found = [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threads]
        if time.monotonic() > until or (like is not None and found == like):
            return found
        if like is None and not any(name == "holdfast-board" for name in threads):
            return found
        time.sleep(0.05)


def open_and_close_often(root: str, log: str) -> None:
    """Nothing of a manager, and nothing of a single save, stays in the process or on the group's Store."""
    _, world = start(log)
    state, store = build(world), dist.distributed_c10d._get_default_store()
    held = []
    for step in range(1, 7):
        with holdfast.CheckpointManager(root, state, config=config(every=1)) as manager:
            manager.restore()
            manager.step(step)
        holdfast.save(state, Path(root) / "one", overwrite=True)
        gc.collect()
        dist.barrier()
        # Newer versions of torch can list them.
        keys = [key for key in store.list_keys() if "holdfast" in key] if hasattr(store, "list_keys") else []
        held.append([*_resources(like=held[1][:3] if step > 2 else None), keys])
        dist.barrier()
    assert held[1:] == held[1:2] * 5, held
    assert held[1][3] == [], held
    note("ending")


def fail_on_one_rank(root: str, log: str) -> None:
    """In the middle of training: rank 0 goes on until it can't talk to rank 1 any more."""
    with begin(root, log) as manager:
        if dist.get_rank() == 1:
            note("ending")
            raise ValueError("the loss is not a number")
        manager.save(2)
        note("ending")
        dist.all_reduce(torch.zeros(1))


def fail_on_one_rank_without_with(root: str, log: str) -> None:
    manager = begin(root, log)
    if dist.get_rank() == 1:
        note("ending")
        raise ValueError("the loss is not a number")
    manager.save(2)
    note("ending")
    dist.all_reduce(torch.zeros(1))
