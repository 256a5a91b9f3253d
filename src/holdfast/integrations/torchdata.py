"""Positions in data that any number of ranks can go on from: torchdata's loader and sampler, by import.

    from holdfast.integrations.torchdata import StatefulDataLoader, StatefulDistributedSampler

`StatefulDistributedSampler` gives out a dataset in the order of torchdata's sampler of that name. Ranks take turns in
one order, so what was consumed is its beginning, if all have taken equally many samples: one number, the *position*.
`StatefulDataLoader` keeps it beside torchdata's own state, and on any number of ranks, of workers and of samples a
batch the rest of the epoch is divided among those there are now.

Guarantees: no sample of an epoch is repeated or skipped, except that, as ever, the end of an order that can't be
divided evenly is filled up or dropped (`drop_last`). What can't go on at a position is a `ConfigError` that says why,
never another beginning: on other ranks than they were saved by, iterable datasets, datasets with state of their own,
other samplers, and ranks that have consumed unequally; on any, another length, seed or shuffle than was saved. States
that were taken at the end of an epoch, or between a load and the first batch, are exact (in torchdata 0.11 they aren't,
without workers). Going on draws no random numbers of this process.

Does not: keep the random states of workers: they are seeded anew, as in torchdata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader as _Loader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler as _Sampler
from torchdata.stateful_dataloader.stateful import Stateful

from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["StatefulDataLoader", "StatefulDistributedSampler"]

_POSITION: Final = "position"
_FINISHED: Final = "finished"
_ORDER: Final = ("samples", "seed", "shuffle")
"""What the order of an epoch depends on, beside its number."""


class StatefulDistributedSampler(_Sampler):
    """torchdata's ``StatefulDistributedSampler``, which can begin an epoch anywhere, on any number of ranks.

    Arguments and the order of samples are the original's. ``state_dict()`` is equal on all ranks that have taken
    equally many samples, and holds the epoch, too; a state of the original loads on as many ranks as it was taken on.
    """

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        self.least = 1
        """Fewer samples of a rank than this are not worth an iteration: its loader drops them."""
        self._order: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=self.shuffle, seed=self.seed)
        self._start = 0
        self._pending: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[int]:
        start, self._pending = self._begin(self._pending), None
        self._start, self.yielded, self.next_yielded = start, 0, None
        self._order.set_epoch(self.epoch)
        order = list(self._order)
        rest = order[start:]
        odd = len(rest) % self.num_replicas
        if odd and self.drop_last:
            del rest[-odd:]
        elif odd:
            missing = self.num_replicas - odd
            rest += (order * -(-missing // len(order)))[:missing]
        for index in rest[self.rank :: self.num_replicas]:
            self.yielded += 1
            yield index

    def _begin(self, state: Mapping[str, Any] | None) -> int:
        if state is None:
            return 0
        position, epoch = int(state[_POSITION]), state["epoch"]
        if epoch == self.epoch:
            return position
        left = max(0, len(self.dataset) - position)
        if (left if self.drop_last else left + self.num_replicas - 1) // self.num_replicas < self.least:
            return 0
        raise ConfigError(
            f"the data is to go on at sample {position} of epoch {epoch}, and set_epoch({self.epoch}) was called: "
            f"{left} samples of epoch {epoch} would be skipped; go on with that epoch, or begin_anew()",
            field="sampler",
        )

    def begin_anew(self) -> None:
        """Begin the next iteration at the first sample, whatever was loaded."""
        self._pending = self.next_yielded = None
        self._start = self.yielded = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from; it changes with each sample."""
        if self._pending is not None:
            return self.state_at(int(self._pending[_POSITION]), int(self._pending["epoch"]))
        return self.state_at(self._start + self.yielded * self.num_replicas)

    def state_at(self, position: int, epoch: int | None = None) -> dict[str, Any]:
        """Return the state in which ``position`` samples of an epoch, by default this one, have been consumed."""
        state = {_POSITION: position, "epoch": self.epoch if epoch is None else epoch, **self._order_now()}
        # By this, torchdata's own sampler can go on from it on as many ranks.
        return state if position % self.num_replicas else {**state, "yielded": position // self.num_replicas}

    def _order_now(self) -> dict[str, Any]:
        return {"samples": len(self.dataset), "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the next iteration where ``state_dict`` was taken, in its epoch. Raises `ConfigError`."""
        if _POSITION not in state_dict:
            super().load_state_dict(dict(state_dict))  # of the original, which refuses what isn't
            self._pending = self.state_at(self.next_yielded * self.num_replicas)
            return
        now = self._order_now()
        changed = [
            f"{key} was {state_dict.get(key)}, is {now[key]}" for key in _ORDER if state_dict.get(key) != now[key]
        ]
        if changed:
            raise ConfigError(
                f"the order of the data isn't that in which it was saved ({'; '.join(changed)}): samples would be "
                "repeated and skipped. Exclude the dataloader from the load to begin anew",
                field="sampler",
            )
        self.epoch = int(state_dict["epoch"])
        self._pending = dict(state_dict)


class StatefulDataLoader(_Loader):
    """torchdata's ``StatefulDataLoader``, whose position loads on any number of ranks, workers and samples a batch.

    For that its ``sampler`` has to be a `StatefulDistributedSampler` of this module, and its dataset one without state
    of its own; all else is as in the original. On as many ranks, a state of the original loads, and the original loads
    a state of this. Put it into the state under any key: Holdfast keeps a state of each rank.
    """

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        if isinstance(self.sampler, StatefulDistributedSampler) and self.drop_last:
            self.sampler.least = self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return torchdata's state, and the position that it stands for."""
        state: dict[str, Any] = super().state_dict()
        position = self._position_in(state) if self._why_not() is None else None
        return state if position is None else {**state, _POSITION: position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken. Raises `ConfigError` where that can't be."""
        position = state_dict.get(_POSITION)
        if position is None and state_dict and self._why_not() is None:
            position = self._position_in(state_dict)  # of the original
        if position is None:
            super().load_state_dict(dict(state_dict))
        else:
            self._go_to(position)

    def reshard_state_dict(self, states: Sequence[Mapping[str, Any]], rank: int, world: int) -> None:
        """Go on where ``len(states)`` ranks were, on another number of ranks; Holdfast calls this.

        Raises `ConfigError` for what can't be divided anew, and says why.
        """
        why = self._why_not()
        if why is None and any(_POSITION not in state for state in states):
            why = "it was saved by torchdata's own loader or sampler, which don't say how the data was divided"
        elif why is None and any(state[_POSITION] != states[0][_POSITION] for state in states):
            taken = [state[_POSITION].get(_POSITION, _FINISHED) for state in states]
            why = f"the ranks are at {taken} in their common order, and not at one position"
        if why is not None:
            raise ConfigError(
                f"the position in the data was saved by {len(states)} ranks, and rank {rank} of {world} can't go on "
                f"from it: {why}. Resume on {len(states)} ranks, or exclude the dataloader from the load to begin anew",
                field="dataloader",
            )
        self._go_to(states[0][_POSITION])

    def _why_not(self) -> str | None:
        """Say why this loader has no position that other ranks can go on from; None if it has one."""
        if isinstance(self.dataset, IterableDataset):
            return "its dataset is iterable, so that its position is in the iterators of each rank and worker"
        if isinstance(self.dataset, Stateful):
            return "its dataset has a state_dict() of its own, which is one rank's"
        if not isinstance(self.sampler, StatefulDistributedSampler):
            kind = type(self.sampler)
            return (
                f"its sampler is a {kind.__module__}.{kind.__qualname__}; what ranks share is the order of a "
                f"{__name__}.StatefulDistributedSampler"
            )
        return None

    def _position_in(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the state of the sampler that torchdata's ``state`` stands for; None if it has none."""
        if state.get("_iterator_finished"):
            return {_FINISHED: True}
        snapshot = state.get("_snapshot")
        main = state if snapshot is None else snapshot["_main_snapshot"]
        kept = (main.get("_sampler_iter_state") or {}).get("sampler_state") or main.get("_index_sampler_state")
        if not kept:
            return None
        each = self.sampler.num_replicas
        position = kept[_POSITION] if _POSITION in kept else kept["yielded"] * each
        # And the batches that were given out since torchdata took its snapshot.
        position += state.get("_steps_since_snapshot", 0) * (self.batch_size or 1) * each
        return dict(self.sampler.state_at(position, kept.get("epoch")))

    def _go_to(self, position: Mapping[str, Any]) -> None:
        super().load_state_dict({})
        self.sampler.begin_anew()
        if _FINISHED not in position:
            self.sampler.load_state_dict(position)

    def _get_iterator(self) -> Any:
        if self.next_iter_state is None and getattr(self.sampler, "_pending", None) is None:
            return super()._get_iterator()
        # A seed for workers is drawn, as when an epoch begins; a run that wasn't interrupted has drawn it there.
        before = torch.get_rng_state()
        try:
            return super()._get_iterator()
        finally:
            torch.set_rng_state(before)
