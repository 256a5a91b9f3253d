"""Weights from one, two or four publisher ranks to one, two or three receivers: fifty versions in a row, bit by bit.

The ranks of one job play both: the first publish, as a group of their own, the others receive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from sync_sides import KINDS, STAGED, TIMEOUT_S, assert_same_bits, roles, sharded, transport_of, whole_of
from worlds import Net, fill, fsdp, tensor_parallel

import holdfast

VERSIONS = 50
COUNTS = [(publishers, receivers) for publishers in (1, 2, 4) for receivers in (1, 2, 3)]
QUICK = ((1, 1), (2, 1), (1, 2), (2, 2))


def versions_in_a_row(place: str, kind: str, publishers: str, bypass: str) -> None:
    publishes, group, mesh = roles(int(publishers))
    receivers = dist.get_world_size() - int(publishers)
    transport = transport_of(kind, Path(place), group)
    waits = bypass == "True" and kind not in STAGED  # else a publisher would run away
    if publishes:
        options: dict[str, Any] = {"bucket_bytes": 2048, "bypass_cpu": bypass == "True", "receivers": receivers}
        with holdfast.sync.Publisher(transport, **options) as publisher:
            for version in range(1, VERSIONS + 1):
                whole = whole_of(version)
                weights = sharded(whole, mesh, 0) if mesh is not None else whole
                published = publisher.publish(weights, version, timeout=TIMEOUT_S)
                assert published.version == version
                if waits:
                    assert (published.receivers, published.lost) == (receivers, 0)
                else:
                    dist.barrier()
            dist.barrier()
        return
    into = whole_of(0)
    if mesh is not None:
        into = sharded(into, mesh, 1)
    with holdfast.sync.Receiver(transport) as receiver:
        for version in range(1, VERSIONS + 1):
            assert receiver.receive(into, timeout=TIMEOUT_S) == version == receiver.version
            assert not receiver.dirty
            expected = whole_of(version)
            assert_same_bits(into, sharded(expected, mesh, 1) if mesh is not None else expected, f"version {version}")
            if not waits:
                dist.barrier()
        dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("publishers", "receivers"),
    [pytest.param(*counts, marks=() if counts in QUICK else pytest.mark.slow) for counts in COUNTS],
)
def test_fifty_versions_in_a_row_arrive_bit_by_bit(tmp_path: Path, kind: str, publishers: int, receivers: int) -> None:
    bypass = (publishers + receivers) % 2 == 0
    run_job(versions_in_a_row, nproc=publishers + receivers, args=[tmp_path, kind, publishers, bypass])


def fsdp_to_tensor_parallel(place: str, kind: str, versions: str) -> None:
    publishes, group, mesh = roles(2)
    assert mesh is not None
    transport = transport_of(kind, Path(place), group)
    if publishes:
        with holdfast.sync.Publisher(transport, bucket_bytes=512, receivers=2) as publisher:
            for version in range(int(versions)):
                model = Net()
                fill(model, f"version {version}")
                model = fsdp(model, mesh)
                publisher.publish(dict(model.named_parameters()), version, timeout=TIMEOUT_S)
                if kind in STAGED:
                    dist.barrier()
            dist.barrier()
        return
    model = Net()
    fill(model, "before")
    model = tensor_parallel(model, mesh)
    mean = model.mean.clone()
    with holdfast.sync.Receiver(transport) as receiver:
        for version in range(int(versions)):
            assert receiver.receive(model, timeout=TIMEOUT_S, streaming=version % 3 == 1) == version
            expected = Net()
            fill(expected, f"version {version}")
            expected = tensor_parallel(expected, mesh)
            found = dict(model.named_parameters())
            assert_same_bits(found, dict(expected.named_parameters()), f"version {version}")
            assert torch.equal(model.mean, mean)  # a buffer that isn't published
            if kind in STAGED:
                dist.barrier()
        dist.barrier()


@pytest.mark.parametrize("versions", [3, pytest.param(VERSIONS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_from_two_ranks_of_fsdp_to_two_of_tensor_parallelism(
    tmp_path: Path, kind: str, versions: int
) -> None:
    run_job(fsdp_to_tensor_parallel, nproc=4, args=[tmp_path, kind, versions])
