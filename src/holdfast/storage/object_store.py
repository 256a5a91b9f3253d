"""Calls to an object store: each bounded in time, tried again where that helps, its errors named by URL. Torch-free.

    store = ObjectStore("s3://bucket/runs/a", {"endpoint": "https://…"})      # nothing is asked of anybody yet
    store.get("version-7/holdfast.json", ends_s=time.monotonic() + 10)

Guarantees: no call goes on for longer than until ``ends_s`` (on the monotonic clock) by more than `SHORTEST_S` twice
over, nor for longer than `PATIENCE_S` while nobody answers; an object is there whole or not at all; `create` replaces
nothing, and says whether what is there is its own even where an answer was lost. What it raises is `StorageError`, with
the errno of what it comes to: ENOENT no such object, EACCES, ENODEV no such bucket, ERANGE beyond the end, EINVAL
whatever else was refused; and of `AGAIN` where there was no good answer in time. Thread-safe.
Assumes: the store answers a read after a write with what was written, as S3, Google's and Azure's do.
Does not: know what objects mean, or trust a listing to have everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from holdfast.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_T = TypeVar("_T")

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https", "file")
SHORTEST_S: Final = 0.5
REQUEST_S: Final = (15.0, 5.0, 2.0, 1.0, SHORTEST_S)
"""How long one request may take: the first of these that fits twice into what is left."""
PATIENCE_S: Final = 45.0
"""How long one call is repeated while the store doesn't answer, or says that it can't."""
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 2.0
PART_BYTES: Final = 8 << 20
PARTS_MAX: Final = 9_000
"""Of one upload; stores allow 10,000."""
UPLOADS_AT_A_TIME: Final = 4
AGAIN: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EAGAIN})
"""Errnos of what may go well another time."""

_FLAGS: Final = frozenset(
    {"allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses"}
)
_CLIENT_TEXTS: Final = frozenset(
    {"proxy_ca_certificate", "proxy_excludes", "proxy_url", "root_certificate", "user_agent"}
)
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3")
_STATUS: Final = re.compile(r"status(?: code)?:? (\d{3})")
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_NO_CREDENTIALS: Final = (
    "169.254.169.254",
    "169.254.170.2",
    "/latest/api/token",
    "computeMetadata",
    "identity/oauth2/token",
    "MissingCredentials",
    "Missing credentials",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
)
_ADVICE: Final = {
    errno.EACCES: "check the credentials, in the environment or in store_options, and what they may do there",
    errno.ENODEV: "make the bucket, or correct the URL; if it exists, check region and endpoint",
    errno.ETIMEDOUT: "check endpoint and network, or allow more time",
    errno.EHOSTUNREACH: "check the endpoint and the network",
    errno.EAGAIN: "the store is overloaded or down; try again later",
    errno.EINVAL: "see what the store says, and check URL, region and endpoint",
}


class Listed(NamedTuple):
    """One object of a listing: ``name`` below what was listed, ``size`` in bytes, seconds since the epoch."""

    name: str
    size: int
    modified_s: float


class ObjectStore:
    """What lies below ``url`` (``s3://bucket/prefix``, ``gs://``, ``az://container/prefix``, …).

    options: of the store or of its HTTP client, by the names that ``obstore`` has for them (``endpoint``,
    ``access_key_id``, ``region``, ``account_name``, ``allow_http``, …); what is left out comes from the environment, as
    usual for the store. Raises `ConfigError` for a URL or an option that can't be used; asks nobody.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.url = _checked_url(url)
        self._config, self._client_options = _sorted_options(options or {})
        self._clients: dict[float, Any] = {}
        self._lock = threading.Lock()
        self._client(REQUEST_S[0])

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def url_of(self, name: str) -> str:
        """The URL of an object, for messages."""
        return f"{self.url}/{name}" if name else self.url

    # Reading. ----------------------------------------------------------------------------------------------------

    def get(self, name: str, start: int = 0, end: int | None = None, *, ends_s: float) -> tuple[memoryview, int]:
        """Bytes ``start`` up to ``end`` (None: all) of an object, fewer where it is shorter; and its size in bytes."""
        import obstore

        options: Any = None if end is None and not start else {"range": (start, end) if end else {"offset": start}}

        def read(client: Any) -> tuple[memoryview, int]:
            result = obstore.get(client, name, options=options)
            return memoryview(result.bytes()), int(result.meta["size"])

        try:
            return self._call("read", name, read, ends_s)
        except StorageError as error:
            if error.errno == errno.ERANGE and not start:  # nothing has no range
                return memoryview(b""), 0
            raise

    def size(self, name: str, *, ends_s: float) -> int | None:
        """Its size in bytes; None where there is no such object."""
        import obstore

        try:
            return self._call("look at", name, lambda client: int(obstore.head(client, name)["size"]), ends_s)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def names(self, below: str, *, ends_s: float) -> list[str]:
        """What is one level below, sorted: objects, and prefixes of objects. Raises where there is no bucket."""
        import obstore

        def look(client: Any) -> list[str]:
            found = obstore.list_with_delimiter(client, below or None)
            paths = [*found["common_prefixes"], *(str(meta["path"]) for meta in found["objects"])]
            return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

        return self._listed(below, look, ends_s) or []

    def objects(self, below: str, *, ends_s: float) -> list[Listed]:
        """All objects below, as far as the store lists them now."""
        import obstore

        def look(client: Any) -> list[Listed]:
            rows = [meta for chunk in obstore.list(client, below, chunk_size=1000) for meta in chunk]
            start = len(below) + 1
            return [Listed(row["path"][start:], int(row["size"]), row["last_modified"].timestamp()) for row in rows]

        return self._listed(below, look, ends_s) or []

    def _listed(self, below: str, look: Callable[[Any], list[_T]], ends_s: float) -> list[_T] | None:
        try:
            return self._call("list", below, look, ends_s)
        except StorageError as error:
            if error.errno == errno.ENOENT:  # only where a prefix is a directory
                return None
            raise

    # Writing. ----------------------------------------------------------------------------------------------------

    def put(self, name: str, data: memoryview | bytes, *, ends_s: float) -> None:
        """Store ``data``, in the place of whatever was there; large ones in parts, some at a time."""
        import obstore

        memory = memoryview(data)
        part_bytes = max(PART_BYTES, -(-len(memory) // PARTS_MAX))

        def send(client: Any) -> None:
            if len(memory) <= part_bytes:
                obstore.put(client, name, memory, mode="overwrite", use_multipart=False)
                return
            parts = self._parts(memory, part_bytes, ends_s)
            obstore.put(
                client,
                name,
                parts,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=UPLOADS_AT_A_TIME,
            )

        self._call("write", name, send, ends_s)

    def _parts(self, memory: memoryview, part_bytes: int, ends_s: float) -> Iterator[memoryview]:
        for start in range(0, len(memory), part_bytes):
            if time.monotonic() > ends_s:
                raise _Late(f"no time is left after {start:,} of {len(memory):,} bytes")
            yield memory[start : start + part_bytes]

    def create(self, name: str, data: bytes, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        """Store ``data`` unless an object of that name exists; whether what is there now is ``ours``.

        ours: says so of an object's bytes; of what this very call has put it must be true. Raises `InDoubt` where that
        can't be learnt, and any other `StorageError` only if nothing of this call is there, or ever will be.
        """
        import obstore

        asked = False
        pause_s = FIRST_PAUSE_S
        give_up_s = self._patience(ends_s)
        while True:
            problem: StorageError | None = None
            try:
                obstore.put(self._client_for(ends_s), name, data, mode="create")
            except _lost_races() as lost:
                problem = _problem(lost, "create", self.url_of(name))
            except Exception as error:
                problem = _problem(error, "create", self.url_of(name))
                if problem.errno not in AGAIN and not asked:
                    raise problem from error
            else:
                return True
            asked = True
            found = self._try_get(name, ends_s)
            if found is not None:
                return ours(found)
            if time.monotonic() + pause_s >= give_up_s:
                message = f"{problem}. Whether it is there can't be told: it was sent, and not seen since"
                raise InDoubt(message, path=self.url_of(name), errno=problem.errno)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _try_get(self, name: str, ends_s: float) -> bytes | None:
        with contextlib.suppress(StorageError):
            return bytes(self.get(name, ends_s=min(ends_s, time.monotonic() + 2 * REQUEST_S[1]))[0])
        return None

    def delete(self, names: Sequence[str], *, ends_s: float) -> None:
        """Remove objects; absent ones are fine."""
        import obstore

        def remove(client: Any) -> None:
            try:
                obstore.delete(client, list(names))
            except FileNotFoundError:  # some stores say so, and may have stopped there
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(client, name)

        if names:
            self._call("delete", names[0], remove, ends_s)

    # Calls. ------------------------------------------------------------------------------------------------------

    def _call(self, doing: str, name: str, act: Callable[[Any], _T], ends_s: float) -> _T:
        """What ``act`` returns, which may be done any number of times."""
        give_up_s = self._patience(ends_s)
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return act(self._client_for(ends_s))
            except Exception as error:
                problem = _problem(error, doing, self.url_of(name))
                if problem.errno not in AGAIN or time.monotonic() + pause_s >= give_up_s:
                    raise problem from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _patience(self, ends_s: float) -> float:
        return min(ends_s, time.monotonic() + PATIENCE_S)

    def _client_for(self, ends_s: float) -> Any:
        left_s = ends_s - time.monotonic()
        return self._client(next((limit_s for limit_s in REQUEST_S if 2 * limit_s <= left_s), SHORTEST_S))

    def _client(self, request_s: float) -> Any:
        """One whose requests end within ``request_s``, and that begins none again after as long."""
        with self._lock:
            client = self._clients.get(request_s)
            if client is None:
                client = self._clients[request_s] = self._connected(timedelta(seconds=request_s))
            return client

    def _connected(self, limit: timedelta) -> Any:
        from obstore.store import HTTPStore, from_url

        if self.url.startswith("file:"):
            return from_url(self.url, mkdir=True)
        client_options = {**self._client_options, "timeout": limit, "connect_timeout": min(limit, timedelta(seconds=5))}
        backoff = {"init_backoff": timedelta(seconds=FIRST_PAUSE_S), "max_backoff": timedelta(seconds=1), "base": 2}
        retries = {"max_retries": 10, "retry_timeout": limit, "backoff": backoff}
        options: Any = {"config": self._config, "client_options": client_options, "retry_config": retries}
        try:
            client = from_url(self.url, **options)
        except Exception as error:
            raise ConfigError(f"{self.url}: {_short(error)}; check the URL and store_options", field="root") from error
        if isinstance(client, HTTPStore):
            raise ConfigError(f"{self.url} is no object store that could be written to; {_EXPECTED}", field="root")
        return client


class InDoubt(StorageError):
    """An object was sent, and whether it is there can't be learnt."""


class _Late(Exception):
    """The deadline of an upload has passed."""


_EXPECTED: Final = "expected s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"


def is_url(root: object) -> bool:
    """Whether ``root`` is a URL, and no path."""
    return isinstance(root, str) and "://" in root


def _checked_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    bucket = rest.split("/", 1)[0]
    if scheme not in SCHEMES or (not bucket and scheme != "file") or not rest.strip("/"):
        raise ConfigError(f"{url!r} is not the URL of an object store; {_EXPECTED}", field="root")
    if any(part in {".", ".."} for part in rest.split("/")) or "?" in rest or "#" in rest:
        raise ConfigError(f"{url!r}: a URL with '..', '?' or '#' in it is not taken; {_EXPECTED}", field="root")
    return url.rstrip("/")


def _sorted_options(options: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the store, and those of its HTTP client."""
    config: dict[str, Any] = {}
    client: dict[str, Any] = {}
    for key, value in options.items():
        if not isinstance(key, str) or not isinstance(value, (str, bool)):
            raise ConfigError(f"store_options[{key!r}] must be a string, not {value!r:.80}", field="store_options")
        if key in _FLAGS:
            if str(value).lower() not in {"true", "false", "1", "0"}:
                raise ConfigError(f"store_options[{key!r}] must be 'true' or 'false'", field="store_options")
            client[key] = str(value).lower() in {"true", "1"}
        elif key in _CLIENT_TEXTS:
            client[key] = value
        else:
            config[key] = str(value).lower() if isinstance(value, bool) else value
    given = [str(value) for key, value in config.items() if key.lower().endswith(("endpoint", "endpoint_url"))]
    endpoints = given or [os.environ[name] for name in _ENDPOINTS if name in os.environ]
    # Who writes http:// means it; and client options that are given hide those of the environment.
    if any(endpoint.startswith("http://") for endpoint in endpoints) or _is_set("AWS_ALLOW_HTTP"):
        client.setdefault("allow_http", True)
    return config, client


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"true", "1"}


def _lost_races() -> tuple[type[Exception], ...]:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return AlreadyExistsError, PreconditionError


def _problem(error: Exception, doing: str, url: str) -> StorageError:
    """``error`` as ours, its errno saying what it comes to."""
    if isinstance(error, StorageError):
        return error
    code = _errno_of(error)
    advice = _ADVICE.get(code)
    message = f"can't {doing} {url}: {_short(error)}"
    return StorageError(f"{message}; {advice}" if advice else message, path=url, errno=code)


def _errno_of(error: Exception) -> int:
    from obstore import exceptions

    text = str(error)
    if any(words in text for words in _NO_BUCKET):
        return errno.ENODEV
    if isinstance(error, FileNotFoundError) or "Not a directory (os error" in text:
        return errno.ENOENT
    if isinstance(error, _lost_races()):
        return errno.EEXIST
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(error, denied) or any(words in text for words in _NO_CREDENTIALS):
        return errno.EACCES
    if isinstance(error, _Late):
        return errno.ETIMEDOUT
    statuses = [int(status) for status in _STATUS.findall(text)]
    if 416 in statuses or "Requested range was invalid" in text:
        return errno.ERANGE
    if statuses and statuses[-1] in {401, 403}:
        return errno.EACCES
    if statuses:
        return errno.EAGAIN if statuses[-1] >= 500 or statuses[-1] in {408, 409, 425, 429} else errno.EINVAL
    if isinstance(error, exceptions.GenericError) and "LocalFileSystem" not in text:
        return errno.ETIMEDOUT if "timed out" in text or "kind: Timeout" in text else errno.EHOSTUNREACH
    return getattr(error, "errno", None) or errno.EINVAL


def _short(error: Exception) -> str:
    """What it says in one line, without what may be a signature in a URL."""
    said = str(error).partition("\n\nDebug source")[0]
    return re.sub(r"(?<=[\w/])\?[^\s)]*", "", " ".join(said.split()))[:600] or type(error).__name__
