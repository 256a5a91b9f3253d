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

With ``delta="sparse"`` the trainer sends what changed, and workers load it as vLLM's checkpoint patches; with
``prefetch=True`` workers fetch what `VllmTrainer.publish` publishes while they generate.

Guarantees: a version is completely fetched and verified, and its names and shapes compared with those of the version
loaded before, before vLLM's weights are changed: if any of that fails, the worker is unchanged, and the error is raised
there. (vLLM's own engines prepare the model in ``start_weight_update``, and lose it then.) A delta is loaded only on
exactly the version it is of.
Does not: keep the old weights while new ones are loaded: if vLLM's own loading fails, the engine is `dirty` until a
version is loaded completely, and ``version`` stays the last one that was; hash vLLM's own tensors; update a draft
model.

Runs in tests with the wheel of vLLM 0.33.0 on CPU: its factories, its worker's methods and its Llama, tied and
Qwen3-MoE models, without generating, which needs a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from holdfast.errors import ConfigError, StateMismatch, VersionRevoked
from holdfast.sync.adapters.by_name import require, transport_of
from holdfast.sync.adapters.deltas import DeltaSender, PreparedVersion, checked_delta, digest_in, is_delta, read
from holdfast.sync.adapters.host_share import HostShare
from holdfast.sync.adapters.prefetch import Prefetch, Taker
from holdfast.sync.publisher import Publisher, checked_flag
from holdfast.sync.receiver import Receiver
from holdfast.validation import checked_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from holdfast.sync.protocol import TensorInfo, Transport

BACKEND: Final = "holdfast"
_BASE: Final = "vllm.distributed.weight_transfer.base"
_FACTORY: Final = "vllm.distributed.weight_transfer.factory"
_RELOAD: Final = "vllm.model_executor.model_loader.reload"
_PATCHES: Final = "vllm.model_executor.model_loader.checkpoint_weight_patch"
BATCH_BYTES: Final = 512 << 20
"""Maximum bytes in host memory while a version is loaded, unless one tensor is larger."""
_log = logging.getLogger("holdfast.sync.adapters")


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
    delta: str | None = None,
    prefetch: bool = False,
    backend: str = BACKEND,
) -> Any:
    """Return vLLM's trainer engine, made by its factory; all trainer ranks call it. Registers the backend.

    Args:
        client: vLLM's ``VLLMWeightSyncClient``; used on rank 0.
        source: a ``WeightSource`` with ``iter_full``.
        rank: of this process among the trainers; the same as in torch's default group, if there is one.
        place, transport, options: how versions are transferred, as for verl's engine; workers are told.
        timeout_s: seconds for publishing a version, and for each worker to receive it, > 0.
        delta: ``"sparse"``: send the elements that changed since the version that the workers have, where that is less.
            Takes two copies of the rank's share in host memory. Workers need vLLM 0.33, and a model whose loader only
            copies.
        prefetch: workers fetch what `VllmTrainer.publish` publishes at once, while they generate.
    """
    register(backend)
    factory = require(_FACTORY, "vllm", why="this weight transfer engine")
    if backend not in _trainers:
        raise ConfigError("this vLLM has no WeightTransferTrainerFactory; use a Publisher", field="vllm")
    made = _trainers[backend].init_info_cls(
        rank=rank,
        transport=transport,
        place=place,
        options=dict(options or {}),
        timeout_s=timeout_s,
        delta=delta,
        prefetch=checked_flag("prefetch", prefetch),
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
            ("prefetch", bool, False),
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
            ("delta", "str | None", None),
            ("prefetch", bool, False),
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
    digest: str | None = None
    """Of its contents, if the trainer told; a delta is taken for exactly this base."""
    dirty = False
    """True if vLLM's loading failed half way: the weights are a mix until a version is loaded completely."""
    _receiver: Receiver | None = None
    _prefetch: Prefetch
    _taker: _Weights
    _failed: int | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Become a receiver; called once per worker. ``init_info``: transport, place, options, prefetch."""
        watch = checked_flag("prefetch", init_info.prefetch)
        self.shutdown()
        self._receiver = Receiver(transport_of(init_info.transport, init_info.place, init_info.options))
        expected = self._taker.expected if hasattr(self, "_taker") else None
        self._taker = _Weights()
        self._taker.expected = expected
        self._prefetch = Prefetch(self._receiver, self._taker, watch=watch)

    @property
    def fetched(self) -> int | None:
        """The version that is fetched and verified, and not loaded yet; None if there is none."""
        return None if self._receiver is None else self._receiver.fetched

    def prefetch(self, version: int | None = None, timeout_s: float = 600.0) -> None:
        """Have ``version`` (None: the newest) fetched while vLLM generates; doesn't wait.

        `receive_weights` of that version then only loads it. By ``collective_rpc`` for all workers.
        """
        if self._receiver is None:
            raise ConfigError("no transport yet: call init_weight_transfer_engine first")
        self._prefetch.begin(version, checked_seconds("timeout_s", timeout_s))

    def start_weight_update(self) -> None:
        """Do nothing yet: the model is changed when the version has arrived."""

    def receive_weights(self, update_info: Any, load_weights: Callable[..., object] | None = None) -> None:
        """Fetch ``update_info.version`` (None: the newest), unless that was done ahead, then load it into the model.

        Raises the errors of `Receiver.fetch`; `StateMismatch` for other names or shapes than before, or a delta of
        another base; and what vLLM's loading raises: then `dirty` is set, and None stands for the version that failed
        as well.
        """
        if self._receiver is None:
            raise ConfigError("no transport yet: call init_weight_transfer_engine first")
        timeout_s = checked_seconds("timeout_s", update_info.timeout_s)
        brought = self._prefetch.bring(update_info.version, timeout_s, failed=self._failed)
        taker = self._taker
        with contextlib.ExitStack() as stack:
            taker.start(lambda batch: self._load(batch, brought, stack, load_weights))
            self._commit(brought, timeout_s)
            if taker.packed:
                self._load_delta(brought, can=load_weights is None)
            else:
                taker.flush()
        self.version, self.dirty, self._failed = brought, False, None
        self.digest = digest_in(self._receiver.meta)

    def _commit(self, version: int, timeout_s: float) -> None:
        try:
            self._prefetch.commit()
        except VersionRevoked:
            if self._failed == version:
                raise  # some of it was loaded
            self._prefetch.bring(version, timeout_s)
            self._prefetch.commit()

    def _load(
        self,
        batch: list[tuple[str, torch.Tensor]],
        version: int,
        stack: contextlib.ExitStack,
        load_weights: Callable[..., object] | None,
    ) -> None:
        """Load some weights in the way and context in which vLLM reloads a checkpoint: code that makes tensors there
        depends on it. Entered with the first batch, left after the last.
        """
        self.dirty, self._failed = True, version
        if load_weights is not None:
            load_weights(batch)  # vLLM before 0.25 prepares and finishes the loading itself
            return
        if not self._taker.in_reload:
            why = "loading weights into vLLM's model"
            config, reload = require("vllm.config", "vllm", why=why), require(_RELOAD, "vllm", why=why)
            stack.enter_context(torch.device(self.device))
            stack.enter_context(config.set_current_vllm_config(self.vllm_config))
            reload.initialize_layerwise_reload(self.model)
            self._taker.in_reload = True
            # Also after a failure: what vLLM keeps for unfinished layers would count for the next version.
            stack.callback(reload.finalize_layerwise_reload, self.model, self.model_config)
        self.model.load_weights(iter(batch))

    def _load_delta(self, version: int, *, can: bool) -> None:
        """Write what changed into the model, through its loader: each rank of a tensor parallel group takes its part.

        Everything is checked before anything is written, also that vLLM holds exactly the base.
        """
        taker, receiver = self._taker, self._receiver
        base = None if self.dirty else self.digest
        patches = read(taker.packed, {} if receiver is None else receiver.meta, base)
        taker.packed = {}
        taker.compare({name: patch.shape for name, patch in patches.items()})
        if not can:
            raise ConfigError("this vLLM takes no deltas; let the trainer send whole versions", field="delta")
        made = require(_PATCHES, "vllm 0.33 or later", why="a delta")
        sparse = []
        for name, patch in patches.items():
            if not patch.record.head.changed:
                continue
            positions, values = patch.positions_and_values()
            if bool(torch.isnan(values).any()):
                raise StateMismatch(f"{name} becomes NaN in places, which vLLM's patches can't say; send it whole")
            given = {"values": values.to(self.device), "indices": positions.to(self.device)}
            sparse.append(made.CheckpointWeightPatch(name=name, shape=patch.shape, dtype=patch.dtype, **given))
        if sparse:
            self.dirty, self._failed = True, version
            # Positions ascend in a record: they are unique.
            made.load_checkpoint_weight_patches(self.model, sparse, validate_unique_indices=False)

    def finish_weight_update(self) -> None:
        """Do nothing: the model was ready when `receive_weights` returned."""

    def shutdown(self) -> None:
        """Leave; idempotent."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._prefetch.close()
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


class _Weights(Taker):
    """Where a worker's versions go: whole ones into the model batch by batch, deltas aside."""

    def __init__(self) -> None:
        super().__init__(self._pass, BATCH_BYTES)
        self.in_reload = False
        self.packed: dict[str, torch.Tensor] = {}
        self._load: Callable[[list[tuple[str, torch.Tensor]]], None] | None = None

    def select(self, published: Mapping[str, TensorInfo]) -> None:
        if not is_delta(published):
            super().select(published)

    def start(self, load: Callable[[list[tuple[str, torch.Tensor]]], None]) -> None:
        """Begin a commit. load: takes the batches of a whole version."""
        self.begin()
        self._load, self.packed, self.in_reload = load, {}, False

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        if is_delta((name,)):
            self.packed[name] = tensor
        else:
            super().__call__(name, tensor)

    def _pass(self, batch: list[tuple[str, torch.Tensor]], is_last: bool) -> None:  # noqa: FBT001
        del is_last
        if self._load is not None and batch:
            self._load(batch)


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
    _deltas: DeltaSender | None
    _share: HostShare
    _published: PreparedVersion | int | None = None
    """What was published and not loaded yet: a version's number, or what is needed to repeat it whole."""

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        """Make the publisher, on all ranks, and the workers' receivers. Called by vLLM's factory."""
        if source is None or not source.implements_iter_full():
            raise ConfigError("source must be a WeightSource that implements iter_full()", field="source")
        made: Any = cls
        is_sparse = checked_delta(init_info.delta)
        engine = made(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        transport = transport_of(init_info.transport, init_info.place, init_info.options)
        engine.open(transport, checked_seconds("timeout_s", init_info.timeout_s), deltas=is_sparse)
        if engine.is_sender:
            told = {"transport": init_info.transport, "place": init_info.place, "options": init_info.options}
            client.init_weight_transfer_engine({**told, "prefetch": init_info.prefetch})
        return engine

    def open(self, transport: Transport, timeout_s: float, *, deltas: bool) -> None:
        """Make the publisher; all ranks call it, once."""
        self._timeout_s, self._share = timeout_s, HostShare()
        self._deltas = DeltaSender() if deltas else None
        self._publisher = Publisher(transport, bypass_cpu=False)
        # Above the versions of earlier jobs; the ranks' clocks may differ.
        self._version = _from_first_rank(time.time_ns() // 1_000_000)

    def publish(self) -> int:
        """Publish the source's weights as the next version, without loading it: workers fetch it ahead.

        All ranks call it, while vLLM generates. `send_weights`, at a pause, then has it loaded. Returns its number.
        """
        version = self._version = self._version + 1
        if self._deltas is None:
            self._publisher.publish(self._share.copy(self._declared())[0], version, self._timeout_s)
            self._published = version
        else:
            # With one base only: what was published and not loaded is none.
            outgoing = self._deltas.prepare(self._declared(), self._deltas.digest)
            self._publisher.publish(outgoing.payload, version, self._timeout_s, meta=outgoing.meta)
            self._published = outgoing
        return version

    def send_weights(self) -> None:
        """Have the workers load what `publish` has published, or else publish first. All ranks call it.

        A delta that is not loaded, for whatever reason (a worker is new), is followed by the whole version.

        Raises what publishing raises, on all ranks; on rank 0 what the workers raise: their old weights are unchanged
        unless they are `dirty`. Call it again to repeat with a new version.
        """
        if self._published is None:
            self.publish()
        outgoing, self._published = self._published, None
        if self._deltas is None or not isinstance(outgoing, PreparedVersion):
            if self.is_sender:
                self._have_it_loaded()
            return
        self._deltas.forget()
        failure = self._tried()
        if failure is not None and outgoing.base is not None:
            _log.info("workers did not load a delta, and get the whole version: %s", failure)
            outgoing = outgoing.whole
            version = self._version = self._version + 1
            self._publisher.publish(outgoing.payload, version, self._timeout_s, meta=outgoing.meta)
            failure = self._tried()
        if failure is None:
            self._deltas.sent(outgoing)
        elif isinstance(failure, BaseException):
            raise failure

    def _tried(self) -> Exception | str | None:
        """Return why the workers did not load it, as an error on the sender; None if they did."""
        failure: Exception | None = None
        if self.is_sender:
            try:
                self._have_it_loaded()
            except Exception as error:  # noqa: BLE001 - whatever the client raises
                failure = error
        told: str | None = _from_first_rank(None if failure is None else str(failure) or type(failure).__name__)
        return told if failure is None else failure

    def _have_it_loaded(self) -> None:
        self.client.start_weight_update()
        try:
            self.client.update_weights({"version": self._version, "timeout_s": self._timeout_s})
        except Exception:
            # A worker that failed has left the update; the others are still in it, and would refuse the next one.
            with contextlib.suppress(Exception):
                self.client.finish_weight_update()
            raise
        self.client.finish_weight_update(weight_version=str(self._version))

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


def _from_first_rank(value: Any) -> Any:
    """Return what trainer rank 0 gave."""
    given = [value]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(given, src=0)
    return given[0]
