"""What was measured: samples, problems, and the run they belong to, as one JSON file. Pure; standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stats import Spread


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
        """All raw samples, so that everything else can be made from them again."""
        content = {
            "meta": self.meta,
            "cases": self.cases,
            "samples": [
                {"case": s.case, "contender": s.contender, "round": s.round, "counted": s.counted, "figures": s.figures}
                for s in self.samples
            ],
            "problems": [
                {"case": p.case, "contender": p.contender, "reason": p.reason, "ours": p.ours} for p in self.problems
            ],
        }
        lines = json.dumps(content, indent=1)
        path.write_text(lines + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        content = json.loads(path.read_text())
        return cls(
            content["meta"],
            [Sample(**sample) for sample in content["samples"]],
            [Problem(**problem) for problem in content["problems"]],
            content["cases"],
        )
