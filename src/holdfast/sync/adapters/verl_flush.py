"""The flushes of verl's wire format ``delta_flush``: what its rollout adapters pass on to SGLang and vLLM.

A flush has a JSON manifest (``__delta_spec__``), values of one dtype (``__values__``), and, unless it is whole weights
(the encoding ``dense``), int32 positions as bytes (``__positions__``). A version is one or more flushes, either all
dense or all of positions. Their consumers are ``verl.workers.rollout.sglang_rollout.delta_loader.apply_delta``, named
in ``rollout.engine_kwargs.sglang.custom_weight_loader``, and the weight transfer backend ``verl_delta_ipc``, named in
``rollout.engine_kwargs.vllm.weight_transfer_config``.

Guarantees: what these consumers can't say, values that become NaN or change in integers, is sent dense.
Does not: make their loading atomic: it is in place.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch

from holdfast.sync.adapters.by_name import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from holdfast.sync.adapters.deltas import Patch

    Flush = tuple[list[tuple[str, torch.Tensor]], bool]

_MOST: Final = 64 << 20
"""Elements of one entry: consumers make an int64 index of it."""


def flushes_of(
    weights: Mapping[str, torch.Tensor], patches: Mapping[str, Patch] | None, bucket_bytes: int
) -> Iterator[Flush]:
    """Yield the flushes of a version; with ``patches`` of what changed, if these can say it; none if nothing did."""
    entries = None if patches is None else _changes(patches)
    if entries is None:
        entries = [(name, tensor, None, tensor.reshape(-1)) for name, tensor in weights.items()]
    pending: Flush | None = None
    for group in _grouped(entries, bucket_bytes):
        if pending is not None:
            yield pending
        pending = (_flush(group), False)
    if pending is not None:
        yield pending[0], True


_Entry = tuple[str, Any, "torch.Tensor | None", torch.Tensor]
"""Name, something of its shape, positions, values."""


def _changes(patches: Mapping[str, Patch]) -> list[_Entry] | None:
    """Return what changed; None if that can't be said."""
    found: list[_Entry] = []
    for name, patch in patches.items():
        if not patch.record.head.changed:
            continue
        positions, values = patch.positions_and_values()
        if not patch.dtype.is_floating_point or bool(torch.isnan(values).any()):
            return None
        for start in range(0, len(values), _MOST):
            cut = slice(start, start + _MOST)
            found.append((name, patch, positions[cut], values[cut]))
    return found


def _grouped(entries: list[_Entry], bucket_bytes: int) -> Iterator[list[_Entry]]:
    """Yield entries of one dtype, up to the size of a bucket, and at least one."""
    by_dtype: dict[torch.dtype, list[_Entry]] = {}
    for entry in entries:
        by_dtype.setdefault(entry[3].dtype, []).append(entry)
    for some in by_dtype.values():
        group: list[_Entry] = []
        nbytes = 0
        for entry in some:
            _, _, positions, values = entry
            more = values.nbytes + (0 if positions is None else positions.nbytes)
            if group and nbytes + more > bucket_bytes:
                yield group
                group, nbytes = [], 0
            group.append(entry)
            nbytes += more
        yield group


def _flush(group: list[_Entry]) -> list[tuple[str, torch.Tensor]]:
    encode = require("verl.checkpoint_engine.delta_sync.encode", "verl 0.9", why="a delta for verl")
    params, value_start, position_start = [], 0, 0
    for name, shaped, positions, values in group:
        value_end = value_start + values.numel()
        position_end = position_start + (0 if positions is None else positions.nbytes)
        params.append(
            {
                "name": name,
                "dtype": str(values.dtype).removeprefix("torch."),
                "shape": list(shaped.shape),
                "pos_start": position_start,
                "pos_end": position_end,
                "pos_width": 4,
                "val_start": value_start,
                "val_end": value_end,
            }
        )
        value_start, position_start = value_end, position_end
    moved = _on_device(torch.cat([values for _, _, _, values in group]))
    positions_of = [positions for _, _, positions, _ in group if positions is not None]
    is_dense = not positions_of
    places = (
        _on_device(torch.cat(positions_of).view(torch.uint8)) if positions_of else torch.empty(0, dtype=torch.uint8)
    )
    spec = {
        "encoding": "dense" if is_dense else "indices",
        "params": params,
        "checksum": int(encode.checksum(places, moved)),
    }
    told = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
    flush = [("__delta_spec__", _on_device(told)), ("__values__", moved)]
    return flush if is_dense else [*flush, ("__positions__", places)]


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return it where verl's consumers want it: on the accelerator, if there is one."""
    return tensor.to(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else tensor
