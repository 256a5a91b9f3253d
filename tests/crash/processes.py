"""Inspect processes, and the event logs of test jobs."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any


class Log:
    """The events of one rank, as far as they have been written; see `saving_job.note`."""

    def __init__(self, base: Path, rank: int) -> None:
        self.path = Path(f"{base}-{rank}.jsonl")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = []
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            with contextlib.suppress(ValueError):  # the last line of a killed process may be cut short
                event = json.loads(line)
                if event["event"] in kinds:
                    found.append(event)
        return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_gone(pid: int) -> bool:
    """Return True if the process has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def children_of(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started; a thread of it, or a child, may end meanwhile."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def engines_of(pid: int) -> list[int]:
    """Return the pids of Holdfast's engines among the children of a process."""
    return [child for child in children_of(pid) if _is_engine(child)]


def _is_engine(pid: int) -> bool:
    try:
        return b"holdfast.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
