"""Adapters to frameworks, against records of their interfaces: these need GPUs, and are not installed here.

A record has what an adapter builds on and nothing else: names, signatures, and what calls what.
    verl 0.8 dev, commit b178a3cd (January 2026): verl/checkpoint_engine/base.py
    vLLM 0.25 to 0.29: vllm/distributed/weight_transfer/{base,factory}.py, config, model_executor/...
    SGLang 0.5: python/sglang/srt/entrypoints/engine.py
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from holdfast.errors import CheckpointNotFound, ConfigError, DeadlineExceeded, HoldfastError, StateMismatch
from holdfast.sync import DirectoryTransport, Publisher
from holdfast.sync.adapters import sglang, verl, vllm
from holdfast.sync.adapters.by_name import transport_of

WEIGHTS = {
    "embed.weight": torch.randn(8, 4).bfloat16(),
    "layers.0.weight": torch.randn(4, 4),
    "scale": torch.tensor(0.5),
    "norm.weight": torch.randn(4),
}


def same(found: dict[str, torch.Tensor], factor: float = 1.0) -> bool:
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], WEIGHTS[name] * factor) for name in WEIGHTS)


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Modules by name, with ``__`` for dots, and the packages above them."""
    for key, members in modules.items():
        name = key.replace("__", ".")
        parts = name.split(".")
        for depth in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def accepts_what_is_given(ours: Callable[..., object], theirs: Callable[..., object]) -> bool:
    """Whether everything that may be called as ``theirs`` may be called as ``ours``."""
    mine, known = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    return list(mine)[: len(known)] == list(known) and all(
        parameter.default is not parameter.empty for name, parameter in mine.items() if name not in known
    )


@pytest.mark.parametrize(("adapter", "framework"), [(verl, "verl"), (vllm, "vllm")], ids=["verl", "vllm"])
def test_without_its_framework_an_adapter_says_so(adapter: Any, framework: str) -> None:
    if importlib.util.find_spec(framework) is not None:
        pytest.skip(f"{framework} is installed here")
    with pytest.raises(ConfigError, match=f"needs {framework}, but .*install {framework}") as error:
        adapter.register()
    assert error.value.field == framework


def test_transports_by_name(tmp_path: Path) -> None:
    assert isinstance(transport_of("directory", str(tmp_path), {"prefix": "model"}), DirectoryTransport)
    for kind, place, options, field in (
        ("nccl", str(tmp_path), {}, "transport"),
        ("directory", None, {}, "place"),
        ("directory", str(tmp_path), {"prefixes": 1}, "options"),
    ):
        with pytest.raises(ConfigError) as error:
            transport_of(kind, place, options)
        assert error.value.field == field


# verl ------------------------------------------------------------------------------------------------------------


class VerlRegistry:
    _registry: ClassVar[dict[str, type]] = {}

    def register(backend: str) -> Callable[[type], type]:  # type: ignore[misc]
        def wrapper(cls: type) -> type:
            VerlRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def get(cls, backend: str) -> type:
        return cls._registry[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


class VerlCheckpointEngine(ABC):
    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, trainer_world_size: int, rollout_world_size: int, metadata: list[dict]) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None: ...

    @abstractmethod
    async def receive_weights(self) -> Any: ...


@pytest.fixture
def verl_backend(monkeypatch: pytest.MonkeyPatch) -> type:
    monkeypatch.setattr(VerlRegistry, "_registry", {})
    members = {"CheckpointEngineRegistry": VerlRegistry, "CheckpointEngine": VerlCheckpointEngine}
    install(monkeypatch, verl__checkpoint_engine__base=members)
    return verl.register()


def verl_engines(tmp_path: Path, count: int, **options: Any) -> tuple[Any, list[Any]]:
    """Trainer rank 0 and rollout workers, made as verl's workers make them."""
    given = {"transport": "directory", "place": str(tmp_path), "timeout_s": 20.0, **options}
    trainer = VerlRegistry.new("holdfast", is_master=True, bucket_size=1 << 20, **given)
    return trainer, [VerlRegistry.new("holdfast", bucket_size=1 << 20, **given) for _ in range(count)]


async def taken_from(rollout: Any) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in rollout.receive_weights()}


def verl_update(engine: type, trainer: Any, rollouts: list[Any], factor: float) -> list[dict[str, torch.Tensor]]:
    """One round, in the order of verl's ``CheckpointEngineManager.update_weights``."""
    metadata = [worker.prepare() for worker in (trainer, *rollouts)]
    trainer_kwargs, rollout_kwargs = engine.build_topology(1, len(rollouts), metadata)
    assert all(len(values) == 1 for values in trainer_kwargs.values())
    assert all(len(values) == len(rollouts) for values in rollout_kwargs.values())
    trainer.init_process_group(**{name: values[0] for name, values in trainer_kwargs.items()})
    for number, rollout in enumerate(rollouts):
        rollout.init_process_group(**{name: values[number] for name, values in rollout_kwargs.items()})

    async def both_sides() -> list[Any]:
        sending = trainer.send_weights((name, tensor * factor) for name, tensor in WEIGHTS.items())
        return await asyncio.gather(sending, *map(taken_from, rollouts))

    _, *received = asyncio.run(both_sides())
    for worker in (trainer, *rollouts):
        worker.finalize()
    return received


@pytest.mark.parametrize("streaming", [False, True])
def test_verl_sends_what_it_hands_out(verl_backend: type, tmp_path: Path, streaming: bool) -> None:
    assert not inspect.isabstract(verl_backend)
    assert verl.register() is verl_backend
    for name in ("prepare", "finalize", "send_weights", "receive_weights", "build_topology"):
        assert accepts_what_is_given(getattr(verl_backend, name), getattr(VerlCheckpointEngine, name)), name
    trainer, rollouts = verl_engines(tmp_path, 2, streaming=streaming)
    for factor in (1.0, 2.0):
        assert all(same(received, factor) for received in verl_update(verl_backend, trainer, rollouts, factor))
    # Replicas were removed, and a job starts anew over the same directory.
    assert same(*verl_update(verl_backend, trainer, rollouts[:1], 3.0), 3.0)
    trainer._publisher.close()
    trainer, rollouts = verl_engines(tmp_path, 1, streaming=streaming)
    assert same(*verl_update(verl_backend, trainer, rollouts, 4.0), 4.0)
    trainer._publisher.close()


def test_verl_casts_caches_and_reuses_its_memory(verl_backend: type, tmp_path: Path) -> None:
    trainer, (rollout,) = verl_engines(tmp_path, 1, cache=True, rollout_dtype="bfloat16")
    for option in ({"rollout_dtype": "int8"}, {"cache": True, "streaming": True}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            verl_engines(tmp_path, 0, **option)

    async def cached() -> dict[str, torch.Tensor]:
        return {name: tensor async for name, tensor in rollout.get_weights()}

    with pytest.raises(ConfigError, match="no version in the cache"):
        asyncio.run(cached())
    memory: list[dict[str, int]] = []
    for factor in (1.0, 2.0):
        (received,) = verl_update(verl_backend, trainer, [rollout], factor)
        want = {name: (tensor * factor).bfloat16() for name, tensor in WEIGHTS.items()}
        assert all(torch.equal(received[name], want[name]) for name in want)
        assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16}
        assert {name: id(tensor) for name, tensor in asyncio.run(cached()).items()} == {
            name: id(tensor) for name, tensor in received.items()
        }
        memory.append({name: tensor.data_ptr() for name, tensor in received.items()})
    assert memory[0] == memory[1], "the second version lies where the first did"
    trainer._publisher.close()


def test_verl_gets_metrics_of_the_master_only(verl_backend: type, tmp_path: Path) -> None:
    trainer, _ = verl_engines(tmp_path, 0)
    trainer.init_process_group(version=1, receivers=1)
    metrics = asyncio.run(trainer.send_weights(iter(WEIGHTS.items()), global_steps=7))
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in WEIGHTS.values())
    assert metrics["checkpoint_engine/payload_mbytes"] * 2**20 == nbytes
    assert metrics["checkpoint_engine/global_steps"] == trainer.global_steps == 7
    trainer._is_master = False
    trainer.init_process_group(version=2, receivers=1)
    assert asyncio.run(trainer.send_weights(iter(WEIGHTS.items()), global_steps=8)) == {}
    with pytest.raises(ConfigError, match=r"norm.weight was passed twice"):
        asyncio.run(trainer.send_weights(iter([("norm.weight", WEIGHTS["scale"])] * 2)))
    trainer._publisher.close()


def test_verl_is_told_when_it_calls_in_another_order(verl_backend: type, tmp_path: Path) -> None:
    trainer, (rollout,) = verl_engines(tmp_path, 1, timeout_s=0.05)
    with pytest.raises(ConfigError, match="init_process_group"):
        asyncio.run(trainer.send_weights(iter(())))
    rollout.init_process_group(version=3, receivers=None)
    with pytest.raises(DeadlineExceeded, match="version 3"):
        asyncio.run(taken_from(rollout))


def test_what_is_received_is_handed_over_and_bounded() -> None:
    handed: list[str] = []

    def receive(apply: Callable[[str, torch.Tensor], None]) -> None:
        for name in "abcdef":
            apply(name, torch.zeros(1))
            handed.append(name)

    async def take_two() -> None:
        items = verl.as_received(receive)
        assert (await anext(items))[0] == "a"
        assert (await anext(items))[0] == "b"
        await items.aclose()

    asyncio.run(take_two())
    assert "".join(handed) in ("ab", "abc"), "no more than there is room for"

    def fails(apply: Callable[[str, torch.Tensor], None]) -> None:
        apply("a", torch.zeros(1))
        raise DeadlineExceeded("late", waited_for="it", timeout_s=1.0)

    async def take_all() -> None:
        async for name, _ in verl.as_received(fails):
            names.append(name)

    names: list[str] = []
    with pytest.raises(DeadlineExceeded):
        asyncio.run(take_all())
    assert names == ["a"]


# vLLM ------------------------------------------------------------------------------------------------------------


@dataclass
class VllmInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class VllmUpdateInfo(ABC):  # noqa: B024
    pass


class VllmTransferEngine(ABC):
    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.model, self.model_config = model, vllm_config.model_config

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None: ...


class VllmFactory:
    _registry: ClassVar[dict[str, Callable[[], type]]] = {}

    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: module_path_or_cls


class VllmModel:
    """Loads as vLLM's models do, and notes what is done to it."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.seen.append("load")
        self.weights = dict(weights)


@pytest.fixture
def vllm_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def initialize_layerwise_reload(model: VllmModel) -> None:
        model.seen.append("begin")

    def finalize_layerwise_reload(model: VllmModel, model_config: str) -> None:
        model.seen.append(f"end {model_config}")

    @contextlib.contextmanager
    def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(vllm, "_engine", None)
    monkeypatch.setattr(vllm, "_registered", set())
    monkeypatch.setattr(VllmFactory, "_registry", {})
    base = {
        "WeightTransferInitInfo": VllmInitInfo,
        "WeightTransferUpdateInfo": VllmUpdateInfo,
        "WeightTransferEngine": VllmTransferEngine,
    }
    reload = {
        "initialize_layerwise_reload": initialize_layerwise_reload,
        "finalize_layerwise_reload": finalize_layerwise_reload,
    }
    install(
        monkeypatch,
        vllm__distributed__weight_transfer__base=base,
        vllm__distributed__weight_transfer__factory={"WeightTransferEngineFactory": VllmFactory},
        vllm__model_executor__model_loader__reload=reload,
        vllm__config={"set_current_vllm_config": set_current_vllm_config},
    )
    assert vllm.register() is vllm.register() is vllm.register("other")
    monkeypatch.setattr(vllm, "_registered", set())
    with pytest.raises(ConfigError, match="another engine"):
        vllm.register()
    made = VllmFactory._registry["holdfast"]()
    assert not inspect.isabstract(made)
    config = types.SimpleNamespace(model_config="of the model")
    return made(None, config, torch.device("cpu"), VllmModel())


def test_vllm_loads_a_version_once_it_is_whole(vllm_engine: Any, tmp_path: Path) -> None:
    for name in VllmTransferEngine.__abstractmethods__:
        assert accepts_what_is_given(getattr(type(vllm_engine), name), getattr(VllmTransferEngine, name)), name
    model = vllm_engine.model
    with pytest.raises(ConfigError, match="init_weight_transfer_engine"):
        vllm_engine.update_weights({"version": 1})
    given = {"transport": "directory", "place": str(tmp_path)}
    vllm_engine.init_transfer_engine(vllm_engine.init_info_cls(**given))
    with Publisher(DirectoryTransport(tmp_path), keep_versions=1) as publisher:
        for version in (1, 2):
            args = {"publisher": publisher, "version": version, "timeout_s": 20.0}
            weights = ((name, tensor * version) for name, tensor in WEIGHTS.items())
            type(vllm_engine).trainer_send_weights(weights, args)
    with pytest.raises(ConfigError, match="version"):
        type(vllm_engine).trainer_send_weights(iter(()), {"publisher": publisher})
    vllm_engine.start_weight_update()
    with pytest.raises(CheckpointNotFound):
        vllm_engine.update_weights({"version": 1})
    vllm_engine.finish_weight_update()
    assert model.seen == [], "a version that doesn't arrive leaves the model alone"
    vllm_engine.start_weight_update()
    vllm_engine.update_weights({"version": 2, "timeout_s": 20.0})
    vllm_engine.finish_weight_update()
    assert model.seen == ["begin", "load", "end of the model"]
    assert same(model.weights, 2)
    # As vLLM before 0.25 calls it.
    older: dict[str, torch.Tensor] = {}
    vllm_engine.receive_weights(vllm_engine.update_info_cls(version=2), load_weights=older.update)
    assert same(older, 2)
    vllm_engine.shutdown()
    vllm_engine.shutdown()


def test_vllm_says_when_its_loading_failed_and_repeats_it(vllm_engine: Any, tmp_path: Path) -> None:
    vllm_engine.init_transfer_engine(vllm_engine.init_info_cls(transport="directory", place=str(tmp_path)))
    with Publisher(DirectoryTransport(tmp_path)) as publisher:
        publisher.publish(WEIGHTS, 1)
        vllm_engine.update_weights({"timeout_s": 20.0})
        assert (vllm_engine.version, vllm_engine.dirty) == (1, False)
        publisher.publish({name: tensor * 2 for name, tensor in WEIGHTS.items()}, 2)

        def fails(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            next(weights)
            raise RuntimeError("out of memory")

        vllm_engine.model.load_weights = fails
        with pytest.raises(RuntimeError, match="out of memory"):
            vllm_engine.update_weights({"timeout_s": 20.0})
        assert (vllm_engine.version, vllm_engine.dirty) == (1, True)
        assert vllm_engine.model.seen[-1] == "end of the model"
        del vllm_engine.model.load_weights
        vllm_engine.update_weights({"timeout_s": 20.0})
        assert (vllm_engine.version, vllm_engine.dirty) == (2, False)
        assert same(vllm_engine.model.weights, 2)
        publisher.publish({**WEIGHTS, "norm.weight": torch.zeros(5)}, 3)
        with pytest.raises(StateMismatch, match=r"norm.weight is \(5,\), was \(4,\); nothing was loaded"):
            vllm_engine.update_weights({"timeout_s": 20.0})
        assert (vllm_engine.version, vllm_engine.dirty) == (2, False)
        assert same(vllm_engine.model.weights, 2)
    vllm_engine.shutdown()


# SGLang ----------------------------------------------------------------------------------------------------------


class SGLangEngine:
    def __init__(self) -> None:
        self.calls: list[tuple[list[str], bool]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.answer = (True, "Success")

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, torch.Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        self.calls.append(([name for name, _ in named_tensors], flush_cache))
        self.weights.update(named_tensors)
        return self.answer


def test_sglang_is_given_a_version_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "BATCH_BYTES", 100)
    engine = SGLangEngine()
    with pytest.raises(ConfigError, match="update_weights_from_tensor"):
        sglang.SGLangReceiver(object(), DirectoryTransport(tmp_path))
    for pause, match in (("sleep", "must be one of abort"), ("retract", "can't be paused")):
        with pytest.raises(ConfigError, match=match):
            sglang.SGLangReceiver(engine, DirectoryTransport(tmp_path), pause=pause)
    worker = sglang.SGLangReceiver(engine, DirectoryTransport(tmp_path), device="cpu")
    with Publisher(DirectoryTransport(tmp_path)) as publisher:
        publisher.publish(WEIGHTS, 1)
        assert worker.receive(timeout=20.0) == worker.version == 1
        assert same(engine.weights)
        assert not worker.dirty
        assert [flush for _, flush in engine.calls] == [False] * (len(engine.calls) - 1) + [True]
        assert len(engine.calls) == 2
        engine.answer = (False, "out of memory")
        publisher.publish({name: tensor * 2 for name, tensor in WEIGHTS.items()}, 2)
        with pytest.raises(HoldfastError, match=r"version 2: the engine refused .* out of memory"):
            worker.receive(timeout=20.0)
        assert (worker.version, worker.dirty) == (1, True)
        engine.answer = (True, "")
        assert worker.receive(version=2, timeout=20.0) == 2
        assert same(engine.weights, 2)
        assert not worker.dirty
    worker.close()
