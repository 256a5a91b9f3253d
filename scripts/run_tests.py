"""Run the test suite as `make test` does: what needs the machine on all of it, the rest in the time that leaves over.

    python scripts/run_tests.py [FLAGS OF PYTEST]

Tests below `FIRST` start several processes by themselves or look at the clock, and wait for much of their time: they
run one by one, at the priority this process has. Those below `BESIDE` work in one process; they run meanwhile, at a low
priority, and their output is shown when they have ended. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from typing import IO

FIRST = (("tests/contract", "tests/crash", "tests/distributed", "tests/simulation"),)
BESIDE = (("tests/unit",), ("tests/property", "tests/fuzz", "tests/corruption", "tests/compat"))
BESIDE_NICE = 15  # below the engines that the first ones start
NOTHING_COLLECTED = 5


@dataclass
class Lane:
    """Runs of pytest, one after the other."""

    runs: tuple[tuple[str, ...], ...]
    flags: list[str]
    nice: int = 0
    output: IO[bytes] | None = None
    statuses: list[int] = field(default_factory=list)
    stopped: bool = False
    running: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        for places in self.runs:
            # A cache for each: what failed last is written at the end of every run.
            cache = ["-o", f"cache_dir=.pytest_cache/{os.path.basename(places[0])}"]
            command = [sys.executable, "-m", "pytest", "-m", "not slow and not gpu", *cache, *self.flags, *places]
            if self.stopped:
                return
            with subprocess.Popen(
                ["nice", "-n", str(self.nice), *command],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT if self.output else None,
            ) as self.running:
                self.statuses.append(self.running.wait())

    def stop(self) -> None:
        self.stopped = True
        if self.running is not None:
            self.running.kill()


def main(flags: list[str]) -> int:
    with tempfile.TemporaryFile() as output:
        first, beside = Lane(FIRST, flags), Lane(BESIDE, flags, BESIDE_NICE, output)
        other = threading.Thread(target=beside.run)
        other.start()
        try:
            first.run()
        except BaseException:  # interrupted
            beside.stop()
            raise
        finally:
            other.join()
        output.seek(0)
        for line in output:
            sys.stdout.buffer.write(line)
        sys.stdout.flush()
    statuses = first.statuses + beside.statuses
    # A flag such as `-k` may leave a run without tests; not all of them.
    failed = [status for status in statuses if status not in (0, NOTHING_COLLECTED)]
    return 1 if failed or set(statuses) == {NOTHING_COLLECTED} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
