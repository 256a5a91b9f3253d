"""Object stores: calls with deadlines and retries. Torch-free.

    store = ObjectStore("s3://bucket/runs/a", {"endpoint": "https://…"})      # sends no request yet
    store.get("version-7/holdfast.json", ends_s=time.monotonic() + 10)

Guarantees: a call ends at most two `SHORTEST_S` after ``ends_s`` (on the monotonic clock), and after `PATIENCE_S`
without an answer; an object is there whole or not at all; `create` replaces nothing, and reports whether the object
is its own even where a response was lost. Failures raise `StorageError` with an errno: ENOENT no such object, EACCES,
ENODEV no such bucket, ERANGE beyond the end, one of `AGAIN` without a usable response in time, EBADMSG among them for
data that was damaged on its way each time, EINVAL for any other refusal. Thread-safe. An acknowledged object is
durable.
Uploads: straight from the caller's memory, in parts, `UPLOADS_AT_A_TIME` of them under way. An upload lasts as long as
it makes progress, and is given up `PATIENCE_S` after its last part was finished (later where parts are so large that
one may take longer). One that fails, or that ``before_part`` ends, is aborted at the store; a process that is killed
leaves its parts there, unseen, and obstore can't list them: a rule of the bucket should remove those after some days.
Checksums, on S3: a CRC64NVME of each part, in place of one by the signature, which costs more; SHA-256 where a server
refuses that, a signed payload where it refuses both, which is found out once for an endpoint and bucket. Options or
variables of the environment that set either are left as they are. Google's and Azure's clients send none.
Conditions: `replace` asks for ETags as the store gives them; where that is refused although the object is unchanged, as
by Ceph's gateway, without their quotes, which is remembered for an endpoint and bucket.
Assumes: the store is consistent (a read returns what was written before), as S3, Google's and Azure's are.
Does not: know what objects mean (`holdfast.storage.object_storage` does), or rely on listings being complete.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from holdfast.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_T = TypeVar("_T")
_log = logging.getLogger("holdfast.storage")

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https", "file")
SHORTEST_S: Final = 0.5
REQUEST_S: Final = (15.0, 5.0, 2.0, 1.0, SHORTEST_S)
"""Timeouts of one request: the first that fits twice into the time left is used."""
PATIENCE_S: Final = 45.0
"""How long one call is retried while the store doesn't answer or reports that it is unavailable."""
FIRST_ANSWER_S: Final = 10.0
"""How long a store that has answered nothing yet is tried in a process that has called `expect_answers_soon`."""
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 2.0
PART_BYTES: Final = 8 << 20
PARTS_MAX: Final = 9_000
"""Most parts of one upload; stores allow 10,000."""
UPLOADS_AT_A_TIME: Final = 8
UPLOAD_TRIES: Final = 8
"""How often an upload of many parts is begun, as long as each try finishes some."""
PART_S: Final = 15.0
SLOWEST_BYTES_PER_S: Final = 1 << 20
"""A request for one part may take `PART_S` and what the part needs at this rate."""
_CHECKSUMS: Final[tuple[dict[str, str], ...]] = (
    {"aws_checksum_algorithm": "CRC64NVME", "aws_unsigned_payload": "true"},
    {"aws_checksum_algorithm": "SHA256", "aws_unsigned_payload": "true"},
    {},
)
"""Options for S3, best first; a server that refuses one gets the next."""
_OWN_CHECKSUMS: Final = ("checksum_algorithm", "unsigned_payload")
_CHECKING_HOSTS: Final = (".amazonaws.com", ".amazonaws.com.cn")
"""Where S3 itself answers; of what calls itself compatible, some take a checksum and don't look."""
_weaker: dict[str, int] = {}
"""By endpoint and bucket, which of `_CHECKSUMS` was found to be accepted, if not the first."""
_answered: set[str] | None = None
"""Endpoints and buckets that have answered; None where all are given `PATIENCE_S`."""
_bare_tags: set[str] = set()
"""Endpoints and buckets that compare ETags without the quotes around them, as Ceph's gateway does for If-Match."""
AGAIN: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EAGAIN, errno.EBADMSG})
"""Errnos of failures that a later call may not meet."""

_FLAGS: Final = frozenset(
    {"allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses"}
)
_CLIENT_TEXTS: Final = frozenset(
    {"proxy_ca_certificate", "proxy_excludes", "proxy_url", "root_certificate", "user_agent"}
)
_ENDPOINTS: Final = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
    "GOOGLE_BASE_URL",
)
_STATUS: Final = re.compile(r"status(?: code)?:? (\d{3})")
NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
NO_CREDENTIALS: Final = (
    "169.254.169.254",
    "169.254.170.2",
    "/latest/api/token",
    "computeMetadata",
    "identity/oauth2/token",
    "MissingCredentials",
    "Missing credentials",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "RequestTimeTooSkewed",
)
DAMAGED: Final = ("BadDigest", "InvalidDigest", "ContentChecksumMismatch", "ContentSHA256Mismatch", "Md5Mismatch")
"""What stores say to data that was damaged on its way."""
ADVICE: Final = {
    errno.EACCES: "check the credentials, in the environment or in store_options, whether they have expired, what they "
    "may do there, and this host's clock",
    errno.ENODEV: "make the bucket, or correct the URL; if it exists, check region and endpoint",
    errno.ETIMEDOUT: "check endpoint and network, or allow more time",
    errno.EHOSTUNREACH: "check the endpoint and the network",
    errno.EAGAIN: "the store is overloaded or down; try again later",
    errno.EBADMSG: "what the store gets is not what was sent: check the network, and proxies on the way",
    errno.EINVAL: "see what the store says, and check URL, region and endpoint",
}


def expect_answers_soon() -> None:
    """Give up on a store that has answered nothing after `FIRST_ANSWER_S`, in all of this process: for a command.

    Who has mistyped an endpoint wants to know; a job that runs for weeks wants its store back.
    """
    global _answered  # noqa: PLW0603
    _answered = set()


class Tag(NamedTuple):
    """What tells the present contents of an object from others: what the store gave it."""

    e_tag: str | None
    version: str | None


class Listed(NamedTuple):
    """One object of a listing: ``name`` below the listed prefix, ``size`` in bytes, seconds since the epoch."""

    name: str
    size: int
    modified_s: float


class ObjectStore:
    """The objects below ``url`` (``s3://bucket/prefix``, ``gs://``, ``az://container/prefix``, …).

    options: of the store or of its HTTP client, by the names that ``obstore`` uses (``endpoint``, ``access_key_id``,
    ``region``, ``account_name``, ``allow_http``, …); the rest comes from the environment, as usual for the store.
    Raises `ConfigError` for a URL or an option that can't be used; sends no request.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.url = _checked_url(url)
        self.options = dict(options or {})
        self._config, self._client_options = _sorted_options(self.options)
        self._clients: dict[tuple[float, float, int], Any] = {}
        self._lock = threading.Lock()
        named = {key.lower() for key in (*self._config, *(name for name, value in os.environ.items() if value))}
        chosen = any(f"{prefix}{key}" in named for key in _OWN_CHECKSUMS for prefix in ("", "aws_"))
        self._ladder = self.url.startswith(("s3:", "s3a:")) and not chosen
        self._endpoints = _endpoints(self._config)
        self._server = " ".join(("/".join(self.url.split("/", 3)[:3]), *self._endpoints))
        """Bucket and endpoint, for `_weaker` and for messages."""
        self._client(REQUEST_S[0])

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    @property
    def can_replace(self) -> bool:
        """True: stores replace an object only if it is still the one that was read."""
        return True

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url}/{name}" if name else self.url

    @property
    def refuses_damage(self) -> bool:
        """True where each upload has a checksum, to a service that is known to refuse data that differs from it."""
        hosts = [urlsplit(endpoint).hostname or "" for endpoint in self._endpoints]
        known = all(host.endswith(_CHECKING_HOSTS) for host in hosts)
        return known and self._ladder and self._level < self._last_level

    # Reading. ----------------------------------------------------------------------------------------------------

    def get(self, name: str, start: int = 0, end: int | None = None, *, ends_s: float) -> tuple[memoryview, int]:
        """Read bytes ``start`` to ``end`` (None: all), fewer where the object is shorter; also return its size."""
        return self.get_tagged(name, start, end, ends_s=ends_s)[:2]

    def get_tagged(
        self, name: str, start: int = 0, end: int | None = None, *, ends_s: float
    ) -> tuple[memoryview, int, Tag]:
        """Read as `get`, and return the tag of the object's present contents for `replace`."""
        import obstore

        options: Any = None if end is None and not start else {"range": (start, end) if end else {"offset": start}}

        def read(client: Any) -> tuple[memoryview, int, Tag]:
            result = obstore.get(client, name, options=options)
            tag = Tag(result.meta["e_tag"], result.meta["version"])
            return memoryview(result.bytes()), int(result.meta["size"]), tag

        try:
            return self._call("read", name, read, ends_s)
        except StorageError as error:
            if error.errno == errno.ERANGE and not start:  # an empty object has no range
                return memoryview(b""), 0, Tag(None, None)
            raise

    def modified_s(self, name: str, *, ends_s: float) -> float:
        """Return when the object was put, in seconds since the epoch by the store's clock."""
        import obstore

        def look(client: Any) -> float:
            return float(obstore.head(client, name)["last_modified"].timestamp())

        return self._call("look at", name, look, ends_s)

    def size(self, name: str, *, ends_s: float) -> int | None:
        """Return the size of an object in bytes; None where there is none."""
        import obstore

        try:
            return self._call("look at", name, lambda client: int(obstore.head(client, name)["size"]), ends_s)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def names(self, below: str, *, ends_s: float) -> list[str]:
        """List the objects and prefixes one level below, sorted. Raises where there is no bucket."""
        import obstore

        def look(client: Any) -> list[str]:
            found = obstore.list_with_delimiter(client, below or None)
            paths = [*found["common_prefixes"], *(str(meta["path"]) for meta in found["objects"])]
            # Where prefixes are directories, one that was emptied is listed below itself.
            return sorted({path.rstrip("/").rpartition("/")[2] for path in paths if path.strip("/") != below})

        return self._listed(below, look, ends_s) or []

    def any_below(self, below: str, *, ends_s: float) -> bool:
        """Return True if there is an object below, at any depth; a prefix that was emptied may still be listed."""
        import obstore

        def look(client: Any) -> list[Any]:
            return next((chunk for chunk in obstore.list(client, below or None, chunk_size=1) if chunk), [])

        return bool(self._listed(below, look, ends_s))

    def objects(self, below: str, *, ends_s: float) -> list[Listed]:
        """List all objects below, as the store lists them now."""
        import obstore

        def look(client: Any) -> list[Listed]:
            rows = [meta for chunk in obstore.list(client, below or None, chunk_size=1000) for meta in chunk]
            start = len(below) + 1 if below else 0
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

    def put(
        self,
        name: str,
        data: memoryview | bytes,
        *,
        ends_s: float,
        before_part: Callable[[int], None] = lambda _nbytes: None,
    ) -> None:
        """Store ``data``, replacing any object there; large data in parts, several at a time.

        before_part: called with the size of each part right before it is sent, again where an upload is begun again; it
        may wait, and what it raises ends the upload and is raised here: nothing is stored then.
        """
        import obstore

        memory = memoryview(data)
        part_bytes = max(PART_BYTES, -(-len(memory) // PARTS_MAX))
        if len(memory) > part_bytes:
            self._put_parts(name, memory, part_bytes, before_part, ends_s)
            return
        before_part(len(memory))

        def send(client: Any) -> None:
            obstore.put(client, name, memory, mode="overwrite", use_multipart=False)

        self._call("write", name, send, ends_s)

    def _put_parts(
        self, name: str, memory: memoryview, part_bytes: int, before_part: Callable[[int], None], ends_s: float
    ) -> None:
        import obstore

        part_s = _part_s(part_bytes)
        patience_s = max(PATIENCE_S, 2 * part_s)
        level, refused = self._level, None
        parts = _Parts(memory, part_bytes, before_part, ends_s)
        tries, pause_s = 0, FIRST_PAUSE_S
        while True:
            tries += 1
            options: Any = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": UPLOADS_AT_A_TIME}
            try:
                obstore.put(self._client_for(ends_s, level, part_s), name, parts.anew(), **options)
            except BaseException as error:
                if parts.ended is not None:
                    raise parts.ended from None
                if not isinstance(error, Exception):
                    raise
                problem = _problem(error, "write", self.url_of(name))
                if problem.errno == errno.EINVAL and level < self._last_level:
                    refused, level = refused or problem, level + 1
                    continue
                # ENOENT: the store knows no such upload any more, as after an answer to its end that was lost.
                again = problem.errno in AGAIN or (problem.errno == errno.ENOENT and tries < 3)
                give_up_s = min(ends_s, parts.moved_s + patience_s)
                if not again or tries >= UPLOAD_TRIES or time.monotonic() + pause_s >= give_up_s:
                    raise refused or problem from error
            else:
                self._accepted(level, refused)
                return
            pause_s = pause(pause_s)

    def create(self, name: str, data: bytes, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        """Store ``data`` unless an object of that name exists; return True if the object there now is ours.

        ours: tells from an object's bytes that they are ours, as those put by this call are. Raises `PutInDoubt`
        where that can't be determined; any other `StorageError` only if this call's object is not there and never
        will be.
        """
        return self._put_if("create", name, data, "create", None, ours=ours, ends_s=ends_s)

    def replace(self, name: str, data: bytes, tag: Tag, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        """Store ``data`` if the object there is still that of ``tag``; return and raise as `create`."""
        mode = {key: value for key, value in tag._asdict().items() if value is not None}
        if not mode:
            path = self.url_of(name)
            raise StorageError(f"can't replace {path}: the store gives no tags", path=path, errno=errno.EOPNOTSUPP)
        mode = (_without_quotes(mode) if self._server in _bare_tags else None) or mode
        return self._put_if("replace", name, data, mode, tag, ours=ours, ends_s=ends_s)

    def _put_if(
        self,
        doing: str,
        name: str,
        data: bytes,
        mode: Any,
        before: Tag | None,
        *,
        ours: Callable[[bytes], bool],
        ends_s: float,
    ) -> bool:
        import obstore

        asked = False
        bare: dict[str, str] | None = None
        pause_s = FIRST_PAUSE_S
        give_up_s = self._patience(ends_s)
        level, refused = self._level, None
        while True:
            problem: StorageError | None = None
            try:
                obstore.put(self._client_for(ends_s, level), name, data, mode=mode, use_multipart=False)
            except Exception as error:
                problem = _problem(error, doing, self.url_of(name))
                if problem.errno == errno.EINVAL and not asked and level < self._last_level:
                    refused, level = refused or problem, level + 1
                    continue
                if problem.errno not in {*AGAIN, errno.EEXIST} and not asked:
                    raise refused or problem from error
            else:
                self._accepted(level, refused)
                if bare is not None:
                    _bare_tags.add(self._server)
                return True
            asked = True
            found = self._try_get(name, ends_s)
            if found is not None and ours(found[0]):
                return True
            if found is not None and found[1] != before:
                return False
            # Refused, though it is unchanged: some compare tags without quotes, and never find them equal.
            if found is not None and problem.errno == errno.EEXIST and bare is None:
                bare = _without_quotes(mode)
                if bare is not None:
                    mode = bare
                    continue
            if time.monotonic() + pause_s >= give_up_s:
                message = f"{problem}. Whether it is there can't be told: it was sent, and not seen since"
                raise PutInDoubt(message, path=self.url_of(name), errno=problem.errno)
            pause_s = pause(pause_s)

    def copy(self, name: str, to: str, *, ends_s: float) -> None:
        """Store the object ``name`` as ``to`` too, replacing any object there; nothing passes through this machine."""
        import obstore

        self._call("copy", name, lambda client: obstore.copy(client, name, to, overwrite=True), ends_s)

    def _try_get(self, name: str, ends_s: float) -> tuple[bytes, Tag] | None:
        with contextlib.suppress(StorageError):
            found, _, tag = self.get_tagged(name, ends_s=min(ends_s, time.monotonic() + 2 * REQUEST_S[1]))
            return bytes(found), tag
        return None

    def delete(self, names: Sequence[str], *, ends_s: float) -> None:
        """Remove objects; absent ones are fine."""
        import obstore

        def remove(client: Any) -> None:
            try:
                obstore.delete(client, list(names))
            except FileNotFoundError:  # some stores report it, and may have stopped there
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        obstore.delete(client, name)

        if names:
            self._call("delete", names[0], remove, ends_s)

    # Calls. ------------------------------------------------------------------------------------------------------

    def _call(self, doing: str, name: str, act: Callable[[Any], _T], ends_s: float) -> _T:
        """Call ``act`` until it succeeds, and return its result; it must be safe to repeat."""
        give_up_s = self._patience(ends_s)
        ends_s = ends_s if self._has_answered else min(ends_s, give_up_s)
        pause_s = FIRST_PAUSE_S
        level, refused = self._level, None
        while True:
            try:
                result = act(self._client_for(ends_s, level))
            except Exception as error:
                problem = _problem(error, doing, self.url_of(name))
                if _answered is not None and problem.errno not in {errno.ETIMEDOUT, errno.EHOSTUNREACH}:
                    _answered.add(self._server)
                if problem.errno == errno.EINVAL and doing == "write" and level < self._last_level:
                    refused, level = refused or problem, level + 1
                    continue
                if problem.errno not in AGAIN or time.monotonic() + pause_s >= give_up_s:
                    raise refused or problem from error
            else:
                self._accepted(level, refused)
                return result
            pause_s = pause(pause_s)

    def _patience(self, ends_s: float) -> float:
        return min(ends_s, time.monotonic() + (PATIENCE_S if self._has_answered else FIRST_ANSWER_S))

    @property
    def _has_answered(self) -> bool:
        return _answered is None or self._server in _answered

    @property
    def _last_level(self) -> int:
        return len(_CHECKSUMS) - 1

    @property
    def _level(self) -> int:
        """Index in `_CHECKSUMS` of what this server is known to accept, or is to be asked first."""
        return _weaker.get(self._server, 0) if self._ladder else self._last_level

    def _accepted(self, level: int, refused: StorageError | None) -> None:
        """Remember that the server answers; and a weaker checksum, if it has refused a better one for the same data."""
        if _answered is not None:
            _answered.add(self._server)
        if refused is not None:
            _weaker[self._server] = level
            what = _CHECKSUMS[level].get("aws_checksum_algorithm", "signed payloads")
            _log.warning("%s takes no %s, and gets %s: %s", self._server, "CRC64NVME", what, refused)

    def _client_for(self, ends_s: float, level: int, part_s: float = 0.0) -> Any:
        """Return a client for a call that ends by ``ends_s``; part_s: what a request may take if there is time."""
        left_s = ends_s - time.monotonic()
        if part_s and left_s >= 2 * (PATIENCE_S + part_s):
            return self._client(part_s, level, PATIENCE_S)
        return self._client(next((limit_s for limit_s in REQUEST_S if 2 * limit_s <= left_s), SHORTEST_S), level)

    def _client(self, request_s: float, level: int | None = None, retry_s: float | None = None) -> Any:
        """Return a client whose requests end within ``request_s``, retried for no longer or for ``retry_s``."""
        key = request_s, request_s if retry_s is None else retry_s, self._level if level is None else level
        with self._lock:
            client = self._clients.get(key)
            if client is None:
                client = self._clients[key] = self._connected(*key)
            return client

    def _connected(self, request_s: float, retry_s: float, level: int) -> Any:
        from obstore.store import HTTPStore, from_url

        if self.url.startswith("file:"):
            return from_url(self.url, mkdir=True)
        limit, patient = timedelta(seconds=request_s), retry_s > request_s
        client_options = {**self._client_options, "timeout": limit, "connect_timeout": min(limit, timedelta(seconds=5))}
        pause = timedelta(seconds=LAST_PAUSE_S if patient else 1)
        backoff = {"init_backoff": timedelta(seconds=FIRST_PAUSE_S), "max_backoff": pause, "base": 2}
        retries = {
            "max_retries": 1000 if patient else 10,
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": backoff,
        }
        config = {**self._config, **_CHECKSUMS[level]}
        options: Any = {"config": config, "client_options": client_options, "retry_config": retries}
        try:
            client = from_url(self.url, **options)
        except Exception as error:
            raise ConfigError(f"{self.url}: {_short(error)}; check the URL and store_options", field="root") from error
        if isinstance(client, HTTPStore):
            raise ConfigError(f"{self.url} is not an object store that can be written to; {_EXPECTED}", field="root")
        return client


def _without_quotes(mode: Any) -> dict[str, str] | None:
    """Return the condition of a put with its ETag as it is without quotes; None if it has none."""
    tag = mode.get("e_tag", "") if isinstance(mode, dict) else ""
    return {**mode, "e_tag": tag[1:-1]} if len(tag) > 2 and tag[0] == tag[-1] == '"' else None


class PutInDoubt(StorageError):
    """An object was sent, but whether it was stored is unknown."""


class _Late(Exception):
    """The deadline of an upload has passed."""


class _Parts:
    """The parts of one upload, taken by a client as it has room for another; and when that was last so."""

    def __init__(self, memory: memoryview, part_bytes: int, before_part: Callable[[int], None], ends_s: float) -> None:
        self._memory, self._part_bytes = memory, part_bytes
        self._before_part, self._ends_s = before_part, ends_s
        self.moved_s = time.monotonic()
        """When a part was last finished; time spent in ``before_part`` doesn't count."""
        self.ended: BaseException | None = None
        """What ``before_part`` has raised."""

    def anew(self) -> Iterator[memoryview]:
        """Yield all parts, from the first on."""
        for number, start in enumerate(range(0, len(self._memory), self._part_bytes)):
            asked_s = time.monotonic()
            if asked_s > self._ends_s:
                raise _Late(f"no time is left after {start:,} of {len(self._memory):,} bytes")
            part = self._memory[start : start + self._part_bytes]
            try:
                self._before_part(len(part))
            except BaseException as error:
                self.ended = error
                raise
            if number >= UPLOADS_AT_A_TIME:  # else it was sent beside the others, not after one
                self.moved_s = time.monotonic()
            else:
                self.moved_s += time.monotonic() - asked_s
            yield part


def _part_s(part_bytes: int) -> float:
    """Return the seconds that a request for one part may take: few different ones, as each has a client of its own."""
    needed_s = PART_S + part_bytes / SLOWEST_BYTES_PER_S
    return float(1 << int(needed_s).bit_length())


def pause(pause_s: float) -> float:
    """Wait for ``pause_s``, or somewhat less: many clients mustn't come back at once. Return the next pause."""
    time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
    return min(2 * pause_s, LAST_PAUSE_S)


_EXPECTED: Final = "expected s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"


def is_url(root: object) -> bool:
    """Return True if ``root`` is a URL, not a path."""
    return isinstance(root, str) and "://" in root


def _checked_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    bucket = rest.split("/", 1)[0]
    if scheme not in SCHEMES or (not bucket and scheme != "file") or not rest.strip("/"):
        raise ConfigError(f"{url!r} is not the URL of an object store; {_EXPECTED}", field="root")
    if any(part in {".", ".."} for part in rest.split("/")) or "?" in rest or "#" in rest:
        raise ConfigError(f"{url!r}: a URL with '..', '?' or '#' in it is not accepted; {_EXPECTED}", field="root")
    return url.rstrip("/")


def _sorted_options(options: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of the store and those of its HTTP client."""
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
    # An http:// URL allows plain HTTP; client options that are given replace those of the environment.
    if any(endpoint.startswith("http://") for endpoint in _endpoints(config)) or _is_set("AWS_ALLOW_HTTP"):
        client.setdefault("allow_http", True)
    return config, client


def _endpoints(config: Mapping[str, Any]) -> list[str]:
    """Return the endpoints that are given by options, or else by the environment."""
    names = ("endpoint", "endpoint_url", "base_url")
    given = [str(value) for key, value in config.items() if key.lower().endswith(names)]
    return given or [os.environ[name] for name in _ENDPOINTS if name in os.environ]


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"true", "1"}


def _lost_races() -> tuple[type[Exception], ...]:
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    return AlreadyExistsError, PreconditionError


def _problem(error: Exception, doing: str, url: str) -> StorageError:
    """Convert ``error`` to a `StorageError` with the errno that it amounts to."""
    if isinstance(error, StorageError):
        return error
    code = _errno_of(error)
    advice = ADVICE.get(code)
    message = f"can't {doing} {url}: {_short(error)}"
    return StorageError(f"{message}; {advice}" if advice else message, path=url, errno=code)


def _errno_of(error: Exception) -> int:
    from obstore import exceptions

    text = str(error)
    if any(words in text for words in NO_BUCKET):
        return errno.ENODEV
    if "InvalidBlockList" in text:  # Azure has no such blocks any more, as after a lost answer to their commit
        return errno.EAGAIN
    if isinstance(error, FileNotFoundError) or "Not a directory (os error" in text:
        return errno.ENOENT
    if isinstance(error, _lost_races()):
        return errno.EEXIST
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(error, denied) or any(words in text for words in NO_CREDENTIALS):
        return errno.EACCES
    if isinstance(error, _Late):
        return errno.ETIMEDOUT
    statuses = [int(status) for status in _STATUS.findall(text)]
    beyond_end = ("Requested range was invalid", "Wanted range starting at", '"bytes 0--1/0"')
    if 416 in statuses or any(words in text for words in beyond_end):
        return errno.ERANGE
    if statuses and statuses[-1] in {401, 403}:
        return errno.EACCES
    if statuses:
        if any(words in text for words in DAMAGED):
            return errno.EBADMSG
        soon = statuses[-1] in {408, 409, 425, 429} or (statuses[-1] >= 500 and statuses[-1] != 501)
        return errno.EAGAIN if soon else errno.EINVAL
    if "HTTP error: builder error" in text:  # no request can be made of this, as of http:// where it isn't allowed
        return errno.EINVAL
    if isinstance(error, exceptions.GenericError) and "LocalFileSystem" not in text:
        return errno.ETIMEDOUT if "timed out" in text or "kind: Timeout" in text else errno.EHOSTUNREACH
    return getattr(error, "errno", None) or errno.EINVAL


def _short(error: Exception) -> str:
    """Return the message of ``error`` in one line, without what may be a signature in a URL."""
    said = str(error).partition("\n\nDebug source")[0]
    return re.sub(r"(?<=[\w/])\?[^\s)]*", "", " ".join(said.split()))[:600] or type(error).__name__
