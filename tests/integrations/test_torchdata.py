"""`holdfast.integrations.torchdata`: every sample once an epoch, on whatever ranks and workers a run goes on with."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchdata")

import torch
import torchdata.stateful_dataloader as stock
import torchdata.stateful_dataloader.sampler as stock_sampler
from jobs import ROOT, losses, run_script
from torchdata_job import EPOCHS, SAMPLES, seen

import holdfast
from holdfast.errors import ConfigError
from holdfast.integrations.torchdata import StatefulDataLoader, StatefulDistributedSampler

JOB = Path(__file__).with_name("torchdata_job.py")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_every_sample_once_an_epoch_whatever_the_number_of_ranks(tmp_path: Path, workers: int) -> None:
    """Two ranks, killed, two again, killed, one, killed, and two to the end; beside torchdata's own loader."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run_script(JOB, whole, "--workers", workers, "--stock", nproc=2)
    for run, (nproc, kill, batch) in enumerate(((2, 5, 4), (2, 9, 4), (1, 17, 6))):
        options = ("--workers", workers, "--turn", run, "--kill", kill, "--batch", batch)
        run_script(JOB, killed, *options, nproc=nproc, killed=True)
    run_script(JOB, killed, "--workers", workers, "--turn", 3, nproc=2)
    # The last kill is in the second epoch: 8 * 8 samples by two ranks, 32 by one in steps of 6, then 2 steps of 6.
    for out in (whole, killed):
        assert {epoch: sorted(found) for epoch, found in seen(out).items()} == {
            epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)
        }
    expected, found = losses([whole / "losses.jsonl"]), losses([killed / "losses.jsonl"])
    assert {step: found[step] for step in range(1, 9)} == {step: expected[step] for step in range(1, 9)}


# Ranks of a run, one after the other in this process.


class Run:
    """The loaders of all ranks of a run."""

    def __init__(self, world: int, samples: int, batch: int, *, drop_last: bool = False, **options: Any) -> None:
        data = list(range(samples))
        self.samplers = [
            StatefulDistributedSampler(data, world, rank, seed=3, drop_last=drop_last) for rank in range(world)
        ]
        self.loaders = [
            StatefulDataLoader(data, batch, sampler=sampler, drop_last=drop_last, **options)
            for sampler in self.samplers
        ]

    def take(self, batches: int | None = None) -> list[int]:
        """The samples of so many batches of each rank, or of what is left of the epoch."""
        found = []
        for loader in self.loaders:
            for number, batch in enumerate(loader, 1):
                found += batch.tolist()
                if number == batches:
                    break
        return found

    def states(self) -> list[Any]:
        return [loader.state_dict() for loader in self.loaders]

    def load(self, states: list[Any]) -> Run:
        for rank, loader in enumerate(self.loaders):
            if len(states) == len(self.loaders):
                loader.load_state_dict(states[rank])
            else:
                assert loader.reshard_state_dict(states, rank, len(self.loaders)) is None
        return self

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)


def test_order_and_state_are_those_of_torchdata() -> None:
    for samples, world, drop_last in ((24, 2, False), (25, 3, False), (25, 3, True), (2, 5, False), (7, 1, False)):
        data = list(range(samples))
        for rank in range(world):
            ours = StatefulDistributedSampler(data, world, rank, seed=3, drop_last=drop_last)
            theirs = stock_sampler.StatefulDistributedSampler(data, world, rank, seed=3, drop_last=drop_last)
            for epoch in range(2):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)
                assert len(ours) == len(theirs)


WORLDS = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1), (3, 3)]


@pytest.mark.parametrize("samples", [48, 49])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_is_left_of_an_epoch_is_divided_anew(samples: int, *, drop_last: bool) -> None:
    """And again, after a second change in the same epoch; and the next epoch is whole."""
    for before, after in WORLDS:
        for batches in range(5):
            run = Run(before, samples, 2, drop_last=drop_last)
            run.set_epoch(1)
            taken = run.take(batches) if batches else []
            run = Run(after, samples, 3, drop_last=drop_last).load(run.states())
            taken += run.take(1)
            run = Run(before, samples, 1, drop_last=drop_last).load(run.states())
            taken += run.take()
            check_once(taken, samples, max(before, after), drop_last=drop_last)
            fresh = Run(before, samples, 1, drop_last=drop_last)
            run.set_epoch(2)
            fresh.set_epoch(2)
            assert run.take() == fresh.take()


def check_once(taken: list[int], samples: int, world: int, *, drop_last: bool) -> None:
    counts = Counter(taken)
    odd = abs(len(taken) - samples)
    assert max(counts.values()) <= (1 if drop_last else 2)
    assert odd < world, "more was filled up, or dropped, than can't be divided"
    assert len(taken) - len(counts) <= (0 if drop_last else odd)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{}, {"snapshot_every_n_steps": 3}, {"persistent_workers": True}])
def test_workers_change_nothing(options: dict[str, Any]) -> None:
    """Neither that they prefetch, nor how many there are, nor how often torchdata asks them for their state."""
    whole = Run(2, 24, 2)
    expected = whole.take()
    for first, second in ((2, 2), (0, 2), (2, 0)):
        for batches in (2, 6):
            run = Run(2, 24, 2, num_workers=first, **(options if first else {}))
            taken = [run.take(batches)]
            states = run.states()
            for ranks in (2, 1):
                rest = Run(ranks, 24, 2, num_workers=second, **(options if second else {})).load(states)
                assert sorted(taken[0] + rest.take()) == sorted(expected)
                assert sorted(rest.take()) == sorted(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_states_at_the_end_and_before_the_beginning_are_exact(workers: int) -> None:
    run = Run(2, 24, 2, num_workers=workers)
    expected = run.take()
    for ranks in (2, 1):  # saved after an epoch: the next one is whole
        assert len(Run(ranks, 24, 2, num_workers=workers).load(run.states()).take()) == 24
    run = Run(2, 24, 2, num_workers=workers)
    taken = run.take(3)
    for ranks in (2, 1, 1, 2, 2):  # loaded, and saved at once
        run = Run(ranks, 24, 2, num_workers=workers).load(run.states())
    assert sorted(taken + run.take()) == sorted(expected)
    untouched = Run(2, 24, 2, num_workers=workers)
    assert sorted(Run(1, 24, 2).load(untouched.states()).take()) == sorted(expected)


def test_torchdata_loads_ours_and_we_load_torchdatas() -> None:
    def theirs(rank: int) -> Any:
        data = list(range(24))
        sampler = stock_sampler.StatefulDistributedSampler(data, 2, rank, seed=3)
        return stock.StatefulDataLoader(data, 2, sampler=sampler)

    expected = Run(2, 24, 2).take()
    run = Run(2, 24, 2)
    taken = run.take(2)
    for rank, state in enumerate(run.states()):
        loader = theirs(rank)
        loader.load_state_dict(state)
        taken += [number for batch in loader for number in batch.tolist()]
    assert sorted(taken) == sorted(expected)
    taken, states = [], []
    for rank in range(2):
        loader = theirs(rank)
        iterator = iter(loader)
        taken += [number for _ in range(2) for number in next(iterator).tolist()]
        states.append(loader.state_dict())
    assert sorted(taken + Run(2, 24, 2).load(states).take()) == sorted(expected)
    with pytest.raises(ConfigError, match="torchdata's own loader or sampler"):
        Run(1, 24, 2).load(states)


def test_going_on_draws_no_random_numbers() -> None:
    """A run that wasn't interrupted draws a seed for its workers when an epoch begins, and not in the midst of one."""
    run = Run(1, 24, 2)
    run.take(2)
    states = run.states()
    before = torch.get_rng_state()
    run = Run(1, 24, 2).load(states)
    run.take()
    assert torch.equal(torch.get_rng_state(), before)
    run.take()
    assert not torch.equal(torch.get_rng_state(), before)  # of the next epoch


# What can't go on.


class Stream(torch.utils.data.IterableDataset[int]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 24:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Remembering(list[int]):
    def state_dict(self) -> dict[str, int]:
        return {"n": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def loaders_that_stay() -> dict[str, Any]:
    data = list(range(24))
    return {
        "its dataset is iterable": StatefulDataLoader(Stream(), 2),
        r"its dataset has a state_dict\(\) of its own": StatefulDataLoader(
            kept := Remembering(data), 2, sampler=StatefulDistributedSampler(kept, 1, 0)
        ),
        r"its sampler is a torchdata\S*RandomSampler": StatefulDataLoader(data, 2, shuffle=True),
        r"its sampler is a torchdata\S*StatefulDistributedSampler": StatefulDataLoader(
            data, 2, sampler=stock_sampler.StatefulDistributedSampler(data, 1, 0)
        ),
    }


def test_what_can_not_be_divided_says_why(tmp_path: Path) -> None:
    for why, loader in loaders_that_stay().items():
        next(iter(loader))
        state = loader.state_dict()
        assert "position" not in state
        with pytest.raises(ConfigError, match=why) as caught:
            loader.reshard_state_dict([state, state], 0, 1)
        assert "Resume on 2 ranks, or exclude" in str(caught.value)
    path = tmp_path / "a"
    holdfast.save({"loader": loaders_that_stay()["its dataset is iterable"]}, path)
    again = loaders_that_stay()["its dataset is iterable"]
    holdfast.load({"loader": again}, path)  # on as many ranks it goes on, as torchdata does


def test_ranks_that_consumed_unequally_are_no_position() -> None:
    run = Run(2, 24, 2)
    next(iter(run.loaders[0]))
    states = run.states()
    with pytest.raises(ConfigError, match=r"the ranks are at \[4, 0\]"):
        Run(1, 24, 2).load(states)
    Run(2, 24, 2).load(states)  # where each goes on by itself, that is its own business


def test_another_order_is_refused() -> None:
    run = Run(2, 24, 2)
    run.take(2)
    with pytest.raises(ConfigError, match="samples was 24, is 26"):
        Run(1, 26, 2).load(run.states())
    with pytest.raises(ConfigError, match="samples was 24, is 26"):
        Run(2, 26, 2).load(run.states())
    states = [
        {**state, "position": {**state["position"], "seed": 4, "shuffle": False}} for state in run.states()
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="seed was 4, is 3; shuffle was False, is True"):
        Run(1, 24, 2).load(states)


def test_a_position_belongs_to_its_epoch() -> None:
    run = Run(2, 24, 2)
    run.set_epoch(3)
    taken = run.take(2)
    states = run.states()
    run = Run(1, 24, 2).load(states)  # whoever forgets to set it
    assert sorted(taken + run.take()) == list(range(24))
    run = Run(1, 24, 2).load(states)
    run.set_epoch(4)
    with pytest.raises(ConfigError, match=r"sample 8 of epoch 3.*16 samples"):
        run.take()
    run.samplers[0].begin_anew()
    assert len(run.take()) == 24
    run = Run(2, 25, 2, drop_last=True)
    run.take(6)  # one is left over, and dropped
    run = Run(1, 25, 2, drop_last=True).load(run.states())
    run.set_epoch(1)  # as loops do that know a step only
    assert len(run.take()) == 24


def test_todays_loader_of_torchdata_is_refused_on_other_ranks() -> None:
    """By Holdfast itself, without this module: a position of each rank's own has no meaning for others."""
    from holdfast.state.tree import StateTree

    data = list(range(24))
    loader = stock.StatefulDataLoader(data, 2, sampler=stock_sampler.StatefulDistributedSampler(data, 1, 0))
    tree = StateTree({"dataloader": loader}, rank=0, world=1)
    names = [entry.name for entry in tree.collect().objects]
    loading = tree.destinations(
        {}, {name.replace("rank-*", f"rank-{rank:05d}") for name in names for rank in (0, 1)}, {}
    )
    assert "saved by 2 ranks" in loading.details["dataloader.rank-*"]


def test_the_example_goes_on_with_other_ranks(tmp_path: Path) -> None:
    example = ROOT / "examples" / "torchdata_position.py"
    run_script(example, tmp_path, "--stop-after", 6, nproc=2)
    output = run_script(example, tmp_path, nproc=3).stdout
    assert "3 ranks go on after step 6, 48 samples" in output
    assert "every sample once" in output


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "integrations" / "torchdata.md").read_text()
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    run_script(script)
