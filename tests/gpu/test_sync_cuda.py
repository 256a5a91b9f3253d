"""Weight sync from device memory: CUDA IPC within a host, and NCCL. Needs devices; skipped without."""

from __future__ import annotations

import multiprocessing
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

HAS_CUDA = torch.cuda.is_available()
VERSIONS = 50
TIMEOUT_S = 60.0


@pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA device")
def test_without_a_device_the_transport_says_so(tmp_path: Path) -> None:
    with pytest.raises(holdfast.ConfigError, match=r"needs a CUDA device.*SharedMemoryTransport") as caught:
        holdfast.sync.CudaIpcTransport(tmp_path)
    assert caught.value.field == "transport"


def transport_of(kind: str, place: str, device: int) -> Any:
    if kind == "cuda ipc":
        return holdfast.sync.CudaIpcTransport(place, device=f"cuda:{device}")
    return holdfast.sync.ProcessGroupTransport(place, "nccl", device=f"cuda:{device}")


def state_of(version: int, device: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    state = {f"w.{index}": torch.randn(300, 7 + index, generator=generator) for index in range(8)}
    state["half"] = torch.randn(1000, generator=generator).bfloat16()
    state["scalar"] = torch.tensor(float(version))
    state["turned"] = torch.randn(50, 90, generator=generator).t()
    state["eight"] = torch.randn(33, generator=generator).to(torch.float8_e4m3fn)
    return {name: tensor.to(f"cuda:{device}") for name, tensor in state.items()}


def receive(kind: str, place: str, device: int, answers: Any) -> None:
    try:
        torch.cuda.set_device(device)
        into = state_of(0, device)
        with holdfast.sync.Receiver(transport_of(kind, place, device)) as receiver:
            answers.put("joined")
            for version in range(1, VERSIONS + 1):
                assert receiver.receive(into, version, TIMEOUT_S, streaming=version % 5 == 0) == version
                for name, tensor in state_of(version, device).items():
                    assert torch.equal(into[name].view(torch.uint8), tensor.view(torch.uint8)), (version, name)
        answers.put("done")
    except BaseException:
        answers.put(traceback.format_exc())


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("kind", ["cuda ipc", "nccl"])
def test_fifty_versions_in_a_row_arrive_bit_by_bit(tmp_path: Path, kind: str, bypass: bool) -> None:
    devices = torch.cuda.device_count()
    if kind == "nccl" and devices < 2:
        pytest.skip("NCCL takes one process a device, and needs two")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=receive, args=(kind, str(tmp_path), 1 if devices > 1 else 0, answers))
    process.start()
    try:
        assert answers.get(timeout=TIMEOUT_S) == "joined"
        publisher = holdfast.sync.Publisher(transport_of(kind, str(tmp_path), 0), 8192, bypass_cpu=bypass)
        staged = holdfast.statistics()["sync_bytes_staged"]
        with publisher:
            for version in range(1, VERSIONS + 1):
                done = publisher.publish(state_of(version, 0), version, TIMEOUT_S)
                assert done.receivers == bypass
                if not bypass:
                    publisher.pin(version)
            assert (holdfast.statistics()["sync_bytes_staged"] == staged) == bypass
            assert answers.get(timeout=TIMEOUT_S) == "done"
    finally:
        process.join(TIMEOUT_S)
        process.kill()
