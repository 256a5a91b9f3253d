"""Serve the page of a root live, on loopback, read-only (starlette and uvicorn, the extra ``view``).

    /                                   the page
    /api/summary                        what `model` tells; 304 while nothing has changed
    /api/checkpoint?name=               columns of one checkpoint
    /api/tensor?name=&tensor=           statistics of one tensor
    /api/difference?a=&b=&tensor=       how it differs between two checkpoints

Guarantees: only GET and HEAD; only requests whose ``Host`` is this server's on loopback, so no page of another site can
read it by a name that it points to 127.0.0.1, and none that another site's page makes; names are looked up among the
root's entries, never joined to a path. Nothing is written.
Assumes: who may connect to loopback may read the root; it asks for no password.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import socket
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import CheckpointNotFound, ConfigError, HoldfastError, StorageError
from holdfast.storage.locks import DIRECTORY, root_held_by
from holdfast.validation import is_store
from holdfast.view.model import summary_of
from holdfast.view.page import encode_json, policy, render_page
from holdfast.view.tensors import tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK: Final = "127.0.0.1"
KEPT: Final = 4
"""How many checkpoints' columns are kept encoded."""
STORE_QUIET_S: Final = 15.0
"""How long what a store said is taken for what it would say."""
_WATCHED: Final = ("", DIRECTORY, f"{DIRECTORY}/pins", f"{DIRECTORY}/journal.jsonl", f"{DIRECTORY}/journal.old.jsonl")


class LiveRoot:
    """The documents of one root, encoded, made anew only when something has changed. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pulse: object = None
        self._summary: dict[str, Any] = {}
        self._encoded = b""
        self._tag = ""
        self._checkpoints: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def summary(self) -> tuple[dict[str, Any], bytes, str]:
        """Return the summary, encoded too, and a tag that changes with it. Raises as `summary_of`."""
        with self._lock:
            pulse = self._look()
            if pulse != self._pulse or not self._encoded or self._in_work():
                self._summary = summary_of(self.path)
                self._encoded = encode_json(self._summary)
                self._tag = hashlib.sha256(encode_json({**self._summary, "generated": 0})).hexdigest()[:32]
                self._pulse = pulse
            return self._summary, self._encoded, self._tag

    def _look(self) -> object:
        """Return what is the same as long as nothing has changed in the root, as far as a few looks tell."""
        if is_store(self.path):
            return time.monotonic() // STORE_QUIET_S
        found: list[object] = [root_held_by(self.path)]
        for name in _WATCHED:
            try:
                seen = os.stat(os.path.join(self.path, name))
                found.append((seen.st_mtime_ns, seen.st_size, seen.st_ino))
            except OSError:
                found.append((0, 0, 0))
        return found

    def _in_work(self) -> bool:
        return any(row["state"] == "in work" for row in self._summary.get("steps", ()))

    def place_of(self, name: str) -> tuple[str, str]:
        """Return path and attempt of the entry ``name``. Raises `CheckpointNotFound` if the root has none such."""
        summary = self.summary()[0]
        for row in summary["steps"]:
            if row["name"] == name and row["state"] in ("published", "stock"):
                return f"{summary['root'].rstrip('/')}/{name}", str(row.get("attempt", ""))
        raise CheckpointNotFound(f"{summary['root']} has no checkpoint {name!r:.200}", path=summary["root"])

    def checkpoint(self, name: str) -> bytes:
        """Return the columns of a checkpoint as JSON, compressed by gzip. Raises as `place_of`, `tensors_of`."""
        path, attempt = self.place_of(name)
        with self._lock:
            found = self._checkpoints.pop((name, attempt), None)
        if found is None:
            found = gzip.compress(encode_json(tensors_of(path)), 1)
        with self._lock:
            self._checkpoints[name, attempt] = found
            while len(self._checkpoints) > KEPT:
                self._checkpoints.popitem(last=False)
        return found


def make_app(path: str, port: int) -> Starlette:
    """Return the application for the root at ``path``, to be served on loopback at ``port``."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import Response
    from starlette.routing import Route

    root = LiveRoot(path)

    def answer(data: bytes, **headers: str) -> Response:
        return Response(data, media_type="application/json", headers=headers)

    def page(request: Request) -> Response:  # noqa: ARG001 - starlette calls it with one
        return Response(render_page(root.summary()[0], live=True), media_type="text/html")

    def summary(request: Request) -> Response:
        _, encoded, tag = root.summary()
        if request.headers.get("if-none-match") == f'"{tag}"':
            return Response(status_code=304, headers={"ETag": f'"{tag}"'})
        return answer(encoded, ETag=f'"{tag}"')

    def checkpoint(request: Request) -> Response:
        return answer(root.checkpoint(_asked(request, "name")), **{"Content-Encoding": "gzip"})

    def tensor(request: Request) -> Response:
        from holdfast.view.statistics import statistics_of  # imports torch

        found = statistics_of(root.place_of(_asked(request, "name"))[0], _asked(request, "tensor"))
        return answer(encode_json(found))

    def difference(request: Request) -> Response:
        from holdfast.view.statistics import difference_of  # imports torch

        one, two = (root.place_of(_asked(request, name))[0] for name in ("a", "b"))
        return answer(encode_json(difference_of(one, two, _asked(request, "tensor"))))

    def refused(request: Request, error: Exception) -> Response:  # noqa: ARG001
        status = 404 if isinstance(error, CheckpointNotFound) else 400 if isinstance(error, ConfigError) else 500
        shown = {"error": type(error).__name__, "message": str(error)}
        return Response(encode_json(shown), status, media_type="application/json")

    served: dict[str, Callable[[Request], Response]] = {
        "/": page,
        "/api/summary": summary,
        "/api/checkpoint": checkpoint,
        "/api/tensor": tensor,
        "/api/difference": difference,
    }
    return Starlette(
        routes=[Route(place, handler, methods=["GET"]) for place, handler in served.items()],
        middleware=[Middleware(_OwnRequestsOnly, port=port)],
        exception_handlers={HoldfastError: refused},
    )


def _asked(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise ConfigError(f"the request names no {name}", field=name)
    return str(value)


class _OwnRequestsOnly:
    """Middleware: answers what this server's own page asks, and adds headers that keep other sites out."""

    def __init__(self, app: Any, port: int) -> None:
        self._app = app
        self._hosts = {f"{host}:{port}".encode() for host in (LOOPBACK, "localhost")}
        self._headers = [
            (b"content-security-policy", policy(live=True).encode() + b"; frame-ancestors 'none'"),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope.get("headers", ()))
        strange = headers.get(b"host") not in self._hosts
        foreign = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if scope["type"] != "http" or strange or foreign:
            await _refuse(send, scope["type"])
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


async def _refuse(send: Any, kind: str) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = b"this server answers its own page on loopback only\n"
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": body})


def listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback; port 0: a free one. Raises `StorageError` if the port is taken."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port))
        found.listen()  # who is told the port may ask at once
    except OSError as error:
        found.close()
        message = f"port {port} of {LOOPBACK} can't be listened on: {error.strerror}; choose another with --port"
        raise StorageError(message, path=f"{LOOPBACK}:{port}", errno=error.errno) from error
    return found


def serve(path: str, listener: socket.socket) -> None:
    """Serve the root at ``path`` on ``listener`` until a signal ends it."""
    import uvicorn

    app = make_app(path, listener.getsockname()[1])
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
