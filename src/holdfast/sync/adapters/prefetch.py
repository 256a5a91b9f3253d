"""Fetch versions while an engine generates, and commit them at its pause: what adapters share.

    Prefetch(receiver, taker)    fetches on a thread; `bring` at the pause takes what it has, or fetches what is wanted
    Taker                        where versions go: a function that sees names and shapes before anything is fetched

Guarantees: between `bring` and `commit` (or `let_go`) nothing else is fetched, so `commit` commits what `bring` said. A
fetch on the thread that fails changes nothing: `bring` repeats it, and raises then.
Assumes: one thread at a time calls `bring`, `commit` and `let_go`.
Does not: know an engine, or commit by itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from holdfast.errors import CheckpointNotFound, HoldfastError, StateMismatch, VersionRevoked
from holdfast.sync.weights.apply import CheckedApply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from holdfast.sync.protocol import TensorInfo
    from holdfast.sync.receiver import Receiver

_LOOK_S: Final = 0.05
"""How often the thread looks for a version."""
_END_S: Final = 10.0
_FETCH_S: Final = 600.0
_log = logging.getLogger("holdfast.sync.adapters")


class Taker(CheckedApply):
    """Takes one version tensor by tensor, in batches, and compares its names and shapes with the last one's.

    take: called with at most ``batch_bytes``, unless one tensor is larger. `flush` passes on the rest, as the last.
    """

    def __init__(self, take: Callable[[list[tuple[str, torch.Tensor]], bool], None], batch_bytes: int) -> None:
        self._take = take
        self._batch_bytes = batch_bytes
        self._batch: list[tuple[str, torch.Tensor]] = []
        self._nbytes = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.expected: dict[str, tuple[int, ...]] | None = None
        """Names and shapes of what the engine holds; None: nothing yet."""

    def select(self, published: Mapping[str, TensorInfo]) -> None:
        self.compare({name: tuple(info.shape) for name, info in published.items()})

    def compare(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `StateMismatch` if names or shapes differ from those of what the engine holds."""
        expected = found if self.expected is None else self.expected
        missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        wrong = [name for name in expected if name in found and found[name] != expected[name]]
        if missing or unexpected or wrong:
            example = f", e.g. {wrong[0]} is {found[wrong[0]]}, was {expected[wrong[0]]}" if wrong else ""
            raise StateMismatch(
                f"the version has other tensors than the one that the engine holds: {len(missing)} missing "
                f"{missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}, {len(wrong)} of another shape{example}"
                "; nothing was loaded"
            )

    def begin(self) -> None:
        """Forget what a commit before, which failed, has left."""
        self._batch, self._nbytes, self._shapes = [], 0, {}

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        if self._batch and self._nbytes + nbytes > self._batch_bytes:
            self._pass_on(is_last=False)
        self._batch.append((name, tensor))
        self._shapes[name] = tuple(tensor.shape)
        self._nbytes += nbytes

    def flush(self) -> None:
        """Pass on the rest of the version; all of it is taken then."""
        self._pass_on(is_last=True)
        self.expected = self._shapes

    def _pass_on(self, *, is_last: bool) -> None:
        batch, self._batch, self._nbytes = self._batch, [], 0
        self._take(batch, is_last)


class Prefetch:
    """See the module. ``watch``: fetch every version that appears, on a thread."""

    def __init__(self, receiver: Receiver, taker: Callable[[str, torch.Tensor], object], *, watch: bool) -> None:
        self._receiver = receiver
        self._taker = taker
        self._state = threading.Condition()
        self._is_held = self._is_fetching = self._closed = False
        self._wanted: tuple[int | None, float] | None = None
        self._watches = watch
        self._thread: threading.Thread | None = None
        if watch:
            self._start()

    def begin(self, version: int | None, timeout: float) -> None:
        """Have ``version`` (None: the newest) fetched on the thread; doesn't wait."""
        with self._state:
            self._wanted = (version, timeout)
            self._start()
            self._state.notify_all()

    def bring(self, version: int | None, timeout: float, *, failed: int | None = None) -> int:
        """Have ``version`` (None: the newest) fetched, and keep it until `commit` or `let_go`; return its number.

        failed: a version that is to be repeated if none is given, if it is still kept.
        """
        deadline = time.monotonic() + timeout
        self._take_turn(version, timeout)
        try:
            if version is None and failed is not None:
                with contextlib.suppress(CheckpointNotFound):
                    return self._fetch(failed, deadline)
            fetched = self._receiver.fetched
            is_wanted = fetched is not None and not self._receiver.dirty and version in (None, fetched)
            if fetched is not None and is_wanted and (version is not None or self._receiver.poll() is None):
                return fetched
            return self._fetch(version, deadline)
        except BaseException:
            self.let_go()
            raise

    def commit(self) -> int:
        """Commit what `bring` has brought; return its number. Call the taker's `flush` afterwards."""
        try:
            return self._receiver.commit()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Let the thread go on without a commit."""
        with self._state:
            self._is_held = False
            self._state.notify_all()

    def close(self) -> None:
        """End the thread; the receiver is not closed."""
        with self._state:
            self._closed = True
            self._state.notify_all()
        if self._thread is not None:
            self._receiver.cancel()
            self._thread.join(_END_S)

    # ------------------------------------------------------------------------------------------------------------------

    def _fetch(self, version: int | None, deadline: float) -> int:
        left_s = max(_LOOK_S, deadline - time.monotonic())
        return self._receiver.fetch(version, into=self._taker, timeout=left_s)

    def _take_turn(self, version: int | None, timeout: float) -> None:
        """Keep the thread from beginning another fetch; wait for one that brings what is wanted, else cancel it."""
        deadline = time.monotonic() + timeout
        with self._state:
            self._is_held = True
            while self._is_fetching:
                asked = self._wanted
                if asked is None or version not in (None, asked[0]):
                    self._receiver.cancel()
                if not self._state.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))) and (
                    time.monotonic() >= deadline
                ):
                    self._receiver.cancel()
                    self._state.wait(_END_S)
                    return  # the fetch that follows says what is the matter
            self._wanted = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-prefetch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._state:
                if not self._closed:
                    self._state.wait_for(lambda: self._closed or (self._wanted and not self._is_held), _LOOK_S)
                if self._closed:
                    return
                if self._is_held or not (self._wanted or self._watches):
                    continue
                self._is_fetching = True
            try:
                self._look()
            finally:
                with self._state:
                    self._is_fetching = False
                    self._state.notify_all()

    def _look(self) -> None:
        """Fetch what is asked for, or what is new."""
        asked = self._wanted
        try:
            if asked is None:
                found = self._receiver.poll()
                if found is None:
                    return
                with self._state:
                    if self._is_held:
                        return
                    asked = self._wanted = (found, _FETCH_S)
            self._receiver.fetch(asked[0], into=self._taker, timeout=asked[1])
        except VersionRevoked:
            pass  # a newer one comes
        except (HoldfastError, OSError) as error:
            _log.info("a version was not fetched ahead, and will be when it is loaded: %s", error)
            time.sleep(_LOOK_S)
        finally:
            with self._state:
                if self._wanted == asked:
                    self._wanted = None
