"""A checkpoint beside the export of another session, at nice 19, while other processes compute on every core.

The export is what one has its engine do, over and over until the checkpoint is published: parts of two files, written,
hashed, fsynced and reported. Its session shares the checkpoint's engine, or has one of its own; all else is alike.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

import holdfast
from benchmarks.files import remove
from holdfast.engine.client import EngineClient
from holdfast.engine.messages import FileRow
from holdfast.engine.shared import EngineHost, process_engine
from holdfast.staging.image import Image
from holdfast.testing.engine import persist

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXPORT_NICE = 19
FILES = 2
SMALL_BYTES = 4 << 10, 16 << 10
LARGE_COUNT = 8
LIMIT_S = 120.0
SETTLE_S = 0.2
"""How long others have to be at work before anything is timed."""


def tensors_of(kind: str, count: int, nbytes: int) -> dict[str, torch.Tensor]:
    """``count`` tensors of 4 to 16 KiB for ``small``, else a few that have ``nbytes`` together."""
    if kind == "small":
        least, most = SMALL_BYTES
        sizes = [least + number * 1024 % (most - least + 1024) for number in range(count)]
    else:
        sizes = [nbytes // LARGE_COUNT] * LARGE_COUNT
    return {str(number): torch.randn(size // 4) for number, size in enumerate(sizes)}


class Export:
    """The engine's part of exports, one after the other, inside `going_on`."""

    def __init__(self, folder: Path, nbytes: int, host: EngineHost) -> None:
        self._folder, self._number = folder, 0
        each = nbytes // FILES & -4096
        self._image = Image(FILES * each)
        self._image.bytes_view.view(torch.float32).normal_()
        self._client = EngineClient(0, nice=EXPORT_NICE, host=host)
        rows = [FileRow(f"model-{at}.safetensors", each, at * each, 0, each) for at in range(FILES)]
        self._known = (
            self._client.add_image(self._image.fd, self._image.nbytes),
            self._client.add_plan(rows, tensor_offsets=b"", tensor_sizes=b"", index=b"none"),
        )

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside, an export is being written. Raises what one of them has raised."""
        stop, begun = threading.Event(), threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                while not stop.is_set():
                    self._write(begun)
            except BaseException as error:
                failed.append(error)
                begun.set()

        thread = threading.Thread(target=run, name="bench-export", daemon=True)
        thread.start()
        begun.wait(LIMIT_S)
        try:
            yield
        finally:
            stop.set()
            thread.join(LIMIT_S)
        if failed:
            raise failed[0]

    def _write(self, begun: threading.Event) -> None:
        self._number += 1
        name, place = str(self._number), self._folder / f"export-{self._number}"
        place.mkdir(parents=True)
        try:
            persist(self._client, place, *self._known, name)
            self._client.staging_verified(name)
            while not self._client.progress(name)[0]:
                time.sleep(0.001)
            begun.set()
            self._client.wait_reported(name, LIMIT_S)
        finally:
            remove(place)

    def close(self) -> None:
        self._client.close(10.0)
        self._image.close()


class Beside:
    """A manager of checkpoints at nice 0, and exports that share its engine (``one``) or don't (``two``)."""

    def __init__(self, folder: Path, kind: str, count: int, nbytes: int) -> None:
        state = tensors_of(kind, count, nbytes)
        self.facts = {"nbytes": sum(4 * tensor.numel() for tensor in state.values()), "tensors": len(state)}
        config = holdfast.CheckpointConfig(every=1, keep=holdfast.Keep(last=1), nice=0, save_on_signal=())
        self._manager = holdfast.CheckpointManager(folder / "run", state, config=config)
        self._exports = {
            "one": Export(folder / "one", 4 * nbytes, process_engine()),
            "two": Export(folder / "two", 4 * nbytes, EngineHost()),
        }
        self._step = 0

    def turn(self, engines: str) -> dict[str, float]:
        """Save beside an export in ``one`` or ``two`` engines, or beside ``none``."""
        with busy_cores():
            time.sleep(SETTLE_S)
            if engines == "none":
                return self._save()
            with self._exports[engines].going_on():
                return self._save()

    def _save(self) -> dict[str, float]:
        self._step += 1
        began = time.perf_counter()
        (handle,) = self._manager.step(self._step)
        handle.result(LIMIT_S)
        return {"durable_s": time.perf_counter() - began, "persist_s": handle.stats.persist_s}

    def close(self) -> None:
        self._manager.close()
        for export in self._exports.values():
            export.close()


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Inside, a process computes on each core."""
    started = [
        subprocess.Popen([sys.executable, "-S", "-E", "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
