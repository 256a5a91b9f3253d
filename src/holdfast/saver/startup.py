"""Startup of a writer: release roots held by unused managers of this process; recover roots and paths.

    forgotten   no longer referenced: it is being closed on its own thread, and the next manager waits for that
    replaced    the code that made it runs again: the new manager closes it, and using it raises an error that says so
    in use      all others, and every manager entered by ``with``: its root stays locked

A notebook cell that is run again makes the new manager while its variables, or the traceback of an error, still refer
to the old one. Code counts as run again if the same lines on the same thread get here, or other top-level code of the
same namespace: another cell.

Guarantees: saves in flight are published or fail as usual before the root is released. All ranks that run the same code
again decide the same. Torch-free.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, ParamSpec, Protocol, TypeVar

from holdfast import events
from holdfast.catalog.root import refuse_occupied
from holdfast.commit.recovery import RecoveryReport, recover, recover_one
from holdfast.engine.removal import remove_quickly
from holdfast.errors import HoldfastError
from holdfast.storage.entries import refuse_no_directory
from holdfast.storage.files import let_go
from holdfast.storage.local import open_storage
from holdfast.storage.locks import refuse_managed
from holdfast.storage.object_storage import refuse_replacing
from holdfast.storage.protocol import DirectoryTarget
from holdfast.validation import is_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from holdfast.storage.protocol import Storage, StorageLock


# `settle_root` recovers a manager's root, which the caller has locked; `claim_path` also locks the path of a single
# save or export. A recovered root is clean except for large trash, which the engine removes; a claimed path is
# locked, and is either free or may be overwritten.

SWEEP_S: Final = 2.0
"""How long all ranks wait at start for trash to be removed."""
LOCK_PATIENCE_S: Final = 10.0
"""How long to wait for the lock of a path: an `async_save` of this process may still hold it until its engine and
threads have ended."""


def settle_root(storage: Storage, *, timeout_s: float) -> tuple[RecoveryReport, list[str]]:
    """Recover ``storage``; wait ``timeout_s`` for saves in progress. Return the report, and the trash that is left."""
    trash: list[str] = []
    report = recover(
        storage,
        clock=time.monotonic,
        sleep=time.sleep,
        timeout_s=timeout_s,
        remove=trash.append,
        claim=storage.lock_path,
    )
    # Remove small trash now, so that the root is clean for the manager; the engine removes the rest.
    target = storage.target("")
    if isinstance(target, DirectoryTarget):
        with target:
            remove_quickly(target.fd, trash, timeout_s=SWEEP_S)
    events.emit(
        "root.recovered", rank=0, path=storage.root, rolled_forward=report.rolled_forward, removed=report.removed
    )
    storage.sweep_locks()
    return report, [name for name in trash if storage.exists(name)]


def claim_path(target: str, *, step: int | None, overwrite: bool, timeout_s: float) -> StorageLock:
    """Make the parent of ``target``, lock the path, recover what an earlier save or export left there; return the lock.

    timeout_s: how long to wait for a save still in progress there. Raises `CheckpointExists` unless ``overwrite``,
    `ConfigError` for a manager's root, `RootLocked`, `StorageError`.
    """
    deadline = time.monotonic() + timeout_s
    parent, name = os.path.split(target)
    storage = open_storage(parent)
    storage.make_root()
    lock = storage.lock_path(name, timeout_s=min(timeout_s, LOCK_PATIENCE_S))
    try:
        if overwrite and not is_store(target):
            let_go(target)
        recover_one(storage, name, timeout_s=max(0.001, deadline - time.monotonic()))
        if overwrite:
            refuse_no_directory(storage, name)
            refuse_replacing(storage, name)
            if not is_store(target):
                refuse_managed(target)
        else:
            refuse_occupied(storage, name, step=step)
    except BaseException:
        lock.release()
        raise
    return lock


_log = logging.getLogger("holdfast")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Tenant(Protocol):
    """The part of a manager that startup uses."""

    def make_room(self, replaced_by: str) -> None:
        """Wait for saves in flight and close; report the replacement in later errors."""
        ...


@dataclass(frozen=True, slots=True)
class _Site:
    """The code that is running: the user's line that called us, and its callers up to top level."""

    lines: tuple[tuple[str, str, int], ...]
    top: CodeType | None
    namespace: int
    thread: int

    @classmethod
    def here(cls) -> _Site:
        frame = inspect.currentframe()
        lines = []
        while frame is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        while frame is not None:
            code = frame.f_code
            lines.append((code.co_filename, code.co_name, frame.f_lineno))
            if code.co_name == "<module>":
                return cls(tuple(lines), code, id(frame.f_globals), threading.get_ident())
            frame = frame.f_back
        return cls(tuple(lines), None, 0, threading.get_ident())

    def runs_again(self, earlier: _Site) -> bool:
        """Return True if the code that made ``earlier`` has ended: this is the same place again, or another cell."""
        if self.thread != earlier.thread:
            return False
        # Compare by identity: a cell that is run again under another name is equal code.
        other_cell = self.top is not None and self.top is not earlier.top and self.namespace == earlier.namespace
        return other_cell or self.lines == earlier.lines

    def __str__(self) -> str:
        return f"{self.lines[0][0]}:{self.lines[0][2]}" if self.lines else "an unknown place"


@dataclass(eq=False)
class Tenancy:
    """One manager's hold on ``root``, from before it is locked until the manager has ended."""

    root: str
    site: _Site
    tenant: weakref.ref[Tenant]
    is_scoped: bool = False
    """Entered by ``with``, whose end closes it."""
    is_forgotten: bool = False
    """Nothing refers to it, so it is being closed."""
    _ended: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def begin(cls, tenant: Tenant, root: str, *, timeout_s: float) -> Tenancy:
        """Take ``root``, once earlier unused managers of this process have released it.

        Waits at most ``timeout_s`` for each, unless a manager has a limit of its own.
        """
        found = cls(root if is_store(root) else os.path.realpath(root), _Site.here(), weakref.ref(tenant))
        for earlier in _at(found.root):
            earlier.leave_to(found, timeout_s)
        with _lock:
            _tenancies.append(found)
        return found

    def leave_to(self, next_one: Tenancy, timeout_s: float) -> None:
        """Release the root if nobody uses this manager any more; waits until it is free or time is up."""
        tenant = None if self.is_forgotten else self.tenant()
        if tenant is not None and not next_one.site.runs_again(self.site):
            del tenant
            gc.collect()  # it may be in an unreachable cycle
            if self.tenant() is None:
                self._ended.wait(timeout_s)
            return
        if tenant is None:
            self._ended.wait(timeout_s)
        elif not self.is_scoped:
            _log.warning(
                "the CheckpointManager of %s made at %s was not closed; the one made at %s takes its place",
                *(self.root, self.site, next_one.site),
            )
            try:
                tenant.make_room(str(next_one.site))
            except HoldfastError as error:
                _log.warning("while closing the manager made at %s: %s", self.site, error)

    @property
    def made_at(self) -> str:
        return str(self.site)

    def end(self) -> None:
        """Release the root; idempotent."""
        self._ended.set()
        with _lock:
            if self in _tenancies:
                _tenancies.remove(self)


_tenancies: list[Tenancy] = []
_lock = threading.Lock()


def weakly(method: Callable[_Args, _Result]) -> Callable[_Args, _Result | None]:
    """Wrap a bound method without keeping its object alive; once that is gone, calls do nothing."""
    reference = weakref.WeakMethod(method)

    def call(*args: _Args.args, **options: _Args.kwargs) -> _Result | None:
        found = reference()
        return None if found is None else found(*args, **options)

    return call


def _at(root: str) -> list[Tenancy]:
    with _lock:
        return [tenancy for tenancy in _tenancies if tenancy.root == root]


def _forget_all() -> None:
    """Forget all tenancies in a forked child: they belong to its parent."""
    global _lock  # noqa: PLW0603 - its holder doesn't exist here
    _lock = threading.Lock()
    _tenancies.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
