"""Checksums of buckets: 64 bits that depend on every byte, its position, and the length.

There are two kinds. ``"xxh3"`` is xxh3_64 of the bytes, for host memory. ``"sums"`` is for the memory of any device:
the bytes as 32-bit words, each multiplied by a weight of its position, summed in wrapping 64-bit integers over each row
of 1 MiB; the sums of the rows and the length are hashed with xxh3_64. Integer results are equal everywhere, so a sender
on an accelerator and a receiver in host memory agree.

Guarantees: equal bytes have equal checksums on every device and torch version. One changed word in a row is always
detected; other changes (words swapped, several changed) are missed with a probability of at most 2**-32. On a device it
takes `SCRATCH_BYTES`, 2 MiB of weights, which are kept, and one transfer of 8 bytes per MiB to the host.
Assumes: nobody writes to the memory meanwhile; little-endian machines. It is no signature: with the weights known,
collisions can be made. Waits for the result, and with it for the current stream.
"""

from __future__ import annotations

import threading
from typing import Any, Final, Literal

import numpy as np
import torch
import xxhash

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError

Kind = Literal["xxh3", "sums"]

ROW_BYTES: Final = 1 << 20
SCRATCH_BYTES: Final = 16 << 20
_WORD_BYTES: Final = 4
_ROW_WORDS: Final = ROW_BYTES // _WORD_BYTES
_HOST_CHUNK_BYTES: Final = 32 << 20

_weights: dict[torch.device, torch.Tensor] = {}
_weights_lock = threading.Lock()


def kind_for(memory: torch.Tensor) -> Kind:
    """Return the cheapest kind for the location of ``memory``."""
    return "xxh3" if memory.device.type == "cpu" else "sums"


def checksum(memory: torch.Tensor, kind: Kind) -> int:
    """Return the checksum, 0 to 2**64-1, of a contiguous one-dimensional tensor of bytes on any device.

    Raises `ConfigError` for an unknown kind, which a message of another version may have.
    """
    if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
        raise AssertionError(f"checksum of {memory.dtype} {tuple(memory.shape)}, expected plain bytes")
    if kind == "xxh3":
        return _xxh3(memory)
    if kind == "sums":
        sums = torch.empty(-(-memory.numel() // ROW_BYTES), dtype=torch.int64, device=memory.device)
        row_sums(memory, ROW_BYTES, sums)
        return finish(sums.tolist(), memory.numel())
    raise ConfigError(
        f"checksums of kind {kind!r} are unknown here; run the same version of Holdfast on both sides", field="kind"
    )


def _xxh3(memory: torch.Tensor) -> int:
    state = xxhash.xxh3_64()
    step = memory.numel() if memory.device.type == "cpu" else _HOST_CHUNK_BYTES
    for start in range(0, memory.numel(), max(step, 1)):
        state.update(compat.host_memory(memory[start : start + step].cpu()))
    return state.intdigest()


# Weighted sums -------------------------------------------------------------------------------------------------


def finish(sums: list[int], nbytes: int) -> int:
    """Return the checksum of ``nbytes`` bytes whose rows of `ROW_BYTES` have these sums."""
    return xxhash.xxh3_64_intdigest(np.array([*sums, nbytes], dtype="<i8").tobytes())


def row_sums(memory: torch.Tensor, row_bytes: int, out: torch.Tensor) -> None:
    """Write into ``out`` the weighted sum of each row of ``row_bytes``, at most `ROW_BYTES`; doesn't wait for it.

    The last row may be short.
    """
    if not 0 < row_bytes <= ROW_BYTES or out.numel() != -(-memory.numel() // row_bytes):
        raise AssertionError(f"{out.numel()} rows of {row_bytes} bytes in {memory.numel()}")
    rows = memory.numel() // row_bytes
    at_once = max(1, SCRATCH_BYTES // 8 * _WORD_BYTES // row_bytes)
    with torch.no_grad():
        weights = _weights_on(memory.device)
        scratch: torch.Tensor | None = None
        for first in range(0, rows, at_once):
            last = min(first + at_once, rows)
            words = _words(memory[first * row_bytes : last * row_bytes], row_bytes)
            if scratch is None:
                scratch = torch.empty(words.shape, dtype=torch.int64, device=memory.device)
            # Not one multiplication of mixed dtypes: on the CPU that takes as much memory again.
            products = scratch[: last - first].copy_(words)
            products.mul_(weights[: words.shape[1]])
            torch.sum(products, dim=1, out=out[first:last])
        rest = memory[rows * row_bytes :]
        if rest.numel():
            words = _words(rest, rest.numel())
            out[rows:] = (words * weights[: words.shape[1]]).sum(dim=1)


def _words(memory: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """Return rows of bytes as rows of 32-bit words, padded with zeros to whole words."""
    short = -row_bytes % _WORD_BYTES
    if short:
        padded = memory.new_zeros(memory.numel() // row_bytes, row_bytes + short)
        padded[:, :row_bytes] = memory.view(-1, row_bytes)
        return padded.view(torch.int32)
    if memory.storage_offset() % _WORD_BYTES:
        memory = memory.clone()
    return memory.view(torch.int32).view(-1, row_bytes // _WORD_BYTES)


def _weights_on(device: torch.device) -> torch.Tensor:
    with _weights_lock:
        found = _weights.get(device)
        if found is None:
            found = _weights[device] = torch.from_numpy(_make_weights()).to(device)
        return found


def _make_weights() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return odd pseudorandom 64-bit numbers, equal everywhere: splitmix64 of 1, 2, 3, ..."""
    numbers = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: np.ndarray[Any, np.dtype[np.uint64]] = (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)
    return odd.view(np.int64)
