"""Learn what a publisher has: where its ranks are, and its versions, on a thread of its own.

Guarantees: a publisher that isn't there yet, ends, starts again, or is stopped and replaced by another one, is found by
itself; asking costs nothing.
Assumes: rank 0 tells the news.
Does not: connect to the other ranks (``versions.receiving``).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from holdfast.coordination.store import BoardLost
from holdfast.errors import ConfigError, HoldfastError
from holdfast.sync.lineage import receiver_name
from holdfast.sync.session.futures import CloseSignal
from holdfast.sync.session.links import Ended, EventLoop, Link
from holdfast.sync.session.rendezvous import PLACES, RendezvousClient
from holdfast.sync.versions import messages
from holdfast.sync.versions.serving import connect_to

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.engine.messages import EngineMessage
    from holdfast.sync.session.rendezvous import Rendezvous

_LOOK_S: Final = 0.01
"""How often a watcher looks for a publisher that isn't there yet."""
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 0.3
"""How long a rendezvous may take to answer before it counts as silent; it is asked again."""
_SLICE_S: Final = 0.5
_LOOK_AGAIN_S: Final = 2.0
"""How often a watcher that hears nothing sees whether another publisher has taken the place of a stopped one."""


class Known(NamedTuple):
    """What a publisher has: its ranks, and its versions, ascending."""

    places: messages.PublisherPlaces
    records: tuple[messages.VersionRecord, ...]

    def find(self, version: int) -> messages.VersionRecord | None:
        return next((record for record in self.records if record.version == version), None)


class PublisherWatch:
    """Learns what a publisher has, on a thread of its own that ends with `close`; all methods are for any thread."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._where = rendezvous
        self._closed = CloseSignal()
        self._rendezvous = RendezvousClient(rendezvous, self._closed)
        self._trouble = ""
        """Why no publisher is found, if it isn't just absent."""
        self._loop: EventLoop | None = None
        self._lock = threading.RLock()
        """Taken by itself: an interrupt in a condition's `__enter__`, which is no C code, would leave it taken."""
        self._changed = threading.Condition(self._lock)
        self._known: Known | None = None
        self._error: HoldfastError | None = None
        self._closing = False
        self._woken = False
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Start the thread, if it isn't running; in a forked child, one of its own."""
        if os.getpid() != self._owner:
            self._start_anew()
        with self._lock:
            if self._thread is None and not self._closing:
                self._loop = EventLoop()
                thread = threading.Thread(target=self._live, name="holdfast-sync-watch", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._loop.close()
                    raise _refused(error) from error
                self._thread = thread

    def _start_anew(self) -> None:
        """In a forked child: forget what is its parent's, without locking: the lock's holder may not exist here."""
        self._owner = os.getpid()
        self._closed = CloseSignal()
        self._rendezvous = RendezvousClient(self._where, self._closed)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._known, self._error, self._thread, self._loop = None, None, None, None

    @property
    def known(self) -> Known | None:
        """What the publisher has, as far as it has told; None while there is none. Raises what went wrong, once."""
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                raise error
            return self._known

    def follows(self, places: messages.PublisherPlaces) -> bool:
        """Return True while this publisher is there, and none has taken its place."""
        known = self._known
        return known is not None and known.places == places

    @property
    def trouble(self) -> str:
        """Why no publisher is found, if it isn't just absent; empty otherwise."""
        return self._trouble

    def wait(self, timeout_s: float, before: Known | None) -> Known | None:
        """Wait until something else is known than ``before``, for `wake`, or for an error, which is raised."""

        def has_changed() -> bool:
            return self._known is not before or self._error is not None or self._closing or self._woken

        with self._lock:
            self._changed.wait_for(has_changed, timeout_s)
            self._woken = False
        return self.known

    def wake(self) -> None:
        """End a wait."""
        with self._lock:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; idempotent, doesn't wait for a rendezvous that doesn't answer."""
        with self._lock:
            self._closing = True
            self._closed.say()
            self._changed.notify_all()
            thread, loop = self._thread, self._loop
        if loop is not None and os.getpid() == self._owner:
            loop.wake()
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self._owner:
            thread.join(_CONNECT_S)

    # the thread ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        assert self._loop is not None
        try:
            while not self._closing:
                try:
                    places = self._find()
                    if places is not None:
                        self._follow(places)
                except BoardLost as error:  # its host may start, or go on, at any time
                    self._trouble = str(error)
                    self._pause(_LOOK_S)
                except (HoldfastError, OSError, RuntimeError) as error:  # no thread, no descriptor: there may be soon
                    self._say(None, error if isinstance(error, HoldfastError) else _refused(error))
                    self._pause(_SLICE_S)
        finally:
            self._loop.close()

    def _find(self) -> messages.PublisherPlaces | None:
        """Return a publisher that may be there; None after a pause if there is none."""
        found = self._rendezvous.get(PLACES, _ANSWER_S)
        self._trouble = ""
        if found is None:
            self._pause(_LOOK_S)
            return None
        return decode_places(found, self._rendezvous.shown)

    def _follow(self, places: messages.PublisherPlaces) -> None:
        """Hear a publisher's news until it ends."""
        assert self._loop is not None
        try:
            sock = connect_to(places.ranks[0], _CONNECT_S)
        except OSError:
            self._pause(_LOOK_S)
            return
        link = Link(sock, "publisher rank 0", messages.FromRank)
        self._loop.add(link)
        try:
            link.send(messages.Introduce(receiver_name(), places.token))
            link.send(messages.AskNews())
            looked_s = time.monotonic()
            while not self._closing:
                if time.monotonic() - looked_s > _LOOK_AGAIN_S:
                    if self._is_replaced(places):
                        return
                    looked_s = time.monotonic()
                for _, said in self._heard():
                    if isinstance(said, Ended):
                        return
                    if isinstance(said, messages.News):
                        looked_s = time.monotonic()
                        self._say(Known(places, said.records), None)
        finally:
            self._loop.drop(link)
            self._say(None, None)

    def _is_replaced(self, places: messages.PublisherPlaces) -> bool:
        """Return True if the rendezvous has another publisher than this one, which may be stopped."""
        try:
            found = self._rendezvous.get(PLACES, _ANSWER_S)
        except BoardLost:
            return False
        return found is not None and decode_places(found, self._rendezvous.shown) != places

    def _heard(self) -> Iterator[tuple[Link, EngineMessage | Ended]]:
        assert self._loop is not None
        for found in self._loop.hear(_SLICE_S):
            assert not isinstance(found, socket.socket)
            yield found

    def _say(self, known: Known | None, error: HoldfastError | None) -> None:
        with self._lock:
            self._known, self._error = known, error or self._error
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        assert self._loop is not None
        for _ in self._loop.hear(seconds):
            pass


def _refused(error: OSError | RuntimeError) -> HoldfastError:
    return HoldfastError(
        f"the publisher can't be looked for: {error}; the system refuses this process what it needs: raise its limits "
        "(`ulimit -n`, `-u` and `-v`, or those of the container)"
    )


def decode_places(found: bytes, shown: str) -> messages.PublisherPlaces:
    """Decode what a publisher has left in the rendezvous. Raises `ConfigError` for one of another transport."""
    try:
        return msgspec.msgpack.decode(found, type=messages.PublisherPlaces)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the publisher at {shown} uses another transport than this receiver, or another version of Holdfast "
            f"({error}); use the same on both sides",
            field="transport",
        ) from error
