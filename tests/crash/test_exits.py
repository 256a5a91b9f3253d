"""A program may end right after any public call: with status 0, what it had begun published, and nothing left behind.

Quiet and beside a process that spins, and where giving back large memory takes long on other threads than the main
one, as it may: what is still at work then when the interpreter is taken apart ends the process by a signal.
``HOLDFAST_EXITS`` says how many programs are run, each in other ways than the one before.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from exits import PROGRAMS
from nursery import Child, Nursery
from processes import engines_of, free_port, is_gone

import holdfast

PROGRAMS_RUN = int(os.environ.get("HOLDFAST_EXITS", "30"))
HOWS = ("held", "falls off", "exits", "thread", "interrupted")
SOON_S = 60.0
ENGINES_GONE_S = 10.0
TORCHS_OWN = re.compile(r"pt_gloo_runloop")
SLOW_MUNMAP = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
int munmap(void *address, size_t length) {
    if (length >= (1 << 20) && syscall(SYS_gettid) != getpid()) usleep(100000);
    return syscall(SYS_munmap, address, length);
}
"""


@contextmanager
def spinning() -> Iterator[None]:
    """Keep two processors busy with spinning processes during the block."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


@pytest.fixture(scope="module")
def slow_munmap(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """Return a library that makes munmap slow; None if it can't be compiled."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    place = tmp_path_factory.mktemp("slow")
    (place / "slow.c").write_text(SLOW_MUNMAP)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", place / "slow.so", place / "slow.c"], check=True)
    return str(place / "slow.so")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery("exits") as found:
        yield found


@pytest.fixture(scope="module")
def slow_nursery(slow_munmap: str | None) -> Iterator[Nursery]:
    if slow_munmap is None:
        pytest.skip("there is no C compiler to make munmap slow with")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", slow_munmap)
        found = Nursery("exits")
    with found:
        yield found


def check_ended(child: Child, root: Path, leaves: tuple[str, ...], said: str) -> None:
    """Check that the program ended well and left what it should, and nothing else."""
    status = child.wait(SOON_S)
    assert status == 0, f"{said}: status {status}\n{child.stderr()}"
    assert child.stderr() == "", said
    left = {path.name for path in root.glob("**/.*")} - {".holdfast", ".metadata"}
    left |= {path.name for path in root.iterdir()} - {path.partition("/")[0] for path in leaves} - {"run"}
    assert not left, f"{said}: {sorted(left)}"
    for path in leaves:
        assert (root / path).is_dir(), f"{said}: {path} was lost"
        if any((root / path).glob("holdfast.json")):
            assert holdfast.open(root / path).verify().ok, f"{said}: {path}"


def wait_no_engine(engines: set[int], said: str) -> None:
    deadline = time.monotonic() + ENGINES_GONE_S
    while not all(map(is_gone, engines)):
        assert time.monotonic() < deadline, f"{said}: an engine is left"
        time.sleep(0.01)


def run_programs(nursery: Nursery, tmp_path: Path, count: int, *, first: int) -> None:
    """Run ``count`` programs: all in turn, each time with another way to end."""
    names = list(PROGRAMS)
    memory = set(os.listdir("/dev/shm"))
    for number in range(first, first + count):
        name, how = names[number % len(names)], HOWS[(number + number // len(names)) % len(HOWS)]
        said = f"{name}, {how}"
        root = tmp_path / f"{number}"
        root.mkdir()
        child = nursery.start(
            "exits", "run", {"program": name, "root": str(root), "how": how}, log=tmp_path / f"log-{number}"
        )
        engines: set[int] = set()
        while child.returncode is None:
            engines |= set(engines_of(child.pid))
            time.sleep(0.02)
        check_ended(child, root, PROGRAMS[name], said)
        wait_no_engine(engines, said)
        shutil.rmtree(root)
    assert set(os.listdir("/dev/shm")) <= memory


def test_programs_end(nursery: Nursery, tmp_path: Path) -> None:
    run_programs(nursery, tmp_path, PROGRAMS_RUN // 3, first=0)


@pytest.mark.slow
def test_programs_end_beside_one_that_spins(nursery: Nursery, tmp_path: Path) -> None:
    with spinning():
        run_programs(nursery, tmp_path, PROGRAMS_RUN // 3, first=PROGRAMS_RUN // 3)


@pytest.mark.slow
def test_programs_end_while_memory_is_freed_slowly(slow_nursery: Nursery, tmp_path: Path) -> None:
    run_programs(slow_nursery, tmp_path, PROGRAMS_RUN - 2 * (PROGRAMS_RUN // 3), first=2 * (PROGRAMS_RUN // 3))


def test_a_save_whose_memory_is_freed_slowly(slow_nursery: Nursery, tmp_path: Path) -> None:
    """This one was seen to abort every other time."""
    for number in range(8):
        run_one(slow_nursery, tmp_path / str(number), "async_save_result", "held")


def run_one(nursery: Nursery, place: Path, name: str, how: str) -> None:
    (place / "root").mkdir(parents=True)
    arguments = {"program": name, "root": str(place / "root"), "how": how}
    child = nursery.start("exits", "run", arguments, log=place / "log")
    check_ended(child, place / "root", PROGRAMS[name], f"{name}, {how}")


@pytest.mark.parametrize("how", ["never", "destroyed", "after"])
def test_two_ranks_end(nursery: Nursery, tmp_path: Path, how: str) -> None:
    """For every end of their process group. A thread of torch may abort a rank there, even without Holdfast."""
    for attempt in itertools.count():
        root = tmp_path / f"{attempt}" / "root"
        root.mkdir(parents=True)
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            nursery.start(
                "exits",
                "of_two_ranks",
                {"root": str(root), "how": how},
                log=tmp_path / f"{attempt}" / f"rank-{rank}",
                env={**place, "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        statuses = [child.wait(SOON_S) for child in ranks]
        if any(TORCHS_OWN.search(child.stderr()) for child in ranks) and attempt < 3:
            continue
        assert statuses == [0, 0], [child.stderr() for child in ranks]
        for child in ranks:
            check_ended(child, root, ("one", "run/step-1"), how)
        break
