"""The servers of a run, one of each kind, and what became of them: at the end each is named, with its tests' number."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("compat", "distributed", "integrations"))

from _faulty_proxy import Proxy
from servers import REGION, Server, known, use

from holdfast.storage.local import open_storage
from holdfast.storage.object_store import ObjectStore

NAMES = os.environ.get("HOLDFAST_STORES", "seaweedfs,azurite,moto").split(",")
"""Which servers are to be tested; one that isn't installed is skipped, and the run's end says so."""
PACKAGES = {"fsspec": "s3fs", "msc": "multistorageclient"} if "seaweedfs" in NAMES else {}
"""Other ways to SeaweedFS than obstore, and what each needs."""
_ABSENT = pytest.StashKey[dict[str, str]]()
_PASSED = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ABSENT] = {}
    config.stash[_PASSED] = Counter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        slow = getattr(metafunc.module, "SLOW_ON", ())
        marked = [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in NAMES]
        metafunc.parametrize("server", marked, indirect=True, scope="session")
    if "root" in metafunc.fixturenames:
        metafunc.parametrize("root", [*NAMES, *PACKAGES, "memory", "file"], indirect=True)
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", list(PACKAGES))


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Callable[[str], Server]]:
    """The server of a name: started when it is first asked for, and ended with the run."""
    running: dict[str, Server] = {}
    with contextlib.ExitStack() as ending:

        def start(name: str) -> Server:
            if name not in running:
                kind = known()[name]
                reason = kind.missing()
                if reason is not None:
                    pytestconfig.stash[_ABSENT][name] = reason
                    pytest.skip(f"{name}: {reason}")
                directory = tmp_path_factory.mktemp(name)
                ending.callback(shutil.rmtree, directory, ignore_errors=True)
                running[name] = ending.enter_context(kind(directory))
            return running[name]

        yield start


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, started: Callable[[str], Server]) -> Server:
    """One of the servers."""
    return started(request.param)


def by_package(package: str, server: Server, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a prefix in a new bucket of ``server``, to which fsspec or MSC leads; skips where it isn't installed.

    The environment leads there; MSC's profile, in ``directory``, takes its credentials from it.
    """
    pytest.importorskip(PACKAGES[package])
    use(monkeypatch, server)
    bucket = server.bucket()
    if package == "fsspec":
        return f"fsspec+s3://{bucket}/run"
    options = {"base_path": bucket, "endpoint_url": "${AWS_ENDPOINT_URL}", "region_name": REGION}
    profiles = {"here": {"storage_provider": {"type": "s3", "options": options}}}
    config = directory / "msc.json"
    config.write_text(json.dumps({"profiles": profiles}))
    monkeypatch.setenv("MSC_CONFIG", str(config))
    return "msc://here/run"


@pytest.fixture
def away(package: str, started: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a prefix in a new bucket of SeaweedFS, reached by a package beside obstore."""
    return by_package(package, started("seaweedfs"), tmp_path, monkeypatch)


@pytest.fixture
def root(
    request: pytest.FixtureRequest,
    started: Callable[[str], Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """The URL of a root that is new: on one of the servers, in memory, or a directory."""
    if request.param == "file":
        yield f"file://{tmp_path}/run"
    elif request.param == "memory":
        name = f"test-{uuid.uuid4().hex}"
        yield f"memory://{name}/run"
        shutil.rmtree(open_storage(f"memory://{name}").root)
    elif request.param in PACKAGES:
        yield by_package(request.param, started("seaweedfs"), tmp_path, monkeypatch)
    else:
        server = started(request.param)
        use(monkeypatch, server)
        yield server.place()


@pytest.fixture
def place(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a prefix in a new bucket; the environment leads to its server."""
    use(monkeypatch, server)
    return server.place()


@pytest.fixture
def faulty(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A faulty way to the server; the environment leads to it."""
    proxy = Proxy(server.port)
    use(monkeypatch, server, proxy.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def store(place: str) -> ObjectStore:
    return ObjectStore(place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    name = params.get("server", params.get("root"))
    if name in NAMES and report.when == "call" and report.passed:
        item.config.stash[_PASSED][name] += 1
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    absent, passed = config.stash[_ABSENT], config.stash[_PASSED]
    if not absent and not passed:
        return
    terminalreporter.section("object stores")
    for name in NAMES:
        said = f"not tested: {absent[name]}" if name in absent else f"{passed[name]} passed"
        terminalreporter.line(f"{name:>12} {said}")
