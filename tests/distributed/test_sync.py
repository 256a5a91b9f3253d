"""Weights from publisher ranks to receivers, in processes of their own: mistakes, damage, what is kept, what changed.

What arrives of every version, from any number of ranks at any number: test_sync_versions.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_job
from sync_sides import TIMEOUT_S, SlotTransport, assert_same_bits, roles, sharded, transport_of, whole_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import _torch_compat as compat
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, DeadlineExceeded, StateMismatch

# mistakes --------------------------------------------------------------------------------------------------------


def mistakes_are_told_to_both_sides(place: str, kind: str) -> None:
    publishes, group, _ = roles(1)
    transport = transport_of(kind, Path(place), group)
    right = {"a": torch.ones(4, 3), "b": torch.ones(5)}
    wrong: list[tuple[dict[str, torch.Tensor], str, tuple[str, ...]]] = [
        ({"a": torch.zeros(4, 3)}, "unexpected", ("b",)),
        ({**{name: torch.zeros_like(t) for name, t in right.items()}, "c": torch.zeros(2)}, "missing", ("c",)),
        ({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, "mismatched", ("a",)),
        ({"a": torch.zeros(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}, "mismatched", ("b",)),
    ]
    if publishes:
        with holdfast.sync.Publisher(transport) as publisher:
            for version, (_, what, names) in enumerate(wrong):
                with pytest.raises(StateMismatch) as caught:
                    publisher.publish(right, version, timeout=TIMEOUT_S)
                assert getattr(caught.value, what) == names
                dist.barrier()  # who asks again at once would get the same version, by now rightly
            assert publisher.publish(right, 10, timeout=TIMEOUT_S).receivers == 1
            for version in (10, 9):
                with pytest.raises(ConfigError, match="isn't greater"):
                    publisher.publish(right, version)
            dist.barrier()
            with pytest.raises(DeadlineExceeded, match="a receiver to ask"):
                publisher.publish(right, 11, timeout=0.3)
        dist.barrier()
        transport = transport_of(kind, Path(place), group)
        publisher = holdfast.sync.Publisher(transport, bucket_bytes=11)
        with pytest.raises(ConfigError, match=r"a row of .a..*12 bytes"):
            publisher.publish(right, 12, timeout=TIMEOUT_S)
        publisher.close()
        dist.barrier()
        with holdfast.sync.Publisher(transport) as publisher:
            with pytest.raises(ConfigError, match="of an earlier publisher"):
                publisher.publish(right, 3, timeout=TIMEOUT_S)
            dist.barrier()
        return
    with holdfast.sync.Receiver(transport) as receiver:
        for into, what, names in wrong:
            before = {name: tensor.clone() for name, tensor in into.items()}
            with pytest.raises(StateMismatch) as caught:
                receiver.receive(into, timeout=TIMEOUT_S)
            assert getattr(caught.value, what) == names
            assert_same_bits(into, before, "after a mistake")
            assert receiver.version is None
            assert not receiver.dirty
            dist.barrier()
        into = {name: torch.zeros_like(tensor) for name, tensor in right.items()}
        assert receiver.receive(into, timeout=TIMEOUT_S) == 10
        assert_same_bits(into, right, "at last")
        with pytest.raises(CheckpointNotFound, match="version 9 is not kept"):
            receiver.receive(into, version=9, timeout=TIMEOUT_S)
        with pytest.raises(DeadlineExceeded, match="newer than 10"):
            receiver.receive(into, timeout=0.2)
        dist.barrier()
        dist.barrier()
        with pytest.raises(ConfigError, match="a row of 'a'"):
            receiver.receive(into, timeout=TIMEOUT_S)
        dist.barrier()
        with pytest.raises(ConfigError, match="of an earlier publisher"):
            receiver.receive(into, timeout=TIMEOUT_S)
        assert receiver.version == 10
        assert_same_bits(into, right, "after all that")
        dist.barrier()


def test_mistakes_are_told_to_both_sides_and_touch_nothing(tmp_path: Path) -> None:
    run_job(mistakes_are_told_to_both_sides, nproc=2, args=[tmp_path, "slots"])


# versions that are kept ------------------------------------------------------------------------------------------


def versions_are_kept(place: str) -> None:
    publishes, group, _ = roles(2)
    transport = transport_of("shared memory", Path(place), group)
    if publishes:
        with holdfast.sync.Publisher(transport, bypass_cpu=False, keep_versions=2) as publisher:
            for version in (1, 2, 3, 4):
                weights = whole_of(version)
                publisher.publish(weights, version, timeout=TIMEOUT_S)
                weights["large"].fill_(-1)  # it is the trainer's again
                if version == 1:
                    publisher.pin(1)
            assert publisher.versions == (1, 3, 4)
            dist.barrier()
            dist.barrier()
            publisher.unpin(1)
            assert publisher.versions == (3, 4)
            dist.barrier()
            dist.barrier()
        return
    into = whole_of(0)
    with holdfast.sync.Receiver(transport) as receiver:
        dist.barrier()
        asked = [None, 1, 3, 4] if dist.get_rank() == 2 else [1, 4, 3, 1]
        for version in asked:
            got = receiver.receive(into, version=version, timeout=TIMEOUT_S)
            assert got == (version or 4) == receiver.version
            assert_same_bits(into, whole_of(got), f"version {got}")
        with pytest.raises(CheckpointNotFound, match=r"version 2 is not kept.*1, 3, 4"):
            receiver.receive(into, version=2, timeout=TIMEOUT_S)
        with pytest.raises(DeadlineExceeded, match="version 5"):
            receiver.receive(into, version=5, timeout=0.2)
        dist.barrier()
        dist.barrier()
        with pytest.raises(CheckpointNotFound, match="version 1 is not kept"):
            receiver.receive(into, version=1, timeout=TIMEOUT_S)
        assert_same_bits(into, whole_of(asked[-1] or 0), "after refusals")
        dist.barrier()


def test_versions_that_are_kept_serve_rollback_and_late_joiners(tmp_path: Path) -> None:
    run_job(versions_are_kept, nproc=4, args=[tmp_path])


# what is damaged, cut short or raised ----------------------------------------------------------------------------


class Flipping(SlotTransport):
    """Slots in which a bit of the slot is flipped, once, after the bucket was packed and hashed."""

    bucket = 5

    def make_channels(self) -> Any:
        channels = super().make_channels()
        plain = channels.send_channel

        def send_channel(addresses: Any, bucket_bytes: int) -> Any:
            made = plain(addresses, bucket_bytes)
            start = made.start

            def flip(seq: int, nbytes: int, lane: Any) -> None:
                if seq == self.bucket:
                    self.bucket = -1
                    made.slot(seq % 2)[nbytes // 2] ^= 4
                start(seq, nbytes, lane)

            made.start = flip
            return made

        channels.send_channel = send_channel
        return channels


def damage_is_caught(place: str, streams: str) -> None:
    publishes, group, _ = roles(1)
    if publishes:
        transport = Flipping(place, process_group=group, peer_timeout_s=10.0)
        with holdfast.sync.Publisher(transport, bucket_bytes=2048) as publisher:
            with pytest.raises(CheckpointCorrupt, match="bucket 5 of version 1 from publisher rank 0"):
                publisher.publish(whole_of(1), 1, timeout=TIMEOUT_S)
            dist.barrier()  # who asks again at once would get the same version, by now whole
            assert publisher.publish(whole_of(2), 2, timeout=TIMEOUT_S).receivers == 1
            dist.barrier()
        return
    into = whole_of(0)
    streaming = streams == "True"
    with holdfast.sync.Receiver(transport_of("slots", Path(place))) as receiver:
        with pytest.raises(CheckpointCorrupt, match="did not arrive as it was sent"):
            receiver.receive(into, timeout=TIMEOUT_S, streaming=streaming)
        assert receiver.version is None
        assert receiver.dirty == streaming
        if not streaming:
            assert_same_bits(into, whole_of(0), "after damage")
        dist.barrier()
        assert receiver.receive(into, timeout=TIMEOUT_S) == 2
        assert not receiver.dirty
        assert_same_bits(into, whole_of(2), "version 2")
        dist.barrier()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_flipped_bit_is_caught_and_the_next_version_goes_through(tmp_path: Path, streaming: bool) -> None:
    run_job(damage_is_caught, nproc=2, args=[tmp_path, streaming])


def functions_are_called(place: str) -> None:
    publishes, group, mesh = roles(2)
    if publishes:
        with holdfast.sync.Publisher(transport_of("slots", Path(place), group), bucket_bytes=2048) as publisher:
            for version in (1, 2):
                publisher.publish(sharded(whole_of(version), mesh, 0), version, timeout=TIMEOUT_S)  # type: ignore[arg-type]
            published = publisher.publish({"a": torch.ones(3)}, 3, timeout=TIMEOUT_S)
            assert (published.receivers, published.lost) == (1, 0)  # it had all of it
            dist.barrier()
        return
    with holdfast.sync.Receiver(transport_of("slots", Path(place))) as receiver:
        kept: dict[int, dict[str, torch.Tensor]] = {1: {}, 2: {}}
        for version, got in kept.items():
            assert receiver.receive(got.__setitem__, timeout=TIMEOUT_S, streaming=version == 2) == version
        for version, got in kept.items():  # also those of the first: nothing is written over what a function was given
            expected = whole_of(version)
            assert_same_bits({name: got[name] for name in expected}, expected, f"version {version}")

        def refuse(name: str, tensor: torch.Tensor) -> None:
            raise RuntimeError(f"no room for {name} of {tensor.numel()}")

        with pytest.raises(RuntimeError, match="no room for a of 3"):
            receiver.receive(refuse, timeout=TIMEOUT_S)
        assert receiver.version == 2
        assert receiver.dirty
        dist.barrier()


def test_a_function_gets_whole_tensors_and_what_it_raises_is_raised(tmp_path: Path) -> None:
    run_job(functions_are_called, nproc=3, args=[tmp_path])


# what is left behind ---------------------------------------------------------------------------------------------


def nothing_grows(place: str, kind: str) -> None:
    publishes, group, _ = roles(2)
    transport = transport_of(kind, Path(place) / "rendezvous", group)
    store, counts = compat.store_of(dist.group.WORLD), []
    if publishes:
        with holdfast.sync.Publisher(transport) as publisher:
            for version in range(1, 24):
                if version == 10:
                    mistaken = {"a": torch.ones(3, dtype=torch.float32 if dist.get_rank() else torch.int32)}
                    with pytest.raises(StateMismatch, match="a"):
                        publisher.publish(mistaken, version, timeout=TIMEOUT_S)
                publisher.publish({"a": torch.full((2 + version % 3,), version)}, version, timeout=TIMEOUT_S)
                dist.barrier()
                dist.barrier()
        return
    with holdfast.sync.Receiver(transport) as receiver:
        for version in range(1, 24):
            got: dict[str, torch.Tensor] = {}
            assert receiver.receive(got.__setitem__, timeout=TIMEOUT_S) == version
            dist.barrier()
            counts.append((store.num_keys(), len(list((Path(place) / "rendezvous").iterdir()))))
            dist.barrier()
    assert len(set(counts[2:])) == 1, counts


@pytest.mark.parametrize("kind", ["slots", "shared memory"])
def test_nothing_that_ranks_tell_one_another_is_left_behind(tmp_path: Path, kind: str) -> None:
    run_job(nothing_grows, nproc=3, args=[tmp_path, kind])


# together with checkpoints ---------------------------------------------------------------------------------------


def captures_are_shared(place: str) -> None:
    publishes, group, mesh = roles(2)
    transport = transport_of("shared memory", Path(place) / "meet", group)
    if not publishes:
        with holdfast.sync.Receiver(transport) as receiver:
            for version in range(1, 5):
                dist.barrier()
                got: dict[str, torch.Tensor] = {}
                assert receiver.receive(got.__setitem__, version, TIMEOUT_S) == version
                if version % 2 == 0:
                    dist.barrier()
                    saved = holdfast.open(Path(place) / "checkpoints" / f"step-{version}")
                    expected = {name: saved.read(f"model.{name}") for name in got}
                    assert_same_bits(got, expected, f"version {version}")
        dist.barrier()
        return
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 6), nn.Linear(6, 5), nn.BatchNorm1d(5))  # the middle one is replicated
    fully_shard(model[0], mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    config = holdfast.CheckpointConfig(every=2)
    with (
        holdfast.CheckpointManager(f"{place}/checkpoints", state, config=config, process_group=group) as manager,
        holdfast.sync.Publisher(transport, bypass_cpu=False, keep_versions=3, manager=manager) as publisher,
    ):
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        for step in range(1, 5):
            model(torch.full((4, 7), float(step))).sum().backward()
            for parameter in model[1].parameters():
                dist.all_reduce(parameter.grad, group=group)
            optimizer.step()
            before = holdfast.statistics()["sync_bytes_staged"]
            manager.step(step)
            publisher.publish(model.state_dict(), step, timeout=TIMEOUT_S)
            staged = torch.tensor(holdfast.statistics()["sync_bytes_staged"] - before)
            dist.all_reduce(staged, group=group)
            whole = sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())
            assert staged == (whole if step % 2 else buffers)
            dist.barrier()
            if step % 2 == 0:
                manager.wait()
                dist.barrier()
        dist.barrier()
    with pytest.raises(ConfigError, match="give both the same process_group"):
        holdfast.sync.Publisher(transport_of("gloo", Path(place) / "other"), bypass_cpu=False, manager=manager)


def test_a_version_takes_the_capture_of_a_checkpoint_of_several_ranks(tmp_path: Path) -> None:
    run_job(captures_are_shared, nproc=3, args=[tmp_path])
