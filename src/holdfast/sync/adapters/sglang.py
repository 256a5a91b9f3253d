"""Receive versions beside an SGLang engine, and pass each to it by ``update_weights_from_tensor``.

    engine = sglang.Engine(model_path=..., tp_size=2)
    worker = SGLangReceiver(engine, holdfast.sync.SharedMemoryTransport(place), device="cuda", pause="retract")
    worker.prefetch()              # fetches what is new on a thread, while the engine generates
    ...
    version = worker.receive()     # pauses the engine only to load what was fetched

The published names are those of the Hugging Face checkpoint, which SGLang's models load.

Guarantees: a version is completely fetched and verified, and its names and shapes compared with those of the version
loaded before, before the engine is paused or gets any of it. The engine's ``weight_version`` names the version once all
of it is loaded. A weight update session that was opened is closed again, also after a failure. Over shared memory no
more than `BATCH_BYTES` of a version are in this process's own memory, or one tensor.
Assumes: without ``pause`` that no requests are running, or they may see weights of two versions: the engine takes a
version in several calls. If one of them fails, the engine holds a mix, as it reports itself: `SGLangReceiver.dirty`
until a later version is loaded.
Does not: use ``update_weights_from_distributed``, in which trainer and engine share an NCCL group without any transport
of Holdfast.

Runs in tests with the wheel of SGLang 0.5.23 on CPU: its ``Engine``'s methods, its scheduler's and its model runner's
weight updaters, around a small model; without generating, which needs a GPU.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, HoldfastError, VersionRevoked
from holdfast.sync.adapters.by_name import require
from holdfast.sync.adapters.prefetch import Prefetch, Taker
from holdfast.sync.receiver import Receiver
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    import torch

    from holdfast.sync.protocol import Transport

BATCH_BYTES: Final = 512 << 20
"""Maximum bytes passed to the engine in one call, unless one tensor is larger."""
PAUSES: Final = ("abort", "retract", "in_place")
_REQUESTS: Final = "sglang.srt.managers.io_struct"
_METHOD: Final = "update_weights_from_tensor"


class SGLangReceiver:
    """Loads published versions into an SGLang ``Engine`` of this process.

    engine: has ``update_weights_from_tensor(named_tensors, load_format, flush_cache)``. transport: as for `Receiver`.
    device: where tensors are moved before the engine gets them; None leaves them in host memory. pause: how the engine
    is paused while it loads: ``"abort"``, ``"retract"`` or ``"in_place"``, as SGLang's ``PauseGenerationReqInput``
    says; None: it isn't. With ``"in_place"`` requests go on with the cache of the old weights, which is not flushed.
    After a failed load the engine stays paused until a version is loaded. Raises `ConfigError` for an invalid argument.
    """

    def __init__(
        self, engine: Any, transport: Transport, *, device: torch.device | str | None = None, pause: str | None = None
    ) -> None:
        method = getattr(engine, _METHOD, None)
        taken = inspect.signature(method).parameters if callable(method) else {}
        if not {"named_tensors", "flush_cache"} <= set(taken):
            raise ConfigError(
                f"engine has no {_METHOD}(named_tensors, ..., flush_cache); expected an sglang.Engine of 0.5 or later, "
                f"found {type(engine).__name__}",
                field="engine",
            )
        if pause is not None and pause not in PAUSES:
            raise ConfigError(f"pause must be one of {', '.join(PAUSES)} or None, not {pause!r}", field="pause")
        if pause is not None and not hasattr(getattr(engine, "tokenizer_manager", None), "pause_generation"):
            raise ConfigError("pause: this engine can't be paused; load between requests, without pause", field="pause")
        self._engine = engine
        self._pause = pause
        self._device = device
        self._receiver = Receiver(transport)
        self._taker = Taker(self._load, BATCH_BYTES)
        self._prefetch = Prefetch(self._receiver, self._taker, watch=False)
        self._loading = -1
        self._version: int | None = None
        self._dirty = False
        self._failed: int | None = None
        self._open = False

    @property
    def version(self) -> int | None:
        """Version that the engine holds, None before the first; incomplete while `dirty`."""
        return self._version

    @property
    def dirty(self) -> bool:
        """True if the engine may hold a mix of versions: don't generate."""
        return self._dirty

    @property
    def fetched(self) -> int | None:
        """The version that is fetched and verified, and not loaded yet; None if there is none."""
        return self._receiver.fetched

    def poll(self) -> int | None:
        """Return the newest version that is newer than what was fetched, as `Receiver.poll`: no I/O."""
        return self._receiver.poll()

    def prefetch(self, version: int | None = None, timeout: float = 600.0) -> None:
        """Have ``version`` (None: the newest) fetched on a thread, while the engine generates; doesn't wait.

        `receive` then only loads it. If fetching it fails, `receive` tries again, and raises that.
        """
        self._prefetch.begin(version, checked_seconds("timeout", timeout))

    def receive(self, version: int | None = None, timeout: float = 600.0) -> int:
        """Fetch a version, unless that was done ahead, then load it into the engine; returns its number.

        The engine is paused when all of it is fetched and verified. version: None stands for the newest, and after a
        failed load for the version that failed, if it is still kept. timeout: seconds for fetching; the engine's own
        time is not limited. Raises the errors of `Receiver.fetch`, and `HoldfastError` with the engine's message if it
        refuses.
        """
        timeout = checked_seconds("timeout", timeout)
        brought = self._prefetch.bring(version, timeout, failed=self._failed)
        try:
            return self._load_fetched(brought)
        except VersionRevoked:
            if self._dirty:
                raise
        finally:
            self._prefetch.let_go()
        # The publisher needed its memory, and the engine has nothing of it yet.
        return self._load_fetched(self._prefetch.bring(version, timeout))

    def _load_fetched(self, version: int) -> int:
        was_dirty = self._dirty
        if self._pause is not None:
            self._ask("pause_generation", "PauseGenerationReqInput", mode=self._pause)
        self._loading = version
        try:
            self._begin(version)
            try:
                self._taker.begin()
                self._prefetch.commit()
                self._taker.flush()
            finally:
                # Also after a failure: the engine refuses to open another session beside this one.
                self._end(version)
        except BaseException:
            if not self._dirty and self._pause is not None:
                self._ask("continue_generation", "ContinueGenerationReqInput")  # it has the old weights, all of them
            self._dirty = self._dirty or was_dirty
            raise
        told = {"new_version": str(version), "abort_all_requests": False}
        self._ask("update_weight_version", "UpdateWeightVersionReqInput", **told)
        self._version, self._dirty, self._failed = version, False, None
        if self._pause is not None:
            self._ask("continue_generation", "ContinueGenerationReqInput")
        return version

    def _begin(self, version: int) -> None:
        """Open a weight update session, if this SGLang has them; and close one that was left open by this receiver."""
        if self._open:
            self._end(version)
        if hasattr(self._engine, "begin_weight_update"):
            _check(self._engine.begin_weight_update(), f"version {version}: the engine opened no session")
            self._open = True

    def _end(self, version: int) -> None:
        if self._open:
            _check(self._engine.end_weight_update(), f"version {version}: the engine did not finish loading")
            self._open = False

    def _load(self, batch: list[tuple[str, torch.Tensor]], is_last: bool) -> None:  # noqa: FBT001
        version = self._loading
        self._dirty, self._failed = True, version
        if self._device is not None:
            batch = [(name, tensor.to(self._device)) for name, tensor in batch]
        # Flush the cache, which belongs to the old weights, once. Requests that are paused in place go on with it:
        # SGLang then fails the update, whose weights are loaded, because it can't flush.
        flush = is_last and self._pause != "in_place"
        answer = self._engine.update_weights_from_tensor(named_tensors=batch, flush_cache=flush)
        first = batch[0][0] if batch else "none"
        _check(answer, f"version {version}: the engine refused {len(batch)} tensors from {first} on", mixed=True)

    def _ask(self, method: str, request: str, **fields: Any) -> None:
        """Call a method that only the engine's tokenizer manager has, and wait for it."""
        manager = getattr(self._engine, "tokenizer_manager", None)
        if not hasattr(manager, method):
            return
        made = getattr(require(_REQUESTS, "sglang", why="this receiver"), request)(**fields)
        self._engine.loop.run_until_complete(getattr(manager, method)(made))

    def close(self) -> None:
        """Disconnect; idempotent. The engine is not closed."""
        self._prefetch.close()
        self._receiver.close()


def _check(answer: Any, told: str, *, mixed: bool = False) -> None:
    success, message = answer[:2] if isinstance(answer, tuple) else (answer is not False, "")
    if not success:
        hint = "; it may hold a mix of versions now: call receive() again, or restart it" if mixed else ""
        raise HoldfastError(f"{told}: {message}{hint}")
