"""The states that are saved and loaded: views into one shared file, so that a dozen contenders hold it once.

A layout says which tensor lies where; each worker maps the file and wraps every tensor in a storage of its own, so that
no contender sees that they are neighbours. With two ranks each tensor is split along its first dimension, as FSDP2
does; its shard is then a range of the same bytes, and what any world has loaded can be compared as one file.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch

ALIGN_BYTES = 64
PAGE_BYTES = 4096
LANGUAGE_MODELS = ("lm", "weights")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: float32, ``shape``, at ``offset`` of the file."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return 4 * _numel(self.shape)


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _place(shapes: list[tuple[str, tuple[int, ...]]]) -> list[Entry]:
    entries, offset = [], 0
    for name, shape in shapes:
        entries.append(Entry(name, shape, offset))
        offset += -(-4 * _numel(shape) // ALIGN_BYTES) * ALIGN_BYTES
    return entries


def lm_shapes(layers: int, hidden: int, vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    """The parameters of a Llama-like language model with tied embeddings."""
    inner = hidden * 8 // 3
    found: list[tuple[str, tuple[int, ...]]] = [("embed.weight", (vocab, hidden))]
    for layer in range(layers):
        found += [
            (f"layers.{layer}.{name}.weight", shape)
            for name, shape in {
                "q": (hidden, hidden),
                "k": (hidden, hidden),
                "v": (hidden, hidden),
                "o": (hidden, hidden),
                "gate": (inner, hidden),
                "up": (inner, hidden),
                "down": (hidden, inner),
                "norm1": (hidden,),
                "norm2": (hidden,),
            }.items()
        ]
    return [*found, ("norm.weight", (hidden,))]


def layout(spec: dict[str, Any]) -> list[Entry]:
    """Where everything lies, from ``{"kind": "lm", layers, hidden, vocab}`` or ``{"kind": "flat", count, each}``.

    ``weights`` are those of ``lm`` without the state of its optimizer.
    """
    if spec["kind"] in LANGUAGE_MODELS:
        parameters = lm_shapes(spec["layers"], spec["hidden"], spec["vocab"])
        shapes = [(f"model.{name}", shape) for name, shape in parameters]
        for name, shape in parameters if spec["kind"] == "lm" else ():
            state = f"optimizer.state.{name}"
            shapes += [(f"{state}.step", ()), (f"{state}.exp_avg", shape), (f"{state}.exp_avg_sq", shape)]
        return _place(shapes)
    return _place([(f"tensors.t{number}", (spec["each"] // 4,)) for number in range(spec["count"])])


def file_nbytes(entries: list[Entry]) -> int:
    last = entries[-1]
    return -(-(last.offset + last.nbytes) // PAGE_BYTES) * PAGE_BYTES


def payload_nbytes(entries: list[Entry]) -> int:
    return sum(entry.nbytes for entry in entries)


class Shared:
    """The mapped file. ``create`` makes it where it isn't there."""

    def __init__(self, path: str, nbytes: int, *, create: bool = False) -> None:
        self.path, self.nbytes = path, nbytes
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(descriptor, nbytes)
            self.map = mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def fill(self, entries: list[Entry]) -> None:
        """Random bytes everywhere, and each tensor's number in its first element: no two are alike."""
        generator = torch.Generator().manual_seed(0)
        block = torch.randn(4 << 20, generator=generator).view(torch.uint8)
        for start in range(0, self.nbytes, len(block)):
            part = self.bytes[start : start + len(block)]
            part.copy_(block[: len(part)])
        for number, entry in enumerate(entries):
            self.view(entry).view(-1)[0] = float(number)

    def view(self, entry: Entry, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or some of its rows, in a storage of its own."""
        shape, offset, count = entry.shape, entry.offset, _numel(entry.shape)
        if rows is not None:
            each = count // shape[0]
            offset, count, shape = offset + 4 * each * rows[0], each * rows[1], (rows[1], *shape[1:])
        return torch.frombuffer(self.map, dtype=torch.float32, offset=offset, count=count).view(shape)


def same(one: Shared, other: Shared, entries: list[Entry]) -> str | None:
    """The name of the first tensor that differs, None where all are equal."""
    if torch.equal(one.bytes.view(torch.int64), other.bytes.view(torch.int64)):
        return None  # gaps and all: the usual case, at the speed of memory
    for entry in entries:
        if not torch.equal(one.view(entry).view(torch.int32), other.view(entry).view(torch.int32)):
            return entry.name
    return None


class BenchState:
    """One rank's view of a shared file, in the two forms contenders take.

    flat: name → tensor (DTensor with two ranks): what peers are handed, ready, which is their best case. objects: a
    module and an optimizer, or a dict of tensors: what a user hands to Holdfast, which collects names itself.
    """

    def __init__(self, shared: Shared, spec: dict[str, Any], *, rank: int, world: int, mesh: Any = None) -> None:
        self.entries = layout(spec)
        self.shared, self.rank, self.world = shared, rank, world
        self.local: dict[str, torch.Tensor] = {}
        self.ranges: list[tuple[int, int]] = []
        """(offset, bytes) in the file that this rank holds."""
        self.flat: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            self._add(entry, mesh)
        is_model = spec["kind"] in LANGUAGE_MODELS
        self.objects = self._language_model() if is_model else {"tensors": self._tensors()}

    @property
    def nbytes(self) -> int:
        """What this rank holds."""
        return sum(size for _, size in self.ranges)

    def _add(self, entry: Entry, mesh: Any) -> None:
        if self.world == 1 or not entry.shape:
            self.local[entry.name] = self.flat[entry.name] = self.shared.view(entry)
            if self.rank == 0:
                self.ranges.append((entry.offset, entry.nbytes))
            return
        from torch.distributed.tensor import DTensor, Shard

        each = -(-entry.shape[0] // self.world)
        first = min(self.rank * each, entry.shape[0])
        rows = (first, min(each, entry.shape[0] - first))
        row_bytes = entry.nbytes // entry.shape[0]
        self.ranges.append((entry.offset + first * row_bytes, rows[1] * row_bytes))
        local = self.local[entry.name] = self.shared.view(entry, rows)
        stride = tuple(_numel(entry.shape[dim + 1 :]) for dim in range(len(entry.shape)))
        self.flat[entry.name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(entry.shape), stride=stride
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("tensors."): tensor for name, tensor in self.flat.items()}

    def _language_model(self) -> dict[str, Any]:
        model = torch.nn.Module()
        parameters: dict[str, torch.nn.Parameter] = {}
        for name, tensor in self.flat.items():
            if not name.startswith("model."):
                continue
            *path, leaf = name.removeprefix("model.").split(".")
            module = model
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            parameter = torch.nn.Parameter(tensor)
            module.register_parameter(leaf, parameter)
            parameters[name.removeprefix("model.")] = parameter
        if len(parameters) == len(self.flat):
            return {"model": model}
        optimizer = torch.optim.AdamW(parameters.values())
        for name, parameter in parameters.items():
            state = f"optimizer.state.{name}"
            optimizer.state[parameter] = {
                part: self.flat[f"{state}.{part}"] for part in ("step", "exp_avg", "exp_avg_sq")
            }
        return {"model": model, "optimizer": optimizer}
