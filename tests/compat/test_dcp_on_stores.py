"""`holdfast.dcp.Writer` on an object store: ``dcp.save`` and ``dcp.async_save`` publish there as they do on a disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _object_server import Proxy, Server
from test_dcp_planner_buffers import SAVE_PLANNERS, MakesValues, OneBuffer, OneStaging, assert_same, make
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from _on_stores import downloaded, environment, set_environment
from launch import run_job

import holdfast
from holdfast.commit.recovery import recover
from holdfast.dcp import Reader, Writer, share
from holdfast.engine.messages import Reported
from holdfast.format.manifest import decode_manifest
from holdfast.storage.local import open_storage
from holdfast.storage.object_storage import ObjectStorage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Bucket:
    """A bucket of its own, reached through the proxy; ``objects``: what is in it, seen past the proxy."""

    def __init__(self, server: Server) -> None:
        self.server, self.name = server, server.bucket()
        self.run = f"s3://{self.name}/run"

    def objects(self) -> list[str]:
        """The names below the run."""
        return [key.removeprefix("run/") for key in self.server.keys(self.name)]


@pytest.fixture
def bucket(object_server: Server, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return Bucket(object_server)


def save(state: dict[str, Any], url: str, *, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(url, **options), planner=planner, no_dist=True)


def loaded(url: str, **options: Any) -> dict[str, Any]:
    found = make(zero=True)
    dcp.load(found, storage_reader=Reader(url), no_dist=True, **options)
    return found


def fails(kind: type[BaseException], words: str, call: Callable[[], object]) -> Any:
    with pytest.raises(CheckpointException) as raised:
        call()
    error = raised.value.failures[0][0]
    assert isinstance(error, kind), error
    assert words in str(error)
    return error


# saving --------------------------------------------------------------------------------------------------------


def test_a_save_is_a_checkpoint_of_the_bucket(bucket: Bucket, tmp_path: Path) -> None:
    url = f"{bucket.run}/step-1"
    writer = Writer(url, step=1, metrics={"loss": 0.5})
    assert (writer.path, writer.checkpoint_id) == (url, url)
    assert Writer.validate_checkpoint_id(url)
    state = {**make(), "wanting": torch.zeros(3, requires_grad=True)}
    dcp.save(state, storage_writer=writer, no_dist=True)
    found = holdfast.open(url)
    assert (found.step, found.metrics["loss"]) == (1, 0.5)
    assert found.verify().ok
    manifest = found.manifest
    assert manifest is not None
    keys = bucket.objects()
    plain = {"step-1/.metadata", "step-1/.planner", "step-1/holdfast.json"}
    assert plain <= set(keys)
    own = [key for key in keys if key.startswith("step-1/") and key not in plain]
    assert own
    assert all(f".{manifest.attempt}" in key for key in own), "objects of two attempts never meet"
    assert not [key for key in keys if ".holdfast/attempts" in key or "lease" in key], "nothing is left to settle"
    assert_same(loaded(url), make())
    assert Reader(url).read_metadata().state_dict_metadata["wanting"].properties.requires_grad, ".planner is read"
    there = downloaded(url, tmp_path / "copy")
    assert holdfast.open(there).verify().ok
    for reader in (FileSystemReader(there), Reader(there)):
        copied = make(zero=True)
        dcp.load(copied, storage_reader=reader, no_dist=True)
        assert_same(copied, make())


def test_a_writer_takes_each_path_it_is_given(bucket: Bucket, tmp_path: Path) -> None:
    """Stores and directories by turns: which one it is is decided for each save."""
    writer = Writer(f"{bucket.run}/a", step=3)
    for place in (f"{bucket.run}/a", tmp_path / "b", f"{bucket.run}/c"):
        dcp.save(make(), checkpoint_id=place, storage_writer=writer, no_dist=True)
        assert holdfast.open(place).verify().ok
        assert_same(loaded(str(place)), make())
    assert holdfast.open(f"{bucket.run}/a").step == 3
    assert holdfast.open(f"{bucket.run}/c").step is None, "as on a disk, the step was that of the first path"


@pytest.mark.parametrize("planner", [*SAVE_PLANNERS, MakesValues], ids=range(len(SAVE_PLANNERS) + 1))
def test_a_planner_may_reuse_what_it_has_handed_out(bucket: Bucket, planner: Callable[[], Any]) -> None:
    save(make(), f"{bucket.run}/a", planner=planner())
    assert_same(loaded(f"{bucket.run}/a", planner=OneStaging()), make())
    assert holdfast.open(f"{bucket.run}/a").verify().ok


def test_a_large_share_goes_up_in_parts(bucket: Bucket, proxy: Proxy) -> None:
    state = {"large": torch.arange(6 << 20, dtype=torch.float32)}
    save(state, f"{bucket.run}/a")
    assert len([request for request in proxy.requests if "partNumber" in request.query]) >= 3
    found = {"large": torch.zeros(6 << 20)}
    dcp.load(found, storage_reader=Reader(f"{bucket.run}/a"), no_dist=True)
    assert torch.equal(found["large"], state["large"])


class Slow:
    """An engine that has ``progress`` to tell at the end of each wait, then a report or nothing more."""

    def __init__(self, *progress: int) -> None:
        self.left, self.written, self.waited = list(progress), 0, []  # type: ignore[var-annotated]

    def wait_reported(self, attempt: str, timeout_s: float) -> Reported:
        self.waited.append(timeout_s)
        if not self.left:
            return Reported(attempt, 7, "0" * 32, 100, 1)
        self.written = self.left.pop(0)
        raise holdfast.DeadlineExceeded("late", waited_for="the report", timeout_s=timeout_s)

    def progress(self, attempt: str) -> tuple[int, int]:
        assert attempt == "0123456789ab"
        return self.written, 100


def test_a_slow_upload_is_waited_for_while_it_moves() -> None:
    """However long the whole takes: what ends the wait is that nothing moves."""
    assignment = share.Assignment("0123456789ab", None, 1, 2, 0, lambda file: f"{file}.there")
    engine: Any = Slow(10, 20, 90, 100)
    line = share._reported(engine, assignment)
    assert (line.rank, line.name, line.nbytes) == (1, "rank-00001.report.there", 100)
    assert engine.waited == [share.STALL_S] * 5
    engine = Slow(10, 20, 20, 100)
    with pytest.raises(holdfast.DeadlineExceeded):
        share._reported(engine, assignment)
    assert engine.left == [100]


# asynchronous saves --------------------------------------------------------------------------------------------


def save_beside(endpoint: str, url: str, place: str) -> None:
    set_environment(endpoint)
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", store=dist.FileStore(f"{place}/store", 1), rank=0, world_size=1)
    for name in ("THREAD", "PROCESS"):
        kind = state_dict_saver.AsyncCheckpointerType[name]
        state = make()
        future: Any = dcp.async_save(
            state, storage_writer=Writer(f"{url}/{name}"), planner=OneBuffer(), async_checkpointer_type=kind
        )
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        getattr(future, "upload_completion", future).result(timeout=60)
    dist.destroy_process_group()


def test_async_saves_of_both_kinds(bucket: Bucket, tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=save_beside, args=(bucket.server.endpoint, bucket.run, str(tmp_path))
    )
    process.start()
    process.join(90)
    assert process.exitcode == 0
    for name in ("THREAD", "PROCESS"):
        assert_same(loaded(f"{bucket.run}/{name}"), make())


# what is there already -----------------------------------------------------------------------------------------


def test_what_is_there_is_refused_or_replaced_as_a_whole(bucket: Bucket) -> None:
    url = f"{bucket.run}/a"
    save({"a": torch.zeros(9)}, url)
    storage = open_storage(bucket.run)
    storage.write_file("a/notes.txt", b"somebody's")
    before = bucket.objects()
    fails(holdfast.CheckpointExists, url, lambda: save(make(), url))
    assert bucket.objects() == before
    save(make(), url, overwrite=True)
    assert_same(loaded(url), make())
    assert storage.read_file("a/notes.txt", max_bytes=100) == b"somebody's"
    assert holdfast.open(url).verify().ok


class Meets(DefaultSavePlanner):
    """Waits for the other writer, once nothing is seen at the target and nothing was begun."""

    def __init__(self, meeting: Any) -> None:
        super().__init__()
        self.meeting = meeting

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.meeting.wait(60)
        return plan

    def create_global_plan(self, all_plans: Any) -> Any:
        self.meeting.wait(60)
        return super().create_global_plan(all_plans)


def race(endpoint: str, url: str, number: int, meeting: Any, told: Any) -> None:
    set_environment(endpoint)
    try:
        save({"a": torch.full((9,), float(number))}, url, planner=Meets(meeting))
    except CheckpointException as error:
        told.put((number, type(error.failures[0][0]).__name__))
    else:
        told.put((number, "won"))


def test_of_two_writers_one_wins(bucket: Bucket) -> None:
    context = multiprocessing.get_context("spawn")
    meeting, told = context.Barrier(2), context.Queue()
    writers = [
        context.Process(target=race, args=(bucket.server.endpoint, f"{bucket.run}/a", number, meeting, told))
        for number in (1, 2)
    ]
    for writer in writers:
        writer.start()
    ends = dict(told.get(timeout=90) for _ in writers)
    for writer in writers:
        writer.join(30)
    assert sorted(ends.values()) == ["CheckpointExists", "won"], ends
    winner = next(number for number, end in ends.items() if end == "won")
    found = {"a": torch.zeros(9)}
    dcp.load(found, storage_reader=Reader(f"{bucket.run}/a"), no_dist=True)
    assert torch.equal(found["a"], torch.full((9,), float(winner)))
    assert holdfast.open(f"{bucket.run}/a").verify().ok


def test_one_that_published_meanwhile_wins(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last look and the create: the create is refused."""
    url, publish = f"{bucket.run}/a", ObjectStorage.publish

    def beaten(self: ObjectStorage, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(ObjectStorage, "publish", publish)
        holdfast.save({"a": torch.ones(4)}, url.replace("/a", "/b"))
        self.store.copy("b/holdfast.json", "a/holdfast.json", ends_s=1e18)
        return publish(self, *args, **options)

    monkeypatch.setattr(ObjectStorage, "publish", beaten)
    fails(holdfast.CheckpointExists, url, lambda: save(make(), url))
    storage = open_storage(bucket.run)
    there = storage.read_file("a/holdfast.json", max_bytes=1 << 20)
    assert there == storage.read_file("b/holdfast.json", max_bytes=1 << 20), "it is as it was"
    own = decode_manifest(there, path="").attempt
    data = [key for key in bucket.objects() if key.startswith("a/") and key.endswith(".distcp") and own not in key]
    assert not data, "the loser's data is gone"


# failures ------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_nothing(bucket: Bucket, proxy: Proxy) -> None:
    url = f"{bucket.run}/a"
    save({"a": torch.zeros(9)}, f"{bucket.run}/first")
    before = bucket.objects()
    proxy.rule = lambda method, path: "denied" if method == "PUT" and path.endswith(".distcp") else None
    error = fails(holdfast.SaveFailed, "distcp", lambda: save(make(), url))
    assert isinstance(error.__cause__, holdfast.StorageError)
    assert error.__cause__.errno == errno.EACCES
    left = [key for key in bucket.objects() if key not in before]
    assert all("holdfast." in key for key in left), "only the void stays, which keeps a late seal from succeeding"
    with pytest.raises(holdfast.CheckpointNotFound):
        holdfast.open(url)
    proxy.clear()
    save(make(), url)
    assert_same(loaded(url), make())


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket) -> None:
    error = fails(holdfast.StorageError, "s3://nobodys", lambda: save(make(), "s3://nobodys-bucket/a"))
    assert error.errno == errno.ENODEV


def die(endpoint: str, url: str, point: str) -> None:
    set_environment(endpoint)

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(ObjectStorage, point, killed)
    save(make(), url)


@pytest.mark.parametrize(
    ("point", "whole"),
    [("write_file", False), pytest.param("seal", False, marks=pytest.mark.slow), ("publish", True)],
)
def test_what_a_killed_job_left_is_settled_by_the_next_start(bucket: Bucket, point: str, whole: bool) -> None:
    """Sealed, it is published: every rank had written its part. Before that, nothing of it stays."""
    url = f"{bucket.run}/a"
    process = multiprocessing.get_context("spawn").Process(target=die, args=(bucket.server.endpoint, url, point))
    process.start()
    process.join(90)
    assert process.exitcode == -signal.SIGKILL
    (entry,) = open_storage(bucket.run).unsettled()
    assert (entry.name, entry.kind) == ("a", "incomplete"), "a start can find it"
    with pytest.raises(holdfast.CheckpointNotFound):
        holdfast.open(url)
    if whole:
        fails(holdfast.CheckpointExists, url, lambda: save({"a": torch.zeros(9)}, url))
    else:
        save(make(), url)
    assert_same(loaded(url), make())
    manifest = holdfast.open(url).manifest
    assert manifest is not None
    assert (manifest.attempt == entry.attempt) == whole
    assert open_storage(bucket.run).unsettled() == []
    data = [key for key in bucket.objects() if key.endswith(".distcp")]
    assert data
    assert all(manifest.attempt in key for key in data)


def test_an_attempt_in_work_is_left_to_its_writer(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its beginning to its end a lease tells others that it is alive, also between seal and publication."""
    url, publish, looks = f"{bucket.run}/a", ObjectStorage.publish, []

    def looked_at(self: ObjectStorage, *args: Any, **options: Any) -> Any:
        clock = iter(range(100))
        storage = open_storage(bucket.run)
        (entry,) = storage.unsettled()
        leases = [name for name in storage.list_dir(entry.entry) if name.startswith("lease-coordinator")]
        looks.append(leases)
        observed = storage.observe_lease(entry.entry, leases[0])
        assert observed is not None
        assert observed.flock_free is None, "its process lives"
        # A start waits for it, as long as it may.
        slept: list[float] = []
        monkeypatch.setattr(ObjectStorage, "withdraw", lambda *_: pytest.fail("it was given up"))
        monkeypatch.setattr(ObjectStorage, "publish", publish)

        def until_published(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                assert publish(self, *args, **options).kind == "published"

        recover(storage, clock=lambda: float(next(clock)), sleep=until_published, timeout_s=1e6)
        assert len(slept) == 2
        return publish(self, *args, **options)

    monkeypatch.setattr(ObjectStorage, "publish", looked_at)
    save(make(), url)
    assert len(looks) == 1
    assert holdfast.open(url).verify().ok
    assert not [key for key in bucket.objects() if "lease" in key]


# several ranks -------------------------------------------------------------------------------------------------


def save_on_two(endpoint: str, url: str) -> None:
    from test_dcp_planner_buffers import Overlapping, sharded, whole

    set_environment(endpoint)
    for number, planner in enumerate((OneBuffer, Overlapping)):
        path = f"{url}/save{number}"
        dcp.save(sharded(), storage_writer=Writer(path, step=number), planner=planner())
        found = sharded(zero=True)
        dcp.load(found, storage_reader=Reader(path), planner=OneStaging())
        assert_same(whole(found), make())
        manifest = holdfast.open(path).manifest
        assert manifest is not None
        assert len(manifest.reports) == 2
        dist.barrier()
    response = dcp.async_save(sharded(), storage_writer=Writer(f"{url}/thread"), planner=OneBuffer())
    getattr(response, "upload_completion", response).result(timeout=60)
    dist.barrier()
    writer = Writer(f"{url}/save0", overwrite=True)
    dcp.save({"other": torch.ones(3)}, storage_writer=writer)
    try:
        dcp.save({"other": torch.ones(3)}, storage_writer=Writer(f"{url}/save1"))
    except CheckpointException as error:
        assert isinstance(error.failures[0][0], holdfast.CheckpointExists)  # noqa: PT017 - there is no pytest here
    else:
        raise AssertionError("it was replaced")


def test_two_ranks(bucket: Bucket) -> None:
    run_job(save_on_two, nproc=2, args=[bucket.server.endpoint, bucket.run])
    assert_same(loaded(f"{bucket.run}/thread"), make())
    assert_same(loaded(f"{bucket.run}/save1"), make())
    assert list(holdfast.open(f"{bucket.run}/save0").tensors) == ["other"]
    assert not [key for key in bucket.objects() if "lease" in key]


class FailsOnOne(Writer):
    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("write_data fails on rank 1")
        return super().write_data(plan, planner)


def one_rank_fails(endpoint: str, url: str) -> None:
    from test_dcp_planner_buffers import sharded, whole

    set_environment(endpoint)
    writer = FailsOnOne(f"{url}/a")
    try:
        dcp.save(sharded(), storage_writer=writer)
    except CheckpointException as error:
        assert isinstance(error.failures[1][0], ValueError)  # noqa: PT017 - there is no pytest here
    else:
        raise AssertionError("it was published")
    try:
        holdfast.open(f"{url}/a")
    except holdfast.CheckpointNotFound:
        pass
    else:
        raise AssertionError("it is visible")
    dist.barrier()
    dcp.save(sharded(), storage_writer=Writer(f"{url}/a"))
    found = sharded(zero=True)
    dcp.load(found, storage_reader=Reader(f"{url}/a"))
    assert_same(whole(found), make())


def test_a_rank_that_fails_fails_all_and_the_next_save_goes_well(bucket: Bucket) -> None:
    run_job(one_rank_fails, nproc=2, args=[bucket.server.endpoint, bucket.run])
    attempt = holdfast.open(f"{bucket.run}/a").manifest.attempt  # type: ignore[union-attr]
    data = [key for key in bucket.objects() if key.endswith(".distcp")]
    assert {key[len("a/__")] for key in data} == {"0", "1"}
    assert all(attempt in key for key in data)
