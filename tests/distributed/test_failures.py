"""What goes wrong on one rank is the same, named error on every rank, soon, with nothing lost; then saving goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import at_world_end, run_job
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worlds import mesh_of

import holdfast
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    HoldfastError,
    SaveFailed,
    StateMismatch,
)

SOON_S = 8.0
_alone: list[Any] = []
"""The group of rank 0 only."""
at_world_end.append(_alone.clear)
TIMEOUT_S = 40.0


@contextmanager
def soon() -> Any:
    """Nothing in here waits for a deadline: all deadlines are far longer."""
    dist.barrier()
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < SOON_S, f"took {took_s:.1f} s"


def same_error(kind: type[HoldfastError], act: Callable[[], Any]) -> HoldfastError:
    """``act`` raises ``kind`` on every rank, soon, for one root cause; returns this rank's."""
    with soon(), pytest.raises(kind) as caught:
        act()
    mine = str(caught.value)
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, mine)
    bare = [text.removeprefix(f"on rank {1 - reader}: ") for reader, text in enumerate(texts)]
    assert bare[0] == bare[1], texts
    return caught.value


def config(**options: Any) -> holdfast.CheckpointConfig:
    limits = {"stage_timeout": TIMEOUT_S, "persist_timeout": TIMEOUT_S, "commit_timeout": TIMEOUT_S}
    return holdfast.CheckpointConfig(**{"keep": None, **limits, **options})


def weights(value: float = 1.0) -> torch.Tensor:
    return distribute_tensor(torch.full((8, 4), value), mesh_of(2), [Shard(0)], src_data_rank=None)


def on_rank(rank: int, value: Any, other: Any) -> Any:
    return value if dist.get_rank() == rank else other


def value_in(state: dict[str, Any]) -> float:
    local = state["w"].to_local()
    assert bool((local == local.flatten()[0]).all())
    return float(local.flatten()[0])


# saving ----------------------------------------------------------------------------------------------------------


def ranks_that_disagree_on_the_step(root: Path) -> None:
    state = {"w": weights()}
    with holdfast.CheckpointManager(root / "steps", state, config=config()) as manager:
        with soon():
            handle = manager.save(on_rank(0, 5, 6))
            error = handle.exception(TIMEOUT_S)
        assert isinstance(error, ConfigError)
        assert "rank 0 said step 5" in str(error)
        assert "rank 1 said step 6" in str(error)
        with pytest.raises(ConfigError):
            manager.wait()
        manager.save(7).result(TIMEOUT_S)
        assert manager.steps() == [7]


def a_leaf_that_one_rank_cannot_store(root: Path) -> None:
    state: dict[str, Any] = {"w": weights(), "extra": {"x": 1}}
    with holdfast.CheckpointManager(root / "leaf", state, config=config()) as manager:
        state["extra"]["x"] = on_rank(1, object(), 1)
        with soon():
            if dist.get_rank() == 1:
                with pytest.raises(ConfigError, match=r"extra\.x"):
                    manager.save(1)
            else:
                error = manager.save(1).exception(TIMEOUT_S)
                assert isinstance(error, ConfigError)
                assert "extra.x" in str(error)
                with pytest.raises(ConfigError):
                    manager.wait()
        state["extra"]["x"] = 2
        manager.save(2).result(TIMEOUT_S)
        assert manager.steps() == [2]
        assert not [name for name in os.listdir(root / "leaf") if "incomplete" in name]


def a_leaf_that_one_rank_cannot_store_yet(root: Path) -> None:
    """Found while preparing the first save, before any was asked for; mended in time."""
    state: dict[str, Any] = {"w": weights(), "x": on_rank(1, object(), 1)}
    with holdfast.CheckpointManager(root / "early", state, config=config(every=2)) as manager:
        if dist.get_rank() == 1:
            with pytest.raises(ConfigError, match="x"):
                manager.step(1)
        else:
            manager.step(1)
        state["x"] = 2
        with soon():
            for handle in manager.step(2):
                handle.result(TIMEOUT_S)
        assert manager.steps() == [2]


def a_leaf_that_one_rank_cannot_store_in_one_call(root: Path) -> None:
    state = {"w": weights(), "x": on_rank(1, object(), 1)}
    error = same_error(ConfigError, lambda: holdfast.save(state, root / "one-leaf", timeout=TIMEOUT_S))
    assert error.field == "x"
    assert not (root / "one-leaf").exists()


def arguments_that_one_rank_gets_wrong(root: Path) -> None:
    """The session is refused on both ranks, and the next one isn't mistaken for it."""
    state = {"w": weights()}
    file = root / f"file-{dist.get_rank()}"
    file.write_text("")
    for bad in (
        lambda: holdfast.save(state, root / "args", step=on_rank(1, -1, 1), timeout=TIMEOUT_S),
        lambda: holdfast.save(on_rank(0, {}, state), root / "args", timeout=TIMEOUT_S),
        lambda: holdfast.save(state, on_rank(1, file, root / "args"), timeout=TIMEOUT_S),
        lambda: holdfast.load(state, on_rank(1, file, root / "args"), timeout=TIMEOUT_S),
        lambda: holdfast.CheckpointManager(on_rank(1, file, root / "args-root"), state, config=config()),
        lambda: holdfast.CheckpointManager(root / "args-root", on_rank(1, {}, state), config=config(load_only=True)),
    ):
        same_error(ConfigError, bad)
    holdfast.save(state, root / "args", step=1, timeout=TIMEOUT_S)
    same_error(CheckpointExists, lambda: holdfast.save(state, root / "args", timeout=TIMEOUT_S))
    assert holdfast.open(root / "args").step == 1


def metrics_are_rank_0s(root: Path) -> None:
    """What another rank is given for them doesn't matter; what rank 0 is given refuses the save on every rank."""
    state = {"w": weights()}
    bad = {"loss": "low"}
    with holdfast.CheckpointManager(root / "metrics", state, config=config()) as manager:
        manager.save(1, metrics=on_rank(1, bad, {"loss": 1.0})).result(TIMEOUT_S)
        with soon():
            if dist.get_rank() == 0:
                with pytest.raises(ConfigError, match="loss"):
                    manager.save(2, metrics=bad)
            else:
                assert isinstance(manager.save(2).exception(TIMEOUT_S), ConfigError)
                with pytest.raises(ConfigError, match="loss"):
                    manager.wait()
        with soon():
            assert manager.save(3, metrics={"loss": 2.0}).result(TIMEOUT_S).metrics == {"loss": 2.0}
        assert manager.steps() == [1, 3]
    checkpoint = holdfast.save(state, root / "call", metrics=on_rank(1, bad, {"loss": 3.0}), timeout=TIMEOUT_S)
    assert checkpoint.metrics == {"loss": 3.0}


def a_saver_that_one_rank_cannot_start(root: Path) -> None:
    state = {"w": weights()}
    start = threading.Thread.start
    refused: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused and dist.get_rank() == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    try:
        for last_of_them, act in (
            ("holdfast-finalizer", lambda: holdfast.CheckpointManager(root / "threads", state, config=config())),
            ("holdfast-stager", lambda: holdfast.save(state, root / "threads-call", timeout=TIMEOUT_S)),
        ):
            refused[:] = [last_of_them]
            with soon(), pytest.raises((RuntimeError, HoldfastError), match="can't start new thread"):
                act()
            assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-stager"]
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    with holdfast.CheckpointManager(root / "threads", state, config=config()) as manager:
        assert manager.save(1).result(TIMEOUT_S).step == 1


def a_final_save_over_the_one_before(root: Path) -> None:
    state = {"w": weights(), "model": torch.nn.Linear(2, 2)}
    options = config(last_model_only=True, last_dtype="bfloat16")
    with holdfast.CheckpointManager(root / "final", state, config=options) as manager:
        manager.save(1)
        assert "w" in manager.save(1, final=True).result(TIMEOUT_S).tensors, "nothing else to resume from"
        manager.save(2)
        final = manager.save(2, final=True).result(TIMEOUT_S)
        assert set(final.tensors) == {"model.weight", "model.bias"}
        assert manager.steps() == [1, 2]


def shapes_that_ranks_disagree_on(root: Path) -> None:
    state: dict[str, Any] = {"w": weights(), "plain": torch.zeros(on_rank(0, 3, 4))}
    with holdfast.CheckpointManager(root / "shapes", state, config=config(on_error="warn")) as manager:
        with soon():
            error = manager.save(1).exception(TIMEOUT_S)
        assert isinstance(error, SaveFailed)
        assert isinstance(error.__cause__, StateMismatch)
        assert error.__cause__.mismatched == ("plain",)
        assert "[3]" in str(error)
        assert "[4]" in str(error)
        state["plain"] = torch.zeros(5)
        with pytest.warns(UserWarning, match="plain"):
            manager.save(2).result(TIMEOUT_S)
        assert manager.steps() == [2]


def failures_keep_ranks_in_step(root: Path) -> None:
    """A loop that catches what a save raises goes on, although its ranks learn of it at different moments."""
    state: dict[str, Any] = {"w": weights(), "x": 0}
    raised = 0
    with holdfast.CheckpointManager(root / "loop", state, config=config()) as manager:
        for step in range(1, 9):
            state["x"] = on_rank(1, object(), 1) if step == 3 else step
            time.sleep(0.05 * dist.get_rank())
            try:
                manager.save(step)
            except HoldfastError:
                raised += 1
        manager.wait()
        assert raised == 1
        assert manager.steps() == [1, 2, 4, 5, 6, 7, 8]


def an_engine_that_dies_on_one_rank(root: Path) -> None:
    """In the middle of writing, which a limit makes slow; then it is replaced."""
    state = {"w": distribute_tensor(torch.ones(2, 3 << 18), mesh_of(2), [Shard(0)], src_data_rank=None)}
    slow = config(io_limit_bytes_per_s=1 << 20, staging="eager", on_error="warn")
    with holdfast.CheckpointManager(root / "engine", state, config=slow) as manager:
        with soon():
            handle = manager.save(1)
            if dist.get_rank() == 1:
                while not list((root / "engine").glob(".step-1.*.incomplete/__1_0.distcp")):
                    time.sleep(0.005)
                os.kill(manager._saver._engine.pid, signal.SIGKILL)
            error = handle.exception(TIMEOUT_S)
        assert isinstance(error, SaveFailed)
        assert isinstance(error.__cause__, EngineDied)
        assert error.rank == 1
        with pytest.warns(UserWarning, match="rank 1"):
            manager.save(2).result(TIMEOUT_S)
        assert manager.steps() == [2]


def paths_that_ranks_do_not_share(root: Path) -> None:
    """One path that means another directory on each rank, as it does on machines without a shared file system."""
    state = {"w": weights()}
    there = os.getcwd()
    own = root / f"own-{dist.get_rank()}"
    own.mkdir()
    os.chdir(own)
    try:
        unshared = "/proc/self/cwd/run"
        error = same_error(ConfigError, lambda: holdfast.save(state, unshared, timeout=TIMEOUT_S))
        assert "share" in str(error)
        assert os.listdir(own) == [] or dist.get_rank() == 0
        error = same_error(ConfigError, lambda: holdfast.CheckpointManager(unshared, state, config=config()))
        assert "rank 1 on" in str(error)
        assert "doesn't see" in str(error)
        if dist.get_rank() == 0:
            holdfast.save({"w": torch.zeros(2)}, own / "alone", process_group=_alone[0])
        dist.barrier()
        plain = {"w": torch.zeros(2)}
        same_error(HoldfastError, lambda: holdfast.load(plain, "/proc/self/cwd/alone", timeout=TIMEOUT_S))
    finally:
        os.chdir(there)
    different = on_rank(0, root / "path-a", root / "path-b")
    error = same_error(ConfigError, lambda: holdfast.save(state, different, timeout=TIMEOUT_S))
    assert "path-a" in str(error)
    assert "path-b" in str(error)
    same_error(ConfigError, lambda: holdfast.load(state, different, timeout=TIMEOUT_S))


def a_rank_that_never_calls(root: Path) -> None:
    """The one wait that needs its deadline: short here."""
    manager = holdfast.CheckpointManager(
        root / "alone", {"w": weights()}, config=config(stage_timeout=1.0, commit_timeout=2.0, on_error="warn")
    )
    with soon():
        if dist.get_rank() == 0:
            error = manager.save(1).exception(TIMEOUT_S)
            assert isinstance(error, SaveFailed)
            assert isinstance(error.__cause__, DeadlineExceeded)
            assert "rank(s) 1" in str(error)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.close()
    assert manager.steps() == []
    dist.barrier()


def a_rank_that_has_closed(root: Path) -> None:
    """It says so: nobody waits for a deadline."""
    manager = holdfast.CheckpointManager(root / "left", {"w": weights()}, config=config(on_error="warn"))
    with soon(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dist.get_rank() == 0:
            error = manager.save(1).exception(TIMEOUT_S)
            assert isinstance(error, SaveFailed)
            assert "rank 1" in str(error)
            assert "closed" in str(error)
        manager.close()
    assert manager.steps() == []
    dist.barrier()


# loading ---------------------------------------------------------------------------------------------------------


def a_shape_that_differs_on_one_rank(root: Path) -> None:
    holdfast.save({"w": weights(2.0), "plain": torch.zeros(3)}, root / "fits", timeout=TIMEOUT_S)
    state = {"w": weights(1.0), "plain": torch.ones(on_rank(1, 4, 3))}
    error = same_error(StateMismatch, lambda: holdfast.load(state, root / "fits", timeout=TIMEOUT_S))
    assert error.mismatched == ("plain",)
    assert "[4]" in str(error)
    assert value_in(state) == 1.0, "nothing was touched"
    state = {"w": weights(1.0), "plain": torch.ones(3), **on_rank(0, {"more": torch.ones(1)}, {})}
    error = same_error(StateMismatch, lambda: holdfast.load(state, root / "fits", timeout=TIMEOUT_S))
    assert error.missing == ("more",)
    assert value_in(state) == 1.0
    holdfast.load(state, root / "fits", strict=False, timeout=TIMEOUT_S)
    assert value_in(state) == 2.0


class Stubborn:
    """Takes its state back on rank 0 only."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not like this")


def a_state_that_one_rank_does_not_take_back(root: Path) -> None:
    holdfast.save({"w": weights(), "thing": Stubborn()}, root / "stubborn", timeout=TIMEOUT_S)
    state = {"w": weights(3.0), "thing": Stubborn()}
    with soon(), pytest.raises((ValueError, HoldfastError), match="not like this") as caught:
        holdfast.load(state, root / "stubborn", timeout=TIMEOUT_S)
    assert type(caught.value) is on_rank(1, ValueError, HoldfastError)
    assert on_rank(1, True, "rank 1" in str(caught.value))


def a_checkpoint_that_is_not_there(root: Path) -> None:
    state = {"w": weights()}
    same_error(CheckpointNotFound, lambda: holdfast.load(state, root / "nothing", timeout=TIMEOUT_S))
    with holdfast.CheckpointManager(root / "empty", state, config=config()) as manager:
        same_error(CheckpointNotFound, lambda: manager.restore(4))
        assert manager.restore() is None


def corrupted(root: Path, damage: Callable[[Path], None]) -> Path:
    """A root with steps 1, 2, 3, whose newest is damaged."""
    state = {"w": weights()}
    with holdfast.CheckpointManager(root, state, config=config()) as manager:
        for step in (1, 2, 3):
            manager.before_update()
            state["w"].to_local().fill_(float(step))
            manager.save(step)
        manager.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        damage(root / "step-3")
    dist.barrier()
    return root


def flip_a_byte(name: str) -> Callable[[Path], None]:
    def flip(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        # In the middle of the weights, where they are the file's; else anywhere.
        at = data.find(torch.full((8,), 3.0).numpy().tobytes())
        data[at if at >= 0 else len(data) // 2] ^= 0x10
        (directory / name).write_bytes(data)

    return flip


DAMAGES: dict[str, Callable[[Path], None]] = {
    "data of rank 0": flip_a_byte("__0_0.distcp"),
    "data of rank 1": flip_a_byte("__1_0.distcp"),
    "report of rank 1": flip_a_byte("rank-00001.report"),
    "manifest": flip_a_byte("holdfast.json"),
    "metadata": flip_a_byte(".metadata"),
    "cut short": lambda directory: os.truncate(directory / "__1_0.distcp", 4096 // 2),
    "gone": lambda directory: (directory / "__1_0.distcp").unlink(),
}


def damage_falls_back_on_all_ranks_together(root: Path) -> None:
    for number, (what, damage) in enumerate(DAMAGES.items()):
        place = corrupted(root / f"damaged-{number}", damage)
        state = {"w": weights(0.0)}
        with holdfast.CheckpointManager(place, state, config=config()) as manager:
            with soon(), pytest.warns(UserWarning, match="falling back to step 2"):
                assert manager.restore() == 2, what
            assert value_in(state) == 2.0
            same_error(HoldfastError, lambda manager=manager: manager.restore(3))
        with holdfast.CheckpointManager(place, state, config=config(on_corrupt="raise")) as manager:
            error = same_error(HoldfastError, manager.restore)
        if "data" in what:
            assert isinstance(error, CheckpointCorrupt)
            assert "step-3" in error.path


def damage_and_a_mismatch_at_once_are_one_error(root: Path) -> None:
    """Rank 0's state doesn't fit, rank 1's part is damaged: both must make the same of it."""
    place = corrupted(root / "both", flip_a_byte("rank-00001.report"))
    state = {"w": weights(0.0), **on_rank(0, {"more": torch.ones(1)}, {})}
    with holdfast.CheckpointManager(place, state, config=config()) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_error(StateMismatch, manager.restore)


def everything_works_after_all_that(root: Path) -> None:
    state = {"w": weights(4.0), "copies": distribute_tensor(torch.ones(3), mesh_of(2), [Replicate()])}
    holdfast.save(state, root / "fine", timeout=TIMEOUT_S)
    other = {"w": weights(0.0), "copies": distribute_tensor(torch.zeros(3), mesh_of(2), [Replicate()])}
    holdfast.load(other, root / "fine", timeout=TIMEOUT_S)
    assert value_in(other) == 4.0


CHECKS = [
    ranks_that_disagree_on_the_step,
    a_leaf_that_one_rank_cannot_store,
    a_leaf_that_one_rank_cannot_store_yet,
    a_leaf_that_one_rank_cannot_store_in_one_call,
    arguments_that_one_rank_gets_wrong,
    metrics_are_rank_0s,
    a_saver_that_one_rank_cannot_start,
    a_final_save_over_the_one_before,
    shapes_that_ranks_disagree_on,
    failures_keep_ranks_in_step,
    an_engine_that_dies_on_one_rank,
    paths_that_ranks_do_not_share,
    a_shape_that_differs_on_one_rank,
    a_state_that_one_rank_does_not_take_back,
    a_checkpoint_that_is_not_there,
    damage_falls_back_on_all_ranks_together,
    damage_and_a_mismatch_at_once_are_one_error,
    a_rank_that_never_calls,
    a_rank_that_has_closed,
    everything_works_after_all_that,
]


def job(place: str) -> None:
    _alone.append(dist.new_group([0]))
    for check in CHECKS:
        try:
            check(Path(place))
        except BaseException as error:
            raise AssertionError(f"{check.__name__} failed on rank {dist.get_rank()}") from error
        dist.barrier()


def test_failures_are_alike_on_all_ranks(tmp_path: Path) -> None:
    run_job(job, nproc=2, args=[tmp_path])
