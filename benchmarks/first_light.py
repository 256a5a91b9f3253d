"""Save and load on one rank: Holdfast against torch.save, stock DCP, and the disk itself.

    make bench            or            python benchmarks/first_light.py --out out/bench --gib 1

All contenders take turns within one run, five rounds, so that a noisy machine is noisy for all. Medians are shown, as
ratios to the raw disk first: absolute figures say more about the machine. Every save is durable when its clock stops;
what does not fsync by itself is fsynced here, within its time. *Held* is how long the caller could not train. Loads are
timed with the files in the page cache (warm) and evicted from it (cold), and compared with the state, outside of that.

Does not: measure several ranks, GPUs or network file systems. Asynchronous saves run beside an idle caller here; what
they take from one that computes is another benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import statistics
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

import holdfast

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
CHUNK_BYTES = 8 << 20
RAW_THREADS = 2

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one save: until the caller was free, and until it was durable."""

    held_s: float
    durable_s: float


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    save: Callable[[State, Path], Timing]
    """Saves to a path that does not exist."""
    load: Callable[[State, Path], None]
    """Loads into the given state, in place where it can."""


def make_state(gib: float) -> State:
    """Tensors of the sizes of a transformer with its optimizer state: some large, many small."""
    generator = torch.Generator().manual_seed(0)
    total, used, state = int(gib * (1 << 30)), 0, {}
    shapes = [(2048, 2048), (2048, 512), (5632, 2048), (2048,), (16, 128)]
    while used < total:
        tensor = torch.randn(shapes[len(state) % len(shapes)], generator=generator)
        state[f"layers.{len(state)}.weight"] = tensor
        used += tensor.nbytes
    return state


def nbytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def sync_below(path: Path) -> None:
    """fsync a file, or a directory with its files: what a save that stops short of it must be charged for."""
    targets = [path, *path.iterdir()] if path.is_dir() else [path]
    for target in [*targets, path.parent]:
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def all_at_once(save: Callable[[], object]) -> Timing:
    begin = time.perf_counter()
    save()
    took = time.perf_counter() - begin
    return Timing(took, took)


# contenders ----------------------------------------------------------------------------------------------------


def save_torch(state: State, path: Path) -> Timing:
    def save() -> None:
        torch.save(state, path)
        sync_below(path)

    return all_at_once(save)


def load_torch(state: State, path: Path) -> None:
    for name, tensor in torch.load(path, weights_only=True, mmap=True).items():
        state[name].copy_(tensor)


def save_dcp(state: State, path: Path) -> Timing:
    return all_at_once(lambda: dcp.save(state, checkpoint_id=str(path), no_dist=True))


def load_dcp(state: State, path: Path) -> None:
    dcp.load(state, checkpoint_id=str(path), no_dist=True)


def save_holdfast(state: State, path: Path) -> Timing:
    return all_at_once(lambda: holdfast.save(state, path))


class Managed:
    """A manager's saves: images and engine are kept from one to the next, as they are in training."""

    def __init__(self, state: State, root: Path) -> None:
        config = holdfast.CheckpointConfig(every=None, keep=None)
        self.manager = holdfast.CheckpointManager(root, state, config=config)
        self.step = 0

    def save(self, _: State, path: Path) -> Timing:
        self.step += 1
        begin = time.perf_counter()
        handle = self.manager.save(self.step)
        checkpoint = handle.result()
        timing = Timing(handle.stats.stall_s, time.perf_counter() - begin)
        os.rename(checkpoint.path, path)
        return timing


def load_holdfast(state: State, path: Path) -> None:
    holdfast.load(state, path)


class RawDisk:
    """The same number of bytes from one warm buffer, two threads, O_DIRECT where there is such a thing, one fsync."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // CHUNK_BYTES) * CHUNK_BYTES
        self.buffer = mmap.mmap(-1, self.nbytes)
        view = memoryview(self.buffer)
        for offset in range(0, self.nbytes, CHUNK_BYTES):
            view[offset : offset + CHUNK_BYTES] = os.urandom(4096) * (CHUNK_BYTES // 4096)
        self.direct = True

    def open(self, path: Path) -> int:
        with contextlib.suppress(OSError):
            return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        self.direct = False
        return os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)

    def save(self, _: State, path: Path) -> Timing:
        def write(descriptor: int, first: int) -> None:
            view = memoryview(self.buffer)
            for offset in range(first * CHUNK_BYTES, self.nbytes, RAW_THREADS * CHUNK_BYTES):
                os.pwrite(descriptor, view[offset : offset + CHUNK_BYTES], offset)

        def save() -> None:
            descriptor = self.open(path)
            threads = [threading.Thread(target=write, args=(descriptor, first)) for first in range(RAW_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os.fsync(descriptor)
            os.close(descriptor)

        return all_at_once(save)

    def load(self, _: State, path: Path) -> None:
        view = memoryview(self.buffer)

        def read(first: int) -> None:
            for offset in range(first * CHUNK_BYTES, self.nbytes, RAW_THREADS * CHUNK_BYTES):
                os.preadv(descriptor, [view[offset : offset + CHUNK_BYTES]], offset)

        descriptor = os.open(path, os.O_RDONLY)
        threads = [threading.Thread(target=read, args=(first,)) for first in range(RAW_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(descriptor)


# measuring -----------------------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def warm(path: Path) -> None:
    for file in files_of(path):
        with file.open("rb", buffering=0) as stream:
            while stream.read(CHUNK_BYTES):
                pass


def evict(path: Path) -> None:
    for file in files_of(path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed_load(contender: Contender, state: State, path: Path, prepare: Callable[[Path], None]) -> float:
    fresh = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    prepare(path)
    begin = time.perf_counter()
    contender.load(fresh, path)
    took = time.perf_counter() - begin
    if contender.name != "raw disk" and not all(torch.equal(fresh[name], state[name]) for name in state):
        raise SystemExit(f"{contender.name} did not load what it saved")
    return took


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def measure(contenders: list[Contender], state: State, out: Path) -> dict[str, dict[str, list[float]]]:
    figures: dict[str, dict[str, list[float]]] = {contender.name: {} for contender in contenders}
    for round_number in range(ROUNDS + 1):  # the first is for warming up, and not counted
        for contender in contenders:
            path = out / "file"
            timing = contender.save(state, path)
            found = {"held": timing.held_s, "durable": timing.durable_s}
            found["warm load"] = timed_load(contender, state, path, warm)
            found["cold load"] = timed_load(contender, state, path, evict)
            remove(path)
            if round_number:
                for what, seconds in found.items():
                    figures[contender.name].setdefault(what, []).append(seconds)
        print(f"round {round_number} of {ROUNDS}" + ("" if round_number else " (not counted)"), flush=True)
    return figures


def show(figures: dict[str, dict[str, list[float]]], nbytes: int) -> None:
    columns = ["held", "durable", "warm load", "cold load"]
    medians = {name: {what: statistics.median(times) for what, times in row.items()} for name, row in figures.items()}
    raw = medians["raw disk"]
    print(f"\n{nbytes / (1 << 30):.2f} GiB, one rank, medians of {ROUNDS}; ratio to the raw disk (seconds)")
    print(f"{'':<22}" + "".join(f"{column:>18}" for column in columns))
    for name, row in medians.items():
        cells = [f"{row[what] / raw[what]:.2f} ({row[what]:.3f})" for what in columns]
        print(f"{name:<22}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="Save and load against torch.save, stock DCP and the raw disk.")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="on the file system to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # said in spite of no_dist
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    state = make_state(args.gib)
    raw = RawDisk(nbytes_of(state))
    managed = Managed(state, args.out / "managed")
    contenders = [
        Contender("raw disk", raw.save, raw.load),
        Contender("holdfast.save", save_holdfast, load_holdfast),
        Contender("holdfast manager", managed.save, load_holdfast),
        Contender("torch.save + fsync", save_torch, load_torch),
        Contender("dcp.save", save_dcp, load_dcp),
    ]
    figures = measure(contenders, state, args.out)
    managed.manager.close()
    show(figures, nbytes_of(state))
    if not raw.direct:
        print("this file system has no O_DIRECT: the raw disk was written through the page cache")
    (args.out / "first_light.json").write_text(json.dumps({"nbytes": nbytes_of(state), "seconds": figures}, indent=1))


if __name__ == "__main__":
    main()
