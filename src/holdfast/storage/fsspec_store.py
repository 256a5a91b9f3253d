"""Object stores by way of fsspec, or of NVIDIA's Multi-Storage Client. Torch-free; both are imported when first used.

    CallStore("fsspec+s3://bucket/run", {"client_kwargs": {"endpoint_url": "https://…"}})    fsspec's own s3fs
    CallStore("msc://profile/run")                   a profile of MSC's configuration, by its storage provider

Guarantees: those of `holdfast.storage.object_client`. A call ends by ``ends_s``, or `SHORTEST_S` after it, and after
`PATIENCE_S` without an answer. Neither package has deadlines: each request runs on a thread of its own, and one that
doesn't answer in time is left behind there, until its package gives it up; a request to write that was left behind may
still arrive. What may be repeated is sent again. Nothing is cached: neither listings nor MSC's cache and replicas are
used.
Uploads of more than `PART_BYTES` are copied part by part: fsspec sends one part of a file at a time, MSC as its profile
says. One that fails is aborted at the store; a process that is killed leaves its parts there.
Assumes: what fsspec calls ``mode="create"`` is a condition that the store keeps, in the classes of `_EXCLUSIVE`: others
look first and write then, so that of two writers both may win. Elsewhere only reading works, and writing is a
`ConfigError`. MSC passes the condition on to S3 and OCI; its other providers refuse it or, as `make_root` finds, ignore
it.
Does not: replace an object of fsspec's on condition (`can_replace`): it has no If-Match, as MSC has. Add checksums to
those that the packages send.
"""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import errno
import functools
import io
import json
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from holdfast.errors import ConfigError, StorageError
from holdfast.storage.object_storage import ACCESS_VARIABLES
from holdfast.storage.object_store import (
    ADVICE,
    AGAIN,
    DAMAGED,
    FIRST_PAUSE_S,
    NO_BUCKET,
    NO_CREDENTIALS,
    PART_BYTES,
    PATIENCE_S,
    REQUEST_S,
    SHORTEST_S,
    Listed,
    PutInDoubt,
    Tag,
    pause,
)
from holdfast.validation import is_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_T = TypeVar("_T")

LONG_S: Final = 60.0
"""Timeout of what takes several requests: listings, removals, copies, the first connection."""
UPLOAD_PATIENCE_S: Final = 120.0
"""How long an upload may take for one part, and for its end."""
UPLOAD_TRIES: Final = 3
CLIENTS_MAX: Final = 8
REMOVERS: Final = 8
"""Threads that remove objects, one request each."""
_EXCLUSIVE: Final = frozenset(
    {"s3fs.core.S3FileSystem", "gcsfs.core.GCSFileSystem", "adlfs.spec.AzureBlobFileSystem"},
)
"""File systems whose ``mode="create"`` is a condition of the request itself."""
_INSTEAD: Final = "use s3://, gs:// or az://, which need no extra, or a directory"
_STATUS: Final = re.compile(r"status(?:[ _]code)?[:=]? ?(\d{3})\b")


class Row(NamedTuple):
    """What a file system tells of one path, which is below the store's URL."""

    name: str
    size: int
    modified_s: float
    is_file: bool


class Files(Protocol):
    """Calls that block as long as they like and raise what they like; names are below the store's URL."""

    refusal: str
    """Why nothing can be written; empty if it can."""
    has_tags: bool
    """Whether `replace` works, by what `tag` returns."""

    def read(self, name: str, start: int, end: int | None) -> bytes: ...

    def look(self, name: str) -> Row: ...

    def below(self, name: str, *, deep: bool) -> Iterable[Row]: ...

    def put(self, name: str, data: bytes) -> None: ...

    def create(self, name: str, data: bytes) -> None:
        """Raise `FileExistsError`, or an answer of status 412, if an object of that name exists."""
        ...

    def tag(self, name: str) -> str | None: ...

    def replace(self, name: str, data: bytes, tag: str) -> None:
        """Raise an answer of status 412 if the object is another than that of ``tag``."""
        ...

    def upload(self, name: str, source: Source) -> None: ...

    def copy(self, name: str, to: str) -> None: ...

    def remove(self, names: list[str]) -> None: ...


class Source(io.RawIOBase):
    """The data of one upload as a file to read; ``before_part`` is called with the size of each read."""

    def __init__(self, memory: memoryview, before_part: Callable[[int], None]) -> None:
        self._memory, self._before_part, self._at = memory, before_part, 0
        self.moved_s = time.monotonic()
        """When something was last read; infinity while ``before_part`` waits, which doesn't count."""
        self.ended: BaseException | None = None
        """What ``before_part`` has raised, or why nothing may be read any more."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._memory)}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, copied; raises what has ended the upload."""
        part = self._memory[self._at : None if size < 0 else self._at + size]
        if len(part) and self.ended is None:
            self.moved_s = float("inf")
            try:
                self._before_part(len(part))
            except BaseException as error:
                self.ended = error
                raise
            finally:
                self.moved_s = time.monotonic()
        if self.ended is not None:
            raise self.ended
        self._at += len(part)
        return bytes(part)


class CallStore:
    """The objects below ``url``; see the module, and `holdfast.storage.object_client.ObjectClient`.

    options: of fsspec's file system, such as ``{"anon": True}``; none for ``msc://``. They travel to other processes as
    JSON. Sends no request, except where a file system connects when it is made. Raises `ConfigError`, or `StorageError`
    where that takes longer than `LONG_S`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = url.rstrip("/")
        self.options = dict(options or {})
        if not is_foreign(self.url):
            raise ConfigError(f"{url!r}: expected fsspec+PROTOCOL://… or msc://profile/…", field="root")
        try:
            written = json.dumps(self.options, sort_keys=True)
        except TypeError as error:
            raise ConfigError(f"store_options can't be written as JSON: {error}", field="store_options") from error
        access = {name: value for name, value in os.environ.items() if name.startswith(ACCESS_VARIABLES)}
        scheme, _, rest = self.url.partition("://")
        host = rest.partition("/")[0]
        client = self._opened(scheme, host, written, json.dumps(access, sort_keys=True))
        self._files: Files = (_MscFiles if scheme == "msc" else _FsspecFiles)(client, self.url)

    def _opened(self, *how: str) -> Any:
        """Return the package's client; some connect as they are made."""
        ends_s = time.monotonic() + LONG_S
        try:
            return _bounded(lambda: _client_of(*how, os.getpid()), lambda: ends_s)
        except _NoAnswer as error:
            raise self._problem(error, "open", "") from error

    def __repr__(self) -> str:
        return f"CallStore({self.url!r})"

    @property
    def can_replace(self) -> bool:
        """True for MSC: see the module."""
        return self._files.has_tags

    @property
    def refuses_damage(self) -> bool:
        """Return False: which checksums a package sends isn't known."""
        return False

    def url_of(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url}/{name}" if name else self.url

    # Reading. ----------------------------------------------------------------------------------------------------

    def get(self, name: str, start: int = 0, end: int | None = None, *, ends_s: float) -> tuple[memoryview, int]:
        """Read bytes ``start`` to ``end``; also return the object's size, which takes a request more where they end
        before the object may.
        """

        def read() -> tuple[memoryview, int]:
            try:
                found = self._files.read(name, start, end)
            except Exception as error:
                if start or errno_of(error) != errno.ERANGE:
                    raise
                found = b""  # an empty object has no range
            ended = end is None or (len(found) < end - start and (found or not start))
            return memoryview(found), start + len(found) if ended else self._files.look(name).size

        return self._call("read", name, read, ends_s)

    def get_tagged(
        self, name: str, start: int = 0, end: int | None = None, *, ends_s: float
    ) -> tuple[memoryview, int, Tag]:
        """Read as `get`, and return a tag that is not younger than what was read."""
        tag = self._call("look at", name, lambda: self._files.tag(name), ends_s) if self.can_replace else None
        return (*self.get(name, start, end, ends_s=ends_s), Tag(tag, None))

    def modified_s(self, name: str, *, ends_s: float) -> float:
        """Return when the object was put, in seconds since the epoch by the store's clock."""
        return self._call("look at", name, lambda: self._files.look(name).modified_s, ends_s)

    def size(self, name: str, *, ends_s: float) -> int | None:
        """Return the size of an object in bytes; None where there is none."""
        try:
            return self._call("look at", name, lambda: self._files.look(name).size, ends_s)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def names(self, below: str, *, ends_s: float) -> list[str]:
        """List the objects and prefixes one level below, sorted."""
        return sorted({row.name for row in self._listed(below, deep=False, ends_s=ends_s)})

    def any_below(self, below: str, *, ends_s: float) -> bool:
        """Return True if there is an object below, at any depth."""
        return bool(self._listed(below, deep=True, ends_s=ends_s))

    def objects(self, below: str, *, ends_s: float) -> list[Listed]:
        """List all objects below."""
        found = self._listed(below, deep=True, ends_s=ends_s)
        return [Listed(row.name, row.size, row.modified_s) for row in found if row.is_file]

    def _listed(self, below: str, *, deep: bool, ends_s: float) -> list[Row]:
        start = f"{below}/" if below else ""

        def look() -> list[Row]:
            rows = [row for row in self._files.below(below, deep=deep) if row.name.startswith(start)]
            found = [row._replace(name=row.name[len(start) :].rstrip("/")) for row in rows]
            return [row for row in found if row.name and (deep or "/" not in row.name)]

        try:
            return self._call("list", below, look, ends_s, longest_s=LONG_S)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return []
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
        """Store ``data``, replacing any object there; large data in parts.

        before_part: called with the size of each part right before it is sent, again where an upload is begun again; it
        may wait, and what it raises ends the upload and is raised here: nothing is stored then.
        """
        self._require_exclusive()
        memory = memoryview(data)
        if len(memory) > PART_BYTES:
            self._upload(name, memory, before_part, ends_s)
            return
        before_part(len(memory))
        small = bytes(memory)
        self._call("write", name, lambda: self._files.put(name, small), ends_s)

    def _upload(self, name: str, memory: memoryview, before_part: Callable[[int], None], ends_s: float) -> None:
        pause_s = FIRST_PAUSE_S
        for tries in range(1, UPLOAD_TRIES + 1):
            source = Source(memory, before_part)
            try:
                upload = functools.partial(self._files.upload, name, source)
                _bounded(upload, lambda source=source: min(ends_s, source.moved_s + UPLOAD_PATIENCE_S))  # type: ignore[misc]
                return
            except Exception as error:
                ended, late = source.ended, _NoAnswer("the upload makes no progress, or its deadline has passed")
                source.ended = ended or late  # it may still be running
                if ended is not None:
                    raise ended from None
                problem = self._problem(error, "write", name)
                last = tries == UPLOAD_TRIES or time.monotonic() + pause_s >= ends_s
                if last or problem.errno not in {*AGAIN, errno.ENOENT}:
                    raise problem from error
            pause_s = pause(pause_s)

    def create(self, name: str, data: bytes, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        """Store ``data`` unless an object of that name exists; return True if the object there now is ours.

        ours: tells from an object's bytes that they are ours, as those put by this call are. Raises `ConfigError` where
        that isn't offered; `PutInDoubt` where the outcome can't be determined; any other `StorageError` only if this
        call's object is not there and never will be.
        """
        self._require_exclusive()
        return self._put_if("create", name, lambda: self._files.create(name, data), None, ours, ends_s)

    def replace(self, name: str, data: bytes, tag: Tag, *, ours: Callable[[bytes], bool], ends_s: float) -> bool:
        """Store ``data`` if the object there is still that of ``tag``; return and raise as `create`."""
        e_tag = tag.e_tag
        if not self.can_replace or e_tag is None:
            path = self.url_of(name)
            message = f"can't replace {path}: there is no tag of what is to be replaced; {_INSTEAD}"
            raise StorageError(message, path=path, errno=errno.EOPNOTSUPP)
        return self._put_if("replace", name, lambda: self._files.replace(name, data, e_tag), tag, ours, ends_s)

    def _put_if(
        self,
        doing: str,
        name: str,
        send: Callable[[], None],
        before: Tag | None,
        ours: Callable[[bytes], bool],
        ends_s: float,
    ) -> bool:
        asked, pause_s = False, FIRST_PAUSE_S
        give_up_s = min(ends_s, time.monotonic() + PATIENCE_S)
        while True:
            try:
                _bounded(send, _soon(ends_s))
                return True
            except Exception as error:
                if any(isinstance(found, NotImplementedError) for found in _chain(error)):
                    raise ConfigError(
                        f"{self.url} doesn't {doing} objects on condition ({error}), without which two writers could "
                        f"destroy each other's checkpoints; {_INSTEAD}",
                        field="root",
                    ) from error
                problem = self._problem(error, doing, name)
                if problem.errno not in {*AGAIN, errno.EEXIST} and not asked:
                    raise problem from error
            asked = True
            found = self._try_get(name, ends_s)
            if found is not None and ours(found[0]):
                return True
            if found is not None and found[1] != before:
                return False
            if time.monotonic() + pause_s >= give_up_s:
                message = f"{problem}. Whether it is there can't be told: it was sent, and not seen since"
                raise PutInDoubt(message, path=self.url_of(name), errno=problem.errno)
            pause_s = pause(pause_s)

    def _try_get(self, name: str, ends_s: float) -> tuple[bytes, Tag] | None:
        with contextlib.suppress(StorageError):
            found, _, tag = self.get_tagged(name, ends_s=min(ends_s, time.monotonic() + 2 * REQUEST_S[1]))
            return bytes(found), tag
        return None

    def copy(self, name: str, to: str, *, ends_s: float) -> None:
        """Store the object ``name`` as ``to`` too, replacing any object there."""
        self._require_exclusive()
        self._call("copy", name, lambda: self._files.copy(name, to), ends_s, longest_s=LONG_S)

    def delete(self, names: Sequence[str], *, ends_s: float) -> None:
        """Remove objects; absent ones are fine."""
        left = list(names)

        if left:
            self._call("delete", left[0], lambda: self._files.remove(left), ends_s, longest_s=LONG_S)

    def _require_exclusive(self) -> None:
        if self._files.refusal:
            raise ConfigError(
                f"{self.url} can be read, but not written to: {self._files.refusal}; {_INSTEAD}", field="root"
            )

    # Calls. ------------------------------------------------------------------------------------------------------

    def _call(
        self, doing: str, name: str, act: Callable[[], _T], ends_s: float, *, longest_s: float = REQUEST_S[0]
    ) -> _T:
        """Call ``act`` until it succeeds, and return its result; it must be safe to repeat."""
        give_up_s = min(ends_s, time.monotonic() + max(PATIENCE_S, longest_s))
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return _bounded(act, _soon(ends_s, longest_s))
            except Exception as error:
                problem = self._problem(error, doing, name)
                if problem.errno not in AGAIN or time.monotonic() + pause_s >= give_up_s:
                    raise problem from error
            pause_s = pause(pause_s)

    def _problem(self, error: Exception, doing: str, name: str) -> StorageError:
        if isinstance(error, StorageError):
            return error
        path, code = self.url_of(name), errno_of(error)
        said = " ".join(str(error).split())[:600] or type(error).__name__
        advice = ADVICE.get(code)
        message = f"can't {doing} {path}: {said}"
        return StorageError(f"{message}; {advice}" if advice else message, path=path, errno=code)


class _NoAnswer(Exception):
    """A call has not ended in time."""


def _soon(ends_s: float, longest_s: float = REQUEST_S[0]) -> Callable[[], float]:
    """Return the deadline of one request of a call that ends by ``ends_s``: if it is lost, another can be sent."""
    left_s = ends_s - time.monotonic()
    limit_s = next((limit_s for limit_s in (longest_s, *REQUEST_S) if 2 * limit_s <= left_s), SHORTEST_S)
    at_s = time.monotonic() + limit_s
    return lambda: at_s


def _bounded(act: Callable[[], _T], until: Callable[[], float]) -> _T:
    """Return what ``act`` returns on a thread of its own, which is left behind at ``until()``, a time that may move.

    Raises what it raises, or `_NoAnswer`.
    """
    done = threading.Event()
    found: list[_T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(act())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller
            failed.append(error)
        finally:
            done.set()

    begun_s = time.monotonic()
    threading.Thread(target=run, name="holdfast-store-call", daemon=True).start()
    while not done.wait(min(1.0, max(0.0, until() - time.monotonic()))):
        if time.monotonic() >= until():
            raise _NoAnswer(f"no answer in {time.monotonic() - begun_s:.1f} s")
    if failed:
        raise failed[0]
    return found[0]


# What it was that failed. --------------------------------------------------------------------------------------------


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        yield found
        found = found.__cause__ or found.__context__


def _answers(error: BaseException) -> Iterator[tuple[int, str]]:
    """Yield status and code of the store's answers in ``error`` and its causes."""
    for found in _chain(error):
        response = getattr(found, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            yield int(status or 0), str(response.get("Error", {}).get("Code", ""))
        for attribute in ("status_code", "status", "code"):
            status = getattr(found, attribute, None)
            if isinstance(status, int) and 300 <= status < 600:
                yield status, str(getattr(found, "error_code", ""))
        for status in _STATUS.findall(str(found)):
            yield int(status), ""


def _names_no_bucket(error: BaseException) -> bool:
    said = [*(str(found) for found in _chain(error)), *(code for _, code in _answers(error))]
    return any(words in text for words in NO_BUCKET for text in said)


def errno_of(error: BaseException) -> int:
    """Return the errno that an error of a package amounts to; see `holdfast.storage.object_store`."""
    errors, answers = list(_chain(error)), list(_answers(error))
    kinds = " ".join(type(found).__name__ for found in errors)
    said = " ".join((*map(str, errors), *(code for _, code in answers)))
    statuses = {status for status, _ in answers}
    if _names_no_bucket(error):
        return errno.ENODEV
    if statuses & {409} or isinstance(error, _NoAnswer):
        return errno.EAGAIN if statuses else errno.ETIMEDOUT
    if isinstance(error, FileExistsError) or "PreconditionFailed" in kinds + said or 412 in statuses:
        return errno.EEXIST
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)) or 404 in statuses:
        return errno.ENOENT
    denied = isinstance(error, PermissionError) or "Credential" in kinds or bool(statuses & {401, 403})
    if denied or any(words in said for words in NO_CREDENTIALS):
        return errno.EACCES
    if 416 in statuses or "InvalidRange" in said:
        return errno.ERANGE
    if any(words in said for words in DAMAGED):
        return errno.EBADMSG
    if statuses & {408, 425, 429} or any(status >= 500 and status != 501 for status in statuses):
        return errno.EAGAIN
    if statuses:
        return errno.EINVAL
    if "Timeout" in kinds:
        return errno.ETIMEDOUT
    if any(word in kinds for word in ("Connect", "Disconnect", "ClientOSError", "HTTPClientError", "ClientPayload")):
        return errno.EHOSTUNREACH
    found = next((found.errno for found in errors if isinstance(found, OSError) and found.errno), None)
    busy = found in {errno.EBUSY, errno.EREMOTEIO} or "Retryable" in kinds
    return errno.EAGAIN if busy else found or errno.EINVAL


# The packages. -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=CLIENTS_MAX)
def _client_of(scheme: str, host: str, options_json: str, access_json: str, pid: int) -> Any:
    """Return a file system of fsspec, or a storage provider of MSC; another one where the environment has changed."""
    del access_json, pid
    options = json.loads(options_json)
    return _msc_provider(host, options) if scheme == "msc" else _file_system(scheme.partition("+")[2], host, options)


def _file_system(protocol: str, host: str, options: dict[str, Any]) -> Any:
    try:
        from fsspec.core import url_to_fs
        from fsspec.dircache import DirCache
    except ImportError as error:
        where = f"fsspec+{protocol}://{host}"
        raise ConfigError(f"{where} needs fsspec: pip install 'holdfast[fsspec]'", field="root") from error
    try:
        files, base = url_to_fs(f"{protocol}://{host}", skip_instance_cache=True, **options)
    except ImportError as error:
        raise ConfigError(
            f"fsspec+{protocol}://{host} needs a package beside holdfast[fsspec]: {error}", field="root"
        ) from error
    except Exception as error:
        raise ConfigError(f"fsspec+{protocol}://{host} can't be opened: {error}", field="root") from error
    files.dircache = DirCache(use_listings_cache=False)
    return files, str(base).rstrip("/")


def _msc_provider(profile: str, options: dict[str, Any]) -> Any:
    where = f"msc://{profile}"
    try:
        from multistorageclient import StorageClientConfig
        from multistorageclient.providers.posix_file import PosixFileStorageProvider
    except ImportError as error:
        raise ConfigError(
            f"{where} needs NVIDIA's Multi-Storage Client: pip install 'holdfast[msc]'", field="root"
        ) from error
    if options:
        raise ConfigError(f"{where} takes no options; put them into its profile", field="store_options")
    try:
        config = StorageClientConfig.from_file(profile=profile)
    except Exception as error:
        raise ConfigError(f"{where}: MSC can't open this profile: {error}", field="root") from error
    if config.storage_provider is None or config.metadata_provider is not None:
        raise ConfigError(
            f"{where} has several backends or a metadata provider; expected a profile with a storage_provider alone",
            field="root",
        )
    if isinstance(config.storage_provider, PosixFileStorageProvider):
        raise ConfigError(f"{where} is a directory for MSC; give its path instead", field="root")
    return config.storage_provider


class _FsspecFiles:
    """`Files` of a file system of fsspec.

    client: the file system, and the path of the URL's first part in it.
    """

    has_tags = False

    def __init__(self, client: Any, url: str) -> None:
        files, base = client
        self._files = files
        below = url.partition("://")[2].partition("/")[2]
        self._root = f"{base}/{below}" if below else base
        kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(files).__mro__}
        name = type(files).__name__
        self.refusal = "" if kinds & _EXCLUSIVE else f"fsspec's {name} can't create a file only if it is absent"

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def read(self, name: str, start: int, end: int | None) -> bytes:
        return bytes(self._files.cat_file(self._at(name), start=start, end=end))

    def look(self, name: str) -> Row:
        row = self._row(self._files.info(self._at(name)))
        if not row.is_file:
            raise FileNotFoundError(f"{name} is no file")
        return row

    def below(self, name: str, *, deep: bool) -> Iterable[Row]:
        place = self._at(name)
        rows = self._files.find(place, detail=True).values() if deep else self._files.ls(place, detail=True)
        return [row for row in map(self._row, rows) if row.is_file or not deep]

    def _row(self, info: Mapping[str, Any]) -> Row:
        below = f"{self._root.lstrip('/')}/"
        name = str(info["name"]).lstrip("/")
        found = name[len(below) :] if name.startswith(below) else ""
        keys = ("LastModified", "last_modified", "mtime", "updated", "modified")
        said = next((info[key] for key in keys if info.get(key) is not None), 0.0)
        is_file = info.get("type") == "file" and not name.endswith("/")
        return Row(found, int(info.get("size") or 0), _seconds(said), is_file)

    def put(self, name: str, data: bytes) -> None:
        self._files.pipe_file(self._at(name), data)

    def create(self, name: str, data: bytes) -> None:
        self._files.pipe_file(self._at(name), data, mode="create")

    def tag(self, name: str) -> str | None:
        raise NotImplementedError(name)

    def replace(self, name: str, data: bytes, tag: str) -> None:
        raise NotImplementedError(name)

    def upload(self, name: str, source: Source) -> None:
        file = self._files.open(self._at(name), "wb", block_size=PART_BYTES)
        try:
            while part := source.read(PART_BYTES):
                file.write(part)
            file.close()
        except BaseException:
            file.closed = True  # or it would be finished, as far as it has come, when it is collected
            with contextlib.suppress(Exception):
                file.discard()
            raise

    def copy(self, name: str, to: str) -> None:
        self._files.cp_file(self._at(name), self._at(to))

    def remove(self, names: list[str]) -> None:
        # Not by `rm`, which expands patterns, and ignores what s3fs is refused.
        left, failed = collections.deque(names), list[BaseException]()

        def work() -> None:
            while left and not failed:
                try:
                    with contextlib.suppress(FileNotFoundError, IndexError):
                        self._files.rm_file(self._at(left.popleft()))
                except BaseException as error:  # noqa: BLE001 - it is raised below
                    failed.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(REMOVERS, len(names)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def _seconds(said: Any) -> float:
    if isinstance(said, str):
        said = dt.datetime.fromisoformat(said.replace("Z", "+00:00"))
    return float(said.timestamp() if isinstance(said, dt.datetime) else said)


class _MscFiles:
    """`Files` of a storage provider of MSC: its client has neither conditions nor reads past its cache."""

    refusal: str = ""
    has_tags = True

    def __init__(self, provider: Any, url: str) -> None:
        self._provider = provider
        self._root = url.partition("://")[2].partition("/")[2]

    def _at(self, name: str) -> str:
        return "/".join(part for part in (self._root, name) if part)

    def read(self, name: str, start: int, end: int | None) -> bytes:
        from multistorageclient.types import Range

        if end is None and not start:
            return bytes(self._provider.get_object(self._at(name)))
        stop = self.look(name).size if end is None else end
        return bytes(self._provider.get_object(self._at(name), Range(offset=start, size=stop - start)))

    def look(self, name: str) -> Row:
        row = self._row(self._provider.get_object_metadata(self._at(name), strict=False))
        if not row.is_file:
            raise FileNotFoundError(f"{name} is no object")
        return row

    def below(self, name: str, *, deep: bool) -> Iterable[Row]:
        place = self._at(name)
        rows = self._provider.list_objects(f"{place}/" if place else "", include_directories=not deep)
        return list(map(self._row, rows))

    def _row(self, found: Any) -> Row:
        below = f"{self._root}/" if self._root else ""
        name = str(found.key).lstrip("/")
        name = name[len(below) :] if name.startswith(below) else ""
        return Row(name, int(found.content_length), found.last_modified.timestamp(), found.type == "file")

    def put(self, name: str, data: bytes) -> None:
        self._provider.put_object(self._at(name), data)

    def create(self, name: str, data: bytes) -> None:
        self._provider.put_object(self._at(name), data, if_none_match="*")

    def tag(self, name: str) -> str | None:
        found = self._provider.get_object_metadata(self._at(name), strict=False).etag
        return None if found is None else str(found)

    def replace(self, name: str, data: bytes, tag: str) -> None:
        self._provider.put_object(self._at(name), data, if_match=tag)

    def upload(self, name: str, source: Source) -> None:
        self._provider.upload_file(self._at(name), source)

    def copy(self, name: str, to: str) -> None:
        self._provider.copy_object(self._at(name), self._at(to))

    def remove(self, names: list[str]) -> None:
        self._provider.delete_objects([self._at(name) for name in names])
