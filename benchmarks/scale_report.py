"""What ``scale.py`` has measured, as Markdown and as a picture."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def fit(rows: list[dict[str, Any]], x: str, y: str) -> tuple[float, float]:
    """``a, b`` of ``y = a * x**b`` by least squares over logarithms."""
    points = [(math.log(row[x]), math.log(max(row[y], 1e-9))) for row in rows]
    mean_x = statistics.fmean(point[0] for point in points)
    mean_y = statistics.fmean(point[1] for point in points)
    spread = sum((px - mean_x) ** 2 for px, _ in points)
    slope = sum((px - mean_x) * (py - mean_y) for px, py in points) / spread if spread else 0.0
    return math.exp(mean_y - slope * mean_x), slope


LAWS = (
    ("steady_coordinator_s", "steady state, coordinator", "s"),
    ("steady_rank_s", "steady state, any other rank", "s"),
    ("first_coordinator_s", "first save, coordinator", "s"),
    ("plan_rank_s", "first save, a rank plans itself", "s"),
    ("manifest_bytes", "manifest", "bytes"),
    ("report_bytes", "report of a rank", "bytes"),
    ("metadata_plan_s", "plan of all ranks (for .metadata only)", "s"),
    ("metadata_render_s", "stock .metadata (up to a limit, or on demand)", "s"),
    ("metadata_bytes", "stock .metadata", "bytes"),
)


def laws(by_ranks: list[dict[str, Any]], by_tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "what": title,
            "unit": unit,
            "exponent_of_ranks": fit(by_ranks, "ranks", key)[1],
            "exponent_of_tensors": fit(by_tensors, "tensors", key)[1],
            "at_most": by_ranks[-1][key],
        }
        for key, title, unit in LAWS
    ]


def spell(value: float, unit: str) -> str:
    if unit == "bytes":
        for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
            if value >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.0f} B"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def store_price(row: dict[str, Any], tcp: dict[str, Any], name: str) -> dict[str, float]:
    """What a save's requests would cost over the TCPStore measured, polls that come too early apart."""
    trip, server = tcp["round_trip_us"], tcp["server_cpu_us"]
    ask, tell = server["look (compare_set)"], server["append"]
    ranks = row["ranks"] - 1
    answered = row[f"{name}_coordinator_answered"] + ranks * row[f"{name}_rank_answered"]
    unanswered = row[f"{name}_coordinator_unanswered"] + ranks * row[f"{name}_rank_unanswered"]
    return {
        "coordinator_s": row[f"{name}_coordinator_answered"] * trip["look (compare_set)"] * 1e-6,
        "server_s": (answered * ask + unanswered * tell) * 1e-6,
        "bytes": row[f"{name}_coordinator_bytes"] + ranks * row[f"{name}_rank_bytes"],
    }


def render(result: dict[str, Any]) -> str:
    by_ranks, by_tensors, tcp = result["by_ranks"], result["by_tensors"], result["tcp_store"]
    worst = by_ranks[-1]
    price = store_price(worst, tcp, "steady")
    work_s = worst["steady_coordinator_s"] + price["coordinator_s"]
    text = [
        "# Scale, simulated",
        (
            f"{result['machine']}. {result['versions']}. `{result['command']}`, {result['seconds']:.0f} s, peak "
            f"{result['peak_rss_mib']:,.0f} MiB, one core. CPU seconds of one thread, medians of "
            f"{result['saves']} saves."
        ),
        (
            f"**{worst['ranks']:,} ranks x {worst['tensors']:,} tensors, steady state: the coordinator works "
            f"{spell(work_s, 's')} a save** (target: 2 s): {spell(worst['steady_coordinator_s'], 's')} of its own and "
            f"{spell(price['coordinator_s'], 's')} of round trips to a TCPStore. Any other rank works "
            f"{spell(worst['steady_rank_s'], 's')}. The Store's server: {spell(price['server_s'], 's')} of CPU for "
            f"all {worst['ranks']:,} ranks, looks that come too early apart."
        ),
        "![time and bytes against ranks and tensors](scale.png)",
        "## By ranks",
        world_table(by_ranks),
        "## By tensors",
        world_table(by_tensors),
        "## Growth laws",
        (
            "Exponents of ranks (tensors fixed) and of tensors (ranks fixed), fitted over all sizes above; an exponent "
            "of 0 is a constant, of 1 is proportional."
        ),
        table(
            ["what", "ranks^", "tensors^", f"at {worst['ranks']:,} x {worst['tensors']:,}"],
            [
                [
                    law["what"],
                    f"{law['exponent_of_ranks']:.2f}",
                    f"{law['exponent_of_tensors']:.2f}",
                    spell(law["at_most"], law["unit"]),
                ]
                for law in result["laws"]
            ],
        ),
        "## Where the coordinator's time goes",
        phase_table(by_ranks),
        "## Requests to the Store",
        "A save in the steady state, looks that come too early apart; *asks* wait for an answer, *tells* don't.",
        request_table(by_ranks, tcp),
        "A real TCPStore on loopback, server in a process of its own, 4,096 keys:",
        table(
            ["request", "round trip, us", "server's CPU, us"],
            [[kind, f"{trip:.0f}", f"{tcp['server_cpu_us'][kind]:.1f}"] for kind, trip in tcp["round_trip_us"].items()],
        ),
        f"The coordinator over that TCPStore, with the messages of {result['live_ranks']:,} ranks in it: "
        + ", ".join(f"{what} {spell(took, 's')}" for what, took in tcp["coordinator_s"].items())
        + ".",
        (
            "One round trip a rank, one after the other, would be "
            f"{spell(16384 * tcp['round_trip_us']['check'] * 1e-6, 's')} at 16,384 ranks."
        ),
        "## What is not on the path of a save",
        after_table(by_ranks),
        (
            f"`.metadata` is written up to {result['metadata_rows_max']:,} rows (tensors and objects, counted on each "
            "rank); `Checkpoint.write_dcp_metadata()` derives it later. (*) extrapolated."
        ),
    ]
    return "\n\n".join(text) + "\n"


def world_table(rows: list[dict[str, Any]]) -> str:
    head = ["ranks", "tensors", "steady: coordinator", "steady: a rank", "first: coordinator", "first: a rank"]
    head += ["of that its plan", "manifest", "a rank's report"]
    return table(
        head,
        [
            [f"{row['ranks']:,}", f"{row['tensors']:,}"]
            + [spell(row[key], "s") for key in ("steady_coordinator_s", "steady_rank_s")]
            + [spell(row[key], "s") for key in ("first_coordinator_s", "first_rank_s", "plan_rank_s")]
            + [spell(row[key], "bytes") for key in ("manifest_bytes", "report_bytes")]
            for row in rows
        ],
    )


def phase_table(rows: list[dict[str, Any]]) -> str:
    phases = [what for what in rows[-1]["steady"] if what.startswith("coordinator")]
    return table(
        ["ranks", *(what.partition(": ")[2] for what in phases)],
        [[f"{row['ranks']:,}", *(spell(row["steady"][what], "s") for what in phases)] for row in rows],
    )


def request_table(rows: list[dict[str, Any]], tcp: dict[str, Any]) -> str:
    body = []
    for row in rows:
        price = store_price(row, tcp, "steady")
        cells = [f"{row['ranks']:,}"]
        for who in ("coordinator", "rank"):
            cells += [f"{row[f'steady_{who}_{kind}']:.3g}" for kind in ("answered", "unanswered")]
            cells.append(spell(row[f"steady_{who}_bytes"], "bytes"))
        body.append([*cells, spell(price["coordinator_s"], "s"), spell(price["server_s"], "s")])
    head = ["ranks", "coordinator asks", "tells", "bytes", "a rank asks", "tells", "bytes"]
    return table([*head, "coordinator waits", "server's CPU"], body)


def after_table(rows: list[dict[str, Any]]) -> str:
    body = []
    for row in rows:
        mark = " (*)" if row["metadata_extrapolated"] else ""
        body.append(
            [
                f"{row['ranks']:,}",
                f"{row['metadata_rows']:,}",
                spell(row["metadata_plan_s"], "s") + mark,
                spell(row["metadata_render_s"], "s") + mark,
                spell(row["metadata_bytes"], "bytes") + mark,
                spell(row["recovery_s"], "s"),
                spell(row["recovery_bytes_read"], "bytes"),
                f"{row['recovery_rss_growth_mib']:.0f} MiB",
                f"{spell(row['open_all_reports_s'], 's')}, {spell(row['open_all_reports_bytes'], 'bytes')} (*)",
            ]
        )
    head = ["ranks", "rows", "plan of all", "`.metadata`", "its bytes", "recovery reads reports in", "bytes"]
    return table([*head, "memory for it", "a rank opens all reports"], body)


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    by_ranks, by_tensors = result["by_ranks"], result["by_tensors"]
    seconds = [
        ("steady_coordinator_s", "steady: coordinator", "o-"),
        ("steady_rank_s", "steady: any other rank", "o-"),
        ("first_coordinator_s", "first save: coordinator", "s--"),
        ("plan_rank_s", "first save: a rank's own plan", "s--"),
        ("metadata_plan_s", "plan of all ranks (once made)", "x:"),
        ("metadata_render_s", "stock .metadata (derived on demand)", "x:"),
    ]
    for axis, rows, x in ((axes[0], by_ranks, "ranks"), (axes[1], by_tensors, "tensors")):
        for key, label, style in seconds:
            exponent = fit(rows, x, key)[1]
            axis.loglog(
                [row[x] for row in rows], [row[key] for row in rows], style, label=f"{label}: {x}^{exponent:.2f}"
            )
        axis.axhline(2, color="grey", linewidth=0.8)
        axis.text(rows[0][x], 2.2, "target: 2 s", color="grey", fontsize=8)
        axis.set(xlabel=x, ylabel="seconds of work", ylim=(1e-5, 1e6))
        axis.legend(fontsize=7, loc="upper left")
    axes[0].set_title(f"{by_ranks[0]['tensors']:,} tensors")
    axes[1].set_title(f"{by_tensors[0]['ranks']:,} ranks")
    for key, label in (
        ("manifest_bytes", "manifest"),
        ("report_bytes", "a rank's report"),
        ("steady_coordinator_bytes", "Store traffic a save: coordinator"),
        ("steady_rank_bytes", "Store traffic a save: a rank"),
        ("metadata_bytes", "stock .metadata"),
    ):
        exponent = fit(by_ranks, "ranks", key)[1]
        axes[2].loglog(
            [row["ranks"] for row in by_ranks],
            [row[key] for row in by_ranks],
            "o-",
            label=f"{label}: ranks^{exponent:.2f}",
        )
    axes[2].set(xlabel="ranks", ylabel="bytes", title=f"{by_ranks[0]['tensors']:,} tensors", ylim=(1e2, 1e12))
    axes[2].legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=110)
