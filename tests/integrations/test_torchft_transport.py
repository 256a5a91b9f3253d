"""`holdfast.integrations.torchft.CheckpointTransport`: TorchFT's contract for transports, beside TorchFT's own."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torchft.checkpointing import transport as torchft_transport
from torchft.checkpointing.http_transport import HTTPTransport

import holdfast
from holdfast.integrations.torchft import CheckpointTransport

T = timedelta(seconds=20)
Make = Callable[..., CheckpointTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[CheckpointTransport] = []

    def one(**options: Any) -> CheckpointTransport:
        made.append(CheckpointTransport(**options))
        return made[-1]

    yield one
    for transport in made:
        transport.shutdown()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def states() -> dict[str, Any]:
    """Return what TorchFT's managers send: of modules, optimizers, schedulers and the user's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Conv1d(3, 2, 1))
    model.tied = nn.Linear(3, 4, bias=False)
    model.tied.weight = nn.Parameter(model[0].weight.detach())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model[:2](torch.ones(5, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    return {
        "user": {
            "default": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            "scheduler": scheduler.state_dict(),
            "rng": (torch.get_rng_state(), random.getstate()),
            "dtensor": DTensor.from_local(torch.arange(6.0), mesh, [Replicate()]),
            7: [{(1, "a"): torch.ones(2).bfloat16()}, None, {3, 4}, defaultdict(int, {2: 3}), b"bytes"],
        },
        "torchft": {"step": 3, "batches_committed": 6},
    }


def check_same(ours: Any, theirs: Any, where: str = "state") -> None:
    assert type(ours) is type(theirs), where
    if isinstance(theirs, DTensor):
        assert ours._spec == theirs._spec, where
        check_same(ours.to_local(), theirs.to_local(), where)
        assert torch.equal(ours.full_tensor(), theirs.full_tensor()), where
    elif isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.device, ours.stride()) == (theirs.dtype, theirs.device, theirs.stride()), where
        assert ours.requires_grad == theirs.requires_grad, where
        assert torch.equal(ours, theirs), where
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key, value in theirs.items():
            check_same(ours[key], value, f"{where}[{key!r}]")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for at, value in enumerate(theirs):
            check_same(ours[at], value, f"{where}[{at}]")
    else:
        assert ours == theirs, where


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # HTTPTransport's own
def test_what_arrives_is_what_http_transport_gives(make: Make, group: None) -> None:
    sent = states()
    theirs, ours = HTTPTransport(T, num_chunks=0), make()
    assert isinstance(ours, torchft_transport.CheckpointTransport)
    found = []
    for transport in (ours, theirs):
        transport.send_checkpoint([1], 3, sent, T)
        found.append(transport.recv_checkpoint(0, transport.metadata(), 3, T))
    theirs.shutdown()
    theirs._server.server_close()
    check_same(*found)
    model = found[0]["user"]["default"]["model"]
    assert type(model) is OrderedDict
    assert model._metadata == sent["user"]["default"]["model"]._metadata  # which HTTPTransport loses
    assert model["0.weight"].data_ptr() == model["tied.weight"].data_ptr()


def test_three_replicas_recover_in_turn(make: Make) -> None:
    """TorchFT's own scenario: two recover, then one, then nobody is there in time, and a sender isn't held by that."""
    barrier, places = threading.Barrier(3, timeout=20), [""]
    state = {"w": torch.arange(100.0), "n": 1234, "s": "str"}

    def run(rank: int) -> None:
        transport = make()
        if rank == 0:
            places[0] = transport.metadata()
        barrier.wait()
        for step, receivers in ((1, [1, 2]), (2, [2])):
            if rank == 0:
                transport.send_checkpoint(receivers, step, state, T)
            elif rank in receivers:
                check_same(transport.recv_checkpoint(0, places[0], step, T), state)
            barrier.wait()
            transport.disallow_checkpoint()
        if rank == 2:
            with pytest.raises(Exception, match=r".*(Timed out|timed out|timeout|time out).*"):
                transport.recv_checkpoint(0, places[0], 3, timedelta(milliseconds=10))
            transport.send_checkpoint([0], 4, state, T)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(run, rank) for rank in range(3)]:
            future.result(60)


def test_another_step_is_an_error_at_once_and_allowing_twice_is_fine(make: Make) -> None:
    transport = make()
    transport.disallow_checkpoint()  # before anything was allowed
    transport.disallow_checkpoint()
    for step in (1234, 2345):
        transport.send_checkpoint([], step, {"state": step}, T)
        assert transport.recv_checkpoint(0, transport.metadata(), step, T) == {"state": step}
    with pytest.raises(holdfast.CheckpointNotFound, match=r"serving step 2345, and was asked for step 1234"):
        transport.recv_checkpoint(0, transport.metadata(), 1234, T)
    with pytest.raises(TimeoutError):
        transport.recv_checkpoint(0, transport.metadata(), 2345, timedelta(0))
    transport.disallow_checkpoint()
    transport.disallow_checkpoint()
    with pytest.raises(TimeoutError):
        transport.recv_checkpoint(0, transport.metadata(), 2345, timedelta(seconds=0.2))
    transport.shutdown()
    transport.shutdown(wait=False)


def test_what_is_sent_is_as_it_was_even_if_training_goes_on(make: Make) -> None:
    """HTTPTransport reads tensors of the CPU while it sends them: it has to keep training waiting."""
    transport, weight = make(), torch.ones(8 << 20)
    transport.send_checkpoint([1], 1, {"w": weight}, T)
    weight.zero_()
    assert torch.equal(transport.recv_checkpoint(0, transport.metadata(), 1, T)["w"], torch.ones(8 << 20))


def test_a_receiver_that_hangs_does_not_hold_training(make: Make) -> None:
    import socket

    import msgspec

    from holdfast.sync import handover

    transport = make()
    transport.send_checkpoint([1], 1, {"w": torch.ones(16 << 20)}, T)
    place = msgspec.json.decode(transport.metadata(), type=handover.Address)
    with socket.create_connection(("127.0.0.1", place.port)) as sock:
        wire = handover._Wire(sock, handover.Deadline.after(5), "sender", "test")
        wire.say(handover.AskState(handover._PROTOCOL, place.token, 1, 60.0))
        wire.hear(handover.StateHead)
        began = time.monotonic()
        transport.disallow_checkpoint()
        transport.send_checkpoint([1], 2, {"w": torch.ones(2)}, T)
        assert torch.equal(transport.recv_checkpoint(0, transport.metadata(), 2, T)["w"], torch.ones(2))
        transport.shutdown()
        assert time.monotonic() - began < 5


def test_a_value_that_would_run_code_is_named_on_both_sides(make: Make) -> None:
    class Own:
        pass

    transport = make()
    with pytest.raises(holdfast.ConfigError, match=r"\['user'\]\['default'\]\['own'\].*Own"):
        transport.send_checkpoint([1], 1, {"user": {"default": {"own": Own()}}}, T)
    with pytest.raises(holdfast.CheckpointNotFound, match=r"\['user'\]\['default'\]\['own'\].*Own"):
        transport.recv_checkpoint(0, transport.metadata(), 1, T)
    with pytest.raises(holdfast.ConfigError, match="use the same transport"):
        transport.recv_checkpoint(0, "http://host:1/checkpoint/", 1, T)


def test_it_is_received_into_the_tensors_of_a_replica(make: Make) -> None:
    own, order = {"user": {"default": {"w": torch.zeros(9)}}}, []
    weight = own["user"]["default"]["w"]
    sender = make()
    receiver = make(state_dict=lambda: own, before_update=lambda: order.append(weight.sum().item()))
    sent = {"user": {"default": {"w": torch.arange(9.0), "new": torch.ones(2)}}, "torchft": {"step": 1}}
    sender.send_checkpoint([1], 1, sent, T)
    found = receiver.recv_checkpoint(0, sender.metadata(), 1, T)
    assert found["user"]["default"]["w"] is weight
    assert order == [0.0]
    check_same(found, sent)


def test_quantized_states_come_back_as_their_class(make: Make) -> None:
    quantize = pytest.importorskip("torchao.optim")
    weight = nn.Parameter(torch.randn(128, 128))
    optimizer = quantize.AdamW8bit([weight], block_size=128)
    weight.square().sum().backward()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    sent = {"optimizer": optimizer.state_dict()}
    transport = make()
    transport.send_checkpoint([1], 1, sent, T)
    found = transport.recv_checkpoint(0, transport.metadata(), 1, T)
    mine, given = sent["optimizer"]["state"][0]["exp_avg"], found["optimizer"]["state"][0]["exp_avg"]
    assert type(given) is type(mine)
    assert type(mine) is not torch.Tensor
    assert torch.equal(given.codes, mine.codes)
    assert torch.equal(given.dequantize(), mine.dequantize())
