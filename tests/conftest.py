"""What every test shares: how hypothesis draws, and the count of what was tried to break Holdfast."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# In CI the same examples each time, so that a red run is the change's doing; elsewhere new ones, to find more.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

if TYPE_CHECKING:
    from _object_server import Proxy, Server

_TRIED = pytest.StashKey[Counter[str]]()
_FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_TRIED] = Counter()
    config.stash[_FIGURES] = []


@pytest.fixture(autouse=True)
def release_what_one_call_saves_keep() -> Iterator[None]:
    """Each test starts without the engine and the images that one-call saves of another have kept."""
    yield
    loaded = sys.modules.get("holdfast.saver.process_session")  # not to import torch for tests that have none
    if loaded is not None:
        loaded.release()


@pytest.fixture(scope="session")
def tried(pytestconfig: pytest.Config) -> Counter[str]:
    """How often what was tried; a test counts what it has seen survived, and the run ends with the sums."""
    return pytestconfig.stash[_TRIED]


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> list[str]:
    """Lines with figures that a run ends with."""
    return pytestconfig.stash[_FIGURES]


@pytest.fixture(scope="session")
def descriptors() -> Callable[..., frozenset[tuple[str, str]]]:
    """The open descriptors and what they lead to: what a test left is the difference, whatever else went meanwhile."""

    def held(*, collects: bool = True) -> frozenset[tuple[str, str]]:
        if collects:  # what went out of reach in an earlier test
            gc.collect()
        found = set()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        return frozenset(found)

    return held


@pytest.fixture(scope="session")
def object_server() -> Iterator[Server]:
    """An object store in a process of its own, for all tests of a run that need one."""
    sys.path.append(str(Path(__file__).parent / "compat"))
    from _object_server import serving

    with serving() as server:
        yield server


@pytest.fixture
def proxy(object_server: Server) -> Iterator[Proxy]:
    """A way to that store which can be told to fail."""
    from _object_server import Proxy

    found = Proxy(object_server)
    yield found
    found.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    counts, figures = config.stash[_TRIED], config.stash[_FIGURES]
    if figures:
        terminalreporter.section("figures")
        terminalreporter.write("".join(f"{line}\n" for line in sorted(figures)))
    if not counts:
        return
    terminalreporter.section("tried, and survived")
    for what, count in sorted(counts.items()):
        terminalreporter.line(f"{count:>9,} {what}")
    if exitstatus == 0:
        terminalreporter.line("nothing lost, nothing wrong loaded, nothing hung")
