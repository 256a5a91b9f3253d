"""Programs that end right after a public call: what test_exits.py starts. Each leaves to the exit what it can.

Every program gets an empty directory, and says what it leaves there: `leaves`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _look_for_threads() -> None:
    """Runs after the exit handlers of Holdfast, which is imported below: none of its threads may be left."""
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]
    if left:
        print("threads are left:", *left, file=sys.stderr)


atexit.register(_look_for_threads)

import multiprocessing  # noqa: E402
import warnings  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.distributed.checkpoint.state_dict_saver  # noqa: E402

import holdfast  # noqa: E402
import holdfast.dcp  # noqa: E402
import holdfast.sync  # noqa: E402

MIB = 1 << 20
Program = Callable[[Path], object]
PROGRAMS: dict[str, tuple[str, ...]] = {}
"""The paths that each program leaves, as whole checkpoints, exports or versions."""
MAIN_ONLY: set[str] = set()
"""Programs that can't run on a thread which an exiting interpreter waits for: executors and forks are over then."""


def leaves(*paths: str, main_only: bool = False) -> Callable[[Program], Program]:
    def note(program: Program) -> Program:
        PROGRAMS[program.__name__] = paths
        if main_only:
            MAIN_ONLY.add(program.__name__)
        return program

    return note


def run(program: str, root: str, how: str) -> None:
    """Run a program by name; ``how`` it ends afterwards."""
    warnings.simplefilter("ignore")
    call = globals()[program]
    if how == "falls off" or (how == "thread" and program in MAIN_ONLY):
        call(Path(root))
    elif how == "held":  # what it made is there until the interpreter takes it apart
        globals()["kept"] = call(Path(root))
    elif how == "exits":
        kept = call(Path(root))
        del kept
        sys.exit(0)
    elif how == "thread":
        threading.Thread(target=call, args=(Path(root),)).start()
    elif how == "interrupted":
        kept = call(Path(root))
        try:
            signal_main()
        except KeyboardInterrupt:
            sys.exit(0)
    else:
        raise AssertionError(how)


def signal_main() -> None:
    import signal

    signal.raise_signal(signal.SIGINT)


def state(mib: int = 24) -> dict[str, Any]:
    return {
        **{f"w{number}": torch.ones(MIB) for number in range(mib // 4)},
        "model": torch.nn.Linear(8, 8),
        "train": {"step": 1},
    }


def manager(root: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root / "run", state(), config=holdfast.CheckpointConfig(**options))


# one call each -----------------------------------------------------------------------------------------------------


@leaves("one")
def save(root: Path) -> object:
    return holdfast.save(state(), root / "one")


@leaves("one")
def async_save(root: Path) -> object:
    return holdfast.async_save(state(), root / "one")


@leaves("one")
def async_save_large(root: Path) -> object:
    return holdfast.async_save(state(160), root / "one")


@leaves("one")
def async_save_eager(root: Path) -> object:
    return holdfast.async_save(state(), root / "one", staging="eager")


@leaves("one")
def async_save_staged(root: Path) -> object:
    handle = holdfast.async_save(state(), root / "one")
    handle.wait_staged()
    return handle


@leaves("one")
def async_save_result(root: Path) -> object:
    handle = holdfast.async_save(state(64), root / "one", staging="eager")
    handle.result()
    return handle


@leaves("one", "called")
def async_save_callback(root: Path) -> object:
    handle = holdfast.async_save(state(), root / "one")
    handle.add_done_callback(lambda _: (root / "called").mkdir())
    return handle


@leaves("one", "two", "three")
def async_saves(root: Path) -> object:
    return [holdfast.async_save(state(), root / name) for name in ("one", "two", "three")]


@leaves("one")
def load(root: Path) -> object:
    found = state()
    holdfast.save(found, root / "one")
    return holdfast.load(found, root / "one")


@leaves("one")
def open_and_read(root: Path) -> object:
    holdfast.save(state(), root / "one")
    checkpoint = holdfast.open(root / "one")
    return checkpoint.read("w0"), checkpoint.map("w1"), checkpoint.objects["train.step"], checkpoint.verify()


@leaves("hf")
def export_hf(root: Path) -> object:
    return holdfast.export_hf({"model": torch.nn.Linear(512, 512)}, root / "hf")


# the manager -------------------------------------------------------------------------------------------------------


@leaves()
def manager_made(root: Path) -> object:
    return manager(root)


@leaves("run/step-1")
def manager_step(root: Path) -> object:
    found = manager(root, every=1)
    found.step(1)
    return found


@leaves()
def manager_warmed_up(root: Path) -> object:
    found = manager(root, every=5)
    found.step(1)
    return found


@leaves("run/step-1", "run/step-2")
def manager_saves(root: Path) -> object:
    found = manager(root, staging="eager")
    found.save(1)
    found.save(2)
    return found


@leaves("run/step-1")
def manager_wait(root: Path) -> object:
    found = manager(root)
    found.save(1)
    found.wait()
    return found


@leaves("run/step-1")
def manager_restore(root: Path) -> object:
    with manager(root) as found:
        found.save(1)
    found = manager(root)
    found.restore()
    return found


@leaves("run/step-1")
def manager_that_only_loads(root: Path) -> object:
    with manager(root) as found:
        found.save(1)
    found = manager(root, load_only=True)
    found.restore()
    return found


@leaves("run/step-1")
def manager_closed(root: Path) -> object:
    found = manager(root)
    found.save(1)
    found.close()
    return found


@leaves("run/step-1")
def manager_pin(root: Path) -> object:
    found = manager(root)
    found.save(1).result()
    found.pin(1)
    return found


@leaves("run/step-1", "hf/hf-1")
def manager_exports(root: Path) -> object:
    export = holdfast.HFExport(root / "hf", every=1, latest_link=False)
    found = holdfast.CheckpointManager(
        root / "run", state(), config=holdfast.CheckpointConfig(every=1), exports=[export]
    )
    found.step(1)
    return found


@leaves("run/step-1")
def manager_on_signal(root: Path) -> object:
    if threading.current_thread() is not threading.main_thread():
        return manager_step(root)
    found = manager(root, every=1, save_on_signal=("SIGUSR1",))
    found.step(1)
    return found


# weight sync -------------------------------------------------------------------------------------------------------


@leaves("versions/version-1")
def publish_to_a_directory(root: Path) -> object:
    transport = holdfast.sync.DirectoryTransport(root / "versions")
    publisher = holdfast.sync.Publisher(transport, bypass_cpu=False)
    publisher.publish({"w": torch.ones(MIB)}, 1)
    return publisher


@leaves()
def publish_to_shared_memory(root: Path) -> object:
    store = dist.HashStore()
    publisher = holdfast.sync.Publisher(holdfast.sync.SharedMemoryTransport(store), bypass_cpu=False)
    publisher.publish({"w": torch.ones(4 * MIB)}, 1)
    return publisher


@leaves()
def receive_from_shared_memory(root: Path) -> object:
    store = dist.HashStore()
    publisher = holdfast.sync.Publisher(holdfast.sync.SharedMemoryTransport(store), bypass_cpu=False)
    publisher.publish({"w": torch.ones(4 * MIB)}, 1)
    receiver = holdfast.sync.Receiver(holdfast.sync.SharedMemoryTransport(store))
    receiver.receive({"w": torch.zeros(4 * MIB)})
    return publisher, receiver


@leaves()
def receiver_that_waits(root: Path) -> object:
    """Wait for a version that never comes, on a daemon thread of the program's own."""
    store = dist.HashStore()
    publisher = holdfast.sync.Publisher(holdfast.sync.SharedMemoryTransport(store), bypass_cpu=False)
    receiver = holdfast.sync.Receiver(holdfast.sync.SharedMemoryTransport(store))

    into, begun = {"w": torch.zeros(MIB)}, threading.Event()

    def receive() -> None:
        """Runs nothing of torch by itself: what a daemon thread does there at the end is the program's own risk."""
        begun.set()
        try:
            receiver.receive(into, timeout=30)
        except holdfast.HoldfastError:
            return

    threading.Thread(target=receive, daemon=True).start()
    assert begun.wait(30)
    return publisher, receiver, into


# stock DCP ---------------------------------------------------------------------------------------------------------


@leaves("one")
def dcp_save_and_load(root: Path) -> object:
    found = {"w": torch.ones(MIB)}
    dcp.save(found, storage_writer=holdfast.dcp.Writer(root / "one"))
    dcp.load(found, storage_reader=holdfast.dcp.Reader(root / "one"))
    return found


@leaves("one", main_only=True)
def dcp_async_save(root: Path) -> object:
    return dcp.async_save({"w": torch.ones(16 * MIB)}, storage_writer=holdfast.dcp.Writer(root / "one"))


# observing ---------------------------------------------------------------------------------------------------------


@leaves("one")
def observe(root: Path) -> object:
    told: list[object] = []
    holdfast.add_hook(told.append)
    holdfast.async_save(state(4), root / "one")
    return holdfast.statistics()


# other processes, and groups ---------------------------------------------------------------------------------------


def _save_in_a_child(root: str) -> None:
    holdfast.async_save(state(4), Path(root) / "one")
    manager(Path(root), every=1).step(1)


@leaves("one", "run/step-1", main_only=True)
def saves_of_a_forked_child(root: Path) -> object:
    with warnings.catch_warnings():
        child = multiprocessing.get_context("fork").Process(target=_save_in_a_child, args=(str(root),))
        child.start()
    child.join()
    assert child.exitcode == 0
    return child


def _init_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@leaves("one", "run/step-1")
def save_in_a_group_never_destroyed(root: Path) -> object:
    _init_group()
    found = manager(root, every=1)
    found.step(1)
    return found, holdfast.async_save(state(), root / "one")


@leaves("one", "run/step-1")
def save_in_a_group_destroyed_before(root: Path) -> object:
    _init_group()
    found = manager(root, every=1)
    found.step(1)
    handle = holdfast.async_save(state(), root / "one")
    dist.destroy_process_group()
    return found, handle


def of_two_ranks(root: str, how: str) -> None:
    """Run one rank of a job; ``how``: what happens to its process group."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    place = Path(root)
    found = manager(place, every=1)
    found.step(1)
    globals()["kept"] = found, holdfast.async_save(state(), place / "one")
    if how == "destroyed":
        dist.destroy_process_group()
    elif how == "after":
        found.close()
        globals()["kept"][1].result()
        dist.destroy_process_group()


def without_us(root: str, how: str) -> None:
    """A job of torch alone, that ends as `of_two_ranks` does."""
    del root
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(8))
    if how != "never":
        dist.destroy_process_group()
    assert os.environ["RANK"]
