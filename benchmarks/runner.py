"""Runs the cases and leaves a report: OUT/results.json, OUT/report.md and pictures beside it. Torch-free.

Exit status 0; 1 where Holdfast itself failed or loaded what was not saved; 2 for misuse. Figures never decide it: what
a shared machine measures is for people to read.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import holdfast
from benchmarks.bench import Bench
from benchmarks.cases import CASES
from benchmarks.peers import PEERS
from benchmarks.report import summary, write_report
from benchmarks.sizes import SIZES
from benchmarks.targets import reached

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.cases import Case
    from benchmarks.samples import Results
    from benchmarks.sizes import Size
    from benchmarks.targets import Reached

PACKAGES = ("torch", "numpy", "safetensors", "msgspec", "xxhash", "obstore")


def machine(out: Path) -> dict[str, str]:
    """What the figures belong to."""

    def first(path: str, key: str) -> str:
        try:
            with open(path, encoding="utf-8") as file:
                return next(line.partition(":")[2].strip() for line in file if line.startswith(key))
        except (OSError, StopIteration):
            return "unknown"

    memory_kib = first("/proc/meminfo", "MemTotal").split()[0]
    return {
        "cpu": first("/proc/cpuinfo", "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{int(memory_kib) / (1 << 20):.0f} GiB" if memory_kib.isdigit() else memory_kib,
        "kernel": platform.release(),
        "file system": _file_system(out),
        "python": platform.python_version(),
    }


def _file_system(path: Path) -> str:
    """The type of the mount that holds ``path``."""
    found, kind = "", "unknown"
    with open("/proc/self/mounts", encoding="utf-8") as file:
        for line in file:
            _, mount, this_kind, *_ = line.split()
            inside = str(path.resolve()).startswith(mount.rstrip("/") + "/") or mount == "/"
            if inside and len(mount) >= len(found):
                found, kind = mount, this_kind
    return kind


def versions() -> dict[str, str]:
    found = {"holdfast": holdfast.__version__ + _commit()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Of a checkout, which commit it is; with a mark where it was changed since."""
    try:
        ended = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" ({ended.stdout.strip()})"


def source_of_package() -> str:
    """Where `holdfast` is found by this interpreter: its workers find it there, too."""
    return str(Path(holdfast.__file__).resolve().parents[1])


def end_orderly(number: int, _: object) -> None:
    """On a signal: workers and shared files must not stay behind. Whoever sends it twice waits for that, too."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def is_run(case: Case, size: Size) -> bool:
    """Return True if a run of that size has the case without being asked for it."""
    return not case.by_name and (size.thorough or case.quick)


def run(size: str, out: Path, only: tuple[str, ...] = (), peers: tuple[str, ...] = ()) -> Bench:
    """Run cases (all by default), one after the other; whatever one of them raises, the next is run."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "work", ignore_errors=True)
    bench = Bench(SIZES[size], out, peers, source_of_package())
    meta = bench.results.meta
    meta.update(
        size=size,
        rounds=bench.size.rounds,
        command=" ".join(["holdfast bench", *(["--quick"] if size == "quick" else []), *(f"--only {c}" for c in only)]),
        date=time.strftime("%Y-%m-%d"),
        machine=machine(out),
        seconds={},
    )
    meta["versions"] = versions() | meta.get("versions", {})
    began = time.monotonic()
    signal.signal(signal.SIGTERM, end_orderly)
    try:
        for name in only or [case.name for case in CASES.values() if is_run(case, bench.size)]:
            bench.say(f"case {name}: {CASES[name].about}")
            case_began = time.monotonic()
            try:
                CASES[name].run(bench)
            except Exception as error:
                traceback.print_exc()
                bench.problem(name, "runner", f"{type(error).__name__}: {error}")
            meta["seconds"][name] = round(time.monotonic() - case_began, 1)
            meta["total_s"] = round(time.monotonic() - began, 1)
            bench.results.write(out / "results.json")
    finally:
        bench.close()
        shutil.rmtree(out / "work", ignore_errors=True)
    meta["total_s"] = round(time.monotonic() - began, 1)
    bench.results.write(out / "results.json")
    return bench


def checked(size: str, only: Sequence[str], peers: Sequence[str]) -> Callable[[Path], Results]:
    """What to call with a directory to have it run and reported. Raises `ValueError` for a name nobody has."""
    for given, known, what in (((size,), SIZES, "size"), (only, CASES, "case"), (peers, PEERS, "peer")):
        for name in given:
            if name not in known:
                raise ValueError(f"no {what} is called {name!r}; there are: {', '.join(known)}")

    def run_and_report(out: Path) -> Results:
        results = run(size, out, tuple(only), tuple(peers)).results
        write_report(results, out)
        return results

    return run_and_report


def targets(results: Results) -> list[Reached]:
    """The table of targets, row by row."""
    return reached(results)


def status(results: Results) -> int:
    """1 where Holdfast or the runner itself failed. What a peer does is its own."""
    return 1 if any(problem.ours or problem.contender == "runner" for problem in results.problems) else 0


def main(arguments: list[str]) -> int:
    """The same as `holdfast bench`, where the package's command line is not installed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Holdfast, its peers and the machine's limit.")
    parser.add_argument("--quick", action="store_true", help="smaller states, fewer rounds: under four minutes")
    parser.add_argument("--size", choices=SIZES, default=None, help="full by default")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="on the file system to measure")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help="of " + ", ".join(CASES))
    parser.add_argument("--peers", nargs="+", default=[], metavar="PEER", help="of " + ", ".join(PEERS))
    args = parser.parse_args(arguments)
    try:
        run_and_report = checked(args.size or ("quick" if args.quick else "full"), args.only, args.peers)
    except ValueError as error:
        parser.error(str(error))
    results = run_and_report(args.out)
    print(summary(results))
    return status(results)
