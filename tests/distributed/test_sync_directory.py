"""Weights through a directory: publisher ranks save together, receivers come for what they hold of it.

The ranks of one job play both: the first two publish, as a group of their own, the others receive.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from test_sync import assert_same_bits, roles, sharded, whole_of
from worlds import Net, fill, fsdp, tensor_parallel

import holdfast
from holdfast.errors import ConfigError, DeadlineExceeded, RootLocked, StateMismatch
from holdfast.sync.adapters.verl import share_of

if TYPE_CHECKING:
    from _object_server import Server

PUBLISHERS = 2
TIMEOUT_S = 40.0
NOTHING_COMES_S = 0.05
VERSIONS = range(1, 6)


def versions_in_a_row(place: str) -> None:
    """Each cut by rows where it is published, by columns where it is received; a receiver may skip some."""
    publishes, group, mesh = roles(PUBLISHERS)
    transport = holdfast.sync.DirectoryTransport(Path(place), process_group=group)
    assert mesh is not None
    if publishes:
        with holdfast.sync.Publisher(transport, keep_versions=2) as publisher:
            for version in VERSIONS:
                done = publisher.publish(sharded(whole_of(version), mesh, 0), version, timeout=TIMEOUT_S)
                assert done.bytes_sent > 0
                if version == 2:
                    publisher.pin(version)
                dist.barrier()
            assert publisher.versions == (2, 4, 5)
        dist.barrier()
        return
    into = sharded({name: torch.zeros_like(tensor) for name, tensor in whole_of(0).items()}, mesh, 1)
    receiver = holdfast.sync.Receiver(transport)
    for version in VERSIONS:
        dist.barrier()
        if version % 2 and dist.get_rank() == PUBLISHERS:
            continue
        assert receiver.receive(into, timeout=TIMEOUT_S, streaming=version == 4) == version == receiver.version
        assert_same_bits(into, sharded(whole_of(version), mesh, 1), f"version {version}")
    late = holdfast.sync.Receiver(transport)
    assert late.receive(into, version=2, timeout=TIMEOUT_S) == 2
    assert_same_bits(into, sharded(whole_of(2), mesh, 1), "the pinned version")
    dist.barrier()


def changed(version: int) -> dict[str, torch.Tensor]:
    """Weights of which each version changes some elements."""
    found = whole_of(0)
    for tensor in found.values():
        if tensor.numel() and tensor.dim() == 2 and tensor.is_contiguous():
            memory = tensor.view(torch.uint8).view(-1)
            for number in range(1, version + 1):
                memory[number % 41 :: 97] ^= 1
    return found


def deltas_in_a_row(place: str) -> None:
    """Cut by rows where they are published, by columns and whole where they are received; some are skipped."""
    publishes, group, mesh = roles(PUBLISHERS)
    transport = holdfast.sync.DirectoryTransport(Path(place), process_group=group)
    assert mesh is not None
    if publishes:
        with holdfast.sync.Publisher(transport, delta="sparse", anchor_every=4, delta_bytes=1 << 20) as publisher:
            for version in range(1, 8):
                publisher.publish(sharded(changed(version), mesh, 0), version, timeout=TIMEOUT_S)
                dist.barrier()
                dist.barrier()
        return
    by_columns = sharded({name: torch.zeros_like(tensor) for name, tensor in whole_of(0).items()}, mesh, 1)
    by_rows = sharded({name: torch.zeros_like(tensor) for name, tensor in whole_of(0).items()}, mesh, 0)
    all_of_it = {name: torch.zeros_like(tensor) for name, tensor in whole_of(0).items()}
    cut, alike, whole = (holdfast.sync.Receiver(transport) for _ in range(3))
    for version in range(1, 8):
        dist.barrier()
        assert cut.receive(by_columns, timeout=TIMEOUT_S) == version
        assert_same_bits(by_columns, sharded(changed(version), mesh, 1), f"version {version} by columns")
        assert alike.receive(by_rows, timeout=TIMEOUT_S) == version
        assert_same_bits(by_rows, sharded(changed(version), mesh, 0), f"version {version} by rows")
        if version not in (2, 6):
            assert whole.receive(all_of_it, timeout=TIMEOUT_S) == version
            assert_same_bits(all_of_it, changed(version), f"version {version}")
        chain = holdfast.open(Path(place) / f"version-{version}").manifest.chain
        assert len(chain) == (version - 1) % 4
        dist.barrier()


def versions_on_an_object_store(url: str, options: str) -> None:
    """Cut by rows where they are published, by columns where they are received; one rank can't put its part."""
    publishes, group, mesh = roles(PUBLISHERS)
    right, wrong = json.loads(options), {**json.loads(options), "endpoint": "http://127.0.0.1:1"}
    broken = publishes and dist.get_rank(group) == 1
    assert mesh is not None
    if publishes:
        half = holdfast.sync.DirectoryTransport(url, process_group=group, store_options=wrong if broken else right)
        with holdfast.sync.Publisher(half) as publisher, pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:1"):
            publisher.publish(sharded(whole_of(1), mesh, 0), 1, timeout=1.0)
        whole = holdfast.sync.DirectoryTransport(url, process_group=group, store_options=right)
        with holdfast.sync.Publisher(whole, keep_versions=1) as publisher:
            assert publisher.versions == ()
            for version in (1, 2):
                done = publisher.publish(sharded(whole_of(version), mesh, 0), version, timeout=TIMEOUT_S)
                assert done.bytes_sent > 0
                dist.barrier()
                dist.barrier()
            assert publisher.versions == (2,)
        return
    receiver = holdfast.sync.Receiver(holdfast.sync.DirectoryTransport(url, store_options=right))
    into = sharded({name: torch.zeros_like(tensor) for name, tensor in whole_of(0).items()}, mesh, 1)
    for version in (1, 2):
        dist.barrier()
        assert receiver.receive(into, timeout=TIMEOUT_S, streaming=version == 2) == version
        assert_same_bits(into, sharded(whole_of(version), mesh, 1), f"version {version}")
        dist.barrier()


def a_model_sharded_and_one_in_tensor_parallel(place: str) -> None:
    """FSDP2 publishes its own state, with its buffers and tied weights; tensor parallel receives."""
    publishes, group, mesh = roles(PUBLISHERS)
    transport = holdfast.sync.DirectoryTransport(Path(place), process_group=group)
    assert mesh is not None
    model, expected = Net(), Net()
    fill(model, "published" if publishes else "before")
    fill(expected, "published")
    model = fsdp(model, mesh) if publishes else tensor_parallel(model, mesh)
    if publishes:
        with holdfast.sync.Publisher(transport) as publisher:
            publisher.publish(model.state_dict(), 1, timeout=TIMEOUT_S)
    else:
        assert holdfast.sync.Receiver(transport).receive(model, timeout=TIMEOUT_S) == 1
        tensor_parallel(expected, mesh)
        assert_same_bits(model.state_dict(), expected.state_dict(), "tensor parallel")
    dist.barrier()


def what_goes_wrong_goes_wrong_on_every_rank(place: str) -> None:
    publishes, group, _ = roles(PUBLISHERS)
    transport = holdfast.sync.DirectoryTransport(Path(place), process_group=group)
    rank = dist.get_rank()
    if publishes:
        with holdfast.sync.Publisher(transport) as publisher:
            with pytest.raises(RootLocked):
                holdfast.sync.Publisher(transport)
            with pytest.raises(ConfigError, match="disagree"):
                publisher.publish({"w": torch.ones(3)}, 1 + rank, timeout=TIMEOUT_S)
            assert not publisher.versions
            publisher.publish({"w": torch.ones(3)}, 5, timeout=TIMEOUT_S)
            for comes in (0, 1):  # the other one is late: neither gets through, both know
                if rank == comes:
                    with pytest.raises(DeadlineExceeded):
                        publisher.publish({"w": torch.zeros(3)}, 6, timeout=0.3 if comes == 0 else TIMEOUT_S)
                dist.barrier(group)
            assert publisher.versions == (5,)
            publisher.publish({"w": torch.full((3,), 2.0)}, 7, timeout=TIMEOUT_S)
        dist.barrier()
        return
    receiver = holdfast.sync.Receiver(transport)
    into = {"w": torch.zeros(3)}
    assert receiver.receive(into, version=5, timeout=TIMEOUT_S) == 5
    assert torch.equal(into["w"], torch.ones(3))
    assert receiver.receive(into, timeout=TIMEOUT_S) == 7
    with pytest.raises(StateMismatch, match="w"):
        holdfast.sync.Receiver(transport).receive({"v": torch.zeros(3)}, timeout=TIMEOUT_S)
    with pytest.raises(DeadlineExceeded):
        receiver.receive(into, timeout=NOTHING_COMES_S)
    assert torch.equal(into["w"], torch.full((3,), 2.0))
    dist.barrier()


def trainers_share_what_they_are_handed(place: str) -> None:
    """As verl's trainers are handed weights: all of them, whole, on every rank. A rank may end up with none."""
    transport = holdfast.sync.DirectoryTransport(Path(place))
    whole = {f"layers.{number}": torch.full((number + 1,), float(number)) for number in range(9)}
    with holdfast.sync.Publisher(transport) as publisher:
        for version, weights in ((1, whole), (2, {"alone": torch.ones(3)})):
            share = share_of(weights.items())
            held: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(held, share)
            assert sorted(name for one in held for name in one) == sorted(weights)
            if version == 1:
                sizes = [sum(tensor.numel() for tensor in one.values()) for one in held]
                assert max(sizes) - min(sizes) <= 9
            publisher.publish(share, version, timeout=TIMEOUT_S)
            into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            assert holdfast.sync.Receiver(transport).receive(into, timeout=TIMEOUT_S) == version
            assert_same_bits(into, weights, f"version {version}")
        with pytest.raises(ConfigError, match="empty"):
            publisher.publish({}, 3, timeout=TIMEOUT_S)


def test_versions_in_a_row_arrive_bit_by_bit(tmp_path: Path) -> None:
    run_job(versions_in_a_row, nproc=4, args=[tmp_path / "versions"])


def test_deltas_in_a_row_arrive_bit_by_bit(tmp_path: Path) -> None:
    run_job(deltas_in_a_row, nproc=4, args=[tmp_path / "versions"])


def test_versions_on_an_object_store(object_server: Server) -> None:
    place = f"s3://{object_server.bucket()}/versions"
    run_job(versions_on_an_object_store, nproc=4, args=[place, json.dumps(object_server.options)])


def test_a_model_arrives_in_another_placement(tmp_path: Path) -> None:
    run_job(a_model_sharded_and_one_in_tensor_parallel, nproc=4, args=[tmp_path / "versions"])


def test_what_goes_wrong_goes_wrong_on_every_rank(tmp_path: Path) -> None:
    run_job(what_goes_wrong_goes_wrong_on_every_rank, nproc=4, args=[tmp_path / "versions"])


def test_trainers_share_what_they_are_handed(tmp_path: Path) -> None:
    run_job(trainers_share_what_they_are_handed, nproc=2, args=[tmp_path / "versions"])
