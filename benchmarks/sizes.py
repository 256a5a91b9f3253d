"""How much is measured: the full run, the quick one, and one small enough for a test. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

COPIES = 8.5
"""Of the state, at most at a time: itself, where loads go, what contenders keep staged, and what one of them writes."""
PROCESSES_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """Amounts of every case; durations and budgets follow from them.

    thorough: every case with every peer. rounds: counted rounds of each case, after one that is not; rounds_budget_s:
    once these have taken so long, slow peers have no more than ``rounds_least``, and those whose turns are of more than
    ``slow_turn_s`` no more at all; Holdfast, the raw limit and the fastest peer always have all of them.

    layers, hidden, vocab: of the language model whose weights and AdamW state are case (a). small_tensors, small_bytes:
    case (b). many_tensors: case (c), 256 bytes each. train_*: case (d), one block is so many iterations with a save
    every so many. memory_saves, memory_mib: case (g). warm_up_s: case (e), how long training goes on between the
    warm-up and the first save. beside_*: case (k), its small tensors and the bytes of its large ones. store_*: case
    (m), the state's size, its counted rounds, and how many processes make their first save, and their first load.
    """

    name: str
    thorough: bool
    rounds: int
    rounds_budget_s: float
    rounds_least: int
    slow_turn_s: float
    layers: int
    hidden: int
    vocab: int
    small_tensors: int
    small_bytes: int
    many_tensors: int
    train_layers: int
    train_hidden: int
    train_iterations: int
    train_every: int
    train_rounds: int
    memory_saves: int
    memory_mib: int
    engine_starts: int
    warm_up_s: float
    beside_tensors: int
    beside_mib: int
    beside_rounds: int
    store_mib: int
    store_rounds: int
    store_firsts: int

    def language_model_nbytes(self, layers: int) -> int:
        """Weights and both moments of case (a)'s model, if it had so many layers."""
        inner = self.hidden * 8 // 3
        each = 4 * self.hidden * self.hidden + 3 * self.hidden * inner + 2 * self.hidden
        return 12 * (layers * each + (self.vocab + 1) * self.hidden)

    def layers_that_fit(self, available: int) -> int:
        """How many of its layers leave memory for all who copy the state; all of them on most machines."""
        layers = self.layers
        while layers > 1 and COPIES * self.language_model_nbytes(layers) + PROCESSES_BYTES > available:
            layers -= 1
        return layers


SIZES = {
    size.name: size
    for size in (
        Size(
            name="full",
            thorough=True,
            rounds=5,
            rounds_budget_s=20.0,
            rounds_least=1,
            slow_turn_s=6.0,
            layers=22,
            hidden=768,
            vocab=32_000,
            small_tensors=20_000,
            small_bytes=53_248,
            many_tensors=100_000,
            train_layers=8,
            train_hidden=512,
            train_iterations=6,
            train_every=3,
            train_rounds=5,
            memory_saves=200,
            memory_mib=16,
            engine_starts=10,
            warm_up_s=3.0,
            beside_tensors=8_000,
            beside_mib=128,
            beside_rounds=25,
            store_mib=1024,
            store_rounds=5,
            store_firsts=3,
        ),
        Size(
            name="quick",
            thorough=False,
            rounds=3,
            rounds_budget_s=6.0,
            rounds_least=1,
            slow_turn_s=1.0,
            layers=22,
            hidden=256,
            vocab=8_192,
            small_tensors=2_000,
            small_bytes=16_384,
            many_tensors=3_000,
            train_layers=4,
            train_hidden=256,
            train_iterations=8,
            train_every=4,
            train_rounds=3,
            memory_saves=40,
            memory_mib=16,
            engine_starts=5,
            warm_up_s=1.0,
            beside_tensors=8_000,
            beside_mib=128,
            beside_rounds=5,
            store_mib=128,
            store_rounds=5,
            store_firsts=1,
        ),
        Size(
            name="tiny",
            thorough=True,
            rounds=2,
            rounds_budget_s=25.0,
            rounds_least=2,
            slow_turn_s=25.0,
            layers=2,
            hidden=64,
            vocab=256,
            small_tensors=50,
            small_bytes=4_096,
            many_tensors=200,
            train_layers=1,
            train_hidden=32,
            train_iterations=4,
            train_every=2,
            train_rounds=2,
            memory_saves=4,
            memory_mib=1,
            engine_starts=2,
            warm_up_s=0.2,
            beside_tensors=40,
            beside_mib=1,
            beside_rounds=2,
            store_mib=8,
            store_rounds=2,
            store_firsts=1,
        ),
    )
}
