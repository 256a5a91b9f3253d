"""Quantizing on several ranks gives what quantizing the whole matrix in one place gives, whoever holds what.

Ranks are threads here, with links that are queues.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from _export_files import columns_of, cuts, everywhere, file_of, rows_of

from holdfast.boxes import Box, strides
from holdfast.coordination.board import LocalBoard
from holdfast.coordination.links import LinkLost as PeerLost
from holdfast.coordination.links import PeerLate
from holdfast.dtypes import ITEMSIZE
from holdfast.errors import ConfigError, DeadlineExceeded
from holdfast.export.fp8_grids import grids_of
from holdfast.export.plan import BUFFER_BYTES_MAX, ExportPlan, plan_export
from holdfast.export.rank_plan import SourceBox, SourceTensor
from holdfast.export.transfer import Exchange, fill_local
from holdfast.keymap.moves import KeyMapping, MappedTensor, Move

TIMEOUT_S = 120.0
BLOCK_BYTES = 256


class Wires:
    """What lies between all ranks."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int, int], queue.Queue[torch.Tensor]] = {}
        self.cut = threading.Event()

    def queue(self, sender: int, receiver: int, tag: int) -> queue.Queue[torch.Tensor]:
        """The same for both; a `defaultdict` gives two threads that come at once one each."""
        return self._queues.setdefault((sender, receiver, tag), queue.Queue())


class QueueLinks:
    def __init__(self, wires: Wires, rank: int) -> None:
        self._wires, self._rank = wires, rank

    def send(self, peer: int, memory: torch.Tensor, tag: int) -> Any:
        assert memory.dtype == torch.uint8
        self._wires.queue(self._rank, peer, tag).put(memory.clone())
        return Arrival(self._wires, None, memory)

    def receive(self, peer: int, memory: torch.Tensor, tag: int) -> Any:
        return Arrival(self._wires, self._wires.queue(peer, self._rank, tag), memory)

    def abort(self) -> None:
        self._wires.cut.set()


class Arrival:
    def __init__(self, wires: Wires, source: queue.Queue[torch.Tensor] | None, memory: torch.Tensor) -> None:
        self._wires, self._source, self._memory = wires, source, memory

    def wait(self, timeout_s: float) -> None:
        if self._source is None:
            return
        for _ in range(max(1, int(timeout_s / 0.02))):
            if self._wires.cut.is_set():
                raise PeerLost("cut")
            try:
                self._memory.copy_(self._source.get(timeout=0.02))
            except queue.Empty:
                continue
            return
        raise PeerLate("nothing came")


def on_ranks(world: int, act: Callable[[int, Exchange], Any]) -> list[Any]:
    """What ``act`` returns, or raises, on each rank."""
    wires: dict[str, Wires] = {}
    boards = LocalBoard.of_world(world)

    def made_by(rank: int) -> Exchange:
        return Exchange(
            boards[rank], lambda name, timeout_s: QueueLinks(wires.setdefault(name, Wires()), rank), grace_s=0.5
        )

    exchanges = [made_by(rank) for rank in range(world)]

    def run(rank: int) -> Any:
        try:
            return act(rank, exchanges[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        ends = list(pool.map(run, range(world)))
    for exchange in exchanges:
        exchange.close()
    return ends


# what it should be -------------------------------------------------------------------------------------------------


def quantized(matrix: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One block after the other."""
    most = torch.finfo(dtype).max
    rows, columns = (-(-size // step) for size, step in zip(matrix.shape, block, strict=True))
    scales = torch.ones(rows, columns)
    out = torch.empty(matrix.shape, dtype=dtype)
    for i in range(rows):
        for j in range(columns):
            cut = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            values = matrix[cut].float()
            scale = values.abs().max() / most
            if scale != 0:
                scales[i, j] = scale
            out[cut] = (values / scales[i, j]).clamp(-most, most).to(dtype)
    return out, scales


# states --------------------------------------------------------------------------------------------------------------


def tiles_of(shape: tuple[int, int], world: int) -> tuple[SourceBox, ...]:
    pieces = []
    for row, (a, b) in enumerate(cuts(shape[0], 2)):
        for column, (c, d) in enumerate(cuts(shape[1], 2)):
            pieces.append(SourceBox(Box((a, c), (b - a, d - c)), ((2 * row + column) % world,)))
    return tuple(pieces)


def identity(name: str, shape: tuple[int, int]) -> tuple[tuple[int, int], Move]:
    return shape, Move(name, (prod(shape),), 0, (1,), 0, (1,))


def transposed(name: str, shape: tuple[int, int]) -> tuple[tuple[int, int], Move]:
    rows, columns = shape
    return (columns, rows), Move(name, (columns, rows), 0, (rows, 1), 0, (1, columns))


Way = Callable[[str, tuple[int, int]], tuple[tuple[int, int], Move]]


@dataclass(frozen=True)
class Case:
    plan: ExportPlan
    data: bytes
    value: torch.Tensor


def case_of(
    pieces: tuple[SourceBox, ...],
    value: torch.Tensor,
    way: Way,
    *,
    world: int,
    dtype: torch.dtype = torch.float8_e4m3fn,
    block: tuple[int, int] = (16, 32),
) -> Case:
    source = SourceTensor("w", tuple(value.shape), str(value.dtype).removeprefix("torch."), pieces)
    shape, move = way("w", (value.shape[0], value.shape[1]))
    out = value if shape == tuple(value.shape) and way is identity else value.t()
    matrix, scales = quantized(out, dtype, block)
    kind = str(dtype).removeprefix("torch.")
    tensors = (
        MappedTensor("w", shape, kind, (move,)),
        MappedTensor("w_scale_inv", tuple(scales.shape), "float32", (move,), scale_of="w", block=block),
    )
    header = b"h" * 72
    data = header + b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in (scales, matrix))
    file = file_of(reversed(tensors), header=header)
    plan = plan_export(
        [file],
        KeyMapping(tensors, {}),
        {"w": source},
        world=world,
        bucket_bytes=600,
        block_bytes=BLOCK_BYTES,
    )
    return Case(plan, data, value)


def exported(case: Case) -> bytes:
    world = case.plan.world
    file = bytearray(len(case.data))

    def act(rank: int, exchange: Exchange) -> None:
        plan = case.plan.rank(rank)
        assert plan.memory_bytes <= plan.image_bytes + BUFFER_BYTES_MAX
        memories = []
        for memory in plan.memories:
            (top, left), (rows, columns) = memory.box
            held = case.value[top : top + rows, left : left + columns].contiguous()
            memories.append(held.view(-1).view(torch.uint8).clone())
        image = torch.zeros(plan.image_bytes, dtype=torch.uint8)
        scales = exchange.find_scales(plan, memories, image, key="a", timeout_s=TIMEOUT_S)
        fill_local(plan, memories, image, scales=scales)
        exchange.run(plan, memories, image, key="a", timeout_s=TIMEOUT_S, scales=scales)
        for part in plan.parts:
            file[part.offset : part.offset + part.size] = image[part.image_offset :][: part.size].numpy().tobytes()

    assert on_ranks(world, act) == [None] * world
    return bytes(file)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, columns)).to(dtype)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("held", [rows_of, columns_of, tiles_of, everywhere])
@pytest.mark.parametrize("way", [identity, transposed])
@pytest.mark.parametrize("shape", [(37, 70), (64, 64), (5, 200), (130, 3), (1, 40)])
def test_files_are_those_of_one_place(world: int, held: Any, way: Way, shape: tuple[int, int]) -> None:
    case = case_of(held(shape, world), matrix(*shape), way, world=world)
    assert exported(case) == case.data


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype, source: torch.dtype) -> None:
    value = matrix(40, 70, torch.float32).clamp(-1000, 1000).to(source)
    case = case_of(columns_of((40, 70), 2), value, identity, world=2, dtype=dtype)
    assert exported(case) == case.data


def test_blocks_of_zeros_and_of_what_is_no_number() -> None:
    value = matrix(48, 96)
    value[:16, :32] = 0.0
    value[20, 40] = float("inf")
    value[40, 90] = 1e-44
    value[32:, 64:] = torch.where(value[32:, 64:].abs() > 0, 1e-44, 0.0)
    case = case_of(rows_of((48, 96), 3), value, identity, world=3)
    made = exported(case)
    base = case.plan.files[0].tensors[0]
    scales = torch.frombuffer(bytearray(made[base.start : base.stop]), dtype=torch.float32).view(3, 3)
    assert scales[0, 0] == 1.0
    assert scales[1, 1] == float("inf")
    assert made == case.data


def test_a_large_matrix_is_read_in_pieces() -> None:
    value = matrix(300, 1100)
    case = case_of(columns_of((300, 1100), 2), value, identity, world=2, block=(128, 128))
    assert exported(case) == case.data


def test_a_rank_that_is_missing_ends_the_search_for_scales() -> None:
    case = case_of(columns_of((37, 70), 2), matrix(37, 70), identity, world=2)

    def act(rank: int, exchange: Exchange) -> None:
        if rank == 0:
            image = torch.zeros(case.plan.rank(0).image_bytes, dtype=torch.uint8)
            exchange.find_scales(case.plan.rank(0), [], image, key="a", timeout_s=0.3)

    missing, _ = on_ranks(2, act)
    assert isinstance(missing, DeadlineExceeded)
    assert missing.waited_for == "rank 1"


def test_scales_must_fit_their_matrix() -> None:
    move = Move("w", (64,), 0, (1,), 0, (1,))
    weight = MappedTensor("w", (8, 8), "float8_e4m3fn", (move,))
    for wrong, text in [
        (MappedTensor("s", (1, 1), "float32", (move,), scale_of="v", block=(8, 8)), "not there"),
        (MappedTensor("s", (1, 1), "float32", (move,), scale_of="w"), "no size"),
        (MappedTensor("s", (2, 1), "float32", (move,), scale_of="w", block=(8, 8)), r"\[1, 1\] blocks"),
    ]:
        with pytest.raises(ConfigError, match=text):
            grids_of((weight, wrong))
    plain = MappedTensor("w", (8, 8), "bfloat16", (move,))
    scale = MappedTensor("s", (1, 1), "float32", (move,), scale_of="w", block=(8, 8))
    with pytest.raises(ConfigError, match="8-bit"):
        grids_of((plain, scale))
    with pytest.raises(ConfigError, match="has two"):
        grids_of((weight, scale, MappedTensor("t", (1, 1), "float32", (move,), scale_of="w", block=(8, 8))))
    assert ITEMSIZE[weight.dtype] == 1
    assert strides((8, 8)) == (8, 1)
