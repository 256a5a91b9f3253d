"""`holdfast.sync.adapters.verl` by verl's registry and interface, in the order in which its manager calls them.

Runs in the environment of `make test-rl`, with each of verl's versions: nothing in here needs ray to be started.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from needed import need
from verl_ranks import model_at, verl_version

from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.sync.adapters import verl

need("verl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's imports
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineWithCache

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


class Pair:
    """A trainer and a rollout worker, made by the registry as verl does."""

    def __init__(self, place: Path, **options: Any) -> None:
        verl.register()
        options = {"place": str(place), "timeout_s": 30.0, **options}
        self.trainer = CheckpointEngineRegistry.new("holdfast", bucket_size=300, is_master=True, **options)
        self.worker = CheckpointEngineRegistry.new("holdfast", bucket_size=300, **options)

    def begin(self) -> None:
        given = [self.trainer.prepare(), self.worker.prepare()]
        trainers, rollouts = type(self.worker).build_topology(1, 1, given)
        for engine, told in ((self.trainer, trainers), (self.worker, rollouts)):
            engine.init_process_group(**{name: values[0] for name, values in told.items()})

    def update(self, weights: Any, step: int, take: int | None = None) -> tuple[dict[str, torch.Tensor], Any]:
        """Transfer a version. take: the rollout takes only so many tensors, and then fails."""
        self.begin()
        sent: dict[str, Any] = {}

        def send() -> None:
            try:
                sent.update(asyncio.run(self.trainer.send_weights(weights, global_steps=step)))
            except RuntimeError as error:
                sent["error"] = error

        sending = threading.Thread(target=send)
        sending.start()

        async def receive() -> dict[str, torch.Tensor]:
            got: dict[str, torch.Tensor] = {}
            taken = self.worker.receive_weights(global_steps=step)
            try:
                async for name, tensor in taken:
                    got[name] = tensor.clone()
                    if len(got) == take:
                        raise ZeroDivisionError
            finally:
                await taken.aclose()
            return got

        try:
            return asyncio.run(receive()), sent
        finally:
            sending.join(60.0)
            for engine in (self.trainer, self.worker):
                engine.finalize()

    def close(self) -> None:
        self.trainer.close()
        self.worker.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, cache=True)
    yield made
    made.close()


def weights_at(step: int) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model_at(step).named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_registry_knows_the_engine_and_refuses_others_as_it_does() -> None:
    made = verl.register()
    assert verl.register() is made is CheckpointEngineRegistry.get("holdfast")
    assert issubclass(made, CheckpointEngineWithCache)
    assert not inspect.isabstract(made)
    with pytest.raises(ValueError, match="not registered"):
        CheckpointEngineRegistry.new("not there", bucket_size=1)
    with pytest.raises(ConfigError, match="place"):
        CheckpointEngineRegistry.new("holdfast", bucket_size=1)


@pytest.mark.parametrize("method", ["prepare", "finalize", "send_weights", "receive_weights"])
def test_methods_take_what_verls_own_take(method: str) -> None:
    theirs, ours = (inspect.signature(getattr(cls, method)) for cls in (CheckpointEngine, verl.register()))
    assert [*ours.parameters] == [*theirs.parameters]
    assert [one.default for one in ours.parameters.values()] == [one.default for one in theirs.parameters.values()]


def test_versions_arrive_whole_and_stay_in_the_cache(pair: Pair) -> None:
    async def cached() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() async for name, tensor in pair.worker.get_weights()}

    for step in (7, 3):  # a trainer that was resumed from an earlier step
        got, metrics = pair.update(iter(weights_at(step).items()), step)
        assert same(got, weights_at(step))
        assert pair.trainer.global_steps == pair.worker.global_steps == step
        assert metrics["checkpoint_engine/global_steps"] == step
        assert metrics["checkpoint_engine/lost_receivers"] == 0
        assert all(isinstance(value, float) for value in metrics.values())
        for _ in range(2):
            assert same(asyncio.run(cached()), weights_at(step))


@pytest.mark.parametrize("options", [{"cache": True}, {}, {"streaming": True}])
def test_a_rollout_that_fails_half_way_takes_the_next_version(tmp_path: Path, options: dict[str, Any]) -> None:
    pair = Pair(tmp_path, **options)
    with pytest.raises(ZeroDivisionError):
        pair.update(iter(weights_at(1).items()), 1, take=2)
    assert pair.worker.global_steps is None or options.get("cache")
    assert same(pair.update(iter(weights_at(2).items()), 2)[0], weights_at(2))
    assert pair.worker.global_steps == 2
    pair.close()


@pytest.mark.parametrize("options", [{"cache": True}, {}])
def test_a_trainer_that_fails_while_it_gathers_leaves_the_rollout_as_it_is(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    pair = Pair(tmp_path, **options, timeout_s=3.0)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights_at(2).items())[:2]
        raise RuntimeError("out of memory")

    pair.update(iter(weights_at(1).items()), 1)
    with pytest.raises(DeadlineExceeded):
        pair.update(gathered(), 2)
    assert pair.worker.global_steps == 1
    assert same(pair.update(iter(weights_at(3).items()), 3)[0], weights_at(3))
    pair.close()


def test_deltas_need_verl_0_9(tmp_path: Path) -> None:
    options = {"bucket_size": 1, "place": str(tmp_path), "cache": True, "delta": "sparse"}
    if verl_version() >= "0.9":
        assert verl.register()(**options).wire_format == "delta_flush"
        return
    with pytest.raises(ConfigError, match=r"takes whole weights only; use 0\.9 or later"):
        verl.register()(**options)
    import holdfast.sync.adapters.verl_delta_backend

    made = holdfast.sync.adapters.verl_delta_backend.ENGINE
    assert CheckpointEngineRegistry.get("delta_sharded") is made
