"""Puts a run into the repository: the report into benchmarks/reports, its figures into the documentation.

    make bench-report            or            python -m benchmarks.publish out/bench [...]

Several runs of the same size (of different cases, by `--only`) are put together, the last one that has a case counts.
Nothing in the documentation that was measured is written by hand: it stands between a pair of markers, and is replaced.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.obstacles import obstacles
from benchmarks.report import describe, targets_part, write_report
from benchmarks.samples import Results, merged
from benchmarks.stats import nbytes, seconds
from benchmarks.tables import LABELS, TABLES, case_table, markdown, train_table
from benchmarks.targets import reached

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- measured: {name} -->", "<!-- end of measured: {name} -->"


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced. Raises `ValueError` without them."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"there must be one {begin} and one {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def overview(results: Results) -> str:
    """One row a contender: held, durable and CPU of a save, pace beside a computing trainer, loads."""
    columns = (
        ("save", "held_s", None),
        ("save", "durable_s", ("save", "raw", "durable_s")),
        ("save-compute", "cpu_s", None),
        ("load-warm", "load_s", ("load-warm", "raw", "load_s")),
        ("load-cold", "load_s", ("load-cold", "raw", "load_s")),
    )
    rows = []
    for name in results.contenders("save"):
        row = [LABELS.get(name, name)]
        for case, figure, over in columns:
            reference = None if over is None else results.median(*over)
            median = results.median(case, name, figure)
            row.append("-" if median is None else seconds(median) if not reference else f"{median / reference:.2f}")
        rows.append(row)
    header = ["", "caller held", "until durable", "CPU beside training", "load, warm", "load, cold"]
    return markdown(header, rows)


def conditions(results: Results) -> str:
    """What the figures belong to, in a sentence, and the note that goes with them."""
    machine, facts = results.meta["machine"], results.cases["save"]
    said = (
        f"{nbytes(facts['nbytes'])} in {facts['tensors']:,} tensors (a language model with its AdamW state), one rank, "
        f"{machine['cores']} cores, {machine['file system']}, torch {results.meta['versions']['torch']}, medians of "
        f"{results.meta['rounds']} rounds in which all take turns, {results.meta['date']}."
    )
    return f"{said} {results.meta.get('note', '')}".strip()


def pictures(folder: Path, where: str, **titles: str) -> str:
    """Those of ``titles`` that were drawn, as Markdown; ``where``: the folder, from the page."""
    found = [f"![{title}]({where}/{name}.png)" for name, title in titles.items() if (folder / f"{name}.png").exists()]
    return "\n\n".join(found) or "There are no pictures of this run."


def syncs(results: Results) -> str:
    """The tables of case (j)."""
    parts = [
        f"{title.removeprefix('(j) ')}: {describe(results, case)}\n\n{case_table(results, case, columns)}"
        for case, title, columns in TABLES
        if case.startswith("sync-") and results.contenders(case)
    ]
    return "\n\n".join(parts) or "This run had no weight versions: `holdfast bench --only sync` measures them."


def performance_page(results: Results, folder: Path) -> dict[str, str]:
    """What stands between the markers of docs/performance.md."""
    where = f"../benchmarks/reports/{folder.name}"
    kind = {"full": "It was a full run.", "quick": "It was a quick run: smaller states, fewer rounds, fewer peers."}
    return {
        "report": f"The [whole report]({where}/report.md) has every contender, case, version and command, and [all "
        f"samples]({where}/results.json) are beside it. {kind.get(folder.name, '')}".strip(),
        "stages": pictures(
            folder, where, **{"where-time-goes": "One eager save, stage by stage, below what the machine does at best."}
        ),
        "conditions": conditions(results),
        "targets": targets_part(results, measured_only=True),
        "obstacles": obstacles(reached(results)),
        "training": train_table(results),
        "syncs": syncs(results),
        "pictures": pictures(
            folder,
            where,
            saves="Saves: until durable, CPU seconds, training thread held.",
            loads="Loads, and many small tensors.",
            exports="Hugging Face weights of a model on two ranks.",
            syncs="Weight versions from one process to another.",
            training="Slow-down of a training loop by its saves.",
        ),
    }


def publish(runs: Sequence[Path], root: Path = ROOT, *, note: str = "") -> list[Path]:
    """Write all of it; returns what was written. Of several runs, the last one that has a case counts.

    note: a sentence that belongs to the figures, such as what else the machine was doing.
    """
    results = merged([Results.read(out / "results.json") for out in runs])
    if note:
        results.meta["note"] = note
    folder = root / "benchmarks" / "reports" / str(results.meta["size"])
    shutil.rmtree(folder, ignore_errors=True)
    written = [write_report(results, folder)]
    results.write(folder / "results.json")
    pages = {
        "README.md": {"overview": f"{conditions(results)}\n\n{overview(results)}"},
        "docs/performance.md": performance_page(results, folder),
    }
    for name, contents in pages.items():
        path = root / name
        text = path.read_text()
        for marker, content in contents.items():
            text = replaced(text, marker, content)
        path.write_text(text)
        written.append(path)
    return written


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.publish", description="Put runs into the repository.")
    parser.add_argument("runs", nargs="+", type=Path, help="directories that `holdfast bench` has written")
    parser.add_argument("--note", default="", help="a sentence that belongs to the figures")
    args = parser.parse_args(arguments)
    for path in publish(args.runs, note=args.note):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
