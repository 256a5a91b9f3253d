"""Saved by one world and parallelism, loaded by another, both directions with stock DCP, bit for bit.

Worlds of two, four, one, three and two ranks follow one another; each reads what those before it have written.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import at_world_end, in_world, run_job
from pipeline import inside_pipeline, pipeline_state, stock_pipeline_form
from worlds import (
    Parallelize,
    assert_same,
    ddp,
    fsdp,
    fsdp_tp,
    hsdp,
    inside,
    leaves_of,
    make_state,
    scribble,
    single,
    stock_form,
    tensor_parallel,
)

import holdfast

TAG = "saved"
FOUR_KINDS = {"fsdp": fsdp, "hsdp": hsdp, "tp": tensor_parallel, "fsdp-tp": fsdp_tp, "ddp": ddp}


def write_both(directory: Path, state: dict[str, Any]) -> None:
    """``<directory>`` by Holdfast, ``<directory>-stock`` by stock DCP."""
    with_rng = {**state, "rng": holdfast.RNG()}
    before = {name: value for name, value in inside(state).items() if not isinstance(value, torch.Tensor)}
    checkpoint = holdfast.save(with_rng, directory, step=3, timeout=60)
    assert checkpoint.step == 3
    assert {name: value for name, value in inside(state).items() if name in before} == before
    dcp.save(stock_form(state), checkpoint_id=f"{directory}-stock")


def read_both(directory: Path, how: Parallelize, *, fresh: bool = False) -> None:
    """Holdfast's directory by Holdfast and by stock DCP; stock DCP's by Holdfast; all into state laid out by ``how``.

    With ``fresh`` the optimizer has never been stepped, so that its state has to be made.
    """
    expected, reused = states_of(how)
    wanted = inside(expected)
    what = f"{directory.name} as {how.__name__}"
    for source, writer in ((directory, "Holdfast"), (Path(f"{directory}-stock"), "stock")):
        state = make_state(how, "other", fresh=True) if fresh else dict(reused)
        scribble(state)
        addresses = parameter_addresses(state)
        if writer == "stock":
            del state["lr_scheduler"]
            wanted = {name: value for name, value in wanted.items() if not name.startswith("lr_scheduler")}
        else:
            state["rng"] = holdfast.RNG()
        holdfast.load(state, source, timeout=60)
        assert_same(inside(state), wanted, f"{what}, {writer} to Holdfast")
        assert parameter_addresses(state) == addresses, f"{what}: parameters moved"
    scribble(reused)
    stock = stock_form(reused)
    dcp.load(stock, checkpoint_id=directory)
    assert_same(dict(leaves_of(stock)), dict(leaves_of(stock_form(expected))), f"{what}, Holdfast to stock")


@cache
def states_of(how: Parallelize) -> tuple[dict[str, Any], dict[str, Any]]:
    """What everybody saves, laid out by ``how``, and another such state to load into."""
    return make_state(how, TAG), make_state(how, "other")


at_world_end.append(states_of.cache_clear)


def parameter_addresses(state: dict[str, Any]) -> dict[str, int]:
    return {name: value.data_ptr() for name, value in inside(state).items() if name.startswith("parameter")}


def write_pipeline(directory: Path, state: dict[str, Any]) -> None:
    holdfast.save(state, directory, timeout=60)
    dcp.save(stock_pipeline_form(state), checkpoint_id=f"{directory}-stock")


def read_pipeline(directory: Path, stages: list[int], *, fresh: bool = False, together: bool = False) -> None:
    what = f"{directory.name} by a rank with stages {stages}"
    expected = pipeline_state(stages, TAG, together=together)
    for source in (directory, Path(f"{directory}-stock")):
        state = pipeline_state(stages, "other", fresh=fresh, together=together)
        holdfast.load(state, source, timeout=60)
        assert_same(inside_pipeline(state), inside_pipeline(expected), what)
    if not together:
        stock = stock_pipeline_form(pipeline_state(stages, "other"))
        dcp.load(stock, checkpoint_id=directory)
        assert_same(dict(leaves_of(stock)), dict(leaves_of(stock_pipeline_form(expected))), what)


# jobs ------------------------------------------------------------------------------------------------------------


def two_write(place: str) -> None:
    write_pipeline(Path(place) / "2-pipeline", pipeline_state([dist.get_rank()], TAG))
    write_both(Path(place) / "2-fsdp", states_of(fsdp)[0])
    write_both(Path(place) / "2-tp", states_of(tensor_parallel)[0])


def four_read_and_write(place: str) -> None:
    root = Path(place)
    for name in ("2-fsdp", "2-tp"):
        read_both(root / name, fsdp, fresh=True)
        read_both(root / name, fsdp_tp)
    for name, how in FOUR_KINDS.items():
        write_both(root / f"4-{name}", states_of(how)[0])
        read_both(root / f"4-{name}", how)
    read_both(root / "4-fsdp-tp", hsdp)
    read_both(root / "4-hsdp", tensor_parallel)


def one_reads_and_writes(place: str) -> None:
    root = Path(place)
    for name in ("2-fsdp", "2-tp", *(f"4-{name}" for name in FOUR_KINDS)):
        read_both(root / name, single, fresh=name == "4-fsdp")
    read_pipeline(root / "2-pipeline", [0, 1])
    read_pipeline(root / "2-pipeline", [0, 1], fresh=True, together=True)
    write_pipeline(root / "1-pipeline", pipeline_state([0, 1], TAG))
    write_both(root / "1", states_of(single)[0])
    read_both(root / "1", single)


def three_read(place: str) -> None:
    root = Path(place)
    for name in ("1", "4-fsdp", "4-fsdp-tp", "4-hsdp"):
        read_both(root / name, fsdp, fresh=name == "1")


def two_read(place: str) -> None:
    root = Path(place)
    for name in ("1", *(f"4-{name}" for name in FOUR_KINDS)):
        read_both(root / name, fsdp)
        read_both(root / name, tensor_parallel)
    read_both(root / "4-fsdp-tp", ddp)
    for name in ("1-pipeline", "2-pipeline"):
        read_pipeline(root / name, [dist.get_rank()])
        read_pipeline(root / name, [1 - dist.get_rank()], fresh=True)


def all_worlds(place: str) -> None:
    for size, work in (
        (2, two_write),
        (4, four_read_and_write),
        (1, one_reads_and_writes),
        (3, three_read),
        (2, two_read),
    ):
        in_world(size, work, place)


def test_every_world_reads_what_the_others_wrote(tmp_path: Path) -> None:
    run_job(all_worlds, nproc=4, args=[tmp_path])
