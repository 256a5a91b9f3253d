"""Load versions through SGLang's own `Engine` methods and weight updaters, on CPU, around a small model.

    python sglang_job.py DIRECTORY

The scheduler is called in this process instead of over a socket. Writes DIRECTORY/result.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers.image_utils  # noqa: F401 - before the stand-ins below
from jobs import ROOT, leave

sys.path.insert(0, str(ROOT / "examples"))
from holdfast.errors import HoldfastError
from holdfast.sync import DirectoryTransport, Publisher
from holdfast.sync.adapters import sglang as adapter
from sglang_on_cpu import Manager, engine_of, without_torchvision


def weights_at(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {f"layers.{number}.weight": torch.randn(8, 16).bfloat16() for number in range(5)}


class Model(torch.nn.Module):
    """Loads as SGLang's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 8, bias=False, dtype=torch.bfloat16) for _ in range(5))
        self.fails = False

    def load_weights(self, weights: Any) -> None:
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            if self.fails and name == "layers.3.weight":
                raise ValueError("the model can't load it")
            mine[name].data.copy_(tensor)

    def holds(self, version: int) -> bool:
        return all(torch.equal(value, weights_at(version)[name]) for name, value in self.named_parameters())


def refused(act: Any) -> str:
    try:
        act()
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fetched_ahead(worker: Any, publisher: Publisher, manager: Manager, model: Model, result: dict[str, Any]) -> None:
    """Fetch while the engine generates; versions of another shape don't even pause it."""
    manager.calls.clear()
    publisher.publish(weights_at(3), 3)
    worker.prefetch()
    deadline = time.monotonic() + 30.0
    while worker.fetched != 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    result["ahead"] = [worker.fetched, worker.version, list(manager.calls), model.holds(2)]
    result["then"] = [worker.receive(timeout=30.0), worker.fetched, model.holds(3), manager.weight_version]
    manager.calls.clear()
    publisher.publish({**weights_at(9), "layers.1.weight": torch.zeros(8, 17).bfloat16()}, 5)
    result["shape"] = [refused(lambda: worker.receive(timeout=30.0)), list(manager.calls), worker.dirty, model.holds(3)]
    publisher.publish(weights_at(4), 6)
    worker.prefetch()
    result["next"] = [worker.receive(timeout=30.0), model.holds(4), worker.dirty]
    manager.calls.clear()


def while_requests_run(engine: Any, place: Path, model: Model) -> dict[str, Any]:
    """Load a version beside running requests, paused in each way."""
    found: dict[str, Any] = {}
    manager = engine.tokenizer_manager
    manager.running = True
    with Publisher(DirectoryTransport(place)) as publisher:
        for version, pause in enumerate(adapter.PAUSES, start=1):
            worker = adapter.SGLangReceiver(engine, DirectoryTransport(place), device="cpu", pause=pause)
            publisher.publish(weights_at(version), version)
            manager.calls.clear()
            told = refused(lambda worker=worker: worker.receive(timeout=30.0))
            found[pause] = [told, worker.dirty, model.holds(version), manager.calls.count("flush"), manager.calls[-1]]
            worker.close()
    manager.running = False
    return found


def main(directory: Path) -> None:
    without_torchvision()
    import sglang

    dist.init_process_group("gloo", init_method=f"file://{directory / 'group'}", rank=0, world_size=1)
    model = Model()
    engine = engine_of(model)
    manager = engine.tokenizer_manager
    result: dict[str, Any] = {"sglang": sglang.__version__}
    result["without_session"] = engine.update_weights_from_tensor(list(weights_at(1).items()))
    manager.calls.clear()
    adapter.BATCH_BYTES = 600  # two tensors a call
    worker = adapter.SGLangReceiver(engine, DirectoryTransport(directory / "versions"), device="cpu", pause="retract")
    with Publisher(DirectoryTransport(directory / "versions")) as publisher:
        publisher.publish(weights_at(1), 1)
        result["first"] = [worker.receive(timeout=30.0), manager.weight_version, model.holds(1), worker.dirty]
        result["calls"] = list(manager.calls)
        publisher.publish(weights_at(2), 2)
        model.fails = True
        manager.calls.clear()
        try:
            worker.receive(timeout=30.0)
        except HoldfastError as error:
            result["failed"] = str(error)
        result["after_failure"] = [worker.version, worker.dirty, manager.weight_version, manager.calls[-1]]
        model.fails = False
        result["again"] = [worker.receive(timeout=30.0), manager.weight_version, model.holds(2), worker.dirty]
        result["continued"] = manager.calls[-1]
        fetched_ahead(worker, publisher, manager, model, result)
    result["gone"] = [refused(lambda: worker.receive(version=9, timeout=0.5)), *manager.calls]
    result["after_gone"] = [worker.version, worker.dirty, model.holds(4)]
    worker.close()
    result["running"] = while_requests_run(engine, directory / "running", model)
    (directory / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
