"""Pictures of a run: what a save takes, what loads take, what training loses. PNG, by matplotlib; none without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.stats import bootstrap, seconds
from benchmarks.tables import LABELS, STORE_SERVERS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.samples import Results

OURS, THEIRS, LIMIT = "#0b6e4f", "#9aa5b1", "#c08a2b"


def _label(name: str) -> str:
    return LABELS.get(name, name).replace("*", "").replace("`", "")


def _colour(name: str) -> str:
    if name.startswith("raw"):
        return LIMIT
    return OURS if name.startswith("holdfast") else THEIRS


def bars(axes: Any, results: Results, case: str, figure: str, title: str) -> None:
    """A bar each, shortest on top, with the range of its rounds; the raw limit as a line through all."""
    found = [(name, spread) for name in results.contenders(case) if (spread := results.spread(case, name, figure))]
    found.sort(key=lambda entry: entry[1].median, reverse=True)
    limit = next((name for name, _ in found if name.startswith("raw")), "raw")
    raw = results.median(case, limit, figure)
    for row, (name, spread) in enumerate(found):
        axes.barh(row, spread.median, color=_colour(name), height=0.7)
        axes.plot([spread.low, spread.high], [row, row], color="black", linewidth=1)
        axes.text(spread.high, row, "  " + seconds(spread.median), va="center", fontsize=8)
    if raw:
        axes.axvline(raw, color=LIMIT, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(found)), [_label(name) for name, _ in found], fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlim(0, 1.2 * max((spread.high for _, spread in found), default=1.0))
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _panels(plt: Any, results: Results, panels: list[tuple[str, str, str]], path: Path) -> Path | None:
    panels = [panel for panel in panels if results.contenders(panel[0])]
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(6.2 * columns, 3.2 * rows), squeeze=False)
    flat = [axes for row in grid for axes in row]
    for axes, (case, name, title) in zip(flat, panels, strict=False):
        bars(axes, results, case, name, title)
    for axes in flat[len(panels) :]:
        axes.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def where_time_goes(plt: Any, results: Results, path: Path) -> Path | None:
    """Holdfast's own save, stage by stage, over the raw limits of the same bytes."""
    case, us = "eager", "holdfast-eager"
    stages = [
        ("memcpy, the limit", [("copy", results.median(case, "raw", "memcpy_s"), LIMIT)]),
        ("write + fsync, the limit", [("write", results.median(case, "raw", "durable_s"), LIMIT)]),
        (
            "Holdfast, eager",
            [
                ("staging", results.median(case, us, "held_s"), "#4aa57c"),
                ("persist", results.median(case, us, "persist_s"), OURS),
                ("commit", results.median(case, us, "commit_s"), "#063d2c"),
            ],
        ),
    ]
    if any(amount is None for _, parts in stages for _, amount, _ in parts):
        return None
    figure, axes = plt.subplots(figsize=(8.4, 2.2))
    longest = max(sum(amount or 0.0 for _, amount, _ in parts) for _, parts in stages)
    for row, (_, parts) in enumerate(reversed(stages)):
        start = 0.0
        for name, amount, colour in parts:
            axes.barh(row, amount, left=start, color=colour, height=0.6)
            start += amount
            text = f"{name}\n{seconds(amount)}"
            if amount > 0.1 * longest:
                axes.text(start - amount / 2, row, text, ha="center", va="center", fontsize=7, color="white")
            else:
                axes.text(start + 0.01 * longest, row, text, ha="left", va="center", fontsize=7)
    axes.set_xlim(0, 1.12 * longest)
    axes.set_yticks(range(len(stages)), [name for name, _ in reversed(stages)], fontsize=8)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def slow_down(plt: Any, results: Results, path: Path) -> Path | None:
    """Case (d): means with their intervals."""
    found = [
        (name, bootstrap(values))
        for name in results.contenders("train")
        if (values := results.values("train", name, "slowdown"))
    ]
    if not found:
        return None
    found.sort(key=lambda entry: entry[1].mean, reverse=True)
    figure, axes = plt.subplots(figsize=(8.4, 0.5 + 0.4 * len(found)))
    for row, (name, interval) in enumerate(found):
        axes.barh(row, 100 * interval.mean, color=_colour(name), height=0.6)
        axes.plot([100 * interval.low, 100 * interval.high], [row, row], color="black", linewidth=1)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(found)), [_label(name) for name, _ in found], fontsize=8)
    axes.set_title("slow-down of training by saves, %, mean and 95 % interval", fontsize=10, loc="left")
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def draw(results: Results, folder: Path) -> list[Path]:
    """All pictures there are samples for."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    saves = [
        ("save", "durable_s", "until durable, idle trainer, one rank"),
        ("save-compute", "durable_s", "until durable, trainer computes"),
        ("save-python", "durable_s", "until durable, trainer runs pure Python"),
        ("save-2", "durable_s", "until durable, idle trainer, two ranks"),
        ("save-compute", "cpu_s", "CPU seconds beside a computing trainer"),
        ("save-compute", "held_s", "training thread held, trainer computes"),
    ]
    loads = [
        ("load-warm", "load_s", "load, warm page cache"),
        ("load-cold", "load_s", "load, cold page cache"),
        ("small", "durable_s", "many small tensors, until durable"),
        ("small-warm", "load_s", "many small tensors, load, warm"),
    ]
    exports = [
        ("export", "durable_s", "Hugging Face weights, two ranks, until published"),
        ("export", "held_s", "Hugging Face weights, training thread held"),
    ]
    syncs = [
        ("sync-gloo", "sync_s", "a weight version over gloo, until committed"),
        ("sync-memory", "sync_s", "a weight version through shared memory, until committed"),
        ("sync-delta", "sync_s", "a weight version of which little has changed, until committed"),
    ]
    stores = [
        (f"stores-{name}", figure, f"{called} on loopback: {title}")
        for name, called in STORE_SERVERS.items()
        for figure, title in (
            ("save_s", "save"),
            ("load_s", "load"),
            ("save_cpu_s", "CPU seconds of a save"),
            ("load_cpu_s", "CPU seconds of a load"),
        )
    ]
    pictures = [
        where_time_goes(plt, results, folder / "where-time-goes.png"),
        _panels(plt, results, saves, folder / "saves.png"),
        _panels(plt, results, loads, folder / "loads.png"),
        _panels(plt, results, exports, folder / "exports.png"),
        _panels(plt, results, syncs, folder / "syncs.png"),
        _panels(plt, results, stores, folder / "stores.png"),
        slow_down(plt, results, folder / "training.png"),
    ]
    return [picture for picture in pictures if picture is not None]
