"""Loads in which ranks want the same bytes: each extent is read by one of them, and the values are right."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_server import FileServer
from launch import in_world, run_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import _torch_compat as compat
from holdfast.coordination.links import Links
from holdfast.errors import CheckpointCorrupt, StorageError
from holdfast.events import Event
from holdfast.loader import read_once
from holdfast.loader.read_once import VARIABLE, ReadOnce
from holdfast.loader.shared_reads import MEMORY_BYTES_MAX, SharedReads
from holdfast.storage.ranged_reads import FileSet

WIDTH = 1024
"""A weight of 4 MiB."""
SOON_S = 15.0


@contextlib.contextmanager
def sharing(how: str = "1") -> Iterator[list[Event]]:
    """Ask for sharing; yields the events of loads."""
    seen: list[Event] = []
    remove = holdfast.add_hook(lambda event: seen.append(event) if event.kind == "load.finished" else None)
    os.environ[VARIABLE] = how
    try:
        yield seen
    finally:
        del os.environ[VARIABLE]
        remove()


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """Nothing in here waits for a deadline: all deadlines are far longer."""
    dist.barrier()
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    assert took_s < SOON_S, f"took {took_s:.1f} s"


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.narrow = nn.Parameter(torch.empty(WIDTH, WIDTH + 1, dtype=torch.bfloat16))
        self.register_buffer("seed", torch.tensor(seed))
        with torch.no_grad():
            for value in self.parameters():
                value.copy_(torch.randn(value.shape, generator=generator))


def whole(seed: int) -> nn.Module:
    return Net(seed)


def fsdp(seed: int) -> nn.Module:
    return fully_shard(Net(seed), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def hsdp(seed: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(Net(seed), mesh=mesh)


WAYS = {"whole": whole, "fsdp": fsdp, "hsdp": hsdp}


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def load_and_compare(directory: Path, way: str, *, seed: int = 1, dtype: torch.dtype | None = None) -> list[Event]:
    expected = Net(seed).state_dict()
    model = WAYS[way](9)
    if dtype is not None:
        model.to(dtype)
    extra: dict[str, Any] = {"words": "", "list": []}
    state = {"model": model, "extra": extra}
    with sharing() as events:
        holdfast.load(state, directory, timeout=60)
    assert state["extra"]["words"] == "said" * 1000
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), expected[name].to(value.dtype)), name
    return events


def save_as(directory: Path, way: str, seed: int = 1) -> None:
    holdfast.save({"model": WAYS[way](seed), "extra": {"words": "said" * 1000, "list": [1, 2]}}, directory, timeout=60)


def check_figures(events: list[Event], what: str) -> None:
    """Every wanted extent was read once, by one rank, and all have read about as much."""
    (event,) = events
    figures = event.fields
    assert figures["read_alone"] == "", what
    mine = torch.tensor([figures["bytes_read"], figures["unique_bytes"]])
    of_all = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, mine)
    read, unique = sum(int(row[0]) for row in of_all), figures["unique_bytes"]
    assert read == unique > WIDTH * WIDTH * 4, f"{what}: {read} bytes read of {unique}"
    assert max(int(row[0]) for row in of_all) <= unique / len(of_all) + (2 << 20), f"{what}: {of_all}"
    if dist.get_rank() == 0:
        assert figures["bytes_read_by_all"] == read
        assert figures["ranks_read_alone"] == 0
        print(f"{what}: bytes read / unique bytes = {read / unique:.3f}", flush=True)


# jobs ------------------------------------------------------------------------------------------------------------


def write(place: str, *ways: str) -> None:
    for way in ways:
        save_as(Path(place) / f"{dist.get_world_size()}-{way}", way)


def read(place: str, *names: str) -> None:
    for name in names:
        for way in WAYS if dist.get_world_size() >= 4 else ("whole", "fsdp"):
            events = load_and_compare(Path(place) / name, way)
            check_figures(events, f"{name} as {way} of {dist.get_world_size()}")


def read_converted(place: str, name: str) -> None:
    events = load_and_compare(Path(place) / name, "whole", dtype=torch.float64)
    check_figures(events, f"{name} converted")


def two_and_four(place: str) -> None:
    in_world(2, write, place, "whole", "fsdp")
    in_world(4, write, place, "fsdp", "hsdp")
    in_world(4, read, place, "2-whole", "2-fsdp", "4-hsdp")
    in_world(2, read, place, "2-whole", "4-fsdp", "4-hsdp")
    in_world(4, read_converted, place, "4-fsdp")


def eight(place: str) -> None:
    in_world(8, write, place, "fsdp")
    in_world(8, read, place, "8-fsdp")


def corrupt(place: str) -> None:
    """All ranks want all, so that a unit is owned by one and sent to the others: all of them find it damaged."""
    path = Path(place) / "saved"
    save_as(path, "whole")
    dist.barrier()
    if dist.get_rank() == 0:
        for damaged in path.glob("*.distcp"):
            if damaged.stat().st_size > 8 << 20:
                with damaged.open("r+b") as file:
                    file.seek(5 << 20)
                    file.write(b"not what was here")
    dist.barrier()
    found = []
    check = FileSet.check

    def watched(files: FileSet, name: str, start: int, memory: memoryview) -> None:
        try:
            check(files, name, start, memory)
        except CheckpointCorrupt as error:
            found.append(str(error))
            raise

    FileSet.check = watched  # type: ignore[method-assign]
    try:
        with sharing(), soon(), pytest.raises(CheckpointCorrupt, match="don't match their checksum") as caught:
            holdfast.load({"model": whole(9)}, path, timeout=60)
        assert found, "this rank has not verified what it was sent"
        assert caught.value.byte_range is not None
        assert (5 << 20) in range(*caught.value.byte_range)
    finally:
        FileSet.check = check  # type: ignore[method-assign]


def unreadable_for_one(place: str) -> None:
    path = Path(place) / "saved"
    save_as(path, "whole")
    read_unverified = FileSet.read_unverified

    def refuse(files: FileSet, name: str, start: int, memory: memoryview) -> None:
        if dist.get_rank() == 1:
            raise StorageError(f"{name} could not be read", path=name, errno=errno.EIO)
        read_unverified(files, name, start, memory)

    FileSet.read_unverified = refuse  # type: ignore[method-assign]
    try:
        with sharing(), soon(), pytest.raises(StorageError, match="could not be read") as caught:
            holdfast.load({"model": whole(9)}, path, timeout=60)
        assert caught.value.errno == errno.EIO
    finally:
        FileSet.read_unverified = read_unverified  # type: ignore[method-assign]
    load_and_compare(path, "whole")


def unconnected(place: str) -> None:
    """One rank can't connect: all read for themselves, and say so."""
    path = Path(place) / "saved"
    save_as(path, "whole")
    make, links_s = read_once.make_links, read_once.LINKS_S

    def refuse(store: Any, rank: int, world: int, timeout_s: float) -> Links:
        if rank == 1:
            raise RuntimeError("no such interface")
        return make(store, rank, world, timeout_s)

    read_once.make_links, read_once.LINKS_S = refuse, 2.0
    try:
        with soon():
            (event,) = load_and_compare(path, "whole")
    finally:
        read_once.make_links, read_once.LINKS_S = make, links_s
    assert "could not be connected" in event.fields["read_alone"]
    assert event.fields["bytes_read"] >= event.fields["unique_bytes"]
    if dist.get_rank() == 0:
        assert event.fields["ranks_read_alone"] == dist.get_world_size()


def failing_before_it_says_what_it_wants(place: str) -> None:
    path = Path(place) / "saved"
    save_as(path, "whole")
    for rank in range(dist.get_world_size()):
        wanted = SharedReads.wanted
        if dist.get_rank() == rank:
            SharedReads.wanted = lambda _: 1 / 0  # type: ignore[assignment, method-assign, return-value]
        try:
            with sharing(), soon(), pytest.raises(Exception, match="division by zero"):
                holdfast.load({"model": whole(9)}, path, timeout=60)
        finally:
            SharedReads.wanted = wanted  # type: ignore[method-assign]
        load_and_compare(path, "whole")


def off_on_a_local_disk(place: str) -> None:
    """No offer, no round, no group; the same with the variable at 0 on what is said to be on a network."""
    path = Path(place) / "saved"
    save_as(path, "whole")
    made: list[ReadOnce] = []
    init = ReadOnce.__init__

    def watched(self: ReadOnce, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    on_network = read_once.is_on_network
    ReadOnce.__init__ = watched  # type: ignore[method-assign]
    try:
        for how in ("", "0"):
            (event,) = load_with(path, how)
            assert "bytes_received" not in event.fields
        read_once.is_on_network = lambda _: True
        load_with(path, "0")
        assert not made
        # Several ranks of one host, on a network file system: its page cache is faster.
        (event,) = load_with(path, "")
        assert len(made) == 1
        assert "one host" in event.fields["read_alone"]
        assert event.fields["bytes_received"] == 0
        read_once.socket.gethostname, gethostname = lambda: f"host-{dist.get_rank()}", read_once.socket.gethostname
        try:
            (event,) = load_with(path, "")
        finally:
            read_once.socket.gethostname = gethostname
        assert event.fields["read_alone"] == ""
        assert event.fields["bytes_received"] > 0
    finally:
        ReadOnce.__init__ = init  # type: ignore[method-assign]
        read_once.is_on_network = on_network


def load_with(path: Path, how: str) -> list[Event]:
    with sharing(how) as events:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        holdfast.load({"model": whole(9)}, path, timeout=60)
    return events


def nothing_is_left_on_the_board(place: str) -> None:
    path = Path(place) / "saved"
    save_as(path, "whole")
    store = dist.PrefixStore("", compat.store_of(dist.group.WORLD))
    load_and_compare(path, "whole")
    dist.barrier()
    if dist.get_rank() == 0:
        left = [key for key in store.list_keys() if "once/" in str(key)]
        assert left == []


def from_a_store(url: str, environment: str, how: str, tell: str) -> None:
    """Load what `two_and_four` has written, from a store, by ``how`` the variable says; tells what was wrong."""
    os.environ.update(json.loads(environment))
    for number, way in enumerate(WAYS):
        expected = Net(1).state_dict()
        model = WAYS[way](9)
        dist.barrier()
        began = time.monotonic()
        with sharing(how) as events:
            holdfast.load({"model": model}, url, timeout=100)
        took_s = time.monotonic() - began
        for name, value in model.state_dict().items():
            assert torch.equal(full(value), expected[name]), name
        if how != "0":
            check_figures(events, f"{url} as {way}")
        if dist.get_rank() == 0:
            figures = dict(events[0].fields)
            (Path(tell) / f"{number}.json").write_text(json.dumps({"way": way, "took_s": took_s, **figures}))


def with_little_memory(place: str) -> None:
    """384 MiB that both ranks want, into other dtypes: all of it passes through buffers, and jobs need two units."""
    tensors = {f"w{at}": torch.full((6 << 20,), float(at)) for at in range(16)}
    path = Path(place) / "saved"
    if dist.get_rank() == 0:
        holdfast.save(tensors, path, process_group="alone")
    dist.barrier()
    for dtype in (torch.bfloat16, torch.float32):
        state = {name: torch.zeros_like(value, dtype=dtype) for name, value in tensors.items()}
        before = reset_peak()
        with sharing() as events:
            holdfast.load(state, path, timeout=100)
        took = peak_bytes() - before
        check_figures(events, f"as {dtype}")
        assert all(bool((value == float(name[1:])).all()) for name, value in state.items())
        print(f"rank {dist.get_rank()}, {dtype}: {took >> 20} MiB beside the destinations", flush=True)
        assert took <= MEMORY_BYTES_MAX, f"{took >> 20} MiB"


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


# tests -----------------------------------------------------------------------------------------------------------


def test_each_extent_is_read_by_one_rank(tmp_path: Path) -> None:
    run_job(two_and_four, nproc=4, args=[tmp_path])


@pytest.mark.slow
def test_each_extent_is_read_by_one_rank_of_eight(tmp_path: Path) -> None:
    run_job(eight, nproc=8, args=[tmp_path], timeout_s=200.0)


def test_memory_is_bounded(tmp_path: Path) -> None:
    run_job(with_little_memory, nproc=2, args=[tmp_path])


def test_all_who_want_a_corrupt_extent_say_so(tmp_path: Path) -> None:
    run_job(corrupt, nproc=3, args=[tmp_path])


def test_an_owner_that_cant_read_fails_the_load_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    run_job(unreadable_for_one, nproc=3, args=[tmp_path])


def test_ranks_that_cant_be_connected_read_for_themselves(tmp_path: Path) -> None:
    run_job(unconnected, nproc=3, args=[tmp_path])


def test_a_rank_that_fails_before_it_says_what_it_wants(tmp_path: Path) -> None:
    run_job(failing_before_it_says_what_it_wants, nproc=2, args=[tmp_path])


def test_where_it_does_not_pay_nothing_is_shared_and_nothing_asked(tmp_path: Path) -> None:
    run_job(off_on_a_local_disk, nproc=2, args=[tmp_path])


def test_what_ranks_tell_one_another_is_removed(tmp_path: Path) -> None:
    run_job(nothing_is_left_on_the_board, nproc=2, args=[tmp_path])


def test_a_store_sends_each_byte_once_and_that_is_faster(tmp_path: Path) -> None:
    """By default; a store that sends 64 MiB/s in all, to two ranks or four, twice or four times as much otherwise."""
    run_job(write, nproc=2, args=[tmp_path / "bucket", "fsdp"])
    data = {f"/bucket/2-fsdp/{file.name}": file.stat().st_size for file in (tmp_path / "bucket").rglob("*.distcp")}
    took_s: dict[str, dict[str, float]] = {}
    with FileServer(tmp_path, bytes_per_s=64 << 20) as server:
        for how in ("", "0"):
            tell = tmp_path / f"told-{how}"
            tell.mkdir()
            server.sent.clear()
            args = ["s3://bucket/2-fsdp", json.dumps(server.environment), how, tell]
            run_job(from_a_store, nproc=4, args=args)
            rows = [json.loads(file.read_text()) for file in sorted(tell.glob("*.json"))]
            took_s[how] = {row["way"]: row["took_s"] for row in rows}
            sent = sum(server.sent[path] for path in data)
            ratio = sent / len(WAYS) / sum(data.values())
            print(f"the store has sent {ratio:.3f} times all data; loads took {took_s[how]} s")
            reports = sum(count for key, count in server.requests.items() if key[1].endswith(".report"))
            server.requests.clear()
            if how == "":
                assert ratio <= 1.0
                assert reports == 2 * len(WAYS)
                # Neither ranks nor loads list anything: they know what is there.
                assert not [key for key in server.requests if key[1].endswith("?")]
            else:
                assert ratio > 2.0
                assert reports == 4 * 2 * len(WAYS)
    assert took_s[""]["whole"] < 0.6 * took_s["0"]["whole"], took_s
    assert took_s[""]["hsdp"] < took_s["0"]["hsdp"], took_s
