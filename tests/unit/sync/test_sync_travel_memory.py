"""What conversions and slices cost in memory: peaks of real processes, one that casts and one that takes quarters.

Both are processes of their own, since a peak belongs to a process. Sizes are such that a copy of the whole, on either
side, could not be missed.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

VERSION_MIB = 256
"""Of bfloat16; the trainer has twice that in float32."""
OVERHEAD_MIB = 40
"""Libraries that are loaded meanwhile, buckets, threads: measured was less than 1."""

_COMMON = """
    import sys, threading, torch, holdfast

    def status(key):
        for line in open("/proc/self/status"):
            if line.startswith(key + ":"):
                return int(line.split()[1]) / 1024

    def peak_mib(work):
        # Of its own memory, above what it has before. What the publisher shares is there once for all.
        found, over = [status("RssAnon")], threading.Event()

        def look():
            while not over.wait(0.002):
                found.append(status("RssAnon"))

        looking = threading.Thread(target=look)
        looking.start()
        work()
        over.set()
        looking.join()
        return max(found) - found[0]

    kind, place = sys.argv[1:]
    made = {"directory": holdfast.sync.DirectoryTransport, "shared memory": holdfast.sync.SharedMemoryTransport}
    transport = made[kind](place)
    torch.set_num_threads(1)
"""
_PUBLISHER = """
    weights = {f"layers.{n}": torch.full((2048, 4096), float(n)) for n in range(16)}
    publisher = holdfast.sync.Publisher(transport, bypass_cpu=False, dtype=torch.bfloat16)
    print(peak_mib(lambda: publisher.publish(weights, 1, timeout=60)), flush=True)
    sys.stdin.read()
    publisher.close()
"""
_RECEIVER = """
    def quarter(by_rows):
        part = torch.zeros((512, 4096) if by_rows else (2048, 1024), dtype=torch.bfloat16)
        return holdfast.Shard(part, (2048, 4096), (512, 0) if by_rows else (0, 1024))

    into = {f"layers.{n}": quarter(n % 2) for n in range(16)}
    with holdfast.sync.Receiver(transport) as receiver:
        print(peak_mib(lambda: receiver.receive(into, timeout=60)), flush=True)
    assert all((shard.tensor == n).all() for n, shard in enumerate(into.values()))
"""


def started(script: str, kind: str, place: Path) -> subprocess.Popen[str]:
    source = textwrap.dedent(_COMMON) + textwrap.dedent(script)
    command = [sys.executable, "-c", source, kind, str(place)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [pytest.param("directory", marks=pytest.mark.slow), "shared memory"])
def test_casts_and_slices_hold_no_whole_copy(tmp_path: Path, kind: str) -> None:
    publisher = started(_PUBLISHER, kind, tmp_path / "versions")
    receiver = None
    try:
        assert publisher.stdout is not None
        told = publisher.stdout.readline()
        assert told, publisher.communicate(timeout=60)[1]
        assert float(told) <= OVERHEAD_MIB, "the version itself lies in shared memory; the cast takes nothing beside it"
        receiver = started(_RECEIVER, kind, tmp_path / "versions")
        out, error = receiver.communicate(timeout=60)
        assert receiver.returncode == 0, error
        shadow_mib = VERSION_MIB / 4 if kind == "directory" else 0
        assert float(out) <= shadow_mib + OVERHEAD_MIB, "more than a shadow of the slices"
        publisher.communicate(timeout=60)
    finally:
        for process in (publisher, receiver):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
