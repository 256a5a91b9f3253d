"""Runs a behaviour of stock DCP in every combination of who writes and who reads a checkpoint.

A behaviour is a function of a `Way`: it saves and loads through it and asserts what a user of stock DCP relies on. Its
combinations are those of ``WRITERS`` and ``READERS``: stock's ``FileSystemWriter`` and ``FileSystemReader``,
`holdfast.dcp.Writer` and ``Reader`` in their place, and, where no part of DCP is called by the behaviour itself,
`holdfast.save` and `holdfast.load`. Stock with stock is the reference: what fails there is no behaviour of DCP.

All behaviours of a module that need one world size run in one job, one after the other, and each combination is a test
of its own. A combination that fails takes its world with it: the next one gets a new process group.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import _module, at_world_end, in_world, run_job
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.tensor import _redistribute, debug
from worlds import assert_same, leaves_of

import holdfast
from holdfast.dcp import Reader, Writer

STOCK, BEHIND, OWN = "stock", "dcp", "own"
"""Stock DCP alone; Holdfast behind ``dcp.save`` and ``dcp.load``; `holdfast.save` and `holdfast.load`."""
FOUR = [(writer, reader) for writer in (STOCK, BEHIND) for reader in (STOCK, BEHIND)]
NINE = [(writer, reader) for writer in (STOCK, BEHIND, OWN) for reader in (STOCK, BEHIND, OWN)]
FIVE = [*FOUR, (OWN, OWN)]
"""For what differs in the state alone: that each writer and each reader knows it is enough."""
FULL = {(STOCK, STOCK), (BEHIND, OWN), (OWN, BEHIND)}
"""In the full form only: the reference, and writers of one format with one another's readers."""
TOGETHER_S = 60.0
"""How long a rank waits for the others at the end of a combination: longer than a collective."""
TIMEOUT_S = 40.0
JOB_S = 100.0
"""Less than a test may take."""
CASES_A_JOB = 60


@dataclass
class Way:
    """How one combination saves and loads.

    What one writer has written is written once for all readers, so what a behaviour saves must not differ from one run
    to the next; with ``each=True`` it is written every time.
    """

    writer: str
    reader: str
    place: Path
    written: set[Path] = field(default_factory=set)

    def path(self, name: str = "a") -> Path:
        """Where this way's writer puts the checkpoint ``name``."""
        return self.place / f"{name}-by-{self.writer}"

    def own_path(self, name: str) -> Path:
        """A place that no other combination uses."""
        return self.place / f"{name}-{self.writer}-{self.reader}"

    def storage_writer(self, path: Path, **stock: Any) -> Any:
        return FileSystemWriter(path, **stock) if self.writer == STOCK else Writer(path)

    def storage_reader(self, path: Path) -> Any:
        return FileSystemReader(path) if self.reader == STOCK else Reader(path)

    def save(self, state: dict[str, Any], name: str = "a", *, each: bool = False, **options: Any) -> Path:
        """Save ``state`` as the checkpoint ``name``; options are those of ``dcp.save``."""
        path = self.own_path(name) if each else self.path(name)
        if path in self.written:
            return path
        self.written.add(path)
        if self.writer == OWN:
            holdfast.save(state, path, timeout=TIMEOUT_S, **options)
        else:
            dcp.save(state, storage_writer=self.storage_writer(path), **options)
        return path

    def load(
        self, state: dict[str, Any], name: str | Path = "a", *, partial: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Load the checkpoint ``name`` into ``state``; options are those of ``dcp.load``.

        partial: the checkpoint holds more than ``state`` below one of its keys, which stock DCP lets pass.
        """
        path = name if isinstance(name, Path) else self.path(name)
        if self.reader == OWN:
            holdfast.load(state, path, timeout=TIMEOUT_S, strict=not partial, **options)
        else:
            dcp.load(state, storage_reader=self.storage_reader(path), **options)
        return state


@dataclass(frozen=True)
class Behaviour:
    function: Callable[[Way], None]
    world: int
    combinations: Sequence[tuple[str, str]]


Case = tuple[str, str, str]
"""The name of a behaviour, who writes, who reads."""


class Behaviours:
    """The behaviours of one test module."""

    def __init__(self) -> None:
        self._known: dict[str, Behaviour] = {}

    def __call__(
        self,
        *,
        world: int,
        own: bool = True,
        combinations: Sequence[tuple[str, str]] | None = None,
        name: str | None = None,
    ) -> Callable[[Callable[[Way], None]], Callable[[Way], None]]:
        """Register a behaviour that runs on ``world`` ranks, without a process group if that is one.

        own: it can be said with `holdfast.save` and `holdfast.load`, too. name: if not the function's.
        """

        def register(function: Callable[[Way], None]) -> Callable[[Way], None]:
            known_as = name or function.__name__
            assert known_as not in self._known
            self._known[known_as] = Behaviour(function, world, combinations or (NINE if own else FOUR))
            return function

        return register

    def every_case(self) -> pytest.MarkDecorator:
        """Parametrize a test by all cases; it has to be given the fixture that `outcomes` makes."""
        cases = [
            pytest.param((name, *pair), id="{}-{}-to-{}".format(name, *pair), marks=[pytest.mark.slow] * (pair in FULL))
            for name, behaviour in self._known.items()
            for pair in behaviour.combinations
        ]
        return pytest.mark.parametrize("case", cases)

    def outcomes(self, request: pytest.FixtureRequest, place: Path) -> Outcomes:
        """What becomes of the cases that were selected in ``request``'s module."""
        chosen = [item for item in request.session.items if getattr(item, "module", None) is request.module]
        cases = [item.callspec.params["case"] for item in chosen if isinstance(item, pytest.Function)]
        return Outcomes(self, request.module.__file__, place, cases)

    def world_of(self, case: Case) -> int:
        return self._known[case[0]].world

    def check(self, case: Case, outcomes: Outcomes) -> None:
        """Fail with what went wrong in ``case``."""
        error = outcomes.of(case)
        if error:
            pytest.fail(error, pytrace=False)

    def attempts(self, cases: Sequence[Case], place: Path) -> Iterator[tuple[Case, str]]:
        """Run one case after the other; yields what went wrong in each of them, on this rank."""
        written: set[Path] = set()
        for case in cases:
            name, writer, reader = case
            folder = place / name
            folder.mkdir(exist_ok=True)
            try:
                self._known[name].function(Way(writer, reader, folder, written))
            except (Exception, CheckpointException, pytest.fail.Exception):
                written.clear()  # it is removed
                yield case, traceback.format_exc()
            else:
                yield case, ""


class Outcomes:
    """Runs cases as their outcomes are asked for: behaviours of one world, some at a time, in one job."""

    def __init__(self, behaviours: Behaviours, home: str, place: Path, cases: Sequence[Case]) -> None:
        self._behaviours = behaviours
        self._home = home
        self._place = place
        self._waiting = list(cases)
        self._found: dict[Case, str] = {}

    def of(self, case: Case) -> str:
        """What went wrong in ``case``, "" if nothing."""
        if case not in self._found:
            world = self._behaviours.world_of(case)
            some = [other for other in self._waiting if self._behaviours.world_of(other) == world]
            names = list(dict.fromkeys(other[0] for other in some[some.index(case) :][:CASES_A_JOB]))
            some = [other for other in some if other[0] in names]
            self._waiting = [other for other in self._waiting if other not in some]
            self._found.update(zip(some, self._run(some, world), strict=True))
        return self._found[case]

    def _run(self, cases: list[Case], world: int) -> list[str]:
        if world == 1:
            errors = []
            for case, error in self._behaviours.attempts(cases, self._place):
                errors.append(error)
                _free(self._place, case, cases, failed=bool(error))
            return errors
        wanted = self._place / f"cases-{len(self._found)}.json"
        wanted.write_text(json.dumps(cases))
        trouble = ""
        try:
            run_job(run_cases, nproc=world, args=[self._home, wanted], timeout_s=JOB_S)
        except pytest.fail.Exception as error:
            trouble = f"not reached, or where the job ended:\n{error}"
        lines = wanted.with_suffix(".errors").read_text().splitlines()
        return [*map(json.loads, lines), *[trouble] * (len(cases) - len(lines))]


def _free(place: Path, case: Case, cases: Sequence[Case], *, failed: bool) -> None:
    """Remove what a behaviour has written when the last of its ``cases`` is through, or one has failed."""
    if failed or [other for other in cases if other[0] == case[0]][-1] == case:
        shutil.rmtree(place / case[0], ignore_errors=True)


# on the ranks ----------------------------------------------------------------------------------------------------


def run_cases(home: str, wanted: str) -> None:
    """Run the cases listed in the file ``wanted`` of the module ``home``; rank 0 writes down what went wrong."""
    behaviours = _module(Path(home)).behaviours
    cases: list[Case] = [tuple(case) for case in json.loads(Path(wanted).read_text())]
    size, rank = dist.get_world_size(), dist.get_rank()
    with Path(wanted).with_suffix(".errors").open("a") if rank == 0 else contextlib.nullcontext() as errors:
        while cases:
            in_world(size, _run_until_failure, behaviours, cases, Path(wanted).parent, errors)


def _run_until_failure(behaviours: Behaviours, cases: list[Case], place: Path, errors: IO[str] | None) -> None:
    """Run the first ``cases`` and take them off the list, up to the first that fails."""
    store = dist.PrefixStore("cases", dist.distributed_c10d._get_default_store())
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    for number, (case, error) in enumerate(behaviours.attempts(cases.copy(), place)):
        store.set(f"{number}/{rank}", error)
        if error:
            _drop_group()  # so that nobody waits for this rank
        keys = [f"{number}/{peer}" for peer in ranks]
        store.wait(keys, timedelta(seconds=TOGETHER_S))
        said = [store.get(key).decode() for key in keys]
        if errors is not None:
            told = "\n".join(f"rank {peer}:\n{text}" for peer, text in zip(ranks, said, strict=True) if text)
            errors.write(f"{json.dumps(told)}\n")
            errors.flush()
            _free(place, case, cases, failed=any(said))
        cases.remove(case)
        if any(said):
            _drop_group()
            return


def _drop_group() -> None:
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _forget_groups() -> None:
    """DTensor remembers for each mesh which groups it moves data over, by names that the next world gives to others."""
    for owner, forget in ((debug, "_clear_sharding_prop_cache"), (_redistribute, "_gen_transform_infos.cache_clear")):
        found: Any = owner
        for part in forget.split("."):
            found = getattr(found, part, None)
        if found is not None:  # other versions of torch remember less
            found()


at_world_end.append(_forget_groups)


# what behaviours share -------------------------------------------------------------------------------------------


def equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that two states hold the same, bit for bit; of DTensors, on this rank."""
    assert_same(dict(leaves_of(found)), dict(leaves_of(expected)), "loaded")


def blank(state: Any) -> Any:
    """A state of the same structure with nothing of the values of ``state`` in it."""
    if isinstance(state, dict):
        return type(state)((key, blank(value)) for key, value in state.items())
    if isinstance(state, list):
        return [blank(value) for value in state]
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state).detach()
    return type(state)() if isinstance(state, (int, float, str, bytes)) else None


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
