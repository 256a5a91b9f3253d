"""Deltas by element in a directory or a bucket: small, whole or refused, and read as any other version."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _object_server import Server
from test_sync_directory_transport import KINDS, bits

import holdfast
from holdfast import events
from holdfast.errors import CheckpointCorrupt, CheckpointNotFound, ConfigError, HoldfastError
from holdfast.format import manifest as manifests
from holdfast.storage.leases import being_read
from holdfast.sync import DirectoryTransport, Publisher, Receiver
from holdfast.sync.transports import deltas
from holdfast.sync.weights.apply import CallbackTarget

LARGE = 1 << 19
"""Elements of one tensor: two blocks of a record."""


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    large = torch.randn(LARGE + 77, generator=made).bfloat16()
    return {
        **{name: tensor.clone() for name, tensor in KINDS.items()},
        "large": large,
        "rows": large[:1024].view(32, 32),
    }


def step(weights: dict[str, torch.Tensor], seed: int, share: float = 0.02) -> dict[str, torch.Tensor]:
    """The weights after a step: some elements of each tensor have other bits, among them -0 and NaNs."""
    choose = random.Random(seed)
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in found.items():
        if not tensor.numel() or tensor.is_complex() or tensor.dim() == 0 or choose.random() < 0.2:
            continue
        memory = tensor.contiguous().view(-1).view(torch.uint8)
        where = torch.tensor(choose.sample(range(len(memory)), max(1, int(share * len(memory) / 2))))
        memory[where] ^= 1 if tensor.dtype is torch.bool else 1 + seed % 254
        found[name] = memory.view(tensor.dtype).view(tensor.contiguous().shape)
    odd = found["large"].view(torch.int16)
    odd[choose.randrange(LARGE)], odd[choose.randrange(LARGE)] = -32768, 0x7FC0 + choose.randrange(64)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(bits(found[name]) == bits(expected[name]) for name in expected)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor.resolve_conj()) for name, tensor in state().items()}


def document(root: Path, version: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"version-{version}" / "holdfast.json").read_text())
    return found


def chains(root: Path) -> dict[int, list[int]]:
    """Which versions each one is a delta to."""
    numbers = sorted(int(path.name.partition("-")[2]) for path in root.glob("version-*"))
    return {number: [row["step"] for row in document(root, number).get("chain", [])] for number in numbers}


def publish(root: Path, count: int, first: int = 1, **options: Any) -> list[dict[str, torch.Tensor]]:
    """Publish versions from ``first`` on; return their weights."""
    weights = [state()]
    with Publisher(DirectoryTransport(root), delta="sparse", keep_versions=100, **options) as publisher:
        for version in range(first, first + count):
            publisher.publish(weights[-1], version)
            weights.append(step(weights[-1], version))
    return weights[:-1]


@pytest.mark.parametrize("kind", ["sparse", "steps"])
def test_every_version_reads_as_if_it_were_whole(tmp_path: Path, kind: str) -> None:
    weights = state()
    into, streamed = zeros(), zeros()
    with (
        Publisher(DirectoryTransport(tmp_path), delta=kind, anchor_every=4, keep_versions=100) as publisher,
        Receiver(DirectoryTransport(tmp_path)) as receiver,
        Receiver(DirectoryTransport(tmp_path)) as other,
    ):
        for version in range(1, 8):
            published = publisher.publish(weights, version, meta={"version": version})
            assert receiver.receive(into) == version
            assert receiver.meta == {"version": version}
            assert same(into, weights)
            if version % 2:  # a laggard
                assert other.receive(streamed, streaming=True) == version
                assert same(streamed, weights)
            late = zeros()
            with Receiver(DirectoryTransport(tmp_path)) as new:
                assert new.receive(late) == version
            assert same(late, weights)
            opened = holdfast.open(tmp_path / f"version-{version}")
            assert opened.verify().ok
            assert same({name: opened.read(name) for name in opened.tensors}, weights)
            assert bits(opened.read("rows", (slice(3, 9), slice(5, 6)))) == bits(weights["rows"][3:9, 5:6])
            loaded = zeros()
            holdfast.load(loaded, tmp_path / f"version-{version}")
            assert same(loaded, weights)
            if version not in (1, 5):
                assert published.bytes_sent < LARGE
            weights = step(weights, version)
    assert chains(tmp_path) == {1: [], 2: [1], 3: [1, 2], 4: [1, 2, 3], 5: [], 6: [5], 7: [5, 6]}


def test_a_function_gets_whole_tensors_and_no_more_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = publish(tmp_path, 3)
    monkeypatch.setattr("holdfast.sync.transports.stored_receiving.BATCH_BYTES", 1)
    got: dict[str, torch.Tensor] = {}
    made: list[str] = []
    real = CallbackTarget.memory

    def memory(self: Any, name: str) -> torch.Tensor:
        made.append(name)
        return real(self, name)

    def take(name: str, tensor: torch.Tensor) -> None:
        assert len(set(made) - got.keys()) == 1, "one batch at a time"
        got[name] = tensor

    monkeypatch.setattr(CallbackTarget, "memory", memory)
    with Receiver(DirectoryTransport(tmp_path)) as receiver:
        assert receiver.receive(take, streaming=True) == 3
    assert same(got, weights[-1])


def test_a_state_of_a_delta_is_nested_as_that_of_its_anchor(tmp_path: Path) -> None:
    with Publisher(DirectoryTransport(tmp_path, prefix="model"), delta="sparse") as publisher:
        for version in (1, 2):
            publisher.publish({"up.weight": torch.arange(4096.0) + (torch.arange(4096) == version)}, version)
    found = holdfast.open(tmp_path / "version-2").state()
    assert torch.equal(found["model"]["up.weight"], torch.arange(4096.0) + (torch.arange(4096) == 2))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_readers_and_older_ones_are_kept_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = publish(tmp_path, 2)
    assert (tmp_path / "version-1" / ".metadata").exists()
    into = zeros()
    dcp.load(into, checkpoint_id=tmp_path / "version-1", no_dist=True)
    assert same(into, weights[0])
    assert not (tmp_path / "version-2" / ".metadata").exists()
    delta = holdfast.open(tmp_path / "version-2")
    with pytest.raises(ConfigError, match="a delta to version-1"):
        delta.write_dcp_metadata()
    with pytest.raises(ConfigError, match="stored as a delta"):
        delta.map("large")
    monkeypatch.setattr(manifests, "_KNOWN", (manifests.FORMAT, manifests.EXPORT_FORMAT))
    with pytest.raises(ConfigError, match="format"):
        holdfast.open(tmp_path / "version-2")
    assert same({name: holdfast.open(tmp_path / "version-1").read(name) for name in into}, weights[0])


def test_who_holds_a_member_reads_what_is_newer_only(tmp_path: Path) -> None:
    weights = state()
    read: list[int] = []
    into = zeros()
    with (
        Publisher(DirectoryTransport(tmp_path), delta="sparse") as publisher,
        Receiver(DirectoryTransport(tmp_path)) as receiver,
    ):
        for version in range(1, 5):
            publisher.publish(weights, version)
            before = events.statistics().counters.get("bytes_read", 0)
            receiver.receive(into)
            read.append(events.statistics().counters.get("bytes_read", 0) - before)
            weights = step(weights, version)
    assert read[0] > 2 * LARGE
    assert max(read[1:]) < read[0] / 5, read


def test_the_command_line_says_what_a_version_needs(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    chains = {row["name"]: row["chain"] for row in json.loads(holdfast_told("ls", tmp_path, "--json"))["entries"]}
    assert chains == {"version-1": [], "version-2": ["version-1"], "version-3": ["version-1", "version-2"]}
    shown = holdfast_told("show", tmp_path / "version-3")
    assert re.search(r"delta to +version-1, version-2", shown), shown
    assert "large" in shown
    holdfast_told("verify", tmp_path / "version-3")


def holdfast_told(*arguments: Any) -> str:
    """What a command prints that succeeds."""
    command = [sys.executable, "-m", "holdfast", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60.0).stdout


# What makes a version whole -------------------------------------------------------------------------------------------


def test_other_tensors_make_an_anchor(tmp_path: Path) -> None:
    more = [
        {"w": torch.zeros(9000)},
        {"w": torch.ones(9000)},
        {"w": torch.ones(9000), "v": torch.ones(2)},
        {"w": torch.ones(9000).bfloat16(), "v": torch.ones(2)},
        {"w": torch.ones(90, 100).bfloat16(), "v": torch.ones(2)},
    ]
    with Publisher(DirectoryTransport(tmp_path), delta=True, keep_versions=100, delta_bytes=1 << 30) as publisher:
        for version, weights in enumerate(more, 1):
            publisher.publish(weights, version)
            into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            with Receiver(DirectoryTransport(tmp_path)) as receiver:
                assert receiver.receive(into) == version
            assert same(into, weights)
    assert chains(tmp_path) == {1: [], 2: [1], 3: [], 4: [], 5: []}


@pytest.mark.parametrize(("delta_bytes", "expected"), [(None, 5), (1, 1), (1 << 30, 10)])
def test_deltas_take_so_many_bytes_together(tmp_path: Path, delta_bytes: int | None, expected: int) -> None:
    weights = {"w": torch.randn(LARGE)}
    longest = 0
    with Publisher(
        DirectoryTransport(tmp_path), delta="sparse", delta_bytes=delta_bytes, keep_versions=100
    ) as publisher:
        for version in range(1, 11):
            publisher.publish(weights, version)
            weights = {"w": weights["w"].clone()}
            where = torch.rand(LARGE) < 0.12
            weights["w"][where] = torch.randn(int(where.sum()))
    longest = max(map(len, chains(tmp_path).values())) + 1
    assert longest == expected


def test_a_restarted_publisher_begins_with_an_anchor(tmp_path: Path) -> None:
    publish(tmp_path, 2)
    weights = publish(tmp_path, 2, first=3)
    assert chains(tmp_path) == {1: [], 2: [1], 3: [], 4: [3]}
    into = zeros()
    with Receiver(DirectoryTransport(tmp_path)) as receiver:
        receiver.receive(into)
    assert same(into, weights[-1])


def test_after_a_failure_comes_an_anchor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = state()
    with Publisher(DirectoryTransport(tmp_path), delta="sparse", keep_versions=100) as publisher:
        publisher.publish(weights, 1)
        publisher.publish(step(weights, 1), 2)
        with monkeypatch.context() as patched:
            patched.setattr(deltas.DeltaSeries, "agree", _refused)
            with pytest.raises(CheckpointNotFound):
                publisher.publish(step(weights, 2), 3)
        publisher.publish(step(weights, 3), 4)
        publisher.publish(step(weights, 4), 5)
    assert chains(tmp_path) == {1: [], 2: [1], 4: [], 5: [4]}
    into = zeros()
    with Receiver(DirectoryTransport(tmp_path)) as receiver:
        receiver.receive(into)
    assert same(into, step(weights, 4))


def _refused(*_: Any, **__: Any) -> Any:
    raise CheckpointNotFound("for the test", path="")


def test_a_publisher_that_cannot_encode_publishes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas.DeltaSeries, "encode", _without_memory)
    weights = publish(tmp_path, 2)
    assert chains(tmp_path) == {1: [], 2: []}
    opened = holdfast.open(tmp_path / "version-2")
    assert same({name: opened.read(name) for name in opened.tensors}, weights[-1])


def _without_memory(*_: Any) -> Any:
    raise MemoryError


# Damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = struct.unpack("B", file.read(1))
        file.seek(at)
        file.write(struct.pack("B", byte ^ 0x10))


def data_file(root: Path, version: int) -> Path:
    (found,) = (root / f"version-{version}").glob("*.distcp")
    return found


def remove_member(root: Path) -> str:
    shutil.rmtree(root / "version-2")
    return "version-2"


def replace_member(root: Path) -> str:
    publish(root / "other", 2)
    shutil.rmtree(root / "version-2")
    shutil.copytree(root / "other" / "version-1", root / "version-2")
    return "version-2"


def damage_delta(root: Path) -> str:
    path = data_file(root, 2)
    flip(path, path.stat().st_size // 2)
    return "version-2"


def damage_anchor(root: Path) -> str:
    path = data_file(root, 1)
    flip(path, path.stat().st_size // 2)
    return "version-1"


@pytest.mark.parametrize("harm", [remove_member, replace_member, damage_delta, damage_anchor])
def test_what_is_wrong_with_a_member_is_said(tmp_path: Path, harm: Callable[[Path], str]) -> None:
    publish(tmp_path, 3)
    named = harm(tmp_path)
    into = zeros()
    with Receiver(DirectoryTransport(tmp_path)) as receiver, pytest.raises(CheckpointCorrupt, match=named):
        receiver.receive(into)
    assert same(into, zeros())
    with pytest.raises(CheckpointCorrupt, match=named):
        holdfast.load(into, tmp_path / "version-3")
    found: list[str] = []
    try:
        found = [problem.message for problem in holdfast.open(tmp_path / "version-3").verify().problems]
    except CheckpointCorrupt as error:
        found = [str(error)]
    assert any(named in message for message in found), found


def test_what_was_torn_in_memory_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into, weights = zeros(), state()
    with (
        Publisher(DirectoryTransport(tmp_path), delta="sparse") as publisher,
        Receiver(DirectoryTransport(tmp_path)) as receiver,
    ):
        publisher.publish(weights, 1)
        receiver.receive(into)
        publisher.publish(weights := step(weights, 1), 2)
        receiver.receive(into)
        publisher.publish(weights := step(weights, 2), 3)
        real, torn = deltas.bring_forward, []

        def tear(destination: Any, *arguments: Any) -> Any:
            memory = destination.memory("large")
            memory.view(torch.int16)[::7] += 1
            torn.append(memory)
            return real(destination, *arguments)

        monkeypatch.setattr("holdfast.sync.transports.stored_receiving.bring_forward", tear)
        receiver.receive(into)
    assert torn
    assert same(into, weights)


# Retention ---------------------------------------------------------------------------------------------------------


def test_what_a_kept_version_needs_is_kept(tmp_path: Path) -> None:
    weights = state()
    with Publisher(DirectoryTransport(tmp_path), delta="sparse", anchor_every=3, keep_versions=2) as publisher:
        seen = []
        for version in range(1, 9):
            publisher.publish(weights, version)
            if version == 5:
                publisher.pin(5)
            seen.append(sorted(chains(tmp_path)))
            for number, chain in chains(tmp_path).items():
                assert set(chain) <= set(seen[-1]), f"{number} lacks one of {chain}"
            assert holdfast.open(tmp_path / f"version-{version}").verify().ok
            weights = step(weights, version)
    assert seen == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [4, 5], [4, 5, 6], [4, 5, 6, 7], [4, 5, 7, 8]]


def test_a_version_being_read_keeps_its_chain(tmp_path: Path) -> None:
    weights = state()
    with Publisher(DirectoryTransport(tmp_path), delta="sparse", anchor_every=3, keep_versions=1) as publisher:
        for version in (1, 2, 3):
            publisher.publish(weights, version)
        with being_read(str(tmp_path / "version-3")):
            publisher.publish(weights, 4)
            assert sorted(chains(tmp_path)) == [1, 2, 3, 4]
        publisher.publish(weights, 5)
        assert sorted(chains(tmp_path)) == [4, 5]


def test_a_deletion_that_breaks_off_leaves_no_torn_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = state()
    with Publisher(DirectoryTransport(tmp_path), delta="sparse", anchor_every=4, keep_versions=1) as publisher:
        for version in range(1, 5):
            publisher.publish(weights, version)
        storage = type(publisher._half._storage)  # type: ignore[attr-defined]
        real, left = storage.hide, 2

        def hide(self: Any, name: str) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise HoldfastError("for the test")
            return real(self, name)

        with monkeypatch.context() as patched:
            patched.setattr(storage, "hide", hide)
            publisher.publish(weights, 5)
        assert sorted(chains(tmp_path)) == [1, 2, 5]
        assert holdfast.open(tmp_path / "version-2").verify().ok
        publisher.publish(weights, 6)
        assert sorted(chains(tmp_path)) == [5, 6]


# Object stores -----------------------------------------------------------------------------------------------------


def test_deltas_on_an_object_store(object_server: Server) -> None:
    place = f"s3://{object_server.bucket()}/runs/versions"

    def transport() -> DirectoryTransport:
        return DirectoryTransport(place, store_options=object_server.options)

    weights, into = state(), zeros()
    with (
        Publisher(transport(), delta="sparse", anchor_every=3, keep_versions=2) as publisher,
        Receiver(transport()) as receiver,
    ):
        for version in range(1, 6):
            published = publisher.publish(weights, version)
            assert receiver.receive(into, timeout=20.0) == version
            assert same(into, weights)
            late = zeros()
            with Receiver(transport()) as new:
                assert new.receive(late, timeout=20.0) == version
            assert same(late, weights)
            assert (published.bytes_sent < LARGE) == (version not in (1, 4))
            weights = step(weights, version)
        assert publisher.versions == (4, 5)
    publisher = Publisher(transport(), delta="sparse")  # tidies what is there
    publisher.close()
    with Receiver(transport()) as receiver:
        assert receiver.receive(late, timeout=20.0) == 5
