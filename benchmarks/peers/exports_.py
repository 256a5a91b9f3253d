"""Ways to leave Hugging Face weights of a sharded model in bfloat16; all of them in one worker, one after the other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

import holdfast
from benchmarks.contender import Contender, Pending
from benchmarks.files import sync_below
from benchmarks.peers import raw
from benchmarks.peers.holdfast_ import Saving

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.state import Entry, Shared

DTYPE = torch.bfloat16
HF_NAMES = {
    "embed": "embed_tokens",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    **{name: f"self_attn.{name}_proj" for name in "qkvo"},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def hf_name(name: str) -> str:
    """What a Llama of transformers calls it."""
    return "model." + ".".join(HF_NAMES.get(part, part) for part in name.split("."))


def differing(path: Path, source: Shared, entries: list[Entry]) -> str | None:
    """The first tensor that isn't in the files of ``path`` as it should be; None if all are."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    for entry in entries:
        name = entry.name.removeprefix("model.")
        tensor = found.get(name, found.get(hf_name(name)))
        if tensor is None or not torch.equal(tensor, source.view(entry).to(DTYPE)):
            return name
    return None


class Raw(raw.Raw):
    """As many bytes as the export has."""

    part = DTYPE.itemsize / torch.float32.itemsize


class Managed(Contender):
    """An export that a manager makes beside training."""

    keeps = True

    def start(self) -> None:
        self._step = 0
        root = self.folder / "exporting"
        self._manager = holdfast.CheckpointManager(
            root / "checkpoints",
            {"model": self.held_state.objects["model"]},
            config=holdfast.CheckpointConfig(every=None, keep=None),
            exports=[holdfast.HFExport(root / "hf", every=1, latest_link=False, dtype=DTYPE)],
        )

    def save(self, path: Path) -> Pending:
        self._step += 1
        del path  # a manager names its own; see `hand_over`
        (handle,) = self._manager.step(self._step)
        return Saving(handle)

    def hand_over(self, pending: Pending, path: Path) -> None:
        assert isinstance(pending, Saving), "it comes from `save`"
        if self.rank == 0:
            os.rename(pending.handle.result(0), path)

    def before_update(self) -> None:
        self._manager.before_update()

    def close(self) -> None:
        self._manager.close(60.0)


class AtOnce(Contender):
    """An export that the caller waits for."""

    def save(self, path: Path) -> Pending:
        holdfast.export_hf({"model": self.held_state.objects["model"]}, path, dtype=DTYPE)
        return Pending()


class Consolidated(Contender):
    """`dcp.save` by its Hugging Face writer: each rank its shards, which rank 0 then puts together."""

    def save(self, path: Path) -> Pending:
        import torch.distributed.checkpoint as dcp

        weights = {name.removeprefix("model."): tensor.to(DTYPE) for name, tensor in self.held_state.flat.items()}
        writer = dcp.HuggingFaceStorageWriter(
            str(path), save_distributed=True, enable_consolidation=True, thread_count_consolidation=2
        )
        dcp.save(weights, storage_writer=writer)
        if self.rank == 0:
            sync_below(path)
        return Pending()


class Gathered(Contender):
    """All of it on rank 0, then `save_pretrained`."""

    def start(self) -> None:
        if self.rank == 0:
            from transformers import LlamaConfig, LlamaForCausalLM

            shapes = {entry.name.removeprefix("model."): entry.shape for entry in self.held_state.entries}
            vocab, hidden = shapes["embed.weight"]
            config = LlamaConfig(
                vocab_size=vocab,
                hidden_size=hidden,
                intermediate_size=shapes["layers.0.gate.weight"][0],
                num_hidden_layers=sum(name.endswith(".q.weight") for name in shapes),
                num_attention_heads=max(1, hidden // 64),
                tie_word_embeddings=True,
                dtype="bfloat16",
            )
            with torch.device("meta"):
                self._model: Any = LlamaForCausalLM(config)

    def save(self, path: Path) -> Pending:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self.held_state.objects["model"], options=options)
        if self.rank == 0:
            weights = {hf_name(name): whole.pop(name).to(DTYPE) for name in list(whole)}
            self._model.save_pretrained(path, state_dict=weights)
            sync_below(path)
        return Pending()
