"""The report: targets, a table for each case, what did not run, how it was measured; pictures beside it.

    python -m benchmarks.report out/bench/results.json benchmarks/reports/NAME

makes all of it again from the samples; `benchmarks.publish` also puts the figures into the documentation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import plots
from benchmarks.obstacles import obstacles
from benchmarks.peers import PEERS
from benchmarks.samples import Results
from benchmarks.stats import nbytes
from benchmarks.tables import LABELS, TABLES, case_table, markdown, targets_table, train_table
from benchmarks.targets import reached

if TYPE_CHECKING:
    from collections.abc import Iterable

PREFACE = """\
All contenders of a table took turns, round by round, in one run; the others slept meanwhile. Cells hold the ratio to
the reference first, where there is one, then the median of the counted rounds and their range. References: for times
until durable the raw write with fsync, for the training thread a copy of the same bytes in warm memory by two
threads, for loads `preadv` in two threads into the same tensors; beside a busy trainer, where nothing is raw,
Holdfast itself. Every save ends durable: what does not fsync by itself is fsynced within its time. Every load was
compared with what was saved, and the first export of each contender with the weights. The memory of an export is that
of the rank that has most, beyond the model, with what it keeps from one export to the next. Weight versions have no
peers: what they are measured against is the raw limit of each way, a broadcast of as many bytes over gloo between the
same two processes, and a copy of them by two threads. The clock stops when publisher and receiver have returned; the
memory is what the first version took on each side beyond the weights, shared slots on both. CPU seconds are those of
the process and its children without what its training thread computed; the kernel's own write-back threads are not
among them, which flatters whoever writes through the page cache. Warm: read just before. Cold: evicted just before.
Object stores run on loopback, on the cores that the contenders have: what a client computes its server waits for, and
no network hides it. A save ends when the server has acknowledged all of it, which then is in the server's page cache,
and written to its disk before the load begins: loads come from memory. The memory of a store's client is the most that
its processes had in a warm call beyond what they had before the first; it is measured in turns of its own."""


def describe(results: Results, case: str) -> str:
    """What was saved there, in a line."""
    facts = results.cases.get(case, {})
    names = results.contenders(case)
    times = ("durable_s", "load_s", "sync_s", "save_s")
    counts = {max(len(results.values(case, name, figure)) for figure in times) for name in names}
    parts = []
    if facts.get("nbytes"):
        parts.append(nbytes(facts["nbytes"]))
    if facts.get("tensors"):
        parts.append(f"{facts['tensors']:,} tensors")
    if facts.get("parameters"):
        parts.append(f"{facts['parameters'] / 1e6:.1f} million parameters")
    if facts.get("every"):
        parts.append(f"blocks of {facts['iterations']} iterations with a save every {facts['every']}")
    if facts.get("saves"):
        parts.append(f"{facts['saves']} saves")
    if facts.get("world"):
        parts.append("one rank" if facts["world"] == 1 else f"{facts['world']} ranks")
    if facts.get("pair"):
        parts.append("one publisher, one receiver")
    if facts.get("cache"):
        parts.append(f"{facts['cache']} page cache")
    if counts - {0}:
        parts.append("rounds: " + " to ".join(str(count) for count in sorted({min(counts - {0}), max(counts)})))
    return ", ".join(parts) + "."


def targets_part(results: Results, *, measured_only: bool = False) -> str:
    rows = [
        (row.what, row.target, row.reached, row.verdict)
        for row in reached(results)
        if not measured_only or row.value is not None
    ]
    return targets_table(rows)


def case_parts(results: Results) -> Iterable[str]:
    for case, title, columns in TABLES:
        if not results.contenders(case):
            continue
        table = train_table(results) if case == "train" else case_table(results, case, columns)
        yield f"### {title}\n\n{describe(results, case)}\n\n{table}"


def problems_part(results: Results) -> str:
    if not results.problems:
        return "Everything ran."

    def why(reason: str) -> str:
        return reason.replace("|", "/").replace("\n", " ")

    rows = [[LABELS.get(p.contender, p.contender), p.case, why(p.reason)] for p in results.problems]
    return markdown(["", "case", "why"], rows).replace("---:", "---")


def notes_part() -> str:
    return "\n".join(f"- {peer.label}: {peer.says}" for peer in PEERS.values() if peer.says)


def machine_part(results: Results) -> str:
    meta = results.meta
    rows = [[name, value] for name, value in meta.get("machine", {}).items()]
    rows += [[name, value] for name, value in meta.get("versions", {}).items()]
    seconds = ", ".join(f"{name} {value:g}" for name, value in meta.get("seconds", {}).items())
    rows += [["command", f"`{meta.get('command', '')}`"], ["date", meta.get("date", "")]]
    rows += [["note", meta["note"]]] if meta.get("note") else []
    rows += [["seconds", f"{meta.get('total_s', 0):g} in all: {seconds}"]]
    return markdown(["", ""], rows).replace("---:", "---")


def render(results: Results, pictures: Iterable[str] = ()) -> str:
    """The report as Markdown."""
    shown = "\n\n".join(f"![{Path(name).stem}]({name})" for name in pictures)
    parts = [
        "# Measured: Holdfast, its peers and the machine's limit",
        PREFACE,
        "## Targets",
        targets_part(results),
        "## What stands in the way",
        obstacles(reached(results)),
        *([shown] if shown else []),
        "## Cases",
        *case_parts(results),
        "## What did not run",
        problems_part(results),
        "## Contenders",
        notes_part(),
        "## Machine",
        machine_part(results),
    ]
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """What is printed at the end of a run."""
    rows = [row for row in reached(results) if row.value is not None]
    width = max((len(row.what) for row in rows), default=0)
    target_width = max((len(row.target) for row in rows), default=0)
    lines = [f"{row.what:<{width}}  {row.target:<{target_width}}  {row.verdict:<24}  {row.reached}" for row in rows]
    lines += [f"did not run: {p.contender} ({p.case}): {p.reason}" for p in results.problems]
    return "\n".join(lines) if lines else "nothing was measured that has a target"


def write_report(results: Results, folder: Path) -> Path:
    """report.md and the pictures, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(results, folder)
    path = folder / "report.md"
    path.write_text(render(results, [picture.name for picture in pictures]))
    return path


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    print(write_report(Results.read(Path(arguments[0])), Path(arguments[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
