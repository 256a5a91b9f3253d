"""vLLM: a weight transfer engine by the name of ``holdfast``, which each worker receives whole versions by.

    from holdfast.sync.adapters import vllm
    vllm.register()                                              # in every process of vLLM: a general plugin's job
    LLM(model, weight_transfer_config=WeightTransferConfig(backend="holdfast"))

    llm.init_weight_transfer_engine({"init_info": {"transport": "shared_memory", "place": "/dev/shm/run-7"}})
    publisher.publish(weights, 7)                                # in the trainer: a Publisher with bypass_cpu=False,
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": 7}})
    llm.finish_weight_update()

The names that are published are those of the Hugging Face checkpoint: vLLM's model loads them as it loads one from
disk, each worker takes its slices.

Guarantees: a version is received whole and verified, into host memory, before vLLM's weights are touched at all: one
that fails on its way leaves the worker as it was, and raises there. (vLLM's own engines prepare the model in
``start_weight_update``, and lose it then.)
Does not: keep the old weights while new ones are loaded: what vLLM's own loading breaks off is broken.

Written against vLLM 0.25 to 0.29 (``vllm/distributed/weight_transfer/base.py``), and what came before, which hands in
``load_weights``. Its parts are tested against a record of that interface; it has not been run in vLLM, which needs
what this machine has not.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast.arguments import checked_seconds
from holdfast.errors import ConfigError
from holdfast.sync.adapters.transports import require, transport_of
from holdfast.sync.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BACKEND: Final = "holdfast"
_BASE: Final = "vllm.distributed.weight_transfer.base"
_FACTORY: Final = "vllm.distributed.weight_transfer.factory"
_RELOAD: Final = "vllm.model_executor.model_loader.reload"


def register(backend: str = BACKEND) -> type:
    """Make the engine known to vLLM's ``WeightTransferEngineFactory`` as ``backend``; returns its class. Idempotent.

    Raises `ConfigError` where vLLM is not installed, or knows no weight transfer yet.
    """
    global _engine  # noqa: PLW0603 - one class a process, whatever it is registered as
    why = "this weight transfer engine"
    base, factory = require(_BASE, "vllm", why=why), require(_FACTORY, "vllm", why=why)
    if _engine is None:
        _engine = _engine_class(base)
    if backend not in _registered:  # vLLM may load plugins more than once
        try:
            factory.WeightTransferEngineFactory.register_engine(backend, _engine)
        except ValueError as error:
            raise ConfigError(f"vLLM has another engine by the name {backend!r}: {error}", field="backend") from error
        _registered.add(backend)
    return _engine


_engine: type | None = None
_registered: set[str] = set()


def _engine_class(base: Any) -> type:
    """The engine, on vLLM's own base classes."""
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


class VllmEngine:
    """What the engine does, without vLLM's base class, which gives it all that is declared here."""

    device: torch.device
    model: Any
    model_config: Any
    vllm_config: Any
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Become a receiver; once in the life of a worker. ``init_info``: transport, place, options."""
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = Receiver(transport_of(init_info.transport, init_info.place, init_info.options))

    def start_weight_update(self) -> None:
        """Nothing yet: the model is touched when the version is here."""

    def receive_weights(self, update_info: Any, load_weights: Callable[..., object] | None = None) -> None:
        """Receive ``update_info.version`` (None: the newest), then load it into the model."""
        if self._receiver is None:
            raise ConfigError("no transport yet: call init_weight_transfer_engine first")
        weights: list[tuple[str, torch.Tensor]] = []
        timeout_s = checked_seconds("timeout_s", update_info.timeout_s)
        self._receiver.receive(lambda name, tensor: weights.append((name, tensor)), update_info.version, timeout_s)
        if load_weights is not None:
            load_weights(weights)  # vLLM before 0.25 prepares the model, and ends its loading, by itself
        else:
            self._load(weights)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As vLLM loads a checkpoint again, and in its own surroundings: what makes new tensors there looks at them."""
        why = "loading weights into vLLM's model"
        config, reload = require("vllm.config", "vllm", why=why), require(_RELOAD, "vllm", why=why)
        with torch.device(self.device), config.set_current_vllm_config(self.vllm_config):
            reload.initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(iter(weights))
            finally:
                reload.finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing more: the model was ready when `receive_weights` returned."""

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
