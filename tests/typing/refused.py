"""Wrong uses that a type checker must refuse: each ``type: ignore`` that nothing needs is an error of its own."""

from __future__ import annotations

import torch

import holdfast
from holdfast.sync import DirectoryTransport, Publisher, Receiver


def misuse(model: torch.nn.Module, checkpoint: holdfast.Checkpoint, handle: holdfast.SaveHandle) -> None:
    holdfast.save(model, "a")  # type: ignore[arg-type]
    holdfast.save({"model": model}, 3)  # type: ignore[arg-type]
    holdfast.save({"model": model}, "a", 3)  # type: ignore[call-arg]
    holdfast.save({"model": model}, "a", step="3")  # type: ignore[arg-type]
    holdfast.save({"model": model}, "a", metrics={"loss": "low"})  # type: ignore[dict-item]
    holdfast.save({"model": model}, "a", files={"a": "text"})  # type: ignore[dict-item]
    holdfast.save({"model": model}, "a", overwite=True)  # type: ignore[call-arg]
    holdfast.async_save({"model": model}, "a", staging="fast")  # type: ignore[arg-type]
    holdfast.load({"model": model}, None)  # type: ignore[arg-type]
    holdfast.open()  # type: ignore[call-arg]
    checkpoint.tensors["w"] = 3  # type: ignore[index]
    checkpoint.step = 3  # type: ignore[misc]
    checkpoint.read(3)  # type: ignore[arg-type]
    handle.stats.bytes = 3  # type: ignore[misc]
    handle.add_done_callback(lambda: None)  # type: ignore[misc, arg-type]


def misconfigure(model: torch.nn.Module) -> None:
    config = holdfast.CheckpointConfig(every="500")  # type: ignore[arg-type]
    config.every = 3  # type: ignore[misc]
    holdfast.CheckpointConfig(mode="fast")  # type: ignore[arg-type]
    holdfast.CheckpointConfig(evry=500)  # type: ignore[call-arg]
    holdfast.CheckpointConfig(keep=3)  # type: ignore[arg-type]
    holdfast.Best("loss", mode="least")  # type: ignore[arg-type]
    holdfast.HFExport("a", every="2")  # type: ignore[arg-type]
    manager = holdfast.CheckpointManager("a", model)  # type: ignore[arg-type]
    manager.step("3")  # type: ignore[arg-type]
    manager.step(3, {"loss": "low"})  # type: ignore[dict-item]
    holdfast.CheckpointManager("a", {"model": model}, exports=[holdfast.HFExport("b")], config={"every": 3})  # type: ignore[arg-type]
    holdfast.add_hook(lambda: None)  # type: ignore[arg-type, misc]


def missynchronise(model: torch.nn.Module) -> None:
    Publisher("/tmp/run")  # type: ignore[arg-type]
    publisher = Publisher(DirectoryTransport("a"), delta="dense")  # type: ignore[arg-type]
    publisher.publish(model.state_dict(), "1")  # type: ignore[arg-type]
    publisher.publish(model)  # type: ignore[call-arg]
    publisher.publish([torch.ones(3)], 1)  # type: ignore[list-item]
    receiver = Receiver(DirectoryTransport("a"))
    receiver.receive(model, version="1")  # type: ignore[arg-type]
    receiver.version = 3  # type: ignore[misc]
