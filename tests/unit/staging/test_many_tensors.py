"""Very many small tensors: eager ones are gathered, and all are copied by address."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import CheckpointConfig, CheckpointManager, Keep, StateChangedWhileStaging
from holdfast.saver.snapshot import SnapshotTaker
from holdfast.staging import small_copies as gathering
from holdfast.staging import small_copies as scatter
from holdfast.staging.image import Image
from holdfast.staging.small_copies import (
    GATHER_MIN,
    GatherList,
    PayloadCopy,
    Scatter,
    ScatterBatch,
    can_gather,
    worth_scattering,
)
from holdfast.state.tree import StateTree
from holdfast.testing.staging import held_copies

MANY = 3 * GATHER_MIN


def manager_of(root: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    return CheckpointManager(root, state, config=CheckpointConfig(every=None, keep=None, **options))


def loaded(root: Path, step: int, like: dict[str, Any]) -> dict[str, Any]:
    with manager_of(root, like) as manager:
        assert manager.restore(step) == step
    return like


def flat(count: int = MANY) -> dict[str, Any]:
    dtypes = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64, torch.complex64, torch.float8_e5m2]
    made = [torch.randn(1 + at % 9).mul(5).to(dtypes[at % len(dtypes)]) for at in range(count)]
    odd = {
        "transposed": torch.randn(3, 5).t(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
        "large": torch.randn(5000),
        "note": "text",
    }
    return {f"t{at:03d}": tensor for at, tensor in enumerate(made)} | odd


def like(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> list[int]:
        resolved = tensor.resolve_conj().resolve_neg().contiguous()
        return list(resolved.flatten().view(torch.uint8).tolist()) if resolved.numel() else []

    return left.shape == right.shape and left.dtype == right.dtype and bits(left) == bits(right)


def test_eager_values_are_those_of_the_moment_save_was_called(tmp_path: Path) -> None:
    state = {"ema": flat(), "list": [torch.full((3,), float(at)) for at in range(MANY)]}
    kept: dict[int, dict[str, Any]] = {}
    with manager_of(tmp_path, state) as manager:
        for step in range(1, 5):  # the first plans, the others find the plan made
            kept[step] = {key: value.clone() for key, value in state["ema"].items() if key != "note"}
            handle = manager.save(step)
            for value in state["ema"].values():
                if isinstance(value, torch.Tensor) and value.dtype != torch.float8_e5m2:
                    value.zero_() if value.dtype == torch.bool else value.add_(1)
            handle.result(60)
    for step, expected in kept.items():
        fresh = {"ema": like(state["ema"]), "list": [torch.zeros(3) for _ in range(MANY)]}
        found = loaded(tmp_path, step, fresh)["ema"]
        assert [key for key, value in expected.items() if not same_bits(found[key], value)] == []


def test_the_next_save_does_not_overwrite_one_in_flight(tmp_path: Path) -> None:
    state = {f"t{at}": torch.zeros(4) for at in range(MANY)}
    with manager_of(tmp_path, state, in_flight=2) as manager:
        manager.save(1).result(60)
        with held_copies(opens_for_updates=False) as gate:
            handles = []
            for step in (2, 3):
                for tensor in state.values():
                    tensor.fill_(step)
                handles.append(manager.save(step))
            for tensor in state.values():
                tensor.fill_(9)
            gate.open()
            for handle in handles:
                handle.result(60)
    for step in (2, 3):
        found = loaded(tmp_path, step, {key: torch.zeros(4) for key in state})
        assert all(bool((tensor == step).all()) for tensor in found.values())


def test_a_replaced_tensor_a_renamed_key_and_another_shape_are_noticed(tmp_path: Path) -> None:
    inner: dict[str, Any] = {f"t{at}": torch.zeros(4) for at in range(MANY)}
    state = {"outer": {"inner": inner}}
    with manager_of(tmp_path, state) as manager:
        manager.save(1).result(60)
        inner["t3"] = torch.full((4,), 3.0)
        manager.save(2).result(60)
        inner["t3"] = torch.full((4,), 4.0)
        inner["t5"].data = torch.full((4,), 5.0)
        manager.save(3).result(60)
        inner["renamed"] = inner.pop("t3")
        inner["t5"].data = torch.full((2, 3), 6.0)
        manager.save(4).result(60)
    fresh = {"outer": {"inner": {key: torch.ones(4) for key in [f"t{at}" for at in range(MANY)]}}}
    assert loaded(tmp_path, 2, fresh)["outer"]["inner"]["t3"].tolist() == [3.0] * 4
    found = loaded(tmp_path, 3, fresh)["outer"]["inner"]
    assert (found["t3"].tolist(), found["t5"].tolist()) == ([4.0] * 4, [5.0] * 4)
    last = {"outer": {"inner": {key: torch.ones(tensor.shape) for key, tensor in inner.items()}}}
    found = loaded(tmp_path, 4, last)["outer"]["inner"]
    assert (found["renamed"].tolist(), found["t5"].tolist()) == ([4.0] * 4, [[6.0] * 3] * 2)


def test_changed_containers_are_noticed(tmp_path: Path) -> None:
    holder: dict[Any, Any] = {f"t{at}": torch.zeros(2) for at in range(4)}
    state: dict[str, Any] = {"d": holder, "l": [torch.zeros(2), torch.ones(2)], "step": 1}
    tree = StateTree(state, rank=0, world=1)

    def names() -> set[str]:
        return {entry.name for entry in tree.collect().tensors}

    assert names() == {"d.t0", "d.t1", "d.t2", "d.t3", "l.0", "l.1"}
    first = tree.collect()
    assert first.unchanged
    holder["t1"] = torch.ones(2)
    second = tree.collect()
    assert second.unchanged
    assert second.number != first.number
    assert [entry.name for entry in second.fleeting] == ["d.t1"]
    assert next(entry for entry in second.tensors if entry.name == "d.t1").tensor is holder["t1"]
    holder["t1"] = torch.ones(2)
    third = tree.collect()
    assert (third.unchanged, third.number) == (True, second.number)
    assert third.fleeting[0].tensor is holder["t1"]
    holder["t1"] = torch.ones(3)
    assert not tree.collect().unchanged
    holder["t2"] = 5
    assert "d.t2" not in names()
    holder["t2"] = torch.ones(1)
    assert "d.t2" in names()
    state["step"] = torch.ones(1)
    assert "step" in names()
    state["l"].append(torch.ones(1))
    assert "l.2" in names()
    holder[7] = torch.ones(1)
    assert "d.7" in names()
    del holder[7], holder["t0"]
    assert not {"d.7", "d.t0"} & names()
    state["d"] = dict(holder)
    assert "d.t3" in names()


def test_a_changed_kind_is_noticed_in_one_pass() -> None:
    model = nn.ParameterList(torch.zeros(4, 4) for _ in range(MANY))
    state = {"model": model, "ema": {f"t{at}": torch.zeros(4) for at in range(MANY)}}
    tree, taker = StateTree(state, rank=0, world=1), SnapshotTaker()
    first = taker.take(tree, None)
    again = taker.take(tree, None)
    assert again.lazy is first.lazy
    with torch.no_grad():
        assert taker.take(tree, None).digest == first.digest
    model[3].data = torch.arange(16.0).view(4, 4).t()  # alike in all but strides
    other = taker.take(tree, None)
    assert other.digest == first.digest
    assert other.lazy is not first.lazy
    model[3].data = torch.zeros(5)
    assert taker.take(tree, None).digest != first.digest


def test_state_dict_of_an_object_may_write_to_what_is_saved(tmp_path: Path) -> None:
    model = nn.ParameterList(torch.zeros(4) for _ in range(8))

    class Averaging:
        def state_dict(self) -> dict[str, Any]:
            with torch.no_grad():
                for parameter in model:
                    parameter.add_(1)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with manager_of(tmp_path, {"model": model, "averaging": Averaging()}) as manager:
        for step in (1, 2, 3):
            manager.save(step)
            expected = model[0].detach().clone()
            manager.before_update()
            manager.wait()
    fresh = nn.ParameterList(torch.zeros(4) for _ in range(8))
    loaded(tmp_path, 3, {"model": fresh, "averaging": Averaging()})
    assert torch.equal(fresh[0], expected)


@pytest.mark.parametrize("how", ["in place", "unseen", "swapped"])
def test_small_tensors_changed_during_the_copy_are_noticed(tmp_path: Path, how: str) -> None:
    model = nn.ParameterList(torch.randn(64) for _ in range(MANY))
    with manager_of(tmp_path, {"model": model}, on_error="warn") as manager:
        manager.save(1).result(60)
        with held_copies() as gate:
            handle = manager.save(2)
            if how == "in place":
                with torch.no_grad():
                    model[5].add_(1)
            elif how == "unseen":
                model[5].data.add_(1)
            else:
                model[5].data = torch.randn(64)
            gate.open()
            error = handle.exception(60)
        assert isinstance(error, StateChangedWhileStaging)
        assert "model.5" in str(error)
        with pytest.warns(UserWarning, match="model.5"):
            manager.wait()
        manager.save(3).result(60)
    fresh = nn.ParameterList(torch.zeros(64) for _ in range(MANY))
    loaded(tmp_path, 3, {"model": fresh})
    assert all(torch.equal(a, b) for a, b in zip(fresh, model, strict=True))


# copies by address -------------------------------------------------------------------------------------------------


def test_only_the_pieces_are_written() -> None:
    image = Image(1 << 16)
    background = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8)
    image.bytes_view.copy_(background)
    sources = [torch.randint(0, 256, (1 + at % 13,), dtype=torch.uint8) for at in range(900)]
    pieces, expected, offset = [], background.clone(), 17
    for at, source in enumerate(sources):
        if at % 7 != 3:  # places left out are other records
            pieces.append(PayloadCopy(at, offset, source.numel(), at + at // 300))
            expected[offset : offset + source.numel()] = source
        offset += source.numel() + at % 5
    pieces.reverse()
    copies = Scatter(image, pieces, lambda sources: pytest.fail(f"can't read {sources}"))
    assert sorted(source for batch in copies.batches for source in batch.sources) == sorted(p.source for p in pieces)
    copies.locate([source.data_ptr() for source in sources])
    for batch in copies.batches:
        batch.copy()
    assert torch.equal(image.bytes_view, expected)


def test_nothing_is_written_between_records_that_are_no_neighbours() -> None:
    alone, together = (
        [PayloadCopy(0, 0, 4, 0), PayloadCopy(1, 50, 4, 2)],
        [PayloadCopy(at, 60 + at, 1, 4 + at) for at in range(3)],
    )
    found = worth_scattering(np.array([*together, *alone]))
    assert [list(map(tuple, pieces.tolist())) for pieces in found] == [together, alone]
    copies = Scatter(Image(4096), [*alone, *together], lambda _: None)
    assert [(call.offset, call.nbytes) for batch in copies.batches for call in batch.calls] == [
        (0, 4),
        (50, 4),
        (60, 3),
    ]


def test_an_unreadable_address_causes_no_crash() -> None:
    image, told = Image(4096), list[int]()
    copies = Scatter(image, [PayloadCopy(0, 0, 8, 0), PayloadCopy(1, 8, 8, 1)], told.extend)
    word = torch.ones(1, dtype=torch.int64)
    copies.locate([word.data_ptr(), 4096])
    for batch in copies.batches:
        batch.copy()
    assert told == [0, 1]


def test_copies_in_progress_may_finish_after_the_buffer_is_closed() -> None:
    image = Image(4096)
    view = image.bytes_view
    copies = Scatter(image, [PayloadCopy(0, 0, 8, 0)], lambda _: None)
    image.close()
    with open(os.devnull, "rb"):  # takes the descriptor that became free
        word = torch.full((1,), 5, dtype=torch.int64)
        copies.locate([word.data_ptr()])
        copies.batches[0].copy()
    assert view[:8].view(torch.int64).tolist() == [5]


def descriptors_of(image: Image) -> int:
    found = 0
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it was that of the listing, or is closed meanwhile
            found += os.path.samestat(os.fstat(fd), os.fstat(image.fd))
    return found


def test_descriptors_are_closed_with_their_copies() -> None:
    image = Image(4096)
    before = descriptors_of(image)
    copies = [Scatter(image, [PayloadCopy(0, 0, 8, 0)], lambda _: None) for _ in range(5)]
    assert descriptors_of(image) == before + 5
    copies.clear()
    assert descriptors_of(image) == before


def test_blocks_are_reused_only_when_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{at}": torch.full((4,), float(at)) for at in range(5)}
    taken = GatherList(tensors)
    first, second = taken.gather(), taken.gather()
    assert first is not None
    assert second is not None
    assert not set(first.addresses.tolist()) & set(second.addresses.tolist())
    first.give_back()
    first.give_back()
    third, fourth = taken.gather(), taken.gather()
    assert third is not None
    assert fourth is not None
    assert third.addresses.tolist() == first.addresses.tolist()
    assert fourth.addresses.tolist() not in (third.addresses.tolist(), second.addresses.tolist())
    monkeypatch.setattr(gathering, "KEPT_BYTES_MAX", 4096)
    for each in (second, third, fourth):
        each.give_back()
    assert len(taken._kept) == 1
    tensors["t1"].data = torch.zeros(8)
    assert taken.gather() is None


def test_only_plain_small_host_tensors_are_gathered() -> None:
    assert can_gather(torch.zeros(4))
    assert can_gather(nn.Parameter(torch.zeros(4)))
    refused = [
        torch.zeros(0), torch.zeros(1 << 14), torch.zeros(4, 4).t()[:2], torch.zeros(4, dtype=torch.complex64),
        torch.zeros(1, dtype=torch.complex64).conj().imag, torch.zeros(4, device="meta"),
    ]  # fmt: skip
    assert not any(map(can_gather, refused))


def test_memory_does_not_grow_from_save_to_save(tmp_path: Path) -> None:
    state = {
        "model": nn.ParameterList(torch.randn(8) for _ in range(MANY)),
        "ema": [torch.zeros(8) for _ in range(MANY)],
    }
    with CheckpointManager(tmp_path, state, config=CheckpointConfig(every=None, keep=Keep(last=2))) as manager:
        for step in range(1, 4):
            manager.save(step).result(60)
        gc.collect()
        objects, descriptors = len(gc.get_objects()), len(os.listdir("/proc/self/fd"))
        for step in range(4, 24):
            manager.save(step).result(60)
        gc.collect()
        assert len(gc.get_objects()) - objects < 200
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_without_the_system_call_torch_copies_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scatter, gathering, __import__("holdfast.staging.buffer", fromlist=["x"])):
        monkeypatch.setattr(module, "CAN_SCATTER", False)

    def never(*_: object, **__: object) -> None:
        pytest.fail("copied by address")

    monkeypatch.setattr(ScatterBatch, "copy", never)
    state = {f"t{at}": torch.full((3,), float(at)) for at in range(MANY)}
    with manager_of(tmp_path, state) as manager:
        for step in (1, 2):
            manager.save(step).result(60)
    found = loaded(tmp_path, 2, {key: torch.zeros(3) for key in state})
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def settled_descriptors() -> int:
    """Return the number of open descriptors, once the unmapping thread is idle."""
    counts = [len(os.listdir("/proc/self/fd"))]
    while len(counts) < 20 or len(set(counts[-20:])) > 1:
        time.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1]


def test_memory_of_gathered_values_is_freed_without_garbage_collection() -> None:
    gc.collect()
    before = settled_descriptors()
    gc.disable()
    try:
        taken = GatherList({f"t{at}": torch.zeros(4) for at in range(5)})
        kept, given = taken.gather(), taken.gather()
        assert given is not None
        given.give_back()
        assert len(os.listdir("/proc/self/fd")) > before
        del taken, kept, given
        assert settled_descriptors() == before
    finally:
        gc.enable()
