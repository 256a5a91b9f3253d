"""Where a version goes: what is wanted of what is published, the shadow, the commit, and who is dirty when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import ConfigError, StateMismatch
from holdfast.sync.protocol import Destination, TensorInfo
from holdfast.sync.weights.apply import TargetFactory


def published(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {
        name: TensorInfo(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            "" if first[id(tensor)] == name else first[id(tensor)],
        )
        for name, tensor in tensors.items()
    }


def bring(destination: Destination, tensors: dict[str, torch.Tensor]) -> None:
    """All of a version, but for the commit."""
    for name in destination.select(published(tensors)):
        destination.memory(name).copy_(tensors[name])
        destination.complete(name)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.zeros(2), persistent=False)


def test_live_tensors_change_at_the_commit_and_not_before() -> None:
    applier, into = TargetFactory(), {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    new = {"a": torch.ones(3), "b": torch.full((2, 2), 7.0)}
    destination = applier.destination(into, streaming=False)
    bring(destination, new)
    assert not destination.dirty
    assert not any(tensor.any() for tensor in into.values())
    destination.commit(1)
    assert not destination.dirty
    assert all(torch.equal(into[name], tensor) for name, tensor in new.items())


def test_streaming_writes_in_place_and_is_dirty_until_the_commit() -> None:
    applier, into = TargetFactory(), {"a": torch.zeros(3)}
    destination = applier.destination(into, streaming=True)
    assert destination.select(published(into)) == ("a",)
    assert not destination.dirty
    assert destination.memory("a").data_ptr() == into["a"].data_ptr()
    assert destination.dirty
    destination.abandon()
    assert destination.dirty
    destination.commit(1)
    assert not destination.dirty


def test_the_shadow_is_used_again_and_known_to_hold_what_was_committed() -> None:
    applier, into = TargetFactory(), {"a": torch.zeros(3)}
    first = applier.destination(into, streaming=False)
    first.select(published(into))
    memory = first.memory("a")
    assert first.base is None
    first.commit(4)
    second = applier.destination(into, streaming=False)
    second.select(published(into))
    assert second.memory("a") is memory
    assert second.base == 4
    # It may have been written to by now, and was not committed.
    third = applier.destination(into, streaming=False)
    third.select(published(into))
    third.memory("a")
    assert third.base is None
    third.commit(5)
    other = {"a": torch.zeros(4)}
    fourth = applier.destination(other, streaming=False)
    fourth.select(published(other))
    assert fourth.memory("a").shape == (4,)
    assert fourth.base is None


def test_the_shadow_has_nothing_of_names_that_were_not_received_last() -> None:
    """A tied module takes one of two names, say: the other one is no part of what the shadow holds then."""
    applier, one, both = TargetFactory(), {"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(2)}
    for version, into, base in ((1, both, None), (2, one, 1), (3, both, None), (4, both, 3)):
        destination = applier.destination(into, streaming=False)
        bring(destination, into)
        assert destination.base == base
        destination.commit(version)


@pytest.mark.parametrize("between", ["streaming", "function"])
def test_nothing_builds_on_what_another_publisher_sent(between: str) -> None:
    """Its versions may have the same numbers; the shadow is of the one before until a version comes by way of it."""
    applier, into = TargetFactory(), {"a": torch.zeros(3)}

    def receive(to: Any, version: int, *, streaming: bool = False, first: bool = False) -> int | None:
        destination = applier.destination(to, streaming=streaming)
        if first:
            destination.forget()
        bring(destination, into)
        base = destination.base
        destination.commit(version)
        return base

    receive(into, 5)
    if between == "streaming":
        receive({"a": torch.zeros(3)}, 6, streaming=True, first=True)
    else:
        receive(lambda name, tensor: None, 6, first=True)
    assert receive(into, 7) is None
    assert receive(into, 8) == 7


def test_a_version_of_an_earlier_publisher_that_is_committed_late_is_no_base() -> None:
    applier, into = TargetFactory(), {"a": torch.zeros(3)}
    held, newer = applier.destination(into, streaming=False), applier.destination(into, streaming=False)
    bring(held, {"a": torch.ones(3)})
    newer.forget()  # its publisher is another one
    bring(newer, {"a": torch.full((3,), 2.0)})
    assert held.memory("a") is not newer.memory("a")
    held.commit(9)
    assert applier.destination(into, streaming=True).base is None
    newer.commit(6)
    assert applier.destination(into, streaming=True).base == 6
    for expected in (6, None):  # two shadows: one of each publisher
        following = applier.destination(into, streaming=False)
        following.select(published(into))
        following.memory("a")
        assert following.base == expected
    assert into["a"].eq(2).all()


def test_streaming_builds_only_on_what_was_committed_to_the_same_tensors() -> None:
    applier, into, other = TargetFactory(), {"a": torch.zeros(3)}, {"a": torch.zeros(3)}
    first = applier.destination(into, streaming=False)
    bring(first, into)
    first.commit(1)
    assert applier.destination(other, streaming=True).base is None
    second = applier.destination(into, streaming=True)
    assert second.base == 1
    second.select(published(into))
    second.memory("a")
    assert applier.destination(into, streaming=True).base is None


def test_a_module_takes_tied_parameters_once_under_either_name_and_buffers_if_they_come() -> None:
    model = Tied()
    applier = TargetFactory()
    parameters = {"head.weight": torch.ones(5, 3), "norm.weight": torch.ones(3), "norm.bias": torch.zeros(3)}
    assert set(applier.destination(model, streaming=False).select(published(parameters))) == set(parameters)
    both = {
        **parameters,
        "embed.weight": parameters["head.weight"],
        "table": torch.ones(2),
        "norm.running_mean": torch.ones(3),
    }
    destination = applier.destination(model, streaming=False)
    assert set(destination.select(published(both))) == set(both) - {"head.weight"}
    bring(destination, both)
    destination.commit(1)
    assert model.head.weight.eq(1).all()
    assert model.table.eq(1).all()
    assert model.norm.running_mean.eq(1).all()
    assert model.norm.running_var.eq(1).all()
    with pytest.raises(StateMismatch) as caught:
        destination.select(published({**both, "head.weight": torch.ones(5, 4)}))
    assert caught.value.mismatched == ("head.weight",)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", ["module", "dictionary"])
def test_two_names_of_one_tensor_must_have_the_same_values(kind: str, streaming: bool) -> None:
    model, applier = Tied(), TargetFactory()
    into: Any = model if kind == "module" else model.state_dict()  # whose tensors are other objects, in the same memory
    before = model.embed.weight.detach().clone()
    tensors = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    for version in (1, 2):
        destination = applier.destination(into, streaming=streaming)
        bring(destination, tensors)
        destination.commit(version)
        assert model.head.weight.eq(1).all()
        assert streaming or destination.base is (None if version == 1 else 1)
    tensors["head.weight"][4, 2] = 7
    with torch.no_grad():
        model.embed.weight.copy_(before)
    destination = applier.destination(into, streaming=streaming)
    with pytest.raises(StateMismatch, match=r"`embed.weight` and `head.weight`") as caught:
        bring(destination, tensors)
    assert caught.value.mismatched == ("embed.weight", "head.weight")
    assert destination.dirty == streaming
    assert streaming or torch.equal(model.embed.weight, before)


def test_a_dictionary_still_has_to_be_exactly_what_is_published() -> None:
    shared = torch.zeros(3)
    with pytest.raises(StateMismatch) as caught:
        TargetFactory().destination({"a": shared, "b": shared}, streaming=False).select(published({"a": torch.ones(3)}))
    assert caught.value.missing == ("b",)


@pytest.mark.parametrize("kind", ["module", "dictionary"])
def test_names_must_be_the_same(kind: str) -> None:
    model = nn.Linear(2, 2)
    into: Any = model if kind == "module" else dict(model.named_parameters())
    destination = TargetFactory().destination(into, streaming=True)
    with pytest.raises(StateMismatch) as caught:
        destination.select(published({"weight": torch.zeros(2, 2), "gain": torch.zeros(1)}))
    assert (caught.value.missing, caught.value.unexpected) == (("bias",), ("gain",))
    with pytest.raises(StateMismatch, match=r"float64 \[2\].*float32 \[2\]"):
        destination.select(published({"weight": torch.zeros(2, 2), "bias": torch.zeros(2, dtype=torch.float64)}))
    assert not destination.dirty


@pytest.mark.parametrize("streaming", [True, False])
def test_a_function_is_called_with_whole_tensors_of_its_own(streaming: bool) -> None:
    calls: list[tuple[str, torch.Tensor]] = []
    applier = TargetFactory()
    new = {"a": torch.ones(3), "b": torch.zeros(0, 2)}
    for _ in range(2):
        destination = applier.destination(lambda name, tensor: calls.append((name, tensor)), streaming=streaming)
        bring(destination, new)
        assert destination.dirty == streaming
        assert len(calls) % 2 == 0
        destination.commit(1)
        assert not destination.dirty
    assert [name for name, _ in calls] == ["a", "b", "a", "b"]
    assert calls[0][1].data_ptr() != calls[2][1].data_ptr()


def test_a_function_is_called_with_nothing_of_a_session_that_was_given_up() -> None:
    """One receive may see two sessions; the second may bring a newer version, of another structure."""
    calls: list[str] = []
    destination = TargetFactory().destination(lambda name, tensor: calls.append(name), streaming=False)
    for name in destination.select(published({"a": torch.ones(3), "b": torch.ones(2)})):
        destination.memory(name)
    tensors = {"a": torch.ones(5)}
    bring(destination, tensors)
    destination.commit(2)
    assert calls == ["a"]


def test_a_function_that_raises_leaves_it_dirty() -> None:
    def refuse(name: str, tensor: torch.Tensor) -> None:
        raise RuntimeError(name)

    destination = TargetFactory().destination(refuse, streaming=False)
    bring(destination, {"a": torch.ones(3)})
    with pytest.raises(RuntimeError, match="a"):
        destination.commit(1)
    assert destination.dirty


@pytest.mark.parametrize("into", [7, torch.zeros(3), [torch.zeros(2)], None, {"a": 1.0}])
def test_what_nothing_can_be_received_into_is_refused(into: Any) -> None:
    with pytest.raises(ConfigError, match="into"):
        TargetFactory().destination(into, streaming=False)


class Wrapper(nn.Module):
    """One that leaves no trace in names, as DDP and ``torch.compile`` do."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"": "inner"}


def wrapped(name: str) -> str:
    """As a checkpointed, compiled layer of the publisher has it."""
    return name.replace("head.", "head._checkpoint_wrapped_module._orig_mod.")


def test_wrappers_at_either_side_make_no_difference() -> None:
    model = Tied()
    tensors = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    wrapper = Wrapper()
    wrapper.inner = model
    for into, named in (
        (model, {wrapped(name): tensor for name, tensor in tensors.items()}),
        (wrapper, tensors),
        (wrapper, {f"inner.{name}": tensor for name, tensor in tensors.items()}),
    ):
        nn.init.zeros_(model.head.weight)
        destination = TargetFactory().destination(into, streaming=True)
        bring(destination, named)
        assert model.head.weight.eq(1).all()
        for unknown in ("gain", "embed._orig_mod.weight"):  # the second would be one that is there too
            with pytest.raises(StateMismatch) as caught:
                destination.select(published({**named, unknown: torch.zeros(1)}))
            assert unknown in caught.value.unexpected


def test_streaming_builds_on_nothing_that_was_written_to_or_replaced_since() -> None:
    applier, into = TargetFactory(), {"a": torch.zeros(3), "b": torch.zeros(2)}
    for spoil in (
        lambda: into["a"].add_(1),
        lambda: into.update(b=torch.zeros(2)),
        lambda: into.update(c=torch.zeros(1)),
    ):
        first = applier.destination(into, streaming=True)
        bring(first, {name: torch.ones_like(tensor) for name, tensor in into.items()})
        first.commit(1)
        assert applier.destination(into, streaming=True).base == 1
        spoil()
        second = applier.destination(into, streaming=True)
        second.select(published(into))
        second.memory("a")
        assert second.base is None


@pytest.mark.parametrize("streaming", [True, False])
def test_expanded_tensors_are_refused_before_anything_is_touched(streaming: bool) -> None:
    into = {"a": torch.zeros(2), "b": torch.zeros(1).expand(3)}
    destination = TargetFactory().destination(into, streaming=streaming)
    with pytest.raises(ConfigError, match="b: elements of this tensor share memory"):
        destination.select(published(into))
    assert not destination.dirty


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize(
    "unfit",
    [
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["meta", "sparse", "nested"],
)
def test_tensors_that_hold_no_bytes_are_refused_before_anything_is_touched(
    streaming: bool, unfit: torch.Tensor
) -> None:
    """Each transport would find out in its own way, or not at all: a copy to the meta device goes through."""
    unkept = nn.Module()
    unkept.register_buffer("a", unfit, persistent=False)
    for into in ({"a": unfit}, unkept):
        destination = TargetFactory().destination(into, streaming=streaming)
        with pytest.raises(ConfigError, match=r"^a: "):
            destination.select({"a": TensorInfo((2, 3), "float32")})
        assert not destination.dirty
