"""Saves of a Lightning trainer that are in flight, and what waits for their end: links, deletions, failures.

Guarantees: what is deleted or linked is so once the saves begun before it have ended, and never if one of them failed.
Of what is deleted nothing is visible at its path from then on; its files go afterwards, on the thread that settles.
Assumes: rank 0 alone links and deletes; paths are those that `place_of` returns. Links are made in directories only.
Does not: know anything of Lightning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import holdfast
from holdfast.catalog.root import is_checkpoint
from holdfast.errors import HoldfastError
from holdfast.storage.entries import hidden_name
from holdfast.storage.local import open_storage
from holdfast.validation import is_store, located

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from holdfast.saver.handle import SaveHandle

_log = logging.getLogger("holdfast")

TIMEOUT_S: Final = 600.0
"""How long a save or load may take."""
IN_FLIGHT: Final = 2
"""Most asynchronous saves at a time: each holds a copy of the state in host memory."""
_SET_ASIDE: Final = "-replaced"


def place_of(path: str | os.PathLike[str], *, field: str = "path") -> str:
    """Return the absolute path, or the URL of a store, that ``path`` names. Raises `ConfigError` for other URLs."""
    return located(os.fspath(path), field=field)


def is_there(path: str) -> bool:
    """Return True if there is anything at ``path``; on a store: a checkpoint, or an object of that name."""
    if not is_store(path):
        return os.path.exists(path)
    root, name = os.path.split(path)
    storage = open_storage(root)
    return is_checkpoint(storage, name) or storage.size(name) is not None


@dataclass(eq=False)
class _Flight:
    """One save that was begun. aside: what was at its path and can't be exchanged. links: to be made to it."""

    path: str
    handle: SaveHandle
    aside: str | None = None
    links: list[str] = field(default_factory=list)


@dataclass
class _Removal:
    """One deletion that waits for saves begun before it. failed: one of these failed: what is there is needed."""

    path: str
    behind: list[_Flight]
    failed: bool = False


class Flights:
    """The saves of one process; `settle` does what waits for those that have ended, on whatever thread calls it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._emptying = threading.Lock()
        self._flights: list[_Flight] = []
        self._removals: list[_Removal] = []
        self._trash: list[Callable[[], None]] = []
        self._failures: list[BaseException] = []
        self._is_asynchronous = False

    def __reduce__(self) -> tuple[type[Flights], tuple[()]]:
        return Flights, ()  # a strategy may be pickled for processes it spawns; nothing is in flight there

    @contextlib.contextmanager
    def asynchronous(self) -> Iterator[None]:
        """Let saves begun inside return when they are staged."""
        before, self._is_asynchronous = self._is_asynchronous, True
        try:
            yield
        finally:
            self._is_asynchronous = before

    def save(self, state: Mapping[str, Any], path: str, step: int | None, group: Any, *, is_main: bool) -> None:
        """Save ``state`` to ``path``, replacing what is there; then raise what an earlier save has to tell."""
        with self._lock:
            self._removals = [removal for removal in self._removals if removal.path != path]
            busy = [flight for flight in self._flights if flight.path == path]
            busy += [flight for flight in self._flights if flight not in busy][: -(IN_FLIGHT - 1) or None]
        for flight in busy:
            flight.handle.exception(TIMEOUT_S)
        self.settle()
        aside = _set_aside(path) if is_main else None
        if self._is_asynchronous:
            handle = holdfast.async_save(
                state, path, step=step, staging="eager", process_group=group, timeout=TIMEOUT_S, overwrite=True
            )
            with self._lock:
                self._flights.append(_Flight(path, handle, aside))
            handle.add_done_callback(lambda _: self.settle())
        else:
            try:
                holdfast.save(state, path, step=step, process_group=group, timeout=TIMEOUT_S, overwrite=True)
            except BaseException:
                _put_back(aside, path)
                raise
            _unlink(aside)
        self.raise_failures()

    def settle(self) -> None:
        """Link, delete and note what saves that have ended make due."""
        with self._lock:
            for flight in [flight for flight in self._flights if flight.handle.done()]:
                self._flights.remove(flight)
                self._land(flight)
            for removal in [removal for removal in self._removals if not self._is_behind(removal)]:
                self._removals.remove(removal)
                if removal.failed:
                    _log.warning("%s is kept: a save that was to replace it failed", removal.path)
                else:
                    with _only_logged(removal.path):
                        self._trash.append(_hide(removal.path))
        with self._emptying:  # not under the lock that a save needs: large directories take their time
            while self._trash:
                with _only_logged("what was deleted"):
                    self._trash.pop()()

    def _is_behind(self, removal: _Removal) -> bool:
        return any(flight in self._flights for flight in removal.behind)

    def _land(self, flight: _Flight) -> None:
        error = flight.handle.exception(0)
        if error is None:
            for link in flight.links:
                _link(flight.path, link)
            _unlink(flight.aside)
            return
        _put_back(flight.aside, flight.path)
        self._failures.append(error)
        for removal in self._removals:
            removal.failed |= flight in removal.behind and flight.path != removal.path

    def remove(self, path: str) -> None:
        """Delete the checkpoint at ``path`` once no save begun so far is in flight, if these succeed."""
        with self._lock:
            self._removals.append(_Removal(path, list(self._flights)))
        self.settle()

    def link(self, path: str, link: str) -> None:
        """Make ``link`` point to the checkpoint at ``path`` once that is published."""
        with self._lock:
            for flight in self._flights:
                flight.links = [other for other in flight.links if other != link]
            flying = [flight for flight in self._flights if flight.path == path]
            for flight in flying[-1:]:
                flight.links.append(link)
        if flying:
            self.settle()
        else:
            _link(path, link)

    def will_exist(self, path: str) -> bool:
        """Return True if ``path`` is there, or will be, once nothing is in flight."""
        with self._lock:
            if any(removal.path == path for removal in self._removals):
                return False
            linked = any(path in flight.links for flight in self._flights)
            return linked or any(flight.path == path for flight in self._flights) or is_there(path)

    def wait(self) -> None:
        """Wait until nothing is in flight."""
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            flight.handle.exception(TIMEOUT_S)
        self.settle()

    def finish(self, *, failed: bool) -> None:
        """Wait until nothing is in flight; raise failures, or log them if training has ``failed`` anyway."""
        try:
            self.wait()
            self.raise_failures()
        except HoldfastError as error:
            if not failed:
                raise
            _log.error("while training ended by an error, a save failed too: %s", error)

    def raise_failures(self) -> None:
        with self._lock:
            failures, self._failures = self._failures, []
        for error in failures[1:]:
            _log.error("%s", error, exc_info=error)
        if failures:
            raise failures[0]


def _set_aside(path: str) -> str | None:
    """Move a file or link away that is where a directory is to be published; return where to. Nothing on a store.

    Its new name begins like the old one, so that ``ckpt_path="last"`` finds it should this process die.
    """
    if is_store(path) or (not os.path.islink(path) and not os.path.isfile(path)):
        return None
    stem, suffix = os.path.splitext(path)
    aside = f"{stem}{_SET_ASIDE}{suffix}"
    os.replace(path, aside)
    return aside


def _put_back(aside: str | None, path: str) -> None:
    if aside is not None and not os.path.lexists(path):
        os.replace(aside, path)


def _link(path: str, link: str) -> None:
    """Make ``link`` a link to ``path``, in one step if it was one before."""
    if os.path.isdir(link) and not os.path.islink(link):
        _hide(link)()
    fresh = f"{link}.new"
    _unlink(fresh)
    os.symlink(os.path.relpath(path, os.path.dirname(link)), fresh)
    os.replace(fresh, link)


def _unlink(path: str | None) -> None:
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _only_logged(path: str) -> Iterator[None]:
    try:
        yield
    except HoldfastError as error:  # of a store; the next start of a manager, or `holdfast recover`, removes the rest
        _log.warning("can't delete %s: %s", path, error)


def _hide(path: str) -> Callable[[], None]:
    """Make what is at ``path`` disappear at once; return what deletes its files."""
    parent, name = os.path.split(path)
    if is_store(path):
        storage = open_storage(parent)
        if storage.size(name) is not None:  # a file of Lightning's
            return partial(storage.unlink, name)
        trash = storage.hide(name) or ()

        def remove() -> None:
            for entry in trash:
                storage.remove_tree(entry)

        return remove
    hidden = os.path.join(parent, hidden_name(name, secrets.token_hex(6), "trash"))
    if os.path.isdir(path) and not os.path.islink(path):
        os.rename(path, hidden)
    else:
        _unlink(path)
    return partial(shutil.rmtree, hidden, ignore_errors=True)
