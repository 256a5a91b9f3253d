"""A way to any server that speaks HTTP, on which requests and answers get lost, late, cut and damaged.

    proxy = Proxy(port)                                     # of a server on 127.0.0.1
    proxy.on_nth(7, "after")                                # the answer to the seventh request from now is lost
    proxy.rule = lambda method, path: "busy" if method == "PUT" else None

Requests are handed on as they came, headers and all, so that signatures hold. Each fate that waits, waits no longer
than `Proxy.stall_s`, or `HANG_S` for "hang".
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal, NamedTuple

Fate = Literal[
    "before", "after", "busy", "denied", "hang", "reset", "late", "cut", "damage", "damage-answer", "drip", "after-503"
]
FATES: Final[dict[str, str]] = {
    "before": "the connection ends, and the server has never seen the request",
    "reset": "the same, by a reset (RST)",
    "after": "the server has done what it was asked, and its answer is lost",
    "after-503": "the server has done what it was asked, and the answer is 503",
    "busy": "503 SlowDown; the server has never seen the request",
    "denied": "403; the server has never seen the request",
    "hang": "no answer",
    "late": "the answer comes `stall_s` late",
    "drip": "the answer comes byte for byte for `stall_s`, then the rest",
    "cut": 'half of the answer\'s body comes, then the connection ends; without one: as "after"',
    "damage": "one byte of the request's body is changed on the way; without one nothing happens",
    "damage-answer": "one byte of the answer's body is changed on the way; without one nothing happens",
}
HANG_S: Final = 60.0
SKIPPED: Final = frozenset({"content-length", "connection", "transfer-encoding", "date", "server"})

Rule = Callable[[str, str], "str | None"]
"""What becomes of a request, by method and path: one of `FATES`, or None."""


class Request(NamedTuple):
    """A request that came. ``query`` is as it was sent."""

    method: str
    path: str
    query: str
    body_bytes: int


class Proxy:
    """Hands requests to the server at ``port``, or doesn't, as `rule` says.

    requests: all that came, in order; ``seen``: their (method, path). met: the fates that requests have met.
    """

    def __init__(self, port: int) -> None:
        self.rule: Rule = lambda _method, _path: None
        self.stall_s = 1.0
        self.seen: list[tuple[str, str]] = []
        self.requests: list[Request] = []
        self.met: list[tuple[Request, str]] = []
        self.closing = threading.Event()
        self._port = port
        self._lock = threading.Lock()
        self._nth: dict[int, str] = {}
        self._server = _Listening(self)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def on_nth(self, number: int, fate: Fate | str, *, times: int = 1) -> None:
        """From now on let the request of that number, from 1, meet ``fate``, and ``times - 1`` after it."""
        assert fate in FATES
        with self._lock:
            first = len(self.requests) + number - 1
            self._nth = dict.fromkeys(range(first, first + times), fate)

    def clear(self) -> int:
        """Let everything pass again; returns how many requests came since the proxy was made or last cleared."""
        with self._lock:
            count = len(self.requests)
            self.rule = lambda _method, _path: None
            self._nth.clear()
            self.requests.clear()
            self.seen.clear()
            self.met.clear()
            return count

    def fate_of(self, request: Request) -> str | None:
        """Note a request and say what becomes of it."""
        with self._lock:
            fate = self._nth.get(len(self.requests))
            self.requests.append(request)
            self.seen.append((request.method, request.path))
            if fate is None:
                fate = self.rule(request.method, request.path)
            if fate is not None:
                self.met.append((request, fate))
            return fate

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=120.0)

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Listening(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, *_: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def handle_any(self) -> None:
        assert isinstance(self.server, _Listening)
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        fate = proxy.fate_of(Request(self.command, path, query, len(body)))
        if fate == "hang":
            proxy.closing.wait(HANG_S)
        if fate in ("before", "hang", "reset"):
            self._hang_up(reset=fate == "reset")
        elif fate in ("busy", "denied"):
            self._refuse(503 if fate == "busy" else 403)
        else:
            with contextlib.closing(proxy.connect()) as connection:
                found, data = self._ask(connection, _damaged(body) if fate == "damage" else body)
            self._answer(proxy, found, data, fate)

    def _ask(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                connection.putheader(name, value)
        connection.endheaders(body)
        found = connection.getresponse()
        return found, found.read()

    def _answer(self, proxy: Proxy, found: http.client.HTTPResponse, data: bytes, fate: str | None) -> None:
        """Hand on what the server has answered, as ``fate`` has it."""
        if fate == "after" or (fate == "cut" and len(data) < 2):
            self._hang_up(reset=False)
            return
        if fate == "after-503":
            self._refuse(503)
            return
        if fate == "late":
            proxy.closing.wait(proxy.stall_s)
        if fate == "damage-answer":
            data = _damaged(data)
        kept = [(name, value) for name, value in found.getheaders() if name.lower() not in SKIPPED]
        length = found.getheader("Content-Length") if self.command == "HEAD" else None
        self._send_head(found.status, kept, length or str(len(data)))
        if self.command == "HEAD":
            return
        if fate == "cut":
            self.wfile.write(data[: len(data) // 2])
            self._hang_up(reset=False)
            return
        start = 0
        while fate == "drip" and start < min(len(data) - 1, 20):
            self.wfile.write(data[start : start + 1])
            start += 1
            proxy.closing.wait(proxy.stall_s / 20)
        self.wfile.write(data[start:])

    def _refuse(self, status: int) -> None:
        code = "SlowDown" if status == 503 else "AccessDenied"
        data = f"<Error><Code>{code}</Code><Message>Fate</Message></Error>".encode()
        self._send_head(status, [("Content-Type", "application/xml")], str(len(data)))
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_head(self, status: int, headers: list[tuple[str, str]], length: str) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()

    def _hang_up(self, *, reset: bool) -> None:
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                self.wfile.close()
            self.connection.close()
        else:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any


def _damaged(data: bytes) -> bytes:
    """Return ``data`` with one byte changed, in its middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x20]) + data[middle + 1 :] if data else data
