"""Run the test suite as `make test` does: what works in one process on both halves of the machine, the rest after it.

    python scripts/run_tests.py [FLAGS OF PYTEST]

Tests below `ONE_BY_ONE` start several processes by themselves or look at the clock: they have the machine to
themselves. The output of a lane is shown when it has ended. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

SIDE_BY_SIDE = (("tests/unit",), ("tests/property", "tests/fuzz", "tests/corruption", "tests/compat"))
ONE_BY_ONE = ("tests/contract", "tests/crash", "tests/distributed", "tests/simulation")
NOTHING_COLLECTED = 5


def command(flags: list[str], lane: tuple[str, ...], number: int) -> list[str]:
    # A cache for each: what failed last is written at the end of every run.
    cache = ["-o", f"cache_dir=.pytest_cache/{number}"]
    return [sys.executable, "-m", "pytest", "-m", "not slow and not gpu", *cache, *flags, *lane]


def main(flags: list[str]) -> int:
    statuses = []
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(
            command(flags, SIDE_BY_SIDE[1], 1), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            statuses.append(subprocess.run(command(flags, SIDE_BY_SIDE[0], 0), check=False).returncode)
            statuses.append(beside.wait())
        finally:
            beside.kill()
            beside.wait()
        output.seek(0)
        for line in output:
            sys.stdout.buffer.write(line)
        sys.stdout.flush()
    statuses.append(subprocess.run(command(flags, ONE_BY_ONE, 2), check=False).returncode)
    # A flag such as `-k` may leave a lane without tests; not all of them.
    failed = [status for status in statuses if status not in (0, NOTHING_COLLECTED)]
    return 1 if failed or set(statuses) == {NOTHING_COLLECTED} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
