"""Run a test suite as `make test` does: what needs the machine on all of it, the rest in the time that leaves over.

    python scripts/run_tests.py [FLAGS OF PYTEST]              what it does
    python scripts/run_tests.py --breaking [FLAGS OF PYTEST]   what is done to break it
    python scripts/run_tests.py --integrations [FLAGS OF PYTEST]   the adapters, in jobs of their frameworks

The first tests of a suite start several processes by themselves or look at the clock, and wait for much of their
time: they run one by one, at the priority this process has. The others work in one process; they run meanwhile, at a
low priority and with limits of time that allow for it, and in two runs at once when the first ones are through. Jobs of
frameworks run two at a time from the beginning. The output of all but the first is shown when they have ended; at the
end comes what became of each run, with the last lines of those that died, as pytest does at a limit of time. The exit
status is 1 if anything failed.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A test that gets a tenth of a core isn't hung when it takes two minutes.
BESIDE_LIMITS = ("-o", "timeout=900", "-o", "faulthandler_timeout=890")
NOTHING_COLLECTED = 5
CLOSING_LINE = re.compile(r"^=+ .* in [\d.]+s.* =+$")
LAST_LINES = 40


@dataclass(frozen=True)
class Suite:
    """What runs first, and what beside it: ``in_parts`` is by place, so that no run is much longer than the others."""

    first: tuple[str, ...] = ()
    beside: tuple[tuple[str, ...], ...] = ()
    in_parts: dict[str, int] = field(default_factory=dict)
    nice: int = 10  # below the engines that the first ones start


PLAIN = Suite(("tests/contract", "tests/distributed"), in_parts={"tests/unit": 3, "tests/compat": 2, "tests/view": 1})
OTHERS = {
    "--breaking": Suite(
        ("tests/crash",), (("tests/simulation",), ("tests/property", "tests/fuzz", "tests/corruption"))
    ),
    "--integrations": Suite(in_parts={"tests/integrations": 4}, nice=0),
}


@dataclass
class Run:
    """One run of pytest. What it has in `output` is shown when it has ended; without, at once."""

    name: str
    places: tuple[str, ...]
    flags: tuple[str, ...] = ()
    output: Path | None = None
    status: int | None = None

    def command(self, flags: list[str], nice: int) -> list[str]:
        # A cache for each: what failed last is written at the end of every run.
        cache = ("-o", f"cache_dir=.pytest_cache/{self.name.replace('/', '-')}")
        pytest = [sys.executable, "-m", "pytest", "-m", "not slow and not gpu", *cache, *self.flags, *flags]
        return ["nice", "-n", str(nice), *pytest, *self.places]

    @property
    def failed(self) -> bool:
        return self.status not in (0, NOTHING_COLLECTED)  # a flag such as `-k` may leave a run without tests

    def last_lines(self) -> list[str]:
        """What a run that died said last; nothing of one that came to its closing line."""
        lines = self.output.read_text(errors="replace").splitlines() if self.output else []
        closed = any(CLOSING_LINE.match(line) for line in lines[-3:])
        if closed:
            return []
        # Of stacks that are printed then, what tells the test, which most lines don't.
        return [line for line in lines if 'File "' in line and "/tests/" in line][-LAST_LINES:] + lines[-LAST_LINES:]


@dataclass
class Runs:
    """Takes runs from one queue, in as many threads as call `work`, and remembers what became of them."""

    waiting: deque[Run]
    flags: list[str]
    ended: list[Run] = field(default_factory=list)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, run: Run, nice: int = 0) -> None:
        with run.output.open("wb") if run.output else contextlib.nullcontext() as output:
            process = subprocess.Popen(
                run.command(self.flags, nice),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                cwd=ROOT,
            )
        self.running[run.name] = process
        run.status = process.wait()
        with self.lock:
            self.ended.append(run)
            if run.output:
                sys.stdout.write(run.output.read_text(errors="replace"))
                sys.stdout.flush()

    def work(self, nice: int = 0) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    return
                run = self.waiting.popleft()
            self.run(run, nice)

    def stop(self) -> None:
        with self.lock:
            self.waiting.clear()
        for process in self.running.values():
            process.kill()


def beside(suite: Suite, outputs: Path) -> deque[Run]:
    """What runs beside the first ones."""
    runs = [(" ".join(places), places) for places in suite.beside]
    for place, parts in suite.in_parts.items():
        files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / place).rglob("test_*.py"))
        runs += [(f"{place} {n + 1} of {parts}", tuple(files[n::parts])) for n in range(parts)]
    return deque(
        Run(name, places, BESIDE_LIMITS, outputs / f"{number}.txt") for number, (name, places) in enumerate(runs)
    )


def main(flags: list[str]) -> int:
    suite = next((OTHERS[flag] for flag in flags if flag in OTHERS), PLAIN)
    with tempfile.TemporaryDirectory() as outputs:
        runs = Runs(beside(suite, Path(outputs)), [flag for flag in flags if flag not in OTHERS])
        other = threading.Thread(target=runs.work, args=(suite.nice,))
        other.start()
        try:
            if suite.first:
                runs.run(Run("first", suite.first))
            runs.work()
        except BaseException:  # interrupted
            runs.stop()
            raise
        finally:
            other.join()
        for run in runs.ended:
            if run.failed:
                print("\n".join(run.last_lines()))
        for run in runs.ended:
            print(f"{'ERROR' if run.failed else 'fine'} {run.name}: pytest ended with status {run.status}")
    statuses = {run.status for run in runs.ended}
    return 1 if statuses == {NOTHING_COLLECTED} or any(run.failed for run in runs.ended) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
