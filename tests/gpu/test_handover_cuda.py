"""A state of a CUDA device handed over: into new host tensors, and into those of a device."""

from __future__ import annotations

import pytest
import torch

from holdfast.sync.handover import HandoverServer, fetch_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_it_comes_as_it_was_when_it_was_offered() -> None:
    live = {f"w.{n}": torch.randn(3_000_000 + n, device="cuda") for n in range(5)}
    live["turned"] = torch.randn(50, 90, device="cuda").t()
    expected = {name: tensor.cpu() for name, tensor in live.items()}
    server = HandoverServer()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as the quorum's thread does; the last update is still under way on another stream
        torch.cuda._sleep(10_000_000)
        for tensor in live.values():
            tensor.add_(1)
    server.offer(1, live, timeout_s=60)
    for tensor in live.values():
        tensor.zero_()
    found = fetch_state(server.address, 1, timeout_s=60)
    own = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    memory = own["turned"].data_ptr()
    placed = fetch_state(server.address, 1, timeout_s=60, own=own)
    server.close()
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu"
        assert torch.equal(found[name], tensor + 1)
        assert placed[name] is own[name]
        assert torch.equal(own[name].cpu(), tensor + 1)
    assert own["turned"].data_ptr() == memory
