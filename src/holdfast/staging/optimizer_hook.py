"""Delay every optimizer step until captures in progress have been copied, by one global hook.

The global pre-step hook is used, filtered by the captured tensors, because a hook on one optimizer is bypassed by
wrappers and fires too late in optimizer-in-backward. It is registered with the first saver; if nothing is in flight, it
only checks an empty tuple.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from holdfast import _torch_compat as compat

if TYPE_CHECKING:
    from collections.abc import Callable


class Guard(Protocol):
    """Interface called before an update."""

    def before_update(self, parameters: Callable[[frozenset[int]], bool] | None = None) -> None: ...

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` is about to step; raises nothing."""
        ...

    def before_load(self) -> None:
        """Wait as before an update of everything, but raise nothing: a rank that leaves a load strands the others."""
        ...


_guards: tuple[weakref.ref[Guard], ...] = ()
"""Replaced as a whole under `_lock`, never changed: managers come and go on other threads while this one steps."""
_lock = threading.Lock()
_registered = False


def guard_updates(guard: Guard) -> None:
    """Call ``guard.before_update`` before every optimizer step, while the guard lives."""
    global _registered, _guards  # noqa: PLW0603 - one hook a process
    with _lock:
        if not _registered:
            register_optimizer_step_pre_hook(_before_step)
            _registered = True
        _guards = (*_others(guard), weakref.ref(guard))


def unguard_updates(guard: Guard) -> None:
    global _guards  # noqa: PLW0603 - one hook a process
    with _lock:
        _guards = _others(guard)


def _others(guard: Guard) -> tuple[weakref.ref[Guard], ...]:
    return tuple(reference for reference in _guards if (living := reference()) is not None and living is not guard)


def _living() -> list[Guard]:
    return [guard for reference in _guards if (guard := reference()) is not None]


def before_any_load() -> None:
    """Wait until every captured state of this process may change: a load changes everything."""
    for guard in _living():
        guard.before_load()


@compat.untraced
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    if not _guards:
        return

    def touches(captured: frozenset[int]) -> bool:
        return any(id(param) in captured for group in optimizer.param_groups for param in group["params"])

    for guard in _living():
        guard.before_update(touches)
        with contextlib.suppress(Exception):  # groups of another kind: saves are looked at without this optimizer
            guard.note_step(optimizer)


class UpdateGuard:
    """Run before every update: wait for copies, then raise failures that stop training."""

    def __init__(
        self,
        wait: Callable[[Callable[[frozenset[int]], bool] | None], None],
        raise_failures: Callable[[], None] | None,
        note_step: Callable[[Optimizer], None],
    ) -> None:
        self._wait = wait
        self._raise_failures = raise_failures
        self._note_step = note_step

    def before_update(self, parameters: Callable[[frozenset[int]], bool] | None = None) -> None:
        self._wait(parameters)
        if self._raise_failures is not None:
            self._raise_failures()

    def note_step(self, optimizer: Optimizer) -> None:
        self._note_step(optimizer)

    def before_load(self) -> None:
        self._wait(None)
