"""Weight versions through a directory: what is published is what is received, whole, the right one, or not at all."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    RootLocked,
    StateMismatch,
)
from holdfast.storage.leases import being_read
from holdfast.sync import DirectoryTransport, Publisher, Receiver
from holdfast.validation import located

SOON_S = 0.05
"""For what is not going to happen."""
KINDS = {
    "float32": torch.randn(3, 5),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(2, 3, dtype=torch.complex64),
    "int64": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "columns": torch.randn(6, 5).t(),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "layers.0.weight": torch.randn(1 << 16),
}


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Values that follow from the version, of every tensor."""
    return {"up.weight": torch.full((4, 3), float(version)), "up.bias": torch.full((4,), version / 8)}


class Model(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def holds(model: nn.Module, version: int) -> bool:
    return all(torch.equal(tensor, weights_of(version)[name]) for name, tensor in model.named_parameters())


def transport(root: Path, **options: Any) -> DirectoryTransport:
    return DirectoryTransport(root, **options)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A directory of the versions 3 and 5."""
    with Publisher(transport(tmp_path / "versions")) as publisher:
        for version in (3, 5):
            publisher.publish(weights_of(version), version)
    return tmp_path / "versions"


# what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_of_tensor_arrives_bit_for_bit(tmp_path: Path, streaming: bool) -> None:
    with Publisher(transport(tmp_path)) as publisher:
        done = publisher.publish(KINDS.items(), 1)
        assert (done.version, done.receivers, done.lost) == (1, 0, 0)
        assert done.bytes_sent > (1 << 18)
        assert publisher.versions == (1,)
    into = {name: torch.zeros_like(tensor) for name, tensor in KINDS.items()}
    assert Receiver(transport(tmp_path)).receive(into, streaming=streaming) == 1
    assert {name: bits(tensor) for name, tensor in into.items()} == {name: bits(kind) for name, kind in KINDS.items()}
    called: dict[str, torch.Tensor] = {}
    assert Receiver(transport(tmp_path)).receive(called.__setitem__, streaming=streaming) == 1
    assert {name: bits(tensor) for name, tensor in called.items()} == {name: bits(kind) for name, kind in KINDS.items()}
    assert called["columns"].shape == KINDS["columns"].shape


def test_a_module_gets_one_version_after_the_other(tmp_path: Path) -> None:
    model = Model()
    receiver = Receiver(transport(tmp_path))
    with Publisher(transport(tmp_path), keep_versions=1) as publisher:
        for version in (0, 1, 7):
            publisher.publish(weights_of(version), version)
            assert receiver.receive(model, streaming=version == 1) == version
            assert holds(model, version)
            assert not receiver.dirty
    assert torch.equal(model.seen, torch.zeros(2)), "a buffer that is not published is left alone"


def test_a_version_is_an_ordinary_checkpoint(published: Path) -> None:
    checkpoint = holdfast.open(published / "version-5")
    assert checkpoint.step == 5
    assert checkpoint.verify().ok
    assert torch.equal(checkpoint.read("up.weight"), weights_of(5)["up.weight"])
    state = weights_of(0)
    assert holdfast.load(state, published).step == 5
    assert torch.equal(state["up.bias"], weights_of(5)["up.bias"])


def test_a_publisher_saves_under_its_prefix(tmp_path: Path) -> None:
    under = transport(tmp_path, prefix="model")
    with Publisher(under) as publisher:
        publisher.publish(weights_of(2), 2)
    model = nn.ModuleDict({"up": nn.Linear(3, 4)})
    holdfast.load({"model": model}, tmp_path)
    assert holds(model, 2)
    other = Model(1.0)
    assert Receiver(under).receive(other) == 2
    assert holds(other, 2)


def test_a_structure_may_change_and_change_back(tmp_path: Path) -> None:
    """Other tensors of the same shapes, the same tensors with other values, other shapes, other names."""
    kept = torch.ones(5)
    versions = [{"w": kept}, {"w": kept}, {"w": torch.ones(5)}, {"w": kept[:3]}, {"w": kept, "v": kept[0]}, {"w": kept}]
    into: dict[str, torch.Tensor]
    receiver = Receiver(transport(tmp_path))
    with Publisher(transport(tmp_path)) as publisher:
        for number, weights in enumerate(versions):
            with torch.no_grad():
                weights["w"].fill_(number)
            publisher.publish(weights, number)
            into = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            assert receiver.receive(into) == number
            assert all(bits(into[name]) == bits(tensor) for name, tensor in weights.items()), number
            assert into["w"][0] == number


# which one -------------------------------------------------------------------------------------------------------


def test_the_next_is_newer_than_its_own_and_a_version_is_exactly_that(published: Path) -> None:
    model, receiver = Model(), Receiver(transport(published))
    assert receiver.receive(model) == 5
    with pytest.raises(DeadlineExceeded, match=r"newer than 5.*3, 5") as late:
        receiver.receive(model, timeout=SOON_S)
    assert late.value.timeout_s == SOON_S
    assert receiver.receive(model, version=3) == 3
    assert holds(model, 3)
    assert receiver.receive(model) == 5, "from 3, the next is 5"


def test_a_version_that_will_not_come_is_an_error_at_once(published: Path) -> None:
    receiver = Receiver(transport(published))
    for version in (0, 4):
        with pytest.raises(CheckpointNotFound, match=f"version {version} is not kept") as error:
            receiver.receive(Model(), version=version, timeout=15.0)
        assert error.value.step == version
    with pytest.raises(DeadlineExceeded, match="version 6"):
        receiver.receive(Model(), version=6, timeout=SOON_S)


@pytest.mark.parametrize("version", [None, 1])
def test_a_version_that_is_yet_to_come_is_waited_for(tmp_path: Path, version: int | None) -> None:
    """Also where there is no directory yet."""
    model, received = Model(), []
    receiver = Receiver(transport(tmp_path / "later"))
    thread = threading.Thread(target=lambda: received.append(receiver.receive(model, version=version)))
    thread.start()
    time.sleep(SOON_S)
    with Publisher(transport(tmp_path / "later")) as publisher:
        publisher.publish(weights_of(1), 1)
        thread.join(20.0)
    assert received == [1]
    assert holds(model, 1)


def test_retention_keeps_the_newest_the_pinned_and_what_is_being_read(tmp_path: Path) -> None:
    with Publisher(transport(tmp_path), keep_versions=2) as publisher:
        for version in (1, 2, 3):
            publisher.publish(weights_of(version), version)
        assert publisher.versions == (2, 3)
        publisher.pin(2)
        with pytest.raises(CheckpointNotFound):
            publisher.pin(1)
        with being_read(str(tmp_path / "version-3")):
            publisher.publish(weights_of(4), 4)
            publisher.publish(weights_of(5), 5)
            assert publisher.versions == (2, 3, 4, 5)
        publisher.publish(weights_of(6), 6)
        assert publisher.versions == (2, 5, 6)
    model = Model()
    assert Receiver(transport(tmp_path)).receive(model, version=2) == 2, "a late joiner, at a pinned version"
    assert holds(model, 2)
    with Publisher(transport(tmp_path), keep_versions=1) as publisher:
        publisher.publish(weights_of(7), 7)
        assert publisher.versions == (2, 7), "pins outlive their publisher"
        publisher.unpin(2)
        publisher.publish(weights_of(8), 8)
        assert publisher.versions == (8,)


# what is refused, and what is left then --------------------------------------------------------------------------


def test_a_version_that_is_not_newer_is_refused_also_after_a_restart(published: Path) -> None:
    with Publisher(transport(published)) as publisher:
        for version in (5, 4):
            with pytest.raises(ConfigError, match=f"version {version} is not newer than 5"):
                publisher.publish(weights_of(9), version)
        with pytest.raises(ConfigError, match="empty"):
            publisher.publish({}, 6)
        publisher.publish(weights_of(6), 6)
    model = Model()
    Receiver(transport(published)).receive(model, version=5)
    assert holds(model, 5)


def test_one_publisher_writes_to_a_directory(published: Path) -> None:
    with Publisher(transport(published)):
        with pytest.raises(RootLocked):
            Publisher(transport(published))
        with pytest.raises(RootLocked):
            holdfast.CheckpointManager(published, {"w": torch.zeros(1)})


def test_arguments_are_checked(tmp_path: Path) -> None:
    for template in ("version", "{step:x}", "a/{step}", ".{step}", "{step}{step}", "{step[0]}", "{", 3):
        with pytest.raises(ConfigError, match="name_template") as error:
            transport(tmp_path, name_template=template)
        assert error.value.field == "name_template"
    for prefix in ("", 3):
        with pytest.raises(ConfigError, match="prefix"):
            transport(tmp_path, prefix=prefix)
    with pytest.raises(ConfigError, match="root"):
        DirectoryTransport("")
    with pytest.raises(ConfigError, match="store_options are for the URL of an object store"):
        transport(tmp_path, store_options={})
    for url in ("s3://", "file://localhost/a", "memory://", "s3://a/../b", "ftp://a/b"):
        with pytest.raises(ConfigError, match=r"root: .* can't be used: expected .*s3://.*memory://name"):
            DirectoryTransport(url)
    with pytest.raises(ConfigError, match="let each fetch"):
        Publisher(transport(tmp_path), atomic_fleet=True)
    with pytest.raises(ConfigError, match="key_map"):
        Publisher(transport(tmp_path, key_map={}))
    assert not list(tmp_path.iterdir())


def test_a_url_of_a_directory_is_that_directory(tmp_path: Path) -> None:
    memory = f"memory://test-{os.getpid()}"
    shared = Path(located(memory))
    try:
        for url, place in ((tmp_path / "a b").as_uri(), tmp_path / "a b"), (memory, shared):
            with Publisher(DirectoryTransport(url)) as publisher:
                publisher.publish({"w": torch.ones(3)}, 1)
            assert holdfast.open(f"{url}/version-1").path == str(place / "version-1")
            for way in (url, place):
                into = {"w": torch.zeros(3)}
                assert Receiver(DirectoryTransport(way)).receive(into, timeout=20) == 1
                assert torch.equal(into["w"], torch.ones(3))
    finally:
        shutil.rmtree(shared, ignore_errors=True)


def test_a_model_of_another_structure_stays_as_it_was(published: Path) -> None:
    receiver = Receiver(transport(published))
    other = nn.ModuleDict({"up": nn.Linear(3, 4, bias=False), "down": nn.Linear(4, 3, dtype=torch.float64)})
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(StateMismatch) as error:
        receiver.receive(other)
    assert error.value.missing == ("down.bias", "down.weight")
    assert error.value.unexpected == ("up.bias",)
    assert str(published / "version-5") in str(error.value)
    wide = {"up.weight": torch.zeros(4, 4), "up.bias": torch.zeros(4, dtype=torch.float64)}
    with pytest.raises(StateMismatch) as error:
        receiver.receive(wide)
    assert error.value.mismatched == ("up.bias", "up.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert not any(tensor.any() for tensor in wide.values())
    assert not receiver.dirty
    assert receiver.version is None


def garble(directory: Path) -> None:
    """Another byte in the middle of the data."""
    (data,) = directory.glob("*.distcp")
    raw = bytearray(data.read_bytes())
    at = raw.index(bits(weights_of(5)["up.weight"])) + 7
    raw[at] ^= 0x10
    data.write_bytes(raw)


def test_damage_is_found_and_nothing_is_committed(published: Path) -> None:
    good = Receiver(transport(published))
    model = Model()
    good.receive(model, version=3)
    garble(published / "version-5")
    with pytest.raises(CheckpointCorrupt, match=r"version-5"):
        good.receive(model)
    assert holds(model, 3)
    assert (good.version, good.dirty) == (3, False)
    with pytest.raises(CheckpointCorrupt):
        good.receive(model, streaming=True)
    assert (good.version, good.dirty) == (3, True)
    assert good.receive(model, version=3, streaming=True) == 3
    assert holds(model, 3)
    assert not good.dirty


def test_a_version_under_another_name_is_not_taken(published: Path) -> None:
    shutil.copytree(published / "version-5", published / "version-8")
    with pytest.raises(CheckpointCorrupt, match="holds step 5, not 8"):
        Receiver(transport(published)).receive(Model())


def test_what_is_not_whole_is_not_seen(published: Path) -> None:
    for name in ("version-9", ".version-10.0123456789ab.incomplete", "version-011"):
        shutil.copytree(published / "version-5", published / name)
    for path in (published / "version-9").iterdir():
        if path.name == "holdfast.json" or path.suffix == ".report":
            path.unlink()
    (published / "version-9" / ".metadata").unlink(missing_ok=True)
    model = Model()
    assert Receiver(transport(published)).receive(model) == 5
    with Publisher(transport(published)) as publisher, pytest.raises(ConfigError, match="blocks version 9"):
        publisher.publish(weights_of(9), 9)


# other people's directories --------------------------------------------------------------------------------------


def manager_of(root: Path, model: nn.Module) -> holdfast.CheckpointManager:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keep = holdfast.Keep(last=None)
    state = {"model": model, "optimizer": optimizer, "step": 3}
    return holdfast.CheckpointManager(root, state, config=holdfast.CheckpointConfig(keep=keep, staging="eager"))


def save_steps(root: Path, model: Model) -> None:
    """Steps 10 and 20, whose weights are full of their number."""
    with manager_of(root, model) as manager:
        for step in (10, 20):
            with torch.no_grad():
                model.up.weight.fill_(step)
            manager.save(step)


def test_the_checkpoints_of_a_manager_are_versions(tmp_path: Path) -> None:
    source = Model(1.0)
    save_steps(tmp_path, source)
    model, receiver = Model(), Receiver(transport(tmp_path, name_template="step-{step}", prefix="model"))
    assert receiver.receive(model) == 20
    assert torch.equal(model.up.weight, source.up.weight)
    with manager_of(tmp_path, source) as manager:
        assert manager.restore(10) == 10
        manager.save(15)
    late = Receiver(transport(tmp_path, name_template="step-{step}", prefix="model"))
    assert late.receive(model) == 15, "20 was left behind when the run went back"
    assert torch.equal(model.up.weight, torch.full((4, 3), 10.0))
    with pytest.raises(DeadlineExceeded):
        late.receive(model, version=16, timeout=SOON_S)
    with pytest.raises(StateMismatch, match="prefix='model'"):
        Receiver(transport(tmp_path, name_template="step-{step}")).receive(model)
    with pytest.raises(StateMismatch, match="Nothing there is below 'net'; top-level keys: model, rng"):
        Receiver(transport(tmp_path, name_template="step-{step}", prefix="net")).receive(model)
    with pytest.raises(ConfigError, match="key_map"):
        Receiver(transport(tmp_path, name_template="step-{step}", prefix="model", key_map={})).receive(model)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def test_exports_are_versions(tmp_path: Path) -> None:
    source, model = tiny_llama(), tiny_llama()
    export = holdfast.HFExport(tmp_path / "hf", every=1)
    with holdfast.CheckpointManager(tmp_path / "steps", {"model": source}, exports=[export]) as manager:
        manager.step(4)
        manager.wait()
    receiver = Receiver(transport(tmp_path / "hf", name_template="hf-{step}"))
    assert receiver.receive(model) == 4
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), source.parameters(), strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    named: dict[str, torch.Tensor] = {}
    Receiver(transport(tmp_path / "hf", name_template="hf-{step}")).receive(named.__setitem__, streaming=True)
    assert torch.equal(named["model.norm.weight"], source.model.norm.weight)
    # Another writer's is not known to be whole: it is passed over.
    source.save_pretrained(tmp_path / "hf" / "hf-5")
    with pytest.raises(DeadlineExceeded):
        receiver.receive(model, timeout=SOON_S)
