"""The cases, in the order they are run: what is measured, for whom, and which columns tell of it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.cases import (
    adapters,
    beside,
    engine,
    export,
    first,
    load,
    many,
    memory,
    reshard,
    save,
    small,
    stores,
    sync,
    train,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Bench


@dataclass(frozen=True, slots=True)
class Case:
    """One that `--only` can name. It may fill several tables (``save`` does: idle, computing, pure Python).

    quick: whether it is part of a quick run, too. by_name: it is run only where it is asked for.
    """

    name: str
    about: str
    run: Callable[[Bench], None]
    quick: bool = True
    by_name: bool = False


CASES = {
    case.name: case
    for case in (
        Case("save", "(a) a model with AdamW on one rank: idle, computing and pure-Python trainer", save.one_rank),
        Case("save-2", "(a) the same on two ranks: idle and computing trainer", save.two_ranks, quick=False),
        Case("load", "(f) load it, warm and cold, and 1 % of a tensor", load.run),
        Case("reshard", "(f) load it on another number of ranks", reshard.run, quick=False),
        Case("small", "(b) many small tensors, saved and loaded", small.run),
        Case("many", "(c) very many tiny tensors: planning", many.run),
        Case("train", "(d) a real training loop with saves", train.run),
        Case("first", "(e) the first save, and the first after a warm-up", first.run),
        Case("memory", "(g) memory over many saves", memory.run),
        Case("engine", "(h) the engine's start and size", engine.run),
        Case("export", "(i) Hugging Face weights of a model on two ranks", export.run),
        Case("sync", "(j) weight versions from a trainer to a rollout worker", sync.run),
        Case("beside", "(k) a checkpoint beside an export, in one engine and in two", beside.run, quick=False),
        Case(
            "adapters",
            "(l) saves in loops of frameworks, by their own way and by adapters",
            adapters.run,
            quick=False,
        ),
        Case("stores", "(m) saves to object stores, and loads from them", stores.run, by_name=True),
    )
}
