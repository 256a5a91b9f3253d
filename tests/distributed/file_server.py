"""Serves the files below a directory as an object store of S3's kind, read-only; counts, and slows down if told to."""

from __future__ import annotations

import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from typing_extensions import Self

PIECE_BYTES = 256 << 10


class FileServer:
    """``root/x/y`` is the object ``y`` of bucket ``x``. A context manager.

    bytes_per_s: of all connections together; None for as fast as it goes. ``sent``: bytes of bodies by path;
    ``requests``: how many of each (method, path); the path of a listing ends with "?".
    """

    def __init__(self, root: Path, *, bytes_per_s: float | None = None) -> None:
        self.sent: Counter[str] = Counter()
        self.requests: Counter[tuple[str, str]] = Counter()
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                if "list-type" in url.query:
                    self.list_objects(url.path, parse_qs(url.query).get("prefix", [""])[0])
                    return
                path = unquote(url.path)
                file = root / path.lstrip("/")
                server.count(self.command, path)
                if not file.is_file():
                    self.answer(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
                    return
                size = file.stat().st_size
                headers = {"ETag": f'"{size}"', "Last-Modified": formatdate(file.stat().st_mtime, usegmt=True)}
                start, end, status = 0, size, 200
                if given := self.headers.get("Range"):
                    first, _, last = given.removeprefix("bytes=").partition("-")
                    start, end, status = int(first), min(size, int(last) + 1 if last else size), 206
                    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
                with file.open("rb") as opened:
                    opened.seek(start)
                    data = b"" if self.command == "HEAD" else opened.read(end - start)
                self.answer(status, headers, data, end - start)
                server.count_bytes(path, len(data))

            do_HEAD = do_GET

            def list_objects(self, bucket: str, prefix: str) -> None:
                server.count("GET", f"{bucket}?")
                top = root / bucket.strip("/")
                rows = "".join(
                    f"<Contents><Key>{file.relative_to(top)}</Key><Size>{file.stat().st_size}</Size>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                    for file in sorted(top.rglob("*"))
                    if file.is_file() and str(file.relative_to(top)).startswith(prefix)
                )
                self.answer(200, {}, f"<ListBucketResult>{rows}</ListBucketResult>".encode())

            def answer(self, status: int, headers: dict[str, str], data: bytes, length: int | None = None) -> None:
                self.send_response_only(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) if length is None else length))
                self.end_headers()
                for at in range(0, len(data), PIECE_BYTES):
                    piece = data[at : at + PIECE_BYTES]
                    server.wait_for(len(piece))
                    self.wfile.write(piece)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to read from it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def count(self, method: str, path: str) -> None:
        with self._lock:
            self.requests[method, path] += 1

    def count_bytes(self, path: str, nbytes: int) -> None:
        with self._lock:
            self.sent[path] += nbytes

    def wait_for(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may go: all connections share the bandwidth."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / self.bytes_per_s
            pause_s = self._free_at - now
        time.sleep(pause_s)
