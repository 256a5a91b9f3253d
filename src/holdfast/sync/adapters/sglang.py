"""SGLang: receive versions beside an engine, and hand each to it by ``update_weights_from_tensor``.

    engine = sglang.Engine(model_path=..., tp_size=2)
    worker = SGLangReceiver(engine, holdfast.sync.SharedMemoryTransport("/dev/shm/run-7"), device="cuda")
    version = worker.receive()

The names that are published are those of the Hugging Face checkpoint, which SGLang's models load.

Guarantees: a version is received whole and verified, into host memory, before the engine is given any of it.
Assumes: no requests are running, or may see weights of two versions: the engine takes a version in several calls. If
one of them fails, the engine holds a mix, as it says itself: `SGLangReceiver.dirty` until a later version is in.
Does not: use ``update_weights_from_distributed``, where trainer and engine share a group of NCCL: no transport of
Holdfast's would be part of it.

Written against ``sglang.srt.entrypoints.engine.Engine`` as of SGLang 0.5. Its parts are tested against a record of that
method's signature; it has not been run with an engine, which needs a GPU.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import ConfigError, HoldfastError
from holdfast.sync.receiver import Receiver

if TYPE_CHECKING:
    import torch

    from holdfast.sync.seam import Transport

BATCH_BYTES: Final = 512 << 20
"""What the engine is given in one call, unless one tensor is larger."""
_METHOD: Final = "update_weights_from_tensor"


class SGLangReceiver:
    """Brings published versions into an SGLang ``Engine`` of this process.

    engine: has ``update_weights_from_tensor(named_tensors, load_format, flush_cache)``. transport: as for `Receiver`.
    device: where tensors are moved to before the engine gets them; None leaves them in host memory.
    Raises `ConfigError` for an engine that can't be used.
    """

    def __init__(self, engine: Any, transport: Transport, *, device: torch.device | str | None = None) -> None:
        method = getattr(engine, _METHOD, None)
        taken = inspect.signature(method).parameters if callable(method) else {}
        if not {"named_tensors", "flush_cache"} <= set(taken):
            raise ConfigError(
                f"engine has no {_METHOD}(named_tensors, ..., flush_cache); expected an sglang.Engine of 0.5 or later, "
                f"found {type(engine).__name__}",
                field="engine",
            )
        self._engine = engine
        self._device = device
        self._receiver = Receiver(transport)
        self._version: int | None = None
        self._dirty = False

    @property
    def version(self) -> int | None:
        """The version that the engine holds, None before the first; while `dirty` it is not there whole."""
        return self._version

    @property
    def dirty(self) -> bool:
        """Whether the engine may hold a mix of versions: don't generate."""
        return self._dirty

    def receive(self, version: int | None = None, timeout: float = 600.0) -> int:
        """Receive a version as `Receiver.receive` does, and have the engine load it; returns its number.

        timeout: seconds for receiving; the engine takes what it takes. Raises what that raises, and `HoldfastError`
        with the engine's words where it refuses.
        """
        weights: list[tuple[str, torch.Tensor]] = []
        received = self._receiver.receive(lambda name, tensor: weights.append((name, tensor)), version, timeout)
        self._dirty = True
        while weights:
            batch = _next_batch(weights)
            if self._device is not None:
                batch = [(name, tensor.to(self._device)) for name, tensor in batch]
            # What it has cached belongs to the old weights; once is enough.
            answer = self._engine.update_weights_from_tensor(named_tensors=batch, flush_cache=not weights)
            success, message = answer if isinstance(answer, tuple) else (answer is not False, "")
            if not success:
                raise HoldfastError(
                    f"version {received}: the engine refused {len(batch)} tensors from {batch[0][0]} on: {message}; it "
                    f"may hold a mix of versions now: receive(version={received}) again, or start it anew"
                )
        self._version, self._dirty = received, False
        return received

    def close(self) -> None:
        """Leave; idempotent. The engine stays."""
        self._receiver.close()


def _next_batch(weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Takes the first of ``weights`` away, as many as `BATCH_BYTES` allow, and at least one."""
    nbytes, count = 0, 0
    for _, tensor in weights:
        nbytes += tensor.numel() * tensor.element_size()
        if count and nbytes > BATCH_BYTES:
            break
        count += 1
    batch = weights[:count]
    del weights[:count]
    return batch
