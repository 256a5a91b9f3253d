"""`FileSystemWriterAsync`, alone and in jobs of two ranks that are killed in a save and resumed."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import HASTE, losses, run_script
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

import holdfast
from holdfast.engine.client import EngineClient
from holdfast.errors import ConfigError
from holdfast.integrations.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    CheckpointMetadataCache,
    FileSystemWriterAsync,
    get_metadata_caching_status,
    init_checkpoint_metadata_cache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # stock's, without ranks


@pytest.fixture
def queue() -> Iterator[AsyncCallsQueue]:
    made = AsyncCallsQueue(timeout=60)
    yield made
    made.close(abort=True)


def schedule(queue: AsyncCallsQueue, state: dict[str, Any], target: Path, **planning: Any) -> None:
    writer = FileSystemWriterAsync(target, thread_count=2)
    planned = save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner(), **planning)
    function, preload, arguments = writer.get_save_function_and_args()
    queue.schedule_async_request(
        AsyncRequest(function, arguments, [lambda: save_state_dict_async_finalize(*planned)], preload_fn=preload)
    )


def test_object_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="object store"):
        FileSystemWriterAsync("s3://bucket/a")
    with pytest.raises(ConfigError, match="object store"):
        FileSystemWriterAsync(tmp_path).reset("s3://bucket/a")
    assert not FileSystemWriterAsync.validate_checkpoint_id("s3://bucket/a")


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {"weight": torch.randn(300, 200), "bias": torch.randn(7).bfloat16(), "empty": torch.zeros(0)},
        "step": seed,
        "lists": [torch.tensor(seed), {"lr": 0.1 * seed}],
    }


def assert_loads(target: Path, expected: dict[str, Any]) -> None:
    """By stock's `dcp.load`."""
    found = state_of(99)
    dcp.load(found, checkpoint_id=target, no_dist=True)
    assert torch.equal(found["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(found["model"]["bias"], expected["model"]["bias"])
    assert (found["step"], found["lists"][1]) == (expected["step"], expected["lists"][1])
    assert torch.equal(found["lists"][0], expected["lists"][0])


def test_stock_reads_it_as_what_stock_has_written(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    state = state_of(1)
    schedule(queue, state, tmp_path / "async")
    assert not (tmp_path / "async").exists()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "sync"), no_dist=True)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
    assert_loads(tmp_path / "async", state)
    ours, stock = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("async", "sync"))
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert holdfast.open(tmp_path / "async").verify().ok
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_changes_after_planning_does_not_reach_the_checkpoint(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    state, expected = state_of(1), state_of(1)
    schedule(queue, state, tmp_path / "a")
    state["model"]["weight"].zero_()
    schedule(queue, state, tmp_path / "b")  # two in flight
    state["model"]["weight"].fill_(9)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert_loads(tmp_path / "a", expected)
    expected["model"]["weight"].zero_()
    assert_loads(tmp_path / "b", expected)


def test_a_failed_overwrite_leaves_the_older_checkpoint_whole(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx writes into the directory: the older ``.metadata`` is left over newer data, which loads."""
    target = tmp_path / "c"
    target.mkdir()
    (target / "common.pt").write_bytes(b"of others")
    older, newer = state_of(1), state_of(2)
    schedule(queue, older, target)
    queue.maybe_finalize_async_calls(blocking=True)
    writer = FileSystemWriterAsync(target)
    planned = save_state_dict_async_plan(newer, writer)
    writer._staged.image.close()
    queue.schedule_async_request(
        AsyncRequest(writer.get_save_function_and_args()[0], (), [lambda: save_state_dict_async_finalize(*planned)])
    )
    with pytest.raises(CheckpointException):
        queue.maybe_finalize_async_calls(blocking=True)
    assert_loads(target, older)
    assert (target / "common.pt").read_bytes() == b"of others"
    schedule(queue, newer, target)
    queue.maybe_finalize_async_calls(blocking=True)
    assert_loads(target, newer)
    assert (target / "common.pt").read_bytes() == b"of others"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_keys_that_come_later_are_saved_in_spite_of_the_cache(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx's metadata cache drops them without a word."""
    cache = CheckpointMetadataCache()
    state = state_of(3)
    reused = []
    for name in ("a", "b", "c", "d"):
        if name == "c":
            state["model"]["lora"] = torch.ones(5)
        schedule(queue, state, tmp_path / name, enable_cache=True, metadata_cache=cache)
        queue.maybe_finalize_async_calls(blocking=True)
        reused.append(cache.get_metadata_caching_status()[0])
        assert_loads(tmp_path / name, state)
    assert reused == [False, True, False, True]
    for name in ("c", "d"):
        found = {"model": {"lora": torch.zeros(5)}}
        dcp.load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert bool((found["model"]["lora"] == 1).all())
    first, second = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("a", "b"))
    assert first.state_dict_metadata == second.state_dict_metadata
    assert first.storage_meta.save_id != second.storage_meta.save_id


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an object grows": lambda state: state.update(step=10**40, name="x" * 5000),
    "a tensor is renamed": lambda state: state["model"].update(other=state["model"].pop("bias")),
    "a tensor is dropped": lambda state: state["model"].pop("bias"),
    "an object is dropped": lambda state: state.pop("step"),
    "another shape": lambda state: state["model"].update(weight=torch.ones(7, 5)),
    "another dtype": lambda state: state["model"].update(weight=torch.ones(300, 200, dtype=torch.float64)),
    "a gradient": lambda state: state["model"].update(weight=torch.ones(300, 200, requires_grad=True)),
    "an object becomes a tensor": lambda state: state.update(step=torch.tensor([5])),
    "a tensor becomes an object": lambda state: state["model"].update(bias=[1, 2]),
    "another order": lambda state: state["model"].update(bias=state["model"].pop("bias")),
    "an object comes": lambda state: state.update(later="new"),
    "reallocated": lambda state: state["model"].update(weight=torch.full((300, 200), 4.0)),
}


def as_stored(target: Path) -> dict[str, Any]:
    """Each value by its name, read by stock's own code from what ``.metadata`` says."""
    found: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        found, storage_reader=dcp.FileSystemReader(target), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return found


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_after_a_cached_save_is_saved(
    queue: AsyncCallsQueue, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    cache, state = CheckpointMetadataCache(), state_of(3)
    for name in ("a", "b", "c"):
        if name == "c":
            change(state)
        schedule(queue, state, tmp_path / name, enable_cache=True, metadata_cache=cache)
        queue.maybe_finalize_async_calls(blocking=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    ours, stock = as_stored(tmp_path / "c"), as_stored(tmp_path / "stock")
    assert ours.keys() == stock.keys()
    for key in ("model", "step", "name", "later"):
        assert_equal(ours.get(key), stock.get(key))
    assert holdfast.open(tmp_path / "c").verify().ok


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_the_cache_of_the_process_is_used_where_it_was_made(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    init_checkpoint_metadata_cache(None)
    for name, expected in (("a", False), ("b", True)):
        schedule(queue, state_of(4), tmp_path / name, enable_cache=True)
        assert get_metadata_caching_status() == (expected, False)
    queue.maybe_finalize_async_calls(blocking=True)


def test_a_flipped_bit_is_found(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx has no checksums: it loads without a word."""
    schedule(queue, state_of(5), tmp_path / "c")
    queue.maybe_finalize_async_calls(blocking=True)
    file = max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(holdfast.CheckpointCorrupt):
        holdfast.load(state_of(6), tmp_path / "c")


def test_a_checkpoint_of_many_tensors_takes_no_descriptors(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    """NVRx opens one for each CPU tensor."""
    state = {f"t{number}": torch.full((3,), float(number)) for number in range(3_000)}
    before = len(os.listdir("/proc/self/fd"))
    schedule(queue, state, tmp_path / "c")
    assert len(os.listdir("/proc/self/fd")) < before + 20
    queue.maybe_finalize_async_calls(blocking=True)
    assert float(holdfast.open(tmp_path / "c").read("t2999")[0]) == 2999


def test_the_engine_writes_with_as_many_threads_as_were_asked_for(
    queue: AsyncCallsQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRx's ``thread_count=2`` writes one file after the other."""
    asked: list[tuple[int, object]] = []

    class Client(EngineClient):
        def __init__(self, rank: int, **options: Any) -> None:
            asked.append((options["writers"], options["cores"]))
            super().__init__(rank, **options)

    monkeypatch.setattr("holdfast.dcp.share.EngineClient", Client)
    for thread_count in (3, 99):
        writer = FileSystemWriterAsync(tmp_path / "c", thread_count=thread_count, cores="any")
        planned = save_state_dict_async_plan(state_of(1), writer)
        function, _, arguments = writer.get_save_function_and_args()
        AsyncRequest(function, arguments, [partial(save_state_dict_async_finalize, *planned)]).execute_sync()
    assert asked == [(3, "any"), (16, "any")]
    with pytest.raises(ConfigError, match="cores: this process may not use 8191"):
        FileSystemWriterAsync(tmp_path / "c", cores=[8191])


def test_the_function_can_be_executed_here(tmp_path: Path) -> None:
    state = state_of(7)
    writer = FileSystemWriterAsync(tmp_path / "c", step=7)
    planned = save_state_dict_async_plan(state, writer)
    function, _, arguments = writer.get_save_function_and_args()
    AsyncRequest(function, arguments, [lambda: save_state_dict_async_finalize(*planned)]).execute_sync()
    assert_loads(tmp_path / "c", state)
    assert holdfast.open(tmp_path / "c").step == 7


def test_what_was_not_written_is_not_published(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned = save_state_dict_async_plan(state_of(8), writer)
    with pytest.raises(CheckpointException, match="was not written"):
        save_state_dict_async_finalize(*planned)
    assert not list(tmp_path.iterdir())


def test_an_abort_forgets_the_save(queue: AsyncCallsQueue, tmp_path: Path) -> None:
    schedule(queue, state_of(9), tmp_path / "c")
    queue.close(abort=True)
    assert not (tmp_path / "c").exists()
    schedule(queue, state_of(10), tmp_path / "c")
    queue.maybe_finalize_async_calls(blocking=True)
    assert_loads(tmp_path / "c", state_of(10))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    for wrong in (
        {"single_file_per_rank": False},
        {"separation_hint": "optimizer"},
        {"use_msc": True},
        {"open_file": lambda *_: None},
        {"_extensions": [object()]},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            FileSystemWriterAsync(tmp_path / "c", **wrong)
    FileSystemWriterAsync(
        tmp_path / "c", thread_count=4, is_multiproc_io=True, use_cached_data_structure=True, open_file=open
    )
    writer = FileSystemWriterAsync(tmp_path / "c")
    with pytest.raises(CheckpointException, match="can't be stored"):
        save_state_dict_async_plan({"x": object}, writer)
    assert not list(tmp_path.iterdir())


# Two ranks. --------------------------------------------------------------------------------------------------------


def test_a_run_killed_in_a_save_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    job, steps = HERE / "nvrx_job.py", 14
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    run_script(job, tmp_path / "whole", steps, nproc=2)
    run_script(job, tmp_path / "killed", steps, "--kill", 9, nproc=2, killed=True)
    names = sorted(path.name for path in (tmp_path / "killed").glob("iter_*"))
    latest = (tmp_path / "killed" / "latest.txt").read_text()
    assert latest == names[-1]
    assert "iter_0000009" not in names
    run_script(job, tmp_path / "killed", steps, "--resume", nproc=2)
    assert losses([tmp_path / "killed" / "losses.jsonl"]) == losses([tmp_path / "whole" / "losses.jsonl"])
    for path in (tmp_path / "killed").glob("iter_*"):
        assert holdfast.open(path).verify().ok
    assert not list((tmp_path / "killed").glob(".*.incomplete"))


@pytest.mark.parametrize(
    "scenarios",
    [
        [
            "finalizers_meet_between_training_steps",
            "a_share_that_cannot_be_written_fails_everywhere",
            "parts_move_between_ranks",
            "an_abort_leaves_nothing_behind",
            "two_queues_are_aborted_and_go_on",
        ],
        [
            "a_failure_of_one_rank_is_everyones",
            "a_function_that_hangs_on_one_rank_ends_in_time",
            "a_rank_that_gives_up_says_so",
        ],
    ],
    ids=lambda names: names[0],
)
def test_ranks_act_together(tmp_path: Path, scenarios: list[str]) -> None:
    ended = run_script(HERE / "nvrx_ranks.py", tmp_path, *scenarios, nproc=2)
    assert ended.stdout.count("passed ") == len(scenarios), ended.stdout


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    example = HERE.parents[1] / "examples" / "nvrx_async.py"
    for name, runs in (("whole", [30]), ("twice", [20, 30])):
        (tmp_path / name).mkdir()
        outputs = [run_script(example, tmp_path / name, steps).stdout for steps in runs]
    assert "step 10:" not in outputs[-1]
    found = [{"model": {"0.weight": torch.zeros(64, 16)}, "step": 0} for _ in range(2)]
    for state, name in zip(found, ("whole", "twice"), strict=True):
        dcp.load(state, checkpoint_id=tmp_path / name / "iter_0000030", no_dist=True)
    assert torch.equal(found[0]["model"]["0.weight"], found[1]["model"]["0.weight"])
    assert bool(found[0]["model"]["0.weight"].any())


def run_two_ranks(script: Path, out: Path, *args: object, heard_by: int) -> str:
    """Run two ranks without a launcher, which would end both with one; return what rank ``heard_by`` printed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(out), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **HASTE, **common, "RANK": str(rank), "PYTHONPATH": path},
        )
        for rank in range(2)
    ]
    try:
        return processes[heard_by].communicate(timeout=110)[0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def heard(output: str, scene: str) -> tuple[float, str]:
    """How long a rank waited, and the error."""
    found = re.search(rf"^{scene}: ([\d.]+) s: (.*)$", output, re.MULTILINE)
    assert found is not None, output[-6000:]
    return float(found[1]), found[2]


def test_a_rank_that_never_calls_is_an_error_on_the_other_within_its_patience(tmp_path: Path) -> None:
    """NVRx waits for it in a collective without a word, if its group's limit is not reached."""
    output = run_two_ranks(HERE / "nvrx_silent.py", tmp_path, "stays", 1, heard_by=0)
    assert "a long function was waited for" in output, output[-6000:]
    for scene in ("in_a_call_that_blocks", "in_calls_that_do_not_block", "before_a_checkpoint_is_published"):
        seconds, error = heard(output, scene)
        assert re.match(r"DeadlineExceeded: rank\(s\) 1 of 2 had not .* within 3 s", error), error
        assert seconds < 20
    seconds, error = heard(output, "while_one_is_published")
    assert re.search(r"[Tt]imed out", error), error
    assert seconds < 30


@pytest.mark.parametrize(
    "killed", [pytest.param(1, marks=pytest.mark.slow), 0], ids=["a rank", "the rank that hosts the Store"]
)
def test_a_killed_rank_is_an_error_on_the_other_although_functions_are_at_work(tmp_path: Path, killed: int) -> None:
    """They would be for a minute, and the limit of functions is 100 s."""
    output = run_two_ranks(HERE / "nvrx_silent.py", tmp_path, "killed", killed, heard_by=1 - killed)
    seconds, error = heard(output, "with_a_function_at_work")
    assert seconds < 30
    assert re.match(r"DeadlineExceeded: rank\(s\) 1 of 2 had not|HoldfastError: .* Store .* failed", error), error
