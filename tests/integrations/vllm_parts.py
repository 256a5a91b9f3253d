"""Transfer weights as vLLM does: its trainer and worker factories, its worker's methods, its models, on CPU.

`main` writes DIRECTORY/result.json: for each model what was loaded, compared with a checkpoint that vLLM
loaded from disk.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
import traceback
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
import vllm
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from holdfast.sync.adapters import vllm as adapter
from vllm_on_cpu import Client, one_process, served, worker_of

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
MODELS = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, EXPERTS),
}


def trainer_model(kind: str, seed: int, **changed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made, options = MODELS[kind]
    config = made(**{**SIZES, **changed}, **options, dtype="bfloat16")
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class CheckpointSource(WeightSource):
    """The weights of a checkpoint: names and shapes as vLLM's models load them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.iter_full()]

    def iter_full(self) -> Any:
        yield from load_file(self.directory / "model.safetensors").items()


def equal(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = dict(other.named_parameters())
    mine = dict(model.named_parameters())
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def refused(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def transfer(kind: str, place: Path) -> dict[str, Any]:
    checkpoints = []
    for seed in (1, 2, 3):
        checkpoints.append(place / f"{kind}-{seed}")
        trainer_model(kind, seed).save_pretrained(checkpoints[-1])
    config, model = served(checkpoints[0])
    pointers = {name: value.data_ptr() for name, value in model.named_parameters()}
    worker = worker_of(config, model)
    engine, client = worker.weight_transfer_engine, Client(worker)
    meet = place / f"{kind}-meet"
    meet.mkdir()
    trainer = adapter.trainer_init(client, CheckpointSource(checkpoints[0]), rank=0, place=str(meet), timeout_s=60.0)
    found: dict[str, Any] = {"trainer": type(trainer).__name__, "engine": type(engine).__name__, "equal": []}
    for seed in (2, 3):
        trainer.source = CheckpointSource(checkpoints[seed - 1])
        trainer.send_weights()
        found["equal"].append(equal(model, served(checkpoints[seed - 1])[1]))
    found["in_place"] = pointers == {name: value.data_ptr() for name, value in model.named_parameters()}
    found["version"], found["versions"], found["dirty"] = engine.version, client.versions, engine.dirty

    # The model's own loading fails half way: the worker says so, until a version is loaded completely.
    load, before = model.load_weights, engine.version
    model.load_weights = lambda weights: (load(list(weights)[:3]) and None) or 1 / 0
    found["failed_load"] = refused(trainer.send_weights)
    found["after_failure"] = [engine.version == before, engine.dirty, worker._weight_update_active]
    model.load_weights = load
    client.start_weight_update()
    client.update_weights({"timeout_s": 60.0})  # the newest: the one that failed
    client.finish_weight_update()
    found["after_retry"] = [engine.version > before, engine.dirty, equal(model, served(checkpoints[2])[1])]

    # Other shapes are refused before anything is loaded.
    trainer_model(kind, 4, vocab_size=256).save_pretrained(place / f"{kind}-4")
    trainer.source = CheckpointSource(place / f"{kind}-4")
    found["other_shape"] = refused(trainer.send_weights)
    found["after_other_shape"] = [engine.dirty, equal(model, served(checkpoints[2])[1])]
    found["draft"] = refused(worker.start_draft_weight_update)
    trainer.shutdown()
    worker.shutdown_weight_transfer_engine()
    return found


class ChangedSource(CheckpointSource):
    """A checkpoint whose weights change by a few elements a step."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.weights = load_file(directory / "model.safetensors")

    def iter_full(self) -> Any:
        yield from self.weights.items()

    def step(self, seed: int, share: float = 0.02) -> None:
        made = torch.Generator().manual_seed(seed)
        for name, tensor in self.weights.items():
            where = torch.rand(tensor.shape, generator=made) < share
            self.weights[name] = torch.where(where, torch.randn(tensor.shape, generator=made).bfloat16(), tensor)

    def saved(self, directory: Path) -> Path:
        shutil.copytree(self.directory, directory)
        save_file(self.weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def changes(kind: str, place: Path) -> dict[str, Any]:
    """Send deltas, fetched ahead, and all that may go wrong with them."""
    place.mkdir()
    trainer_model(kind, 1).save_pretrained(place / "start")
    config, model = served(place / "start")
    worker = worker_of(config, model)
    engine, client = worker.weight_transfer_engine, Client(worker)
    (place / "meet").mkdir()
    source = ChangedSource(place / "start")
    trainer = adapter.trainer_init(
        client, source, rank=0, place=str(place / "meet"), timeout_s=60.0, delta="sparse", prefetch=True
    )
    bases: list[bool] = []
    publish = trainer._publisher.publish

    def noted(payload: Any, *args: Any, **options: Any) -> Any:
        bases.append(options["meta"]["holdfast"]["base"] is not None)
        sizes.append(sum(tensor.nbytes for tensor in payload.values()))
        return publish(payload, *args, **options)

    sizes: list[int] = []
    trainer._publisher.publish = noted

    def is_equal(name: str) -> bool:
        return equal(model, served(source.saved(place / name))[1])

    found: dict[str, Any] = {}
    trainer.send_weights()
    for step in (1, 2):
        source.step(step)
        version = trainer.publish()  # while vLLM generates: the worker fetches it by itself
        deadline = time.monotonic() + 30.0
        while engine.fetched != version and time.monotonic() < deadline:
            time.sleep(0.01)
        before = [engine.fetched == version, engine.version == version]
        trainer.send_weights()
        found[f"step {step}"] = [*before, engine.version == version, engine.dirty, is_equal(f"after-{step}")]
    found["bases"], found["share"] = list(bases), sizes[-1] / sizes[0]

    # A worker that holds something else refuses the delta before anything is changed, and gets the whole version.
    bases.clear()
    engine.digest = "another"
    source.step(3)
    trainer.send_weights()
    found["another base"] = [list(bases), engine.dirty, is_equal("other-base")]

    # Values that become NaN can't be said by vLLM's patches.
    bases.clear()
    source.step(4)
    name = "model.layers.0.self_attn.o_proj.weight"
    source.weights[name].view(-1)[5] = float("nan")
    trainer.send_weights()
    mine = dict(model.named_parameters())[name].view(-1)
    found["nan"] = [list(bases), engine.dirty, bool(mine[5].isnan()), int(mine.isnan().sum())]
    source.weights[name].view(-1)[5] = 0.0
    trainer.send_weights()

    # vLLM's loading fails half way, of the delta and of the whole version: dirty, and whole the next time.
    load, version = model.load_weights, engine.version
    model.load_weights = lambda weights: (load(list(weights)[:3]) and None) or 1 / 0
    source.step(5)
    found["failed"] = refused(trainer.send_weights)
    found["after failure"] = [engine.version == version, engine.dirty]
    model.load_weights = load
    bases.clear()
    trainer.send_weights()
    found["repeated"] = [list(bases), engine.dirty, is_equal("repeated")]

    # Another shape among the changes is refused before anything is loaded.
    taker = engine._taker
    taker.expected = {**taker.expected, name: (1, 1)}
    source.step(6)
    found["shape"] = [refused(trainer.send_weights), engine.dirty, is_equal("repeated-again")]
    trainer.shutdown()
    found["closed"] = refused(lambda: (client.start_weight_update(), client.update_weights({"timeout_s": 0.5})))
    found["after close"] = [engine.dirty, worker._weight_update_active]
    worker.shutdown_weight_transfer_engine()
    return found


class Clients:
    """The connection to several workers, as vLLM's client for ray: all are asked, then the first error counts."""

    def __init__(self, workers: list[Any]) -> None:
        self.clients = [Client(worker) for worker in workers]

    def _all(self, method: str, *args: Any) -> None:
        errors = []
        for client in self.clients:
            try:
                getattr(client, method)(*args)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", weight_version)


def two_workers(place: Path) -> dict[str, Any]:
    """One of two workers can't load what the other one can."""
    place.mkdir()
    trainer_model("tied", 1).save_pretrained(place / "start")
    workers = [worker_of(*served(place / "start")) for _ in range(2)]
    first, second = (worker.weight_transfer_engine for worker in workers)
    (place / "meet").mkdir()
    source = ChangedSource(place / "start")
    client = Clients(workers)
    trainer = adapter.trainer_init(client, source, rank=0, place=str(place / "meet"), timeout_s=60.0, delta="sparse")
    trainer.send_weights()

    def state(name: str) -> list[Any]:
        whole = served(source.saved(place / name))[1]
        both = (first, second)
        return [(engine.version == first.version, engine.dirty, equal(engine.model, whole)) for engine in both]

    found: dict[str, Any] = {}
    second.digest = "another"
    source.step(1)
    found["delta"] = [refused(trainer.send_weights), state("delta")]
    load = second.model.load_weights
    second.model.load_weights = lambda weights: (load(list(weights)[:3]) and None) or 1 / 0
    source.step(2)
    found["failed"] = refused(trainer.send_weights)
    found["after"] = [second.dirty, *(worker._weight_update_active for worker in workers)]
    second.model.load_weights = load
    found["again"] = [refused(trainer.send_weights), state("again")]
    found["versions"] = [client.versions[-1] == str(first.version) for client in client.clients]
    trainer.shutdown()
    for worker in workers:
        worker.shutdown_weight_transfer_engine()
    return found


def main(directory: Path) -> None:
    adapter.register()
    with tempfile.TemporaryDirectory() as store:
        one_process(Path(store) / "store")
        result: dict[str, Any] = {"vllm": vllm.__version__}
        for kind in MODELS:
            try:
                result[kind] = transfer(kind, directory)
                result[kind]["changes"] = changes(kind, directory / f"{kind}-changes")
            except Exception:
                result[kind] = traceback.format_exc()
        try:
            result["two_workers"] = two_workers(directory / "two")
        except Exception:
            result["two_workers"] = traceback.format_exc()
        (directory / "result.json").write_text(json.dumps(result))
