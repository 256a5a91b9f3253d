"""What was measured: samples, problems, and the run they belong to, as one JSON file. Pure; standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.stats import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one contender: its figures by name. ``round`` 0 is not counted where a case says so."""

    case: str
    contender: str
    round: int
    counted: bool
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """What didn't run, and why. ``ours``: it is Holdfast's or the runner's: the run as a whole has found something."""

    case: str
    contender: str
    reason: str
    ours: bool


@dataclass(slots=True)
class Results:
    """A whole run."""

    meta: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Facts of each case that was run: bytes, tensors, seconds it took, the page cache."""

    def contenders(self, case: str) -> list[str]:
        """Who has counted samples there, in the order they first ran."""
        return list(
            dict.fromkeys(sample.contender for sample in self.samples if sample.case == case and sample.counted)
        )

    def values(self, case: str, contender: str, figure: str) -> list[float]:
        """The counted values of one figure."""
        return [
            float(sample.figures[figure])
            for sample in self.samples
            if sample.case == case and sample.contender == contender and sample.counted and figure in sample.figures
        ]

    def spread(self, case: str, contender: str, figure: str) -> Spread | None:
        values = self.values(case, contender, figure)
        return Spread.of(values) if values else None

    def median(self, case: str, contender: str, figure: str) -> float | None:
        found = self.spread(case, contender, figure)
        return None if found is None else found.median

    def write(self, path: Path) -> None:
        """All raw samples, a line each, so that everything else can be made from them again."""

        def lines(records: list[dict[str, Any]]) -> str:
            return "[\n" + ",\n".join("  " + json.dumps(record) for record in records) + "\n ]"

        content = {
            "meta": json.dumps(self.meta, indent=2),
            "cases": json.dumps(self.cases, indent=2),
            "problems": lines([asdict(problem) for problem in self.problems]),
            "samples": lines([_rounded(asdict(sample)) for sample in self.samples]),
        }
        path.write_text("{\n" + ",\n".join(f' "{name}": {text}' for name, text in content.items()) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        content = json.loads(path.read_text())
        return cls(
            content["meta"],
            [Sample(**sample) for sample in content["samples"]],
            [Problem(**problem) for problem in content["problems"]],
            content["cases"],
        )


def merged(runs: Sequence[Results]) -> Results:
    """Several runs as one: of each case, the last run that has it. Raises `ValueError` if they measured other sizes."""
    sizes = {run.meta.get("size") for run in runs}
    if len(sizes) != 1:
        raise ValueError(f"runs of different sizes can't be put together: {', '.join(sorted(map(str, sizes)))}")
    last = {case: number for number, run in enumerate(runs) for case in run.cases}
    whole = Results(meta=dict(runs[-1].meta))
    whole.meta["command"] = "; ".join(run.meta.get("command", "") for run in runs)
    whole.meta["seconds"] = {name: value for run in runs for name, value in run.meta.get("seconds", {}).items()}
    whole.meta["total_s"] = round(sum(whole.meta["seconds"].values()), 1)
    whole.meta["versions"] = {name: value for run in runs for name, value in run.meta.get("versions", {}).items()}
    for number, run in enumerate(runs):
        mine = {case for case, latest in last.items() if latest == number}
        whole.cases |= {case: facts for case, facts in run.cases.items() if case in mine}
        whole.samples += [sample for sample in run.samples if sample.case in mine]
        whole.problems += [problem for problem in run.problems if last.get(problem.case, number) == number]
    return whole


def _rounded(value: Any) -> Any:
    """Floats to a microsecond: nothing here is known any better."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
