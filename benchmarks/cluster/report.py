"""Compare what the programs of a recipe have left under OUT/parts, and write OUT/report.md and OUT/report.json.

    python -m benchmarks.cluster.report --out /shared/run

Exit status 1 if any check fails, or could not be made because a part is missing. Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

PARTS = ("reference", "crash", "interrupted", "reloaded", "read-back")
ENOUGH = 5
SMALL_BYTES = 64 << 20
LOSS_TOLERANCE = 1e-2
"""Relative, between runs on accelerators, whose kernels need not add up in the same order twice. On CPUs: none."""
PROBE_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative, between a sharded and an unsharded forward."""

Parts = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A median with its spread; ``median`` is None where too little was measured to say."""

    name: str
    median: float | None
    low: float | None
    high: float | None
    count: int


# checks ----------------------------------------------------------------------------------------------------------


def all_checks(parts: Parts) -> list[Check]:
    return [
        _checked("killed and resumed", check_killed, parts, "crash", "interrupted"),
        _checked("restored state is the saved state", check_restored, parts, "interrupted"),
        _checked("resumed run is the uninterrupted run", check_resumed, parts, "reference", "interrupted"),
        _checked("round trip on another number of ranks", check_reloaded, parts, "reference", "reloaded"),
        _checked("every byte matches its checksum", check_verified, parts, "read-back"),
        _checked("from_pretrained gives the trained weights", check_weights, parts, "reference", "read-back"),
        _checked("from_pretrained gives the same logits", check_logits, parts, "read-back"),
        _checked("the probe's loss is that of training", check_probe, parts, "reference", "read-back"),
    ]


def _checked(name: str, check: Any, parts: Parts, *needed: str) -> Check:
    missing = [part for part in needed if part not in parts]
    if missing:
        return Check(name, ok=False, found=f"not made: {', '.join(missing)} did not end")
    ok, found = check(*(parts[part] for part in needed))
    return Check(name, ok=ok, found=found)


def check_killed(crash: dict[str, Any], interrupted: dict[str, Any]) -> tuple[bool, str]:
    starts = [event for event in interrupted["events"] if event["event"] == "start"]
    resumed = interrupted["resumed"]
    again = crash["step"] - resumed
    found = f"killed after step {crash['step']}, resumed from step {resumed}, {again} steps made again"
    return len(starts) >= 2 and 0 < resumed <= crash["step"], found


def check_restored(interrupted: dict[str, Any]) -> tuple[bool, str]:
    """Exact everywhere: what was saved is what is there after loading."""
    noted = [event for event in interrupted["events"] if event["event"] == "state"]
    resumed = [event for event in noted if event["step"] == interrupted["resumed"]]
    if len(resumed) < 2:
        return False, f"step {interrupted['resumed']} has been fingerprinted {len(resumed)} times, not 2"
    difference = next(filter(None, (_difference(resumed[0], again) for again in resumed[1:])), None)
    return difference is None, difference or f"{len(resumed[0]['tensors'])} tensors, bit for bit"


def check_resumed(reference: dict[str, Any], interrupted: dict[str, Any]) -> tuple[bool, str]:
    expected, states = losses_of(reference), states_of(reference)
    made = [(event["step"], event["loss"]) for event in interrupted["events"] if event["event"] == "step"]
    strangers = [step for step, _ in made if step not in expected]
    if strangers or not made:
        return False, f"steps {strangers} are not in the uninterrupted run" if strangers else "no steps"
    exact = sum(loss == expected[step] for step, loss in made)
    worst = max(_apart(float.fromhex(loss), float.fromhex(expected[step])) for step, loss in made)
    noted = [event for event in interrupted["events"] if event["event"] == "state"]
    difference = next(filter(None, (_difference(states[event["step"]], event) for event in noted)), None)
    if exact == len(made) and difference is None:
        return True, f"{exact} losses and {len(noted)} states, bit for bit"
    found = f"{exact} of {len(made)} losses equal, at most {worst:.1e} apart; {difference or 'states are equal'}"
    if reference["machine"]["accelerator"] == "none":
        return False, found
    return worst <= LOSS_TOLERANCE, f"{found}; tolerance {LOSS_TOLERANCE:g}"


def check_reloaded(reference: dict[str, Any], reloaded: dict[str, Any]) -> tuple[bool, str]:
    states = states_of(reference)
    if reloaded["step"] not in states:
        return False, f"step {reloaded['step']} was never fingerprinted"
    difference = _difference(states[reloaded["step"]], reloaded)
    worlds = f"{reference['world']} → {reloaded['world']} ranks"
    return difference is None, f"{worlds}: {difference or str(len(reloaded['tensors'])) + ' tensors, bit for bit'}"


def check_verified(read_back: dict[str, Any]) -> tuple[bool, str]:
    return read_back["verified"], "; ".join(read_back["problems"]) or f"{read_back['verify_bytes']:,} bytes"


def check_weights(reference: dict[str, Any], read_back: dict[str, Any]) -> tuple[bool, str]:
    trained = states_of(reference)[read_back["step"]]["tensors"]
    weights = {name: value for name, value in trained.items() if name.startswith("model.")}
    for how in ("read", "loaded"):
        difference = _difference({"tensors": weights}, read_back[how])
        if difference:
            return False, f"{how}: {difference}"
    return bool(weights), f"{len(weights)} tensors, bit for bit"


def check_logits(read_back: dict[str, Any]) -> tuple[bool, str]:
    read, loaded = read_back["read"]["logits"], read_back["loaded"]["logits"]
    return read == loaded, f"{read.split()[1]}, bit for bit" if read == loaded else f"{read}, then {loaded}"


def check_probe(reference: dict[str, Any], read_back: dict[str, Any]) -> tuple[bool, str]:
    computed = "float32" if reference["machine"]["accelerator"] == "none" else "bfloat16"
    tolerance = PROBE_TOLERANCES[computed]
    trained, loaded = reference["probe_loss"], read_back["loaded"]["probe_loss"]
    apart = _apart(loaded, trained)
    return apart <= tolerance, f"{loaded:.6f}, {apart:.1e} from training's; tolerance {tolerance:g}"


def losses_of(run: dict[str, Any]) -> dict[int, str]:
    return {event["step"]: event["loss"] for event in run["events"] if event["event"] == "step"}


def states_of(run: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in run["events"] if event["event"] == "state"}


def _apart(value: float, expected: float) -> float:
    """Relatively; anything that is not a number is as far as can be."""
    apart = abs(value - expected) / max(abs(expected), 1e-30)
    return apart if apart == apart else float("inf")  # noqa: PLR0124 - not a number


def _difference(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """What differs first between two fingerprinted states, None if nothing does."""
    for kind in expected.keys() & {"tensors", "objects"}:
        only = expected[kind].keys() ^ found[kind].keys()
        if only:
            return f"{len(only)} {kind} on one side only: {min(only)}"
        wrong = [name for name, value in expected[kind].items() if found[kind][name] != value]
        if wrong:
            return f"{len(wrong)} of {len(expected[kind])} {kind} differ: {wrong[0]}"
    return None


# figures ---------------------------------------------------------------------------------------------------------


def all_ratios(reference: dict[str, Any]) -> list[Ratio]:
    """The first save is left out everywhere: its memory is still cold."""
    saves = {save["step"]: save for save in reference["saves"]}
    timed = [period for period in reference["periods"][1:] if period["clean"]]
    half = reference["every"] // 2

    def persisting(period: dict[str, Any]) -> float:
        save = saves[period["step"]]
        raw_s = period["raw_s"] * save["bytes_largest"] / period["raw_bytes"]
        return float((save["persist_s"] + save["commit_s"]) / raw_s)

    return [
        _ratio("a step with a save / a step without", [row["saving_s"] / row["quiet_s"] for row in timed]),
        _ratio(
            "training time lost to a save, in steps",
            [(row["saving_s"] - row["quiet_s"]) * half / row["quiet_s"] for row in timed],
        ),
        _ratio(
            "training thread held by a save / a step",
            [saves[row["step"]]["stall_s"] / row["quiet_s"] for row in timed],
        ),
        _ratio(
            "persist and commit while training / raw write of as many bytes",
            [persisting(row) for row in reference["periods"][1:]],
        ),
    ]


def _ratio(name: str, values: list[float]) -> Ratio:
    if len(values) < ENOUGH:
        return Ratio(name, None, None, None, len(values))
    return Ratio(name, median(values), min(values), max(values), len(values))


def all_figures(parts: Parts) -> dict[str, float]:
    """Medians, without the first save where there are more."""
    found: dict[str, float] = {}
    if "reference" in parts:
        reference = parts["reference"]
        saves = reference["saves"][1:] or reference["saves"]
        for key in ("stall_s", "staging_s", "persist_s", "commit_s", "bytes", "bytes_largest"):
            found[f"save_{key}"] = median(save[key] for save in saves)
        found["first_save_stall_s"] = reference["saves"][0]["stall_s"]
        found["step_s"] = median(period["quiet_s"] for period in reference["periods"])
        found["parameter_count"] = reference["parameter_count"]
        found |= {f"rank_peak_{key}": value for key, value in reference["memory"].items()}
    if "interrupted" in parts:
        found["load_same_world_s"] = parts["interrupted"]["load_s"]
    if "reloaded" in parts:
        found["load_other_world_s"] = parts["reloaded"]["load_s"]
        found["load_other_world_bytes_per_s"] = parts["reloaded"]["bytes"] / parts["reloaded"]["load_s"]
    if "read-back" in parts:
        found["verify_one_process_s"] = parts["read-back"]["verify_s"]
        found["read_weights_one_process_s"] = parts["read-back"]["read_s"]
        found["read_back_peak_host_bytes"] = parts["read-back"]["memory"]["host_bytes"]
    return found


def caveats(parts: Parts) -> list[str]:
    """What a reader of the ratios must know."""
    if "reference" not in parts:
        return ["The reference run did not end: nothing was measured."]
    reference, found = parts["reference"], []
    late = sum(not period["clean"] for period in reference["periods"])
    if late:
        found.append(
            f"{late} of {len(reference['periods'])} saves had not ended when their block without one began, and are "
            f"left out of the ratios of steps: raise --every."
        )
    starts = sum(event["event"] == "start" for event in reference["events"])
    if starts > 1:
        found.append(f"The reference run was started {starts} times, and measured since the last only.")
    if not reference["raw_direct"]:
        found.append("This file system has no O_DIRECT: the raw write went through the page cache.")
    if max(save["bytes_largest"] for save in reference["saves"]) < SMALL_BYTES:
        found.append(
            "A rank saves so little here that its writing is all system calls and messages: this shows that the "
            "recipe works, not how fast Holdfast is."
        )
    found.append("The page cache is as the programs left it: Holdfast drops what it has written.")
    return found


# pages -----------------------------------------------------------------------------------------------------------


def page(parts: Parts, report: dict[str, Any]) -> str:
    some = next(iter(parts.values()), {})
    reference = parts.get("reference", {})
    lines = [f"# {some.get('recipe', '?')} on {reference.get('world', '?')} ranks", ""]
    lines += ["Medians over saves; spread in parentheses. The slowest rank counts.", ""]
    lines += ["| ratio | median | saves |", "|---|---|---|"]
    for ratio in report["ratios"]:
        shown = "too few to say"
        if ratio["median"] is not None:
            shown = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        lines.append(f"| {ratio['name']} | {shown} | {ratio['count']} |")
    lines += ["", *(f"- {caveat}" for caveat in report["caveats"]), ""]
    lines += ["| check | | found |", "|---|---|---|"]
    lines += [f"| {row['name']} | {'ok' if row['ok'] else '**FAILED**'} | {row['found']} |" for row in report["checks"]]
    lines += ["", "| figure | |", "|---|---|"]
    lines += [f"| {name} | {_shown(name, value)} |" for name, value in report["figures"].items()]
    lines += ["", "| machine | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in some.get("machine", {}).items()]
    shape = [
        f"{name} {reference[name]}" for name in ("layout", "every", "steps", "batch", "length") if name in reference
    ]
    lines += ["", f"Parameters: {some.get('parameters', '?')}. " + "; ".join(shape), ""]
    lines += ["```", *(f"# {name}\n{part['command']}" for name, part in parts.items()), "```", ""]
    return "\n".join(lines)


def _shown(name: str, value: float) -> str:
    if "bytes" in name:
        scale, unit = (1 << 30, "GiB") if value >= 1 << 30 else (1 << 20, "MiB")
        return f"{value / scale:,.2f} {unit}" + ("/s" if name.endswith("_per_s") else "")
    return f"{value:,.4f} s" if name.endswith("_s") else f"{value:,.0f}"


def make_report(out: Path) -> dict[str, Any]:
    """Write both files; returns what they say."""
    parts: Parts = {}
    for name in PARTS:
        path = out / "parts" / f"{name}.json"
        if path.exists():
            parts[name] = json.loads(path.read_text())
    ratios = all_ratios(parts["reference"]) if "reference" in parts else []
    report = {
        "ratios": [asdict(ratio) for ratio in ratios],
        "checks": [asdict(check) for check in all_checks(parts)],
        "caveats": caveats(parts),
        "figures": all_figures(parts),
        "machine": next(iter(parts.values()), {}).get("machine"),
        "commands": {name: part["command"] for name, part in parts.items()},
        "periods": parts.get("reference", {}).get("periods"),
        "saves": parts.get("reference", {}).get("saves"),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1))
    (out / "report.md").write_text(page(parts, report))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare what the programs have left, and write the report.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    report = make_report(out)
    print((out / "report.md").read_text())
    failed = [check["name"] for check in report["checks"] if not check["ok"]]
    sys.exit(f"failed: {'; '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
