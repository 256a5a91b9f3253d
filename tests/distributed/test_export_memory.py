"""What an export takes of a rank's memory, measured: its share in the export's dtype, and 64 MiB.

Of the trainer that is the most it ever had resident, as the kernel counts it; of its engines what they have for
themselves, image and all being the trainer's as well. Captures that checkpoints take, too, are not an export's.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))

from _object_server import Server
from _on_stores import set_environment

import holdfast

MIB = 1 << 20
BUFFERS = 64 * MIB
WIDTH = 2048
LAYER_BYTES = 4 * WIDTH * WIDTH


def status(pid: int | str, field: str) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(f"{field}:")), 0)


def own_bytes_of_engines() -> int:
    """Memory that engines share with nobody."""
    found = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                found += sum(status(pid, "RssAnon") for pid in file.read().split() if is_engine(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    return found


def is_engine(pid: str) -> bool:
    """Not what is about to become one: that is this process once more, with the same memory."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"holdfast.engine.process" in file.read()


class Extra:
    """Bytes beyond what there was when it began; valid at its end."""

    trainer = engines = 0


@contextmanager
def measured() -> Iterator[Extra]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken for free now
    extra, over = Extra(), threading.Event()
    engines_before = own_bytes_of_engines()

    def look() -> None:
        while not over.wait(0.01):
            extra.engines = max(extra.engines, own_bytes_of_engines() - engines_before)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the most it had is counted anew
    before = status("self", "VmRSS")
    try:
        yield extra
    finally:
        extra.trainer = status("self", "VmHWM") - before
        over.set()
        looking.join(10)


def sharded_model(layers: int, world: int) -> nn.Module:
    """Half of the layers cut by FSDP2 alone, half by tensor parallelism below it: rows, columns and strided shards.

    Nobody ever has it whole: it is made on the meta device, cut, and then given memory.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    flat = init_device_mesh("cpu", (world,))
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    for number, layer in enumerate(model):
        if number % 2:
            parallelize_module(layer, mesh["tensor"], ColwiseParallel() if number % 4 == 1 else RowwiseParallel())
            fully_shard(layer, mesh=mesh["data"])
        else:
            fully_shard(layer, mesh=flat)
    model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            local = parameter.to_local()
            local.copy_(torch.arange(local.shape[1]).expand_as(local)).add_(number)
    return model


def check_values(path: Path | str, layers: int) -> None:
    exported = holdfast.open(path)
    for number in range(layers):
        rows = exported.read(f"{number}.weight", (slice(WIDTH // 2 - 1, WIDTH // 2 + 1),))
        assert rows.dtype == torch.bfloat16
        # By columns: those of a row-wise layer count on from each shard's first.
        found = sorted({int(value) for value in rows.float().flatten().tolist()})
        assert found[0] == number


def memory_of_exports(place: str, layers_text: str) -> None:
    root, rank, world = Path(place), dist.get_rank(), dist.get_world_size()
    layers = int(layers_text)
    dist.barrier()
    with measured() as small:  # imports, links, caches, and what an engine takes that writes little
        holdfast.export_hf(sharded_model(4, world), root / "small", dtype="bfloat16")
    model = sharded_model(layers, world)
    share = layers * LAYER_BYTES // 2 // world

    dist.barrier()
    with measured() as extra:
        path = holdfast.export_hf(model, root / "now", dtype="bfloat16")
    if rank == 0:
        check_values(path, layers)
    extra.engines -= small.engines  # a process of its own, again
    check("at once", extra, share)

    export = holdfast.HFExport(root / "hf", every=2, dtype="bfloat16")
    config = holdfast.CheckpointConfig(every=1)
    with holdfast.CheckpointManager(root / "run", {"model": model}, config=config, exports=[export]) as manager:
        manager.step(1)
        manager.wait()
        dist.barrier()
        with measured() as extra:
            manager.step(2)
            manager.wait()
    check("beside a checkpoint", extra, share)

    del model, manager
    dist.barrier()
    with measured() as extra:
        path = holdfast.export_hf(holdfast.open(root / "run" / "step-2"), root / "later", dtype="bfloat16")
    extra.engines -= small.engines
    check("of a checkpoint", extra, share)


def check(what: str, extra: Extra, share: int) -> None:
    trainer, engines, least = (nbytes / MIB for nbytes in (extra.trainer, extra.engines, share))
    said = f"{what}: {trainer:.1f} MiB in the trainer and {engines:.1f} in engines, for a share of {least:.1f}"
    print(said)
    assert share < extra.trainer + extra.engines <= share + BUFFERS, said


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [(2, 12), pytest.param(2, 64, marks=pytest.mark.slow), pytest.param(4, 48, marks=pytest.mark.slow)],
)
def test_an_export_takes_its_share_and_64_mib(ranks: int, layers: int, tmp_path: Path) -> None:
    run_job(memory_of_exports, nproc=ranks, args=[tmp_path, layers])


SHARD_BYTES = 16 * MIB
UPLOADS = 96 * MIB
"""What an engine's HTTP client may take beside the buffers of the exchange: parts that are being sent."""


def memory_on_a_store(endpoint: str, bucket: str, layers_text: str) -> None:
    set_environment(endpoint)
    rank, world, layers = dist.get_rank(), dist.get_world_size(), int(layers_text)
    dist.barrier()
    with measured() as small:
        holdfast.export_hf(sharded_model(4, world), f"s3://{bucket}/small", dtype="bfloat16")
    model = sharded_model(layers, world)
    share = layers * LAYER_BYTES // 2 // world
    dist.barrier()
    with measured() as extra:
        url = holdfast.export_hf(model, f"s3://{bucket}/now", dtype="bfloat16", max_shard_bytes=SHARD_BYTES)
    if rank == 0:
        check_values(url, layers)
    extra.engines -= small.engines
    trainer, engines, least = (nbytes / MIB for nbytes in (extra.trainer, extra.engines, share))
    said = f"on a store: {trainer:.1f} MiB in the trainer and {engines:.1f} in engines, for a share of {least:.1f}"
    print(said)
    assert extra.trainer <= share + SHARD_BYTES + BUFFERS, said
    assert extra.trainer + extra.engines <= share + SHARD_BYTES + BUFFERS + UPLOADS, said


@pytest.mark.parametrize(("ranks", "layers"), [(2, 12), pytest.param(4, 48, marks=pytest.mark.slow)])
def test_on_a_store_it_takes_one_file_more(ranks: int, layers: int, object_server: Server) -> None:
    run_job(memory_on_a_store, nproc=ranks, args=[object_server.endpoint, object_server.bucket(), layers])
