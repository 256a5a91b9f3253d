"""Large eager values: copied once, straight to their places, with the values they had when save was called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CheckpointConfig, CheckpointManager, StateMismatch
from holdfast.saver import agreement, snapshot
from holdfast.saver.agreement import PlanDecision, PlanProposal
from holdfast.saver.snapshot import AT_ONCE_BYTES_MIN, EagerValues, SnapshotTaker
from holdfast.staging.copies import CopyBatch, CopyItem
from holdfast.staging.image import Image
from holdfast.staging.small_copies import PayloadCopy, Scatter
from holdfast.testing.staging import held_copies

KINDS = {"small": (300, 1024), "large": (40, 16 << 10), "mixed": (60, 5 << 10)}


def state_of(kind: str) -> dict[str, Any]:
    count, numel = KINDS[kind]
    made = {f"t{at:03d}": torch.randn(numel + (at % 7 if kind == "mixed" else 0)) for at in range(count)}
    if kind == "mixed":
        made |= {f"s{at:03d}": torch.randn(1 + at) for at in range(50)}
        made |= {"odd": torch.randn(8, 9).t(), "complex": torch.randn(4, dtype=torch.complex64), "none": torch.zeros(0)}
    assert sum(tensor.nbytes for tensor in made.values()) > AT_ONCE_BYTES_MIN
    return made


def managed(root: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    return CheckpointManager(root, {"ema": state}, config=CheckpointConfig(every=None, keep=None, **options))


def assert_saved(root: Path, step: int, expected: dict[str, torch.Tensor]) -> None:
    stored = holdfast.open(root / f"step-{step}")
    assert [name for name, value in expected.items() if not torch.equal(stored.read(f"ema.{name}"), value)] == []


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[EagerValues]:
    """Records the eager values taken by each save."""
    found: list[EagerValues] = []
    take = SnapshotTaker.take

    def noting(*args: Any, **options: Any) -> Any:
        made = take(*args, **options)
        found.append(made.eager)
        return made

    monkeypatch.setattr(SnapshotTaker, "take", noting)
    return found


@pytest.mark.parametrize("staging", ["lazy", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_moment_save_was_called(
    tmp_path: Path, kind: str, staging: str, taken: list[EagerValues]
) -> None:
    state, kept = state_of(kind), {}
    with managed(tmp_path, state, staging=staging) as manager:
        for step in range(1, 5):
            kept[step] = copied(state)
            handle = manager.save(step)
            for tensor in state.values():
                tensor.add_(1)
            handle.result(60)
    assert [eager.placed for eager in taken][2:] == [True, True]
    assert not set(taken[-1].held) & set(taken[-1].plain)
    for step, expected in kept.items():
        assert_saved(tmp_path, step, expected)


def test_a_blocking_save_makes_no_extra_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloned: list[str] = []
    clone = snapshot._clone

    def noting(entry: Any) -> torch.Tensor:
        cloned.append(entry.name)
        return clone(entry)

    monkeypatch.setattr(snapshot, "_clone", noting)
    state = state_of("mixed")
    holdfast.async_save({"ema": state}, tmp_path / "step-1", staging="eager").result(60)
    assert sorted(cloned) == ["ema.complex", "ema.none", "ema.odd"]
    assert_saved(tmp_path, 1, state)
    cloned.clear()
    holdfast.save({"ema": state}, tmp_path / "step-2")
    assert cloned == []
    assert_saved(tmp_path, 2, state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replan_keeps_the_eager_values_taken(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, taken: list[EagerValues]
) -> None:
    state = state_of(kind)
    with managed(tmp_path, state) as manager:
        for step in (1, 2):
            manager.save(step).result(60)

        def replan(ballots: list[PlanProposal], _: object, **__: object) -> PlanDecision:
            return PlanDecision("replan", digests=(ballots[0].digest,), of_rank=(0,))

        monkeypatch.setattr(agreement, "judge", replan)
        expected = copied(state)
        with held_copies(opens_for_updates=False) as gate:
            handle = manager.save(3)
            for tensor in state.values():
                tensor.zero_()
            gate.open()
            handle.result(60)
        assert taken[-1].placed
        monkeypatch.undo()
        manager.save(4).result(60)
    assert_saved(tmp_path, 3, expected)
    assert_saved(tmp_path, 4, state)


def test_the_next_save_does_not_overwrite_one_in_flight(tmp_path: Path) -> None:
    state, kept = state_of("large"), {}
    with managed(tmp_path, state, in_flight=2) as manager:
        for step in (1, 2):
            manager.save(step).result(60)
        handles = []
        for step in (3, 4, 5, 6):
            for tensor in state.values():
                tensor.fill_(step)
            kept[step] = copied(state)
            handles.append(manager.save(step))
        for handle in handles:
            handle.result(60)
    for step, expected in kept.items():
        assert_saved(tmp_path, step, expected)


def test_a_changed_kind_and_a_replaced_tensor_are_noticed(tmp_path: Path, taken: list[EagerValues]) -> None:
    state, kept = state_of("small"), {}

    def change(step: int) -> None:
        if step == 4:
            state["t003"].data = torch.randn(32, 32).t()  # as many bytes, not in this order
        elif step == 5:
            state["t005"] = torch.randn(1024)
        elif step == 6:
            state["t007"].data = torch.randn(7)

    with managed(tmp_path, state) as manager:
        for step in range(1, 8):
            change(step)
            kept[step] = copied(state)
            manager.save(step).result(60)
    assert taken[2].placed
    for step, expected in kept.items():
        assert_saved(tmp_path, step, expected)


def test_an_interrupted_eager_save_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of("large")
    with managed(tmp_path, state, staging="eager") as manager:
        manager.save(1).result(60)
        with held_copies(opens_for_updates=False) as gate:
            with monkeypatch.context() as patched:

                def interrupted(*_: object) -> None:
                    raise KeyboardInterrupt

                patched.setattr("holdfast.saver.saver.Saver._confirm_unchanged", interrupted)
                state["new"] = torch.zeros(1)  # another plan: nothing is copied on this thread
                with pytest.raises(KeyboardInterrupt):
                    manager.save(2)
            gate.open()
        assert manager.save(3).exception(60) is None
        assert manager.steps() == [1, 3]


def test_a_small_tensor_with_freed_memory_is_named() -> None:
    image, tensor = Image(4096), torch.ones(16)
    batch = CopyBatch([CopyItem("x", tensor, None, image.bytes_view[:64].view(torch.float32))])
    batch.copy()
    assert image.bytes_view[:64].view(torch.float32).tolist() == [1.0] * 16
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateMismatch, match="x: its memory was freed"):
        batch.copy()


def test_no_call_exceeds_iov_max() -> None:
    image = Image(1 << 16)
    sources = torch.randint(0, 256, (3000,), dtype=torch.uint8)
    pieces = [PayloadCopy(at, 20 * at + at % 3, 7, at) for at in range(2900)]
    copies = Scatter(image, pieces, lambda sources: pytest.fail(f"can't read {sources}"))
    calls = [call for batch in copies.batches for call in batch.calls]
    assert max(call.rows for call in calls) <= 1024
    assert sum(len(batch.sources) for batch in copies.batches) == len(pieces)
    copies.locate([sources.data_ptr() + at for at in range(2900)])
    for batch in copies.batches:
        batch.copy()
    for at in (0, 1, 511, 512, 513, 1023, 1024, 2899):
        start = 20 * at + at % 3
        assert torch.equal(image.bytes_view[start : start + 7], sources[at : at + 7])
    assert int(image.bytes_view.to(torch.int64).sum()) == sum(int(sources[at : at + 7].sum()) for at in range(2900))
