"""`Receiver`, the receiver's public class: fetch a version aside, commit it at a pause.

    poll()    what a watcher has learnt; no I/O
    fetch()   the transport's half brings a version aside -> held -+
    commit()  the held version is made the live one              <-+    (``receive`` is both)

Three locks: one for the turn of `fetch`; one for whoever writes to live tensors, a commit or a streaming fetch; and one
for the state, held for moments only. `version`, `meta`, `fetched` and `dirty` are read under the last.

Guarantees: one fetched version is held until it is committed, replaced by another one that was fetched, or the receiver
is closed. A failed fetch changes nothing but what it streamed; after a failed commit the version is held again.
Does not: move bytes (the transport's half), know the user's tensors (``weights.apply``).
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from holdfast import events
from holdfast.coordination.deadline import Deadline
from holdfast.coordination.store import board_lost_told
from holdfast.engine.at_exit import close_later, end_at_exit
from holdfast.errors import ConfigError, FetchCancelled
from holdfast.sync.publisher import checked_flag, checked_transport, checked_version, of_parent
from holdfast.sync.weights.apply import TargetFactory
from holdfast.sync.weights.names import NameChoice
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from holdfast.sync.protocol import Destination, FetchedVersion, Receiving, Transport

_CLOSE_S: Final = 10.0
"""How long `close` waits for a fetch or a commit on another thread, which end sooner unless in the user's function."""
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ReceiveStats:
    """How long the version took that was fetched last.

    fetch_s: all of `fetch`. phases: parts of it in seconds, by name: ``wait``, until the version was there and began to
    come; ``transfer``, until all of it was there and verified. commit_s: `commit`; None until then.
    """

    version: int
    fetch_s: float
    phases: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    commit_s: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle ``phases`` as a dictionary: a worker sends its statistics to others."""
        return ReceiveStats, (self.version, self.fetch_s, dict(self.phases), self.commit_s)


@dataclass(slots=True, eq=False)
class _Held:
    """A fetched version, and where it is to go."""

    fetched: FetchedVersion
    destination: Destination
    stats: ReceiveStats


class Receiver:
    """Receives published weights in this process, one complete version at a time.

    Make one per receiving process; a context manager. `fetch` and `receive` are for one thread at a time; any thread
    may use all else. A forked child may ask it what it has and `poll`, on a thread of its own; `cancel` and `close` do
    nothing there, all other calls are a `ConfigError`. The child makes its own to receive.

    Args:
        transport: how versions are transferred; the same kind as the publisher's, with the same rendezvous or
            directory.
        into: where versions go unless a call says otherwise: an ``nn.Module`` (its parameters must equal the published
            ones; buffers may be published), a dictionary of tensors (exactly the published ones), or a function
            ``apply(name, tensor)`` that is called with every complete tensor. DTensors receive their own part, and so
            does a `holdfast.Shard` in a dictionary.
        include, exclude: receive only, or leave out, the published names at or below these dotted prefixes, or that
            match these patterns (``"*.lora_*"``); the rest of ``into`` keeps its values. Of the names that are chosen,
            ``into`` has to have exactly the published ones. A word that matches nothing is a `ConfigError`.
        sparse_commit: where a version came as a delta, `commit` writes only the elements that changed to live tensors
            in host memory that nobody has written to since the commit before. **Writes that torch doesn't count are not
            seen** (``.data``, NumPy, DLPack, collectives): they would stay beside what is new. False, the default,
            copies all.
    """

    def __init__(
        self,
        transport: Transport,
        into: Any = None,
        *,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        sparse_commit: bool = False,
    ) -> None:
        choice = NameChoice(include, exclude)
        self._half = checked_transport(transport).receiving()
        self._into = into
        self._applier = TargetFactory(choice, scatters=checked_flag("sparse_commit", sparse_commit))
        self._version: int | None = None
        self._meta: Mapping[str, Any] = _NOTHING
        self._stats: ReceiveStats | None = None
        self._dirty = False
        """Something that failed has left the weights a mix."""
        self._held: _Held | None = None
        self._committing: _Held | None = None
        self._under_way: Destination | None = None
        self._known: Any = None
        """What was received into last; it could be."""
        self._cancelled = self._closed = False
        # Reentrant: one that an interrupt, such as Ctrl-C, has left taken doesn't stop the thread that it came to.
        self._turn, self._writing, self._state = threading.RLock(), threading.RLock(), threading.RLock()
        self._thread: int | None = None
        self._writer: int | None = None
        self._owner = os.getpid()
        self._stay_at_exit = end_at_exit(self, lambda receiver, _: receiver.close())

    def __del__(self) -> None:
        """Close a forgotten receiver on another thread, since a finalizer may run at any point of the program."""
        if not getattr(self, "_closed", True) and os.getpid() == self._owner:
            close_later("a Receiver", functools.partial(_close, self._half))

    # What it has. ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version that was committed last; None before the first. While `dirty`, it is no longer complete."""
        with self._state:
            return self._version

    @property
    def meta(self) -> Mapping[str, Any]:
        """What `Publisher.publish` was given as ``meta`` with `version`; empty before the first."""
        with self._state:
            return self._meta

    @property
    def fetched(self) -> int | None:
        """The version that was fetched and is not committed yet; None if there is none."""
        with self._state:
            waiting = self._waiting
            return None if waiting is None else waiting.fetched.version

    @property
    def stats(self) -> ReceiveStats | None:
        """How long the version took that was fetched last; None before the first."""
        with self._state:
            return self._stats

    @property
    def dirty(self) -> bool:
        """True while the weights may be a mix of versions: don't serve them. Ended only by a successful commit."""
        with self._state:
            held = [one.destination for one in (self._held, self._committing) if one is not None]
            parts = held if self._under_way is None else [*held, self._under_way]
            return self._dirty or any(part.dirty for part in parts)

    @property
    def _waiting(self) -> _Held | None:
        return self._held or self._committing

    def poll(self) -> int | None:
        """Return the newest version that can be fetched and is newer than what was fetched; None if none is known.

        No I/O: a thread looks for versions, started by the first call, which returns None. It knows of a new one after
        a hundredth of a second with transports that connect, half a second in a directory, and five seconds on an
        object store. What a restarted publisher has published is new, whatever its number.

        Raises what that thread met, once.
        """
        self._check_open()
        with self._state:
            waiting = self._waiting
            # After a failed commit `fetch` may bring the same version again, but it is no news.
            newer_than = self._newer_than(self._version) if waiting is None else waiting.fetched.version
        return self._half.newest(newer_than)

    # Fetch. ------------------------------------------------------------------------------------------------------

    def fetch(
        self, version: int | None = None, *, into: Any = None, streaming: bool = False, timeout: float = 600.0
    ) -> int:
        """Bring one version aside and verify it, while the weights are in use; return its number.

        It is held until `commit` makes it live; another successful fetch replaces it, a failed one doesn't.

        Args:
            version: exactly this version, which may be an older one that is kept; None: the newest that is newer than
                what was fetched. Waits for one that is yet to come.
            into: where it is to go; None: where the receiver was told.
            streaming: write straight into the live tensors, or call the function, as bytes come. Needs no memory, but
                the weights are `dirty` from the first byte until the commit, also after a failure. Waits for a commit
                on another thread, which can't begin meanwhile.
            timeout: seconds. A transfer over links that has begun by then goes on while bytes keep coming.

        Raises:
            StateMismatch: ``into`` doesn't match what is published. CheckpointNotFound: ``version`` isn't kept any
                more.
            CheckpointCorrupt: bytes did not arrive as they were sent. PeerLost: a publisher rank ended.
            DeadlineExceeded: no version in time. FetchCancelled: `cancel` was called. ConfigError: an invalid argument,
                or the published version is older than what this receiver has.
        """
        self._check_own()
        with self._state:
            waiting = self._waiting
            newest = self._version if waiting is None else waiting.fetched.version
        return self._fetch(version, newest, into, streaming, Deadline.after(checked_seconds("timeout", timeout)))

    def receive(
        self,
        into: Any = None,
        version: int | None = None,
        timeout: float = 600.0,
        streaming: bool = False,  # noqa: FBT001, FBT002
    ) -> int:
        """Fetch one version and commit it; return its number when all of it is in place.

        The arguments are those of `fetch`; with no ``version`` it brings the newest that is newer than `version`, also
        if that is held already. Raises what `fetch` and `commit` raise, among it errors of a function. In each case
        `version` is unchanged, and without ``streaming`` so are the weights, unless a function or the copying itself
        failed half way (then `dirty` is True).
        """
        deadline = Deadline.after(checked_seconds("timeout", timeout))
        self._check_own()
        with self._state:
            newest, waiting = self._version, self._waiting
            if newest is not None and waiting is not None and waiting.fetched.version <= newest:
                newest = waiting.fetched.version - 1  # of a publisher that has gone back, as it may
        self._fetch(version, newest, into, streaming, deadline)
        return self._commit(deadline)

    def _fetch(self, version: int | None, newest: int | None, into: Any, streaming: bool, deadline: Deadline) -> int:  # noqa: FBT001
        self._check_open()
        if version is not None:
            version = checked_version(version)
        streaming = checked_flag("streaming", streaming)
        if (into := self._into if into is None else into) is None:
            raise ConfigError(
                "into: nothing says where the version is to go; give it to the Receiver, or to this call", field="into"
            )
        if self._thread == threading.get_ident() or not self._turn.acquire(blocking=False):
            raise ConfigError(
                "this receiver is receiving already, on another thread; make a receiver for each thread",
                field="receiver",
            )
        try:
            with self._state:
                self._check_open()
                self._thread, self._cancelled = threading.get_ident(), False
            with board_lost_told("receiving a version", deadline.timeout_s):
                if not streaming:
                    return self._bring(version, newest, into, deadline, streaming=False)
                self._take_writing(deadline)
                try:
                    return self._bring(version, newest, into, deadline, streaming=True)
                finally:
                    self._writer = None  # not in a function, at whose beginning an interrupt may land
                    self._writing.release()
        finally:
            with self._state:
                self._thread = None
            self._turn.release()

    def _bring(self, version: int | None, newest: int | None, into: Any, deadline: Deadline, *, streaming: bool) -> int:
        began = time.monotonic()
        waited_s = 0.0
        while True:
            destination = None
            with self._state:
                newer_than = self._newer_than(newest)
            try:
                if into is self._known:  # else see at once if anything can be received into it
                    self._half.await_version(version, newer_than, deadline)
                    waited_s = time.monotonic() - began
                destination = self._applier.destination(into, streaming=streaming, committed=self._tell_committed())
                with self._state:
                    self._known, self._under_way = into, destination
                fetched = self._half.fetch(destination, version, newer_than, deadline)
                break
            except BaseException as error:
                with self._state:
                    self._under_way = None
                    # One that fails before it has changed anything leaves the weights as dirty as they were.
                    self._dirty = self._dirty or (destination is not None and destination.dirty)
                    if isinstance(error, FetchCancelled) and not self._cancelled:
                        continue  # it was meant for the fetch before, which had just ended
                raise
        phases = {**fetched.seconds, "wait": waited_s + fetched.seconds.get("wait", 0.0)}
        stats = ReceiveStats(fetched.version, time.monotonic() - began, MappingProxyType(phases))
        self._hold(_Held(fetched, destination, stats))
        wait_s, transfer_s = stats.phases.get("wait", 0.0), stats.phases.get("transfer", 0.0)
        events.emit("sync.fetched", step=stats.version, fetch_s=stats.fetch_s, wait_s=wait_s, transfer_s=transfer_s)
        return stats.version

    def _newer_than(self, newest: int | None) -> int | None:
        """Return what a version is to be newer than; one that is no longer complete may come again."""
        return newest - 1 if newest is not None and self._dirty else newest

    def _hold(self, held: _Held) -> None:
        with self._state:
            was_closed, before = self._closed, self._held
            self._under_way, self._stats, self._held = None, held.stats, None if was_closed else held
            # What streamed and isn't committed has left its bytes there.
            self._dirty = self._dirty or (before is not None and before.destination.dirty)
        for given_up in (before, held if was_closed else None):
            if given_up is not None:
                given_up.fetched.release()
        self._check_open()

    def cancel(self) -> None:
        """Make a `fetch` or `receive` on another thread end with `FetchCancelled`; does nothing if there is none.

        Doesn't wait for that. One that has just brought all of its version may still succeed. Does nothing in a forked
        child.
        """
        if os.getpid() != self._owner:
            return
        with self._state:
            if self._thread is None:
                return
            self._cancelled = True
        self._half.cancel()

    # Commit. -----------------------------------------------------------------------------------------------------

    def commit(self) -> int:
        """Make the fetched version the live one, where `fetch` was told; return its number.

        Call it at a pause: nobody may read the weights meanwhile. It receives nothing, so it takes as long as copying.

        Raises:
            ConfigError: nothing was fetched, or another thread writes to the weights.
            StateMismatch: a tensor was replaced by another one since `fetch`; nothing was changed.
            Errors of a function, and of ``load_state_dict``. The version is then held again, for another try, unless
            another one was fetched meanwhile; and the receiver is `dirty` if anything was written.
        """
        self._check_own()
        self._check_open()
        return self._commit(None)

    def _commit(self, deadline: Deadline | None) -> int:
        self._take_writing(deadline)
        try:
            with self._state:
                self._check_open()
                held, self._held = self._held, None
                self._committing = held
            if held is None:
                raise ConfigError("there is no fetched version to commit; fetch one first", field="version")
            began = time.monotonic()
            try:
                held.fetched.commit()
            except BaseException:
                self._put_back(held)
                raise
            stats = replace(held.stats, commit_s=time.monotonic() - began)
            with self._state:
                self._committing = None
                if self._stats is held.stats:
                    self._stats = stats
            try:
                held.fetched.tell_committed(stats.phases.get("transfer", 0.0) + (stats.commit_s or 0.0))
            finally:
                held.fetched.release()
        finally:
            self._writer = None  # not in a function, at whose beginning an interrupt may land
            self._writing.release()
        events.emit("sync.committed", step=stats.version, fetch_s=stats.fetch_s, commit_s=stats.commit_s)
        return stats.version

    def _tell_committed(self) -> Callable[[int], None]:
        """Return what a destination calls once its version is in place; it keeps no receiver alive."""
        known = weakref.WeakMethod(self._has_committed)

        def tell(version: int) -> None:
            has_committed = known()
            if has_committed is not None:
                has_committed(version)

        return tell

    def _has_committed(self, version: int) -> None:
        with self._state:
            held, self._committing = self._committing, None
            self._version, self._dirty = version, False
            self._meta = _NOTHING if held is None else MappingProxyType(dict(held.fetched.meta))

    def _put_back(self, held: _Held) -> None:
        with self._state:
            self._committing = None
            self._dirty = self._dirty or held.destination.dirty
            is_wanted = self._held is None and not self._closed
            if is_wanted:
                self._held = held
        if not is_wanted:
            held.fetched.release()

    def _take_writing(self, deadline: Deadline | None) -> None:
        """Become the one who writes to live tensors; waits until the deadline, with None not at all."""
        is_own = self._writer == threading.get_ident()
        if is_own or not self._writing.acquire(timeout=0.0 if deadline is None else deadline.left_s()):
            if deadline is not None and not is_own:
                raise deadline.exceeded("a commit on another thread to end", "see where it hangs")
            raise ConfigError(
                "the weights are being written to, by a commit or a fetch with streaming=True; wait for that first",
                field="receiver",
            )
        self._writer = threading.get_ident()

    # The end. ----------------------------------------------------------------------------------------------------

    def _check_own(self) -> None:
        if os.getpid() != self._owner:
            raise of_parent("receiver")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this receiver is closed; make a new one", field="receiver")

    def close(self) -> None:
        """Leave: the publisher stops waiting for this receiver, and what is held is given up. Idempotent.

        A `fetch` that waits, on another thread, ends with a `ConfigError`. Does nothing in a forked child.
        """
        if os.getpid() != self._owner:
            return
        with self._state:
            if self._closed:
                return
            self._closed = True
        self._half.leave()
        me, deadline = threading.get_ident(), Deadline.after(_CLOSE_S)
        waits = [
            lock
            for lock, holder in ((self._turn, self._thread), (self._writing, self._writer))
            if holder != me and lock.acquire(timeout=deadline.left_s())
        ]
        try:
            with self._state:
                held, self._held = self._held, None
            if held is not None:
                held.fetched.release()
            self._half.close()
        finally:
            for lock in waits:
                lock.release()
            self._stay_at_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(half: Receiving) -> None:
    half.leave()
    half.close()
