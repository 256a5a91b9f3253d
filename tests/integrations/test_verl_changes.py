"""`holdfast.sync.adapters.verl` with ``delta="sparse"``: verl's registry and loader, and what goes wrong on the way.

Runs in the environment of `make test-rl`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import ROOT, run_script
from needed import need
from verl_ranks import nearly_at

from holdfast.errors import CheckpointCorrupt, ConfigError, DeadlineExceeded

need("verl")

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # of verl's imports


class Pair:
    """A trainer and a rollout worker, called as verl's manager calls them."""

    def __init__(self, place: Path, timeout_s: float = 30.0) -> None:
        from verl.checkpoint_engine import CheckpointEngineRegistry

        from holdfast.sync.adapters import verl

        verl.register()
        self.cls = CheckpointEngineRegistry.get("holdfast")
        options: dict[str, Any] = {"place": str(place), "cache": True, "delta": "sparse", "timeout_s": timeout_s}
        self.trainer = CheckpointEngineRegistry.new("holdfast", bucket_size=300, is_master=True, **options)
        self.worker = CheckpointEngineRegistry.new("holdfast", bucket_size=300, **options)

    def begin(self) -> None:
        given = [self.trainer.prepare(), self.worker.prepare()]
        trainers, rollouts = self.cls.build_topology(1, 1, given)
        for engine, told in ((self.trainer, trainers), (self.worker, rollouts)):
            engine.init_process_group(**{name: values[0] for name, values in told.items()})

    def update(self, weights: dict[str, torch.Tensor], take: int | None = None) -> tuple[list[Any], float]:
        """Transfer a version; return the flushes that verl got, and whether a delta was sent. take: so many only."""
        self.begin()
        metrics: dict[str, float] = {}
        sending = threading.Thread(
            target=lambda: metrics.update(asyncio.run(self.trainer.send_weights(iter(weights.items()))))
        )
        sending.start()
        try:
            flushes = self.worker.receive_weights(global_steps=1)
            taken = list(flushes) if take is None else [next(flushes) for _ in range(take)]
            if take is not None:
                flushes.close()  # as when verl's loading fails
        finally:
            sending.join()
        return taken, metrics["checkpoint_engine/is_delta"]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.trainer.close()
    made.worker.close()


def weights_at(step: int) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in nearly_at(step).named_parameters()}


def encodings(flushes: list[Any]) -> set[str]:
    specs = [json.loads(bytes(dict(named)["__delta_spec__"].numpy().tobytes())) for named, _ in flushes]
    return {spec["encoding"] for spec in specs}


def loaded(flushes: list[Any], before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load flushes by verl's own decoder."""
    from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

    class Model(torch.nn.Module):
        def load_weights(self, given: Any) -> None:
            for name, tensor in given:
                held[name].copy_(tensor)

    held = {name: value.clone() for name, value in before.items()}
    for named, _ in flushes:
        apply_delta(Model(), named)
    return held


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    bits = {name: value.view(torch.int16) for name, value in one.items()}
    return bits.keys() == other.keys() and all(torch.equal(bits[name], other[name].view(torch.int16)) for name in bits)


def test_changes_make_the_next_version_bit_for_bit(pair: Pair) -> None:
    first, is_delta = pair.update(weights_at(1))
    assert (encodings(first), is_delta) == ({"dense"}, 0)
    weights = weights_at(2)
    weights["1.weight"].view(-1)[0] = -0.0
    second, is_delta = pair.update(weights)
    assert (encodings(second), is_delta) == ({"indices"}, 1)
    assert [is_last for _, is_last in second] == [False] * (len(second) - 1) + [True]
    assert same(loaded(second, loaded(first, weights_at(0))), weights)
    none, is_delta = pair.update(weights)
    assert (none, is_delta) == ([], 1), "nothing changed"


def test_after_a_version_that_verl_did_not_take_all_of_the_next_is_whole(pair: Pair) -> None:
    pair.update(weights_at(1))
    pair.update(weights_at(2), take=1)
    flushes, is_delta = pair.update(weights_at(3))
    assert (encodings(flushes), is_delta) == ({"dense"}, 1), "the cache has the base, the rollout may have a mix"
    assert same(loaded(flushes, weights_at(0)), weights_at(3))
    assert encodings(pair.update(weights_at(4))[0]) == {"indices"}


def test_a_cache_that_was_written_to_is_noticed_before_anything_is_passed_on(pair: Pair) -> None:
    pair.update(weights_at(1))
    pair.worker._cached["1.weight"].view(-1)[3] += 1
    with pytest.raises(CheckpointCorrupt, match="another base, or its memory was written to"):
        pair.update(weights_at(2))
    with pytest.raises(ConfigError, match="no version in the cache"):
        asyncio.run(anext(pair.worker.get_weights()))
    flushes, is_delta = pair.update(weights_at(3))
    assert (encodings(flushes), is_delta) == ({"dense"}, 0)
    assert same(loaded(flushes, weights_at(0)), weights_at(3))


def test_what_verls_patches_cant_say_is_yielded_whole(pair: Pair) -> None:
    pair.update(weights_at(1))
    weights = weights_at(2)
    weights["1.weight"].view(-1)[0] = float("nan")
    flushes, is_delta = pair.update(weights)
    assert (encodings(flushes), is_delta) == ({"dense"}, 1)
    assert same(loaded(flushes, weights_at(0)), weights)


def test_another_table_and_a_large_change_are_sent_whole(pair: Pair) -> None:
    pair.update(weights_at(1))
    flushes, is_delta = pair.update({**weights_at(2), "more": torch.ones(3, dtype=torch.bfloat16)})
    assert (encodings(flushes), is_delta) == ({"dense"}, 0)
    changed = {name: torch.randn_like(value) for name, value in weights_at(2).items()}
    assert pair.update(changed)[1] == 0
    assert pair.update(changed | {"1.bias": torch.zeros(33, dtype=torch.bfloat16)})[1] == 1


def test_a_trainer_that_is_gone_leaves_verl_with_what_it_has(tmp_path: Path) -> None:
    pair = Pair(tmp_path, timeout_s=3.0)
    pair.update(weights_at(1))
    pair.begin()
    pair.trainer.close()
    with pytest.raises(DeadlineExceeded):
        next(pair.worker.receive_weights())
    assert pair.worker.prepare()["holds"] is None, "whole, the next time"
    pair.worker.close()


def test_deltas_need_the_cache(tmp_path: Path) -> None:
    from holdfast.sync.adapters import verl

    with pytest.raises(ConfigError, match="delta needs cache=True"):
        verl.register()(bucket_size=1, place=str(tmp_path), delta="sparse")


def test_the_example_runs(tmp_path: Path) -> None:
    output = run_script(ROOT / "examples" / "verl_sync.py", tmp_path, timeout_s=200).stdout
    assert output.count("equal: True") == 3
