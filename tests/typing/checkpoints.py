"""Saves, loads and managers as users write them, for type checkers only: ``make check`` and ``tests/packaging``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from typing_extensions import assert_type

import holdfast
from holdfast.events import Event


def save_and_load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: str, other: Path) -> None:
    state = {"model": model, "optimizer": optimizer, "train": {"step": 3}}
    assert_type(holdfast.save(state, path), holdfast.Checkpoint)
    assert_type(
        holdfast.save(
            state,
            other,
            step=1,
            metrics={"loss": 0.5},
            process_group=None,
            timeout=60.0,
            overwrite=True,
            files={"a.json": b"{}", "b.txt": other},
        ),
        holdfast.Checkpoint,
    )
    assert_type(holdfast.load(state, path, strict=False, verify=False), holdfast.Checkpoint)
    assert_type(holdfast.load(state, other, include="model", exclude=["model.head"]), holdfast.Checkpoint)
    assert_type(holdfast.open(other), holdfast.Checkpoint)
    assert_type(holdfast.delete(path), bool)
    holdfast.release()
    holdfast.save({"model": [model, model]}, "s3://bucket/run/step-1")


async def save_in_the_background(state: Mapping[str, Any], path: str) -> None:
    handle = holdfast.async_save(state, path, step=1, staging="eager")
    assert_type(handle, holdfast.SaveHandle)
    handle.wait_staged(timeout=1.0)
    handle.wait_mirrored(timeout=1.0)
    assert_type(handle.result(timeout=60.0), holdfast.Checkpoint)
    assert_type(await handle, holdfast.Checkpoint)
    assert_type(handle.exception(), BaseException | None)
    assert_type(handle.done(), bool)
    assert_type(handle.step, int | None)
    assert_type(handle.path, str)
    assert_type(handle.attempt, str | None)
    assert_type(handle.stats, holdfast.SaveStats)
    assert_type(handle.stats.bytes, int)
    assert_type(handle.stats.stall_s, float)

    def then(done: holdfast.SaveHandle) -> None:
        stage: str = done.stage
        print(stage)

    handle.add_done_callback(then)


def look_at(checkpoint: holdfast.Checkpoint) -> None:
    assert_type(checkpoint.step, int | None)
    assert_type(checkpoint.path, str)
    assert_type(checkpoint.metrics, dict[str, float])
    assert_type(checkpoint.tensors, Mapping[str, holdfast.TensorInfo])
    info = checkpoint.tensors["model.w"]
    assert_type(info.shape, tuple[int, ...])
    assert_type(info.dtype, torch.dtype)
    assert_type(info.nbytes, int)
    assert_type(checkpoint.read("model.w"), torch.Tensor)
    assert_type(checkpoint.read("model.w", (slice(0, 128),)), torch.Tensor)
    assert_type(checkpoint.read("model.w", (0, slice(None))), torch.Tensor)
    assert_type(checkpoint.map("model.w"), torch.Tensor)
    assert_type(checkpoint.objects, Mapping[str, Any])
    assert_type(checkpoint.files, Mapping[str, holdfast.FileInfo])
    assert_type(checkpoint.files["a.json"].nbytes, int)
    assert_type(checkpoint.read_file("a.json"), bytes)
    assert_type(checkpoint.state(), dict[str, Any])
    report = checkpoint.verify(progress=lambda done, total: print(done, total))
    assert_type(report, holdfast.VerifyReport)
    assert_type(report.ok, bool)
    assert_type([problem.message for problem in report.problems], list[str])
    assert_type(os.fspath(checkpoint), str)
    if checkpoint.manifest is not None:
        assert_type(checkpoint.manifest.format, int)
        assert_type(checkpoint.manifest.versions, dict[str, str])


def train(model: torch.nn.Module, total: int) -> None:
    config = holdfast.CheckpointConfig(
        every=500,
        keep=holdfast.Keep(last=3, every=10_000, minutes=None, best=holdfast.Best("loss", mode="min", n=2)),
        mode="async",
        staging="lazy",
        when_busy="skip",
        on_error="raise_now",
        on_corrupt="raise",
        last_dtype=torch.bfloat16,
        exclude_from_loading=("dataloader",),
        save_on_signal="SIGUSR1",
    )
    assert_type(config.every, int | None)
    export = holdfast.HFExport("runs/a/hf", every=2_000, dtype=torch.bfloat16, assets="path/of/source/model")
    assert_type(export.every, int | None)
    with holdfast.CheckpointManager(
        Path("runs/a"), {"model": model}, config=config, exports=[export], mirror="s3://bucket/run"
    ) as manager:
        assert_type(manager, holdfast.CheckpointManager)
        start = manager.restore() or 0
        assert_type(start, int)
        for step in range(start + 1, total + 1):
            assert_type(manager.step(step, metrics={"loss": 0.5}), list[holdfast.SaveHandle])
        manager.before_update()
        manager.wait_staged(timeout=1.0)
        manager.wait()
        assert_type(manager.save(total, metrics={"loss": 0.1}, final=True, files={"a": b""}), holdfast.SaveHandle)
        assert_type(manager.steps(), list[int])
        assert_type(manager.latest(), int | None)
        manager.pin(total)
        manager.unpin(total)
        manager.close(timeout=60.0, failed=False)


def wrap(model: torch.nn.Module) -> None:
    assert_type(holdfast.PerRank(3), holdfast.PerRank[int])
    assert_type(holdfast.Replicated("x"), holdfast.Replicated[str])
    holdfast.save({"model": holdfast.TrainableOnly(model), "bare": holdfast.Unprefixed(model)}, "a")
    holdfast.save({"rng": holdfast.RNG()}, "b")


def export(model: torch.nn.Module, checkpoint: holdfast.Checkpoint, out: Path) -> None:
    assert_type(holdfast.export_hf({"model": model}, out, dtype=torch.bfloat16), Path | str)
    assert_type(holdfast.export_hf(checkpoint, out, assets=None, key_map=None, max_shard_bytes=1 << 30), Path | str)
    assert_type(holdfast.async_export_hf(model, out), holdfast.SaveHandle)


def through_stock_dcp(path: str) -> None:
    writer, reader = holdfast.dcp.Writer(path), holdfast.dcp.Reader(path)
    stock_writer: StorageWriter = writer
    stock_reader: StorageReader = reader
    print(stock_writer, stock_reader)


def observe() -> None:
    seen: list[Event] = []
    remove = holdfast.add_hook(seen.append)
    assert_type(seen[0].kind, str)
    assert_type(seen[0].step, int | None)
    assert_type(seen[0].fields, Mapping[str, Any])
    remove()
    assert_type(holdfast.statistics().counters, Mapping[str, int])
    assert_type(holdfast.__version__, str)


def handle_errors(state: dict[str, Any]) -> None:
    try:
        holdfast.load(state, "a")
    except holdfast.CheckpointNotFound as error:
        assert_type(error.step, int | None)
    except holdfast.CheckpointCorrupt as error:
        assert_type(error.path, str)
        assert_type(error.tensor, str | None)
        assert_type(error.byte_range, tuple[int, int] | None)
    except holdfast.ConfigError as error:
        assert_type(error.field, str | None)
    except holdfast.HoldfastError as error:
        raise SystemExit(str(error)) from error
