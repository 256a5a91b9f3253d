"""A bucket in spans: both ends cut it alike, and what is large is not copied where it lies as it travels."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.boxes import Box, whole
from holdfast.errors import CheckpointCorrupt, DeadlineExceeded, PeerLost
from holdfast.sync import ProcessGroupTransport, Publisher, Receiver
from holdfast.sync.transports.process_group import SendApart
from holdfast.sync.weights import copy as spans
from holdfast.sync.weights.buckets import BucketPlan, Piece, PieceBox, plan_buckets
from holdfast.sync.weights.copy import OWN_BYTES, Spans
from holdfast.sync.weights.pieces import Local

ROWS = OWN_BYTES // 4096 + 1
"""Of 1,024 float32: a tensor of so many is large."""


def published() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "small": torch.randn(5, 3, generator=generator),
        "scalar": torch.tensor(7.0, dtype=torch.bfloat16),
        "large": torch.randn(ROWS, 1024, generator=generator),
        "none": torch.zeros(0, 4),
        "turned": torch.randn(1024, ROWS, generator=generator).t(),
        "conjugate": torch.randn(ROWS, 1024, dtype=torch.complex64, generator=generator).conj(),
        "bytes": torch.randint(0, 255, (OWN_BYTES + 17,), generator=generator, dtype=torch.uint8),
        "last": torch.randn(300, generator=generator) > 0,
    }


def planned(tensors: dict[str, torch.Tensor]) -> tuple[list[Piece], BucketPlan]:
    table = [
        Piece(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), (0,) * t.dim(), tuple(t.shape))
        for name, t in tensors.items()
    ]
    (plan,) = plan_buckets(table, [[PieceBox(n, p.offsets, p.sizes) for n, p in enumerate(table)]], 64 << 20)
    return table, plan


def sent(parts: list[spans.Placed], places: list[spans.Placed]) -> None:
    """What a transport does: the bytes of each part to the place of the same number."""
    for part, place in zip(parts, places, strict=True):
        place.memory.numpy()[:] = part.memory.numpy()


def test_what_is_large_travels_from_and_to_the_tensors_themselves() -> None:
    tensors = published()
    table, plan = planned(tensors)
    pieces = [Local(piece.box, tensors[piece.name]) for piece in table]
    slot, theirs = torch.zeros(plan.nbytes, dtype=torch.uint8), torch.zeros(plan.nbytes, dtype=torch.uint8)
    sender, receiver = Spans(plan), Spans(plan)
    into = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    destinations = [[Local(piece.box, into[piece.name])] for piece in table]
    parts, places = sender.gather(pieces, slot), receiver.places(destinations, theirs)
    named = ["small, scalar", "large", "turned", "conjugate", "bytes", "last"]
    assert [name for name, part in zip(named, parts, strict=True) if part.own] == ["large", "bytes"]
    assert [name for name, place in zip(named, places, strict=True) if not place.own] == ["small, scalar", "last"]
    assert parts[1].memory.data_ptr() == tensors["large"].data_ptr()
    assert places[2].memory.data_ptr() == into["turned"].data_ptr(), "it is contiguous at the receiver"
    sent(parts, places)
    assert receiver.take(places, destinations, theirs) == spans.span_checksum(parts)
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    places[1].memory[5] ^= 1
    assert receiver.take(places, destinations, theirs) != spans.span_checksum(parts)


def test_a_span_with_several_places_goes_by_way_of_the_slot() -> None:
    tensors = {"large": torch.randn(2 * ROWS, 1024)}
    _, plan = planned(tensors)
    halves = torch.zeros(ROWS, 1024), torch.zeros(ROWS, 1024)
    boxes = (Box((0, 0), (ROWS, 1024)), Box((ROWS, 0), (ROWS, 1024)))
    destinations = [[Local(box, half) for box, half in zip(boxes, halves, strict=True)]]
    slot = torch.zeros(plan.nbytes, dtype=torch.uint8)
    parts = Spans(plan).gather([Local(whole((2 * ROWS, 1024)), tensors["large"])], torch.empty(0, dtype=torch.uint8))
    places = Spans(plan).places(destinations, slot)
    assert [(part.own, place.own) for part, place in zip(parts, places, strict=True)] == [(True, False)]
    sent(parts, places)
    assert Spans(plan).take(places, destinations, slot) == spans.span_checksum(parts)
    assert torch.equal(torch.cat(halves), tensors["large"])


@pytest.mark.parametrize("inference", [False, True])
def test_who_looks_at_versions_sees_that_a_tensor_was_received_into(inference: bool) -> None:
    tensors = {"large": torch.randn(ROWS, 1024)}
    table, plan = planned(tensors)
    with torch.inference_mode(inference):
        into = torch.zeros(ROWS, 1024)
    destinations = [[Local(table[0].box, into)]]
    slot = torch.empty(plan.nbytes, dtype=torch.uint8)
    before = None if inference else into._version
    places = Spans(plan).places(destinations, slot)
    assert places[0].own
    if before is not None:
        assert into._version > before, "before the first byte comes"
        before = into._version
    sent(Spans(plan).gather([Local(table[0].box, tensors["large"])], slot), places)
    Spans(plan).take(places, destinations, slot)
    assert torch.equal(into, tensors["large"])
    if before is not None:
        assert into._version > before, "and behind the last one"


# Over gloo, between threads of this process ----------------------------------------------------------------------

TIMEOUT_S = 120.0


def bring(place: Path, versions: int, receivers: int, *, streaming: bool) -> list[Any]:
    """What each receiver has, or what it raised, after so many versions that are published."""

    def receive(_: int) -> Any:
        into = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in published().items()}
        with Receiver(ProcessGroupTransport(place, "gloo")) as receiver:
            for version in range(1, versions + 1):
                try:
                    assert receiver.receive(into, timeout=TIMEOUT_S, streaming=streaming) == version
                except CheckpointCorrupt as error:
                    assert receiver.dirty == streaming
                    return error, into
        return into

    with ThreadPoolExecutor(receivers) as pool:
        asked = [pool.submit(receive, number) for number in range(receivers)]
        with Publisher(ProcessGroupTransport(place, "gloo"), bucket_bytes=5 << 20, receivers=receivers) as publisher:
            for version in range(1, versions + 1):
                weights = {name: tensor.roll(version) for name, tensor in published().items()}
                try:
                    assert publisher.publish(weights, version, timeout=TIMEOUT_S).receivers == receivers
                except CheckpointCorrupt:
                    break
        return [one.result(TIMEOUT_S) for one in asked]


@pytest.mark.parametrize(("receivers", "streaming"), [(1, False), (1, True), (2, False)])
def test_versions_of_large_and_small_tensors_arrive_over_gloo(tmp_path: Path, receivers: int, streaming: bool) -> None:
    """One receiver is sent to; two have a broadcast."""
    for into in bring(tmp_path, 3, receivers, streaming=streaming):
        assert all(torch.equal(into[name], tensor.roll(3)) for name, tensor in published().items())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_bit_that_flips_on_the_way_is_caught_where_no_slot_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    start_apart = SendApart.start_apart

    def flip(channel: SendApart, seq: int, parts: list[torch.Tensor], lane: Any) -> None:
        damaged = [part.clone() for part in parts]
        largest = max(damaged, key=torch.numel)
        if largest.numel() >= OWN_BYTES:
            largest[OWN_BYTES // 2] ^= 16
        start_apart(channel, seq, damaged, lane)

    monkeypatch.setattr(SendApart, "start_apart", flip)
    ((error, into),) = bring(tmp_path, 1, 1, streaming=streaming)
    assert "did not arrive as it was sent" in str(error)
    assert streaming or not any(tensor.any() for tensor in into.values())


def test_a_transfer_that_breaks_in_the_middle_of_a_bucket_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_apart, broken = SendApart.start_apart, []

    def once_in_part(channel: SendApart, seq: int, parts: list[torch.Tensor], lane: Any) -> None:
        if broken or seq == 0:
            start_apart(channel, seq, parts, lane)
            return
        broken.append(seq)
        start_apart(channel, seq, parts[:1], lane)
        channel.close()
        raise PeerLost("the wire was cut", peer="a member", phase="a bucket")

    monkeypatch.setattr(SendApart, "start_apart", once_in_part)
    (into,) = bring(tmp_path, 2, 1, streaming=False)
    assert broken == [1]
    assert all(torch.equal(into[name], tensor.roll(2)) for name, tensor in published().items())


def test_nothing_arrives_any_more_when_a_receive_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_apart, given_up = SendApart.start_apart, threading.Event()

    def late(channel: SendApart, seq: int, parts: list[torch.Tensor], lane: Any) -> None:
        assert given_up.wait(TIMEOUT_S)
        start_apart(channel, seq, parts, lane)

    monkeypatch.setattr(SendApart, "start_apart", late)
    weights = published()
    into = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights.items()}
    with (
        ThreadPoolExecutor(1) as pool,
        Publisher(ProcessGroupTransport(tmp_path, "gloo")) as publisher,
        Receiver(ProcessGroupTransport(tmp_path, "gloo")) as receiver,
    ):
        publishing = pool.submit(publisher.publish, weights, 1, TIMEOUT_S)
        with pytest.raises(DeadlineExceeded):
            receiver.receive(into, timeout=1.0, streaming=True)
        assert receiver.dirty
        given_up.set()
        assert publishing.result(TIMEOUT_S).receivers == 0
        assert not any(tensor.any() for tensor in into.values()), "it was given up before the first byte"
        monkeypatch.undo()
        publishing = pool.submit(publisher.publish, weights, 2, TIMEOUT_S)
        assert receiver.receive(into, timeout=TIMEOUT_S, streaming=True) == 2
        assert publishing.result(TIMEOUT_S).receivers == 1
        assert all(torch.equal(into[name], tensor) for name, tensor in weights.items())
