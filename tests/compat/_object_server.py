"""An object store of S3's kind in a process of its own; `_faulty_proxy.Proxy` is a way to it that loses requests."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _faulty_proxy import Proxy as AnyProxy

KEYS = {"access_key_id": "somebody", "secret_access_key": "secret", "region": "us-east-1"}
SIGNED = "AWS4-HMAC-SHA256 Credential=somebody/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
START_S = 300.0
_numbers = itertools.count()


class Server:
    """The store, at ``endpoint``."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"

    @property
    def options(self) -> dict[str, str]:
        return {**KEYS, "endpoint": self.endpoint}

    def bucket(self) -> str:
        """A new one."""
        name = f"bucket-{next(_numbers)}"
        assert self.request("PUT", f"/{name}")[0] == 200
        return name

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Past everything that is tested; this server looks at no signature."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120.0)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, {"Authorization": SIGNED})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def keys(self, bucket: str) -> list[str]:
        """The names of all objects of a bucket, sorted."""
        status, listing = self.request("GET", f"/{bucket}?list-type=2")
        assert status == 200
        return sorted(re.findall(r"<Key>([^<]*)</Key>", listing.decode()))


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server of its own process, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("_moto.py")), str(port)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        said.seek(0)
                        raise AssertionError(f"no server: {said.read().decode()[-2000:]}") from None
                    time.sleep(0.05)
            yield Server(port)
        finally:
            process.kill()
            process.wait()


class Proxy(AnyProxy):
    """A faulty way to this store, with the options by which a client takes it."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.port)

    @property
    def options(self) -> dict[str, str]:
        return {**KEYS, "endpoint": self.endpoint}
