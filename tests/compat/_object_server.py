"""An object store of S3's kind in a process of its own, and a way to it that loses requests and answers."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEYS = {"access_key_id": "somebody", "secret_access_key": "secret", "region": "us-east-1"}
SIGNED = "AWS4-HMAC-SHA256 Credential=somebody/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
START_S = 300.0
_numbers = itertools.count()

Rule = Callable[[str, str], "str | None"]
"""What becomes of a request, by method and path: None, "before" (it is lost), "after" (its answer is), "busy" (503),
"hang", or "denied" (403)."""


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
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
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


class Proxy:
    """Hands requests to a server, or doesn't, as `rule` says; ``seen``: (method, path) of all that came."""

    def __init__(self, server: Server) -> None:
        self.rule: Rule = lambda _method, _path: None
        self.seen: list[tuple[str, str]] = []
        self.closing = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.partition("?")[0]
                proxy.seen.append((self.command, path))
                fate = proxy.rule(self.command, path)
                if fate == "hang":
                    proxy.closing.wait(60.0)
                if fate in ("before", "hang"):
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if fate in ("busy", "denied"):
                    self.answer(503 if fate == "busy" else 403, [], b"<Error><Code>Fate</Code></Error>")
                    return
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120.0)
                with contextlib.closing(connection):
                    connection.request(self.command, self.path, body, dict(self.headers.items()))
                    found = connection.getresponse()
                    data = found.read()
                    if fate == "after":
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    kept = [(name, value) for name, value in found.getheaders() if name.lower() not in SKIPPED]
                    length = found.getheader("Content-Length")
                    self.answer(found.status, kept, data, length if self.command == "HEAD" else None)

            def answer(
                self, status: int, headers: list[tuple[str, str]], data: bytes, length: str | None = None
            ) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def options(self) -> dict[str, str]:
        return {**KEYS, "endpoint": self.endpoint}

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


SKIPPED = frozenset({"content-length", "connection", "transfer-encoding", "date", "server"})
