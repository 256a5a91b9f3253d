"""vLLM: a weight transfer backend named ``holdfast``: a worker engine that receives complete versions, and a trainer.

    from holdfast.sync.adapters import vllm
    vllm.register()                                              # in every process of vLLM, by a general plugin
    LLM(model, weight_transfer_config=WeightTransferConfig(backend="holdfast"))

    trainer = vllm.trainer_init(client, source, rank=rank, place="/dev/shm/run-7")     # on every trainer rank
    trainer.send_weights()                                       # the whole round: start, update, finish

`trainer_init` goes through vLLM's ``WeightTransferTrainerFactory``; ``client`` and ``source`` are vLLM's
``VLLMWeightSyncClient`` and ``WeightSource``. A trainer without vLLM publishes by a `Publisher` (``bypass_cpu=False``)
and calls ``init_weight_transfer_engine``, ``start_weight_update``, ``update_weights({"version": 7})`` and
``finish_weight_update`` itself. The published names are those of the Hugging Face checkpoint: vLLM's model loads them
like a checkpoint from disk, and each worker takes its slices.

Guarantees: a version is completely received and verified, into host memory, and its names and shapes compared with
those of the version loaded before, before vLLM's weights are changed: if any of that fails, the worker is unchanged,
and the error is raised there. (vLLM's own engines prepare the model in ``start_weight_update``, and lose it then.)
Does not: keep the old weights while new ones are loaded: if vLLM's own loading fails, the engine is `dirty` until a
version is loaded completely, and ``version`` stays the last one that was; update a draft model; send patches.

Runs in tests with the wheel of vLLM 0.33.0 on CPU: its factories, its worker's methods and its Llama, tied and
Qwen3-MoE models, without generating, which needs a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from holdfast.errors import CheckpointNotFound, ConfigError, StateMismatch
from holdfast.sync.adapters.by_name import require, transport_of
from holdfast.sync.adapters.verl import HostShare
from holdfast.sync.publisher import Publisher
from holdfast.sync.receiver import Receiver
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from holdfast.sync.protocol import Transport

BACKEND: Final = "holdfast"
_BASE: Final = "vllm.distributed.weight_transfer.base"
_FACTORY: Final = "vllm.distributed.weight_transfer.factory"
_RELOAD: Final = "vllm.model_executor.model_loader.reload"


def register(backend: str = BACKEND) -> type:
    """Register the engines with vLLM's factories as ``backend``; return the worker's engine class. Idempotent.

    Raises `ConfigError` if vLLM is not installed, or has no weight transfer yet.
    """
    global _engine  # noqa: PLW0603 - one class a process, whatever it is registered as
    why = "this weight transfer engine"
    base, factory = require(_BASE, "vllm", why=why), require(_FACTORY, "vllm", why=why)
    if _engine is None:
        _engine = _engine_class(base)
    if backend not in _registered:  # vLLM may load plugins more than once
        try:
            factory.WeightTransferEngineFactory.register_engine(backend, _engine)
            if hasattr(factory, "WeightTransferTrainerFactory"):
                _trainers[backend] = _trainer_class(base, backend)
                factory.WeightTransferTrainerFactory.register_engine(backend, _trainers[backend])
        except ValueError as error:
            raise ConfigError(f"vLLM has another engine by the name {backend!r}: {error}", field="backend") from error
        _registered.add(backend)
    return _engine


def trainer_init(
    client: Any,
    source: Any,
    *,
    rank: int,
    place: str,
    transport: str = "shared_memory",
    options: dict[str, Any] | None = None,
    timeout_s: float = 600.0,
    backend: str = BACKEND,
) -> Any:
    """Return vLLM's trainer engine, made by its factory; all trainer ranks call it. Registers the backend.

    Args:
        client: vLLM's ``VLLMWeightSyncClient``; used on rank 0.
        source: a ``WeightSource`` with ``iter_full``.
        rank: of this process among the trainers; the same as in torch's default group, if there is one.
        place, transport, options: how versions are transferred, as for verl's engine; workers are told.
        timeout_s: seconds for publishing a version, and for each worker to receive it, > 0.
    """
    register(backend)
    factory = require(_FACTORY, "vllm", why="this weight transfer engine")
    if backend not in _trainers:
        raise ConfigError("this vLLM has no WeightTransferTrainerFactory; use a Publisher", field="vllm")
    made = _trainers[backend].init_info_cls(
        rank=rank, transport=transport, place=place, options=dict(options or {}), timeout_s=timeout_s
    )
    return factory.WeightTransferTrainerFactory.trainer_init(made, client=client, source=source)


_trainers: dict[str, Any] = {}
_engine: type | None = None
_registered: set[str] = set()


def _engine_class(base: Any) -> type:
    """Return the engine class, derived from vLLM's own base classes."""
    init_info = dataclasses.make_dataclass(
        "HoldfastInitInfo",
        [
            ("transport", str, "shared_memory"),
            ("place", "str | None", None),
            ("options", dict, dataclasses.field(default_factory=dict)),
        ],
        bases=(base.WeightTransferInitInfo,),
    )
    update_info = dataclasses.make_dataclass(
        "HoldfastUpdateInfo",
        [("version", "int | None", None), ("timeout_s", float, 600.0)],
        bases=(base.WeightTransferUpdateInfo,),
    )
    members = {"init_info_cls": init_info, "update_info_cls": update_info, "__doc__": VllmEngine.__doc__}
    return type("HoldfastWeightTransferEngine", (VllmEngine, base.WeightTransferEngine), members)


def _trainer_class(base: Any, backend: str) -> type:
    """Return the trainer's engine class, derived from vLLM's own base classes."""
    init_info = dataclasses.make_dataclass(
        "HoldfastTrainerInitInfo",
        [
            ("transport", str, "shared_memory"),
            ("place", "str | None", None),
            ("options", dict, dataclasses.field(default_factory=dict)),
            ("timeout_s", float, 600.0),
        ],
        bases=(base.TrainerInitInfo,),
        namespace={"backend": backend},
    )
    members = {"init_info_cls": init_info, "__doc__": VllmTrainer.__doc__}
    return type("HoldfastTrainerWeightTransferEngine", (VllmTrainer, base.TrainerWeightTransferEngine), members)


class VllmEngine:
    """The worker's engine without vLLM's base class, which supplies everything declared here."""

    device: torch.device
    model: Any
    model_config: Any
    vllm_config: Any
    supports_draft_weight_update = False
    version: int | None = None
    """The version that was loaded last, completely; None before the first."""
    dirty = False
    """True if vLLM's loading failed half way: the weights are a mix until a version is loaded completely."""
    _receiver: Receiver | None = None
    _failed: int | None = None
    _shapes: dict[str, tuple[int, ...]] | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Become a receiver; called once per worker. ``init_info``: transport, place, options."""
        self.shutdown()
        self._receiver = Receiver(transport_of(init_info.transport, init_info.place, init_info.options))

    def start_weight_update(self) -> None:
        """Do nothing yet: the model is changed when the version has arrived."""

    def receive_weights(self, update_info: Any, load_weights: Callable[..., object] | None = None) -> None:
        """Receive ``update_info.version`` (None: the newest), then load it into the model.

        Raises the errors of `Receiver.receive`; `StateMismatch` for other names or shapes than before; and what vLLM's
        loading raises: then `dirty` is set, and None stands for the version that failed as well.
        """
        if self._receiver is None:
            raise ConfigError("no transport yet: call init_weight_transfer_engine first")
        timeout_s = checked_seconds("timeout_s", update_info.timeout_s)
        received, weights = self._received(self._receiver, update_info.version, timeout_s)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights}
        if self._shapes is not None:
            self._compare(shapes, self._shapes, received)
        self.dirty, self._failed = True, received
        if load_weights is not None:
            load_weights(weights)  # vLLM before 0.25 prepares and finishes the loading itself
        else:
            self._load(weights)
        self.version, self.dirty, self._failed, self._shapes = received, False, None, shapes

    def _received(
        self, receiver: Receiver, version: int | None, timeout_s: float
    ) -> tuple[int, list[tuple[str, torch.Tensor]]]:
        """Receive into host memory; with no version given the newest, which may be the one that failed to load."""
        weights: list[tuple[str, torch.Tensor]] = []

        def keep(name: str, tensor: torch.Tensor) -> None:
            weights.append((name, tensor))

        if version is None and self._failed is not None:
            with contextlib.suppress(CheckpointNotFound):
                return receiver.receive(keep, self._failed, timeout_s), weights
        return receiver.receive(keep, version, timeout_s), weights

    @staticmethod
    def _compare(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], version: int) -> None:
        missing, unexpected = sorted(expected.keys() - found), sorted(found.keys() - expected)
        wrong = [name for name in expected if name in found and found[name] != expected[name]]
        if missing or unexpected or wrong:
            example = f", e.g. {wrong[0]} is {found[wrong[0]]}, was {expected[wrong[0]]}" if wrong else ""
            raise StateMismatch(
                f"version {version} has other tensors than the version that vLLM loaded before: {len(missing)} missing "
                f"{missing[:3]}, {len(unexpected)} unexpected {unexpected[:3]}, {len(wrong)} of another shape{example}"
                "; nothing was loaded"
            )

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load weights in the way and context in which vLLM reloads a checkpoint: code that makes tensors there depends
        on it.
        """
        why = "loading weights into vLLM's model"
        config, reload = require("vllm.config", "vllm", why=why), require(_RELOAD, "vllm", why=why)
        with torch.device(self.device), config.set_current_vllm_config(self.vllm_config):
            reload.initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(iter(weights))
            finally:
                # Also after a failure: what vLLM keeps for unfinished layers would count for the next version.
                reload.finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Do nothing: the model was ready when `receive_weights` returned."""

    def shutdown(self) -> None:
        """Leave; idempotent."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterable[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """Publish ``iterator``: ``trainer_args`` has a ``publisher``, a ``version``, and may have a ``timeout_s``."""
        args = trainer_args if isinstance(trainer_args, dict) else vars(trainer_args)
        try:
            publisher, version = args["publisher"], args["version"]
        except KeyError as error:
            raise ConfigError(f"trainer_args has no {error}; expected a publisher and a version") from error
        publisher.publish(iterator, version, timeout=args.get("timeout_s", 600.0))


class VllmTrainer:
    """The trainer's engine without vLLM's base class, which supplies everything declared here.

    Every rank makes one, and calls `send_weights`; each sends a share of the tensors that it owns.
    """

    client: Any
    source: Any
    is_sender: bool
    rank: int
    _publisher: Publisher
    _timeout_s: float
    _version: int
    _share: HostShare

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        """Make the publisher, on all ranks, and the workers' receivers. Called by vLLM's factory."""
        if source is None or not source.implements_iter_full():
            raise ConfigError("source must be a WeightSource that implements iter_full()", field="source")
        made: Any = cls
        engine = made(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        transport = transport_of(init_info.transport, init_info.place, init_info.options)
        engine.open(transport, checked_seconds("timeout_s", init_info.timeout_s))
        if engine.is_sender:
            told = {"transport": init_info.transport, "place": init_info.place, "options": init_info.options}
            client.init_weight_transfer_engine(told)
        return engine

    def open(self, transport: Transport, timeout_s: float) -> None:
        """Make the publisher; all ranks call it, once."""
        self._timeout_s, self._share = timeout_s, HostShare()
        self._publisher = Publisher(transport, bypass_cpu=False)
        # Above the versions of earlier jobs; the ranks' clocks may differ.
        begin = [time.time_ns() // 1_000_000]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(begin, src=0)
        self._version = begin[0]

    def send_weights(self) -> None:
        """Publish the source's weights as the next version, then have the workers load it. All ranks call it.

        Raises what publishing raises, on all ranks; on rank 0 what the workers raise: their old weights are unchanged
        unless they are `dirty`. Call it again to repeat with a new version.
        """
        version = self._version = self._version + 1
        self._publisher.publish(self._share.copy(self._declared())[0], version, self._timeout_s)
        if not self.is_sender:
            return
        self.client.start_weight_update()
        self.client.update_weights({"version": version, "timeout_s": self._timeout_s})
        self.client.finish_weight_update(weight_version=str(version))

    def _declared(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the source's tensors, each checked against its metadata."""
        expected = {meta.name: (meta.dtype, tuple(meta.shape)) for meta in self.source.metadata}
        owned = set(self.source.owned_names(self.rank))
        if owned != set(expected):
            raise ConfigError("every trainer rank must own every parameter of the source", field="source")
        for name, tensor in self.source.iter_full():
            if expected.pop(name, None) != (tensor.dtype, tuple(tensor.shape)):
                raise ConfigError(
                    f"source yields {name} as {tensor.dtype} {tuple(tensor.shape)}, unlike its metadata", field="source"
                )
            yield name, tensor
        if expected:
            raise ConfigError(f"source yields {len(expected)} tensors too few, e.g. {min(expected)}", field="source")

    def shutdown(self) -> None:
        """Close the publisher; idempotent."""
        self._publisher.close()
