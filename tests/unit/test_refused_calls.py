"""Sandboxes that refuse system calls: what can be done without is, with a warning; else the error names the call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_LIBRARY = """
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
static int refused(const char *name) {
    const char *names = getenv("REFUSED");
    if (!names || !strstr(names, name)) return 0;
    const char *number = getenv("REFUSED_ERRNO");
    errno = number ? atoi(number) : ENOSYS;
    return 1;
}
int memfd_create(const char *name, unsigned int flags) {
    return refused("memfd_create") ? -1 : syscall(SYS_memfd_create, name, flags);
}
pid_t setsid(void) { return refused("setsid") ? -1 : syscall(SYS_setsid); }
int socketpair(int domain, int type, int protocol, int sv[2]) {
    return refused("socketpair") ? -1 : syscall(SYS_socketpair, domain, type, protocol, sv);
}
int fsync(int fd) {
    struct stat st;
    int directory = fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);
    if (refused(directory ? "fsync_dir" : "fsync_file")) return -1;
    return syscall(SYS_fsync, fd);
}
"""

_PROGRAM = """
import logging, sys, torch, holdfast
logging.basicConfig(level=logging.WARNING)
state = {"w": torch.arange(1000.0), "n": 3}
try:
    with holdfast.CheckpointManager(sys.argv[1] + "/run", state) as manager:
        manager.save(1).result()
    holdfast.save(state, sys.argv[1] + "/one")
    into = {"w": torch.zeros(1000), "n": 0}
    holdfast.load(into, sys.argv[1] + "/one")
    assert torch.equal(into["w"], state["w"])
    assert holdfast.open(sys.argv[1] + "/run").verify().ok
    print("saved")
except holdfast.HoldfastError as error:
    print(type(error).__name__, error)
    print("cause", repr(error.__cause__))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("library")
    (directory / "refuse.c").write_text(_LIBRARY)
    made = directory / "refuse.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(made), str(directory / "refuse.c")]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("needs a C compiler")
    return made


def run(library: Path, place: Path, refused: str, number: int) -> tuple[str, str]:
    environment = {**os.environ, "LD_PRELOAD": str(library), "REFUSED": refused, "REFUSED_ERRNO": str(number)}
    command = [sys.executable, "-c", _PROGRAM, str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


@pytest.mark.parametrize("number", [38, pytest.param(1, marks=pytest.mark.slow)])
def test_what_can_be_done_without(library: Path, tmp_path: Path, number: int) -> None:
    said, warned = run(library, tmp_path, "memfd_create,setsid", number)
    assert said == "saved\n", said
    for name in ("memfd_create", "setsid"):
        assert f"{name} was refused" in warned


def test_a_file_system_without_fsync_for_directories(library: Path, tmp_path: Path) -> None:
    assert run(library, tmp_path, "fsync_dir", 22)[0] == "saved\n"


@pytest.mark.parametrize(
    ("refused", "number", "names"),
    [("socketpair", 1, "socketpair was refused"), ("fsync_file", 22, "can't fsync")],
)
def test_what_can_not_be_done_without_is_named(
    library: Path, tmp_path: Path, refused: str, number: int, names: str
) -> None:
    said, _ = run(library, tmp_path, refused, number)
    assert names in said
    assert said.partition(" ")[0] in ("EngineDied", "SaveFailed", "StorageError"), said
    assert "Traceback" not in said


def test_one_process_of_many_without_a_process_group_is_warned(tmp_path: Path) -> None:
    program = (
        "import sys, torch, holdfast\n"
        "state = {'w': torch.ones(1)}\n"
        "for name in 'ab': holdfast.save(state, sys.argv[1] + '/' + name)\n"
        "holdfast.load(state, sys.argv[1] + '/a')\n"
    )
    for number, (environment, expected) in enumerate(
        (({"WORLD_SIZE": "2", "RANK": "1"}, 1), ({"WORLD_SIZE": "1", "RANK": "0"}, 0), ({"WORLD_SIZE": "2"}, 0))
    ):
        place = tmp_path / str(number)
        place.mkdir()
        known = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        done = subprocess.run(
            [sys.executable, "-c", program, str(place)],
            env={**known, **environment},
            capture_output=True,
            text=True,
            timeout=110,
            check=True,
        )
        assert done.stderr.count("Call init_process_group first") == expected, done.stderr
