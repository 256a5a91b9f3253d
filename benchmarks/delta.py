"""What changes from step to step of a real language model, and what it costs to send only that.

    python -m benchmarks.delta --out out/delta          (--quick: a tiny model, few steps)

A small Qwen3 is trained on the text of Python's own library, by bytes: fp32 masters, AdamW, a warm-up at a usual
learning rate until the moments mean something. From there it takes eight steps at each learning rate of interest; its
weights are published as bf16. Measured from step to step, and over all eight: elements that differ, and the bytes of a
whole version, of the 1 MiB extents that differ, and of a delta by element (`holdfast.format.sparse`): new values or
steps, with zstd and without. Times are of one thread, medians of rounds in which all take turns, with memory larger
than caches; *swap* is decoding a record and writing its elements into the weights, *apply* is that with the hash of
every block of the result, a copy of as many bytes stands beside.

A receiver's *commit* is measured with one thread and two: the changes of a delta, decoded by the fetch, scattered to
the live weights, and the whole version copied to them (`holdfast.sync.weights.scatter`), beside a plain copy. Also for
changes that are spread evenly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from holdfast import events
from holdfast.format import sparse
from holdfast.sync.weights.scatter import Changes, LiveWrite, write_live

if TYPE_CHECKING:
    from collections.abc import Callable

EXTENT_BYTES: Final = 1 << 20
STEPS: Final = 8
RATES: Final = (1e-6, 3e-6, 1e-4)
WRITTEN: Final = ("scattered", "copied")
EVEN: Final = (0.01, 0.03, 0.05)
KINDS: Final = (("values", False), ("values", True), ("steps", False), ("steps", True))
BITS: Final = "bfloat16"


class Training:
    """A small language model, its text and its optimizer."""

    def __init__(self, *, quick: bool) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        wide, layers = (64, 2) if quick else (512, 8)
        config = Qwen3Config(
            vocab_size=256,
            hidden_size=wide,
            intermediate_size=4 * wide,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=wide // 8,
            tie_word_embeddings=False,
        )
        self.model = Qwen3ForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:60])
        self._text = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        self._batch = (2, 32) if quick else (8, 128)
        self._choose = torch.Generator().manual_seed(1)

    def step(self) -> float:
        rows, length = self._batch
        starts = torch.randint(0, len(self._text) - length, (rows,), generator=self._choose)
        batch = torch.stack([self._text[start : start + length] for start in starts.tolist()])
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def weights(self) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """Return all weights as bf16, one after the other, as their bits."""
        with torch.no_grad():
            parts = [parameter.to(torch.bfloat16).reshape(-1) for parameter in self.model.parameters()]
        found: np.ndarray[Any, np.dtype[np.uint16]] = torch.cat(parts).view(torch.int16).numpy().view(np.uint16).copy()
        return found

    def snapshot(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        state = self.optimizer.state_dict()
        moments = {
            key: {name: torch.clone(value) for name, value in row.items()} for key, row in state["state"].items()
        }
        return model, {"state": moments, "param_groups": state["param_groups"]}

    def restore(self, snapshot: tuple[dict[str, torch.Tensor], dict[str, Any]], rate: float) -> None:
        model, optimizer = snapshot
        self.model.load_state_dict(model)
        moments = {
            key: {name: torch.clone(value) for name, value in row.items()} for key, row in optimizer["state"].items()
        }
        self.optimizer.load_state_dict({"state": moments, "param_groups": optimizer["param_groups"]})
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def cloned(moments: dict[Any, dict[str, torch.Tensor]]) -> dict[Any, dict[str, torch.Tensor]]:
    return {key: {name: value.clone() for name, value in row.items()} for key, row in moments.items()}


def versions_at(training: Training, start: Any, rate: float) -> list[Any]:
    """Return the weights before the first step at a rate, and after each."""
    training.restore(start, rate)
    found = [training.weights()]
    for _ in range(STEPS):
        training.step()
        found.append(training.weights())
    return found


def name_of(kind: str, *, zstd: bool) -> str:
    return f"{kind}, zstd" if zstd else kind


def sizes_between(old: Any, new: Any) -> dict[str, Any]:
    """Return the share of elements that differ, and of a whole version's bytes that each way sends."""
    differs = old != new
    pad = -len(differs) % (EXTENT_BYTES // 2)
    extents = np.pad(differs, (0, pad)).reshape(-1, EXTENT_BYTES // 2).any(axis=1)
    found = {"changed": float(differs.mean()), "extents": float(extents.mean())}
    for kind, zstd in KINDS:
        record = sparse.encode(old, new, BITS, kind=kind, compress=zstd).record  # type: ignore[arg-type]
        found[name_of(kind, zstd=zstd)] = len(record) / new.nbytes
    return found


def folded_sizes(versions: list[Any]) -> dict[str, float]:
    """Return the share of a whole version's bytes that all steps take, folded into one record."""
    found = {}
    for kind, zstd in KINDS:
        pairs = itertools.pairwise(versions)
        records = [sparse.encode(*pair, BITS, kind=kind, compress=zstd).record for pair in pairs]  # type: ignore[arg-type]
        found[name_of(kind, zstd=zstd)] = len(sparse.fold(records, compress=zstd)) / versions[0].nbytes
    return found


def timed(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def times_between(old: Any, new: Any, rounds: int, least_bytes: int) -> dict[str, dict[str, float]]:
    """Return encode in GB/s, swap and apply in ms a GB; of weights repeated until they don't fit into caches."""
    repeats = max(1, -(-least_bytes // new.nbytes))
    old, new = np.tile(old, repeats), np.tile(new, repeats)
    hashes, live, copy = sparse.block_hashes(old, BITS), old.copy(), old.copy()
    encoded = {
        (kind, zstd): sparse.encode(old, new, BITS, kind=kind, compress=zstd).record  # type: ignore[arg-type]
        for kind, zstd in KINDS
    }
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        copied_s = timed(lambda: np.copyto(copy, new))
        for kind, zstd in KINDS:
            record = sparse.Record(encoded[kind, zstd])
            options: Any = {"kind": kind, "compress": zstd, "base_hashes": hashes}
            encode_s = timed(lambda options=options: sparse.encode(old, new, BITS, **options))  # type: ignore[misc]
            np.copyto(live, old)
            swap_s = timed(lambda record=record: swap(record, live))  # type: ignore[misc]
            assert np.array_equal(live, new)
            np.copyto(live, old)
            apply_s = timed(lambda record=record: sparse.apply(record, live))  # type: ignore[misc]
            measured = {"encode_s": encode_s, "swap_s": swap_s, "apply_s": apply_s, "copy_s": copied_s}
            for name, seconds in measured.items() if number else ():
                found.setdefault(name_of(kind, zstd=zstd), {}).setdefault(name, []).append(seconds)
    gigabytes = new.nbytes / 1e9
    told: dict[str, dict[str, float]] = {}
    for name, row in found.items():
        told[name] = {"encode_GB_per_s": gigabytes / statistics.median(row["encode_s"])}
        for what in ("swap", "apply", "copy"):
            told[name][f"{what}_ms_per_GB"] = 1e3 * statistics.median(row[f"{what}_s"]) / gigabytes
    return told


def swap(record: sparse.Record, live: Any) -> None:
    """Write what changed into the weights, without a look at the result."""
    size, memory = 2 * record.head.block_units, memoryview(live).cast("B")
    for number in range(record.head.blocks):
        record.change(number, memory[number * size : (number + 1) * size])


def evenly_changed(share: float) -> tuple[Any, Any]:
    """Return weights, and others of which a share of elements, chosen evenly, is different."""
    made = np.random.default_rng(0)
    old = made.integers(0, 1 << 16, 1 << 22, np.uint16)
    return old, old ^ (made.random(len(old)) < share)


def commits_between(old: Any, new: Any, rounds: int, least_bytes: int) -> dict[str, Any]:
    """Return commits by scatter and whole in ms a GB, by threads; and which share was scattered, and copied."""
    repeats = max(1, -(-least_bytes // new.nbytes))
    old, new = np.tile(old, repeats), np.tile(new, repeats)
    record, aside, changes = sparse.Record(sparse.encode(old, new, BITS).record), old.copy(), Changes(new.nbytes)
    size, memory = 2 * record.head.block_units, memoryview(aside).cast("B")
    for number in range(record.head.blocks):
        block = memory[number * size : (number + 1) * size]
        changes.note(number * size, len(block), *record.change(number, block))
    live, source = (torch.from_numpy(bits.view(np.int16)) for bits in (old.copy(), aside))
    before = events.statistics()
    write_live([LiveWrite(live, source, 0, [changes])])
    assert np.array_equal(live.numpy().view(np.uint16), new)
    told = {what: events.statistics()[f"sync_bytes_{what}"] - before[f"sync_bytes_{what}"] for what in WRITTEN}
    jobs: dict[str, Callable[[], object]] = {
        "scatter": lambda: write_live([LiveWrite(live, source, 0, [changes])]),
        "whole": lambda: write_live([LiveWrite(live, source)]),
        "copy": lambda: np.copyto(live.numpy(), source.numpy()),
    }
    found: dict[str, Any] = {what: nbytes / new.nbytes for what, nbytes in told.items()}
    found["kept"] = changes.nbytes / new.nbytes
    cores = sorted(os.sched_getaffinity(0))
    for threads in range(1, min(2, len(cores)) + 1):
        os.sched_setaffinity(0, cores[:threads])
        try:
            turns = [{name: timed(job) for name, job in jobs.items()} for _ in range(6 * rounds + 1)][1:]
        finally:
            os.sched_setaffinity(0, cores)
        medians = {name: statistics.median(turn[name] for turn in turns) for name in jobs}
        found[f"{threads} threads"] = {name: 1e3 * seconds / (new.nbytes / 1e9) for name, seconds in medians.items()}
    return found


def measure(*, quick: bool, rounds: int, warm_steps: int) -> dict[str, Any]:
    training = Training(quick=quick)
    losses = [training.step() for _ in range(warm_steps)]
    start, threads = training.snapshot(), torch.get_num_threads()
    found: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "torch": torch.__version__},
        "model": {"elements": len(training.weights()), "warm_steps": warm_steps, "loss": [losses[0], losses[-1]]},
        "rates": {},
    }
    least_bytes = 8 << 20 if quick else 256 << 20
    for rate in RATES:
        torch.set_num_threads(threads)
        versions = versions_at(training, start, rate)
        torch.set_num_threads(1)
        steps = [sizes_between(old, new) for old, new in itertools.pairwise(versions)]
        one = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        found["rates"][f"{rate:g}"] = {
            "one step": one,
            "eight steps": sizes_between(versions[0], versions[-1]),
            "eight steps, folded": folded_sizes(versions),
            "times": times_between(versions[0], versions[1], rounds, least_bytes),
            "commit": commits_between(versions[0], versions[1], rounds, least_bytes),
        }
    found["even"] = {f"{share:g}": commits_between(*evenly_changed(share), rounds, least_bytes) for share in EVEN}
    return found


def report(results: dict[str, Any]) -> str:
    model = results["model"]
    lines = [
        "# What changes from step to step, and what it costs to send only that\n",
        "python -m benchmarks.delta; see its opening for what was measured.\n",
        (
            f"A Qwen3 of {model['elements'] / 1e6:.1f} M parameters after {model['warm_steps']} steps of AdamW (loss "
            f"{model['loss'][0]:.2f} to {model['loss'][1]:.2f}), published as bf16.\n"
        ),
        "![What one step's delta takes of a whole version](delta.png)\n",
        "Shares of a whole version, medians of eight steps, and all eight at once:\n",
        "| learning rate | | elements changed | extents | values | values, zstd | steps | steps, zstd |",
        "|---|---|---|---|---|---|---|---|",
    ]
    columns = ("changed", "extents", *(name_of(kind, zstd=zstd) for kind, zstd in KINDS))
    for rate, found in results["rates"].items():
        for span in ("one step", "eight steps", "eight steps, folded"):
            row = [f"{100 * found[span][name]:.2f} %" if name in found[span] else "-" for name in columns]
            lines.append(f"| {rate} | {span} | {' | '.join(row)} |")
    lines += [
        "\nOne thread, one step's delta:\n",
        "| learning rate | | encode | swap | apply, verified | a copy |",
        "|---|---|---|---|---|---|",
    ]
    for rate, found in results["rates"].items():
        for name, row in found["times"].items():
            cells = [f"{row[f'{what}_ms_per_GB']:.0f} ms/GB" for what in ("swap", "apply", "copy")]
            lines.append(f"| {rate} | {name} | {row['encode_GB_per_s']:.2f} GB/s | {' | '.join(cells)} |")
    return "\n".join([*lines, *commits_told(results)]) + "\n"


def commits_told(results: dict[str, Any]) -> list[str]:
    """Return the lines of a report on commits."""
    lines = [
        (
            "\nA receiver's commit of one step's delta, in ms a GB. Shares of a version's bytes: scattered, copied, "
            "and kept of the delta from the fetch to the commit.\n"
        ),
        "| changed elements | scattered | copied | kept | threads | commit | whole | a copy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = {f"trained at {rate}": found["commit"] for rate, found in results["rates"].items()}
    rows |= {f"{100 * float(share):g} %, evenly": found for share, found in results["even"].items()}
    for name, row in rows.items():
        shares = " | ".join(f"{100 * row[what]:.1f} %" for what in (*WRITTEN, "kept"))
        for threads in (1, 2):
            times = row.get(f"{threads} threads")
            if times is not None:
                cells = " | ".join(f"{times[what]:.0f}" for what in ("scatter", "whole", "copy"))
                lines.append(f"| {name} | {shares} | {threads} | {cells} |")
    return lines


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the shares of one step, by learning rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rates = list(results["rates"])
    ways = ("extents", "values, zstd", "steps, zstd")
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for number, (way, colour) in enumerate(zip(ways, ("#9aa5b1", "#0b6e4f", "#4caf8a"), strict=True)):
        shares = [100 * results["rates"][rate]["one step"][way] for rate in rates]
        bars = axes.bar([at + 0.27 * (number - 1) for at in range(len(rates))], shares, 0.25, label=way, color=colour)
        axes.bar_label(bars, [f"{share:.1f}" for share in shares], fontsize=8)
    axes.set_xticks(range(len(rates)), [f"lr {rate}" for rate in rates])
    axes.set_ylabel("% of a whole version")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/delta"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-steps", type=int, default=60)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    rounds, warm = (2, 3) if args.quick else (args.rounds, args.warm_steps)
    results = measure(quick=args.quick, rounds=rounds, warm_steps=warm)
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    (args.out / "report.md").write_text(report(results))
    draw(results, args.out / "delta.png")
    print(report(results))


if __name__ == "__main__":
    main()
