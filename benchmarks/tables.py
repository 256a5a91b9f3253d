"""Markdown tables of the cases: ratios to the raw limit first, then medians with the range of their rounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.peers import DELTA_SHARES, PEERS
from benchmarks.stats import Spread, bootstrap, nbytes, rate, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.samples import Results

LABELS = {name: peer.label for name, peer in PEERS.items()} | {
    "holdfast-warmed": "**Holdfast**, warmed up",
    "holdfast-one-engine": "**Holdfast**, one engine",
    "holdfast-two-engines": "**Holdfast**, an engine each",
    "holdfast-no-export": "**Holdfast**, no export",
    "torch-checkpointing-warmed": "`torch_checkpointing`, warmed up",
    **{f"holdfast-sync-delta-{share}": f"**Holdfast**, `delta`, {share} % changed" for share in DELTA_SHARES},
}


@dataclass(frozen=True, slots=True)
class Column:
    """One figure. ``over``: what its ratio is to, as (contender, figure); the raw limit's own as a rule."""

    figure: str
    title: str
    over: tuple[str, str] | None = None
    show: Callable[[float], str] = seconds


def plain(value: float) -> str:
    return f"{value:.2f}"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.0f} MB/s"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


SAVE = (
    Column("durable_s", "until durable", ("raw", "durable_s")),
    Column("held_s", "training thread held", ("raw", "memcpy_s")),
    Column("cpu_s", "CPU"),
)
SAVE_IDLE = (*SAVE, Column("staging_s", "copies beside training"))
EAGER = (
    *SAVE,
    Column("persist_s", "persist", ("raw", "durable_s")),
    Column("commit_s", "commit"),
)
SAVE_BUSY = (
    Column("durable_s", "until durable", ("holdfast", "durable_s")),
    Column("held_s", "training thread held"),
    Column("cpu_s", "CPU beside training", ("holdfast", "cpu_s")),
    Column("pace", "trainer's pace meanwhile", None, percent),
)
LOAD = (
    Column("load_s", "load", ("raw", "load_s")),
    Column("cpu_s", "CPU"),
    Column("cached", "in the page cache before", None, percent),
)
PART = (Column("load_s", "1 % of a tensor", ("raw", "load_s")),)
MANY = (
    Column("first_durable_s", "first save, until durable"),
    Column("first_held_s", "first save, held"),
    Column("durable_s", "later saves, until durable"),
    Column("held_s", "later saves, held"),
)
FIRST = (
    Column("ratio", "first / later saves", None, plain),
    Column("durable_s", "first save, until durable"),
    Column("held_s", "first save, held"),
    Column("steady_durable_s", "later saves, until durable"),
    Column("steady_held_s", "later saves, held"),
)
MEMORY = (
    Column("beside_images", "beside images, at most", None, nbytes),
    Column("images", "images (memfd)", None, nbytes),
    Column("growth_bytes", "growth: memory", None, nbytes),
    Column("growth_fds", "descriptors", None, plain),
    Column("growth_threads", "threads", None, plain),
    Column("growth_files", "files", None, plain),
)
EXPORT = (
    Column("durable_s", "until published", ("raw-export", "durable_s")),
    Column("held_s", "training thread held"),
    Column("peak_bytes", "memory of a rank, at most", None, nbytes),
    Column("cpu_s", "CPU"),
)
SYNC = (
    Column("sync_s", "until committed"),
    Column("publisher_peak_bytes", "publisher's memory, at most", None, nbytes),
    Column("receiver_peak_bytes", "receiver's memory, at most", None, nbytes),
    Column("cpu_s", "CPU"),
)
SYNC_GLOO = (Column("bytes_per_s", "rate", ("raw-broadcast", "bytes_per_s"), rate), *SYNC)
SYNC_MEMORY = (Column("bytes_per_s", "rate", ("raw-copy", "bytes_per_s"), rate), *SYNC)
SYNC_DELTA = (
    Column("sync_s", "until committed", ("holdfast-sync-full", "sync_s")),
    Column("bytes_sent", "sent", ("holdfast-sync-full", "bytes_sent"), nbytes),
    *SYNC[1:],
)
ENGINE = (Column("ready_s", "ready after"), Column("resident", "its memory", None, nbytes))
BESIDE = (
    Column("durable_s", "until published", ("holdfast-two-engines", "durable_s")),
    Column("persist_s", "persist", ("holdfast-two-engines", "persist_s")),
)


STORES = (
    Column("save_s", "save", ("raw-store", "save_s")),
    Column("save_bytes_per_s", "", None, megabytes),
    Column("save_cpu_s", "CPU"),
    Column("save_peak_bytes", "memory beside state and image", None, nbytes),
    Column("save_server_cpu_s", "the server's CPU"),
    Column("load_s", "load", ("raw-store", "load_s")),
    Column("load_bytes_per_s", "", None, megabytes),
    Column("load_cpu_s", "CPU"),
    Column("load_peak_bytes", "memory beside the state", None, nbytes),
    Column("load_server_cpu_s", "the server's CPU"),
    Column("first_save_s", "a process's first save", ("raw-store", "first_save_s")),
    Column("first_load_s", "its first load", ("raw-store", "first_load_s")),
    Column("load_average", "processes that run on the machine", None, plain),
)


def adapter_columns(job: str) -> tuple[Column, ...]:
    """Over the framework's own way."""
    own = f"adapter-{job}-own"
    return (
        Column("held_s", "training held", (own, "held_s")),
        Column("durable_s", "until durable", (own, "durable_s")),
        Column("step_s", "a step without a save"),
    )


ADAPTER_WAYS = {
    "own": "its own way",
    "own-sync": "its own way, waiting",
    "holdfast": "**Holdfast**",
    "holdfast-sync": "**Holdfast**, waiting",
}
ADAPTERS = {
    "accelerate": "accelerate",
    "transformers": "transformers' Trainer",
    "lightning": "Lightning",
    "torchtitan": "torchtitan",
    "nvrx": "NVIDIA Resiliency Extension",
    "xtuner": "XTuner's engine",
    "torchft": "TorchFT, a dataloader at every step",
}
STORE_SERVERS = {"seaweedfs": "SeaweedFS", "ceph": "Ceph's RADOS gateway"}
LABELS |= {f"adapter-{job}-{way}": label for job in ADAPTERS for way, label in ADAPTER_WAYS.items()}

TABLES: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
    ("eager", "(a) One rank, idle trainer, eager staging", EAGER),
    ("save", "(a) One rank, idle trainer", SAVE_IDLE),
    ("save-compute", "(a) One rank, trainer computes on all cores", SAVE_BUSY),
    ("save-python", "(a) One rank, trainer runs pure Python", SAVE_BUSY),
    ("eager-2", "(a) Two ranks, idle trainer, eager staging", EAGER),
    ("save-2", "(a) Two ranks, idle trainer", SAVE_IDLE),
    ("save-2-compute", "(a) Two ranks, trainer computes on all cores", SAVE_BUSY),
    ("small", "(b) Many small tensors, save", SAVE_IDLE),
    ("small-warm", "(b) Many small tensors, load, warm", LOAD),
    ("small-cold", "(b) Many small tensors, load, cold", LOAD),
    ("many", "(c) Very many tiny tensors", MANY),
    ("train", "(d) A training loop with saves", ()),
    ("first", "(e) The first save", FIRST),
    ("load-warm", "(f) Load, warm", LOAD),
    ("load-cold", "(f) Load, cold", LOAD),
    ("part-warm", "(f) 1 % of a tensor, warm", PART),
    ("part-cold", "(f) 1 % of a tensor, cold", PART),
    *(
        (f"reshard-{before}-{after}-{cache}", f"(f) Saved on {before}, loaded on {after}, {cache}", LOAD)
        for before, after in ((2, 1), (1, 2))
        for cache in ("warm", "cold")
    ),
    ("memory", "(g) Memory over many saves", MEMORY),
    ("engine", "(h) The engine process", ENGINE),
    ("export", "(i) Hugging Face weights in bfloat16, two ranks", EXPORT),
    ("sync-gloo", "(j) A weight version over gloo", SYNC_GLOO),
    ("sync-memory", "(j) A weight version through shared memory", SYNC_MEMORY),
    ("sync-delta", "(j) A weight version of which little has changed", SYNC_DELTA),
    ("beside-small", "(k) Many small tensors, beside an export on busy cores", BESIDE),
    ("beside-large", "(k) A few large tensors, beside an export on busy cores", BESIDE),
    *((f"adapter-{job}", f"(l) {title}", adapter_columns(job)) for job, title in ADAPTERS.items()),
    *((f"stores-{name}", f"(m) {title} on loopback", STORES) for name, title in STORE_SERVERS.items()),
)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column to the left, figures to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def cell(spread: Spread | None, reference: float | None, show: Callable[[float], str]) -> str:
    """Ratio first, then the median and the range."""
    if spread is None:
        return "-"
    shown = show(spread.median)
    if spread.count > 1 and show(spread.low) != show(spread.high):
        shown += f" [{show(spread.low)}, {show(spread.high)}]"
    return shown if not reference else f"**{spread.median / reference:.2f}** · {shown}"


def case_table(results: Results, case: str, columns: Sequence[Column]) -> str:
    """All contenders of a case; columns nobody has a figure for are left out."""
    names = results.contenders(case)
    columns = [column for column in columns if any(results.values(case, name, column.figure) for name in names)]
    header = [""] + [column.title + ("" if column.over is None else " (ratio · time)") for column in columns]
    rows = []
    for name in names:
        row = [LABELS.get(name, name)]
        for column in columns:
            reference = None if column.over is None else results.median(case, column.over[0], column.over[1])
            row.append(cell(results.spread(case, name, column.figure), reference, column.show))
        rows.append(row)
    return markdown(header, rows)


def train_table(results: Results) -> str:
    """Means with 95 % intervals: a slow-down is a difference, and small against its noise."""
    rows = []
    for name in results.contenders("train"):
        slow = bootstrap(results.values("train", name, "slowdown"))
        lost = bootstrap(results.values("train", name, "lost_s"))
        rows.append(
            [
                LABELS.get(name, name),
                f"{100 * slow.mean:.1f} % [{100 * slow.low:.1f}, {100 * slow.high:.1f}]",
                f"{seconds(lost.mean)} [{seconds(lost.low)}, {seconds(lost.high)}]",
                *(
                    cell(results.spread("train", name, figure), None, seconds)
                    for figure in ("held_s", "cpu_s", "iteration_s", "iteration_with_saves_s", "iteration_after_s")
                ),
            ]
        )
    header = ["", "slow-down", "lost a save", "held a save", "CPU a save"]
    header += ["iteration, never saved", "with saves", "without, afterwards"]
    return markdown(header, rows)


def targets_table(rows: Sequence[tuple[str, str, str, str]]) -> str:
    lines = ["| what | target | reached | |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
