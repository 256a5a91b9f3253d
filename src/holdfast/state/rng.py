"""Define `RNG`: the random number generators of a training run as one stateful object.

It holds python's ``random``, numpy's global generator, torch's CPU generator and the current accelerator's, all of the
calling process. It is per rank. A manager adds it to the state under ``"rng"`` unless the user's state has that key. An
accelerator that isn't in use yet is left out: asking it would make a context on the device.

On the same world size every generator continues exactly where it was. On another world size no stored state is any
rank's own, so each new rank's generators are seeded afresh from a hash of (the lowest stored rank's state, the new
rank, the new world size): deterministic, and different on every rank.

Does not: keep generators of the user's own (hand those to the state as ``PerRank(generator.get_state())``), nor the
state of other processes such as dataloader workers.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast import _torch_compat as compat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HOST_KEYS = ("python", "numpy", "torch")


class RNG:
    """The process's random number generators; ``state_dict()`` and ``load_state_dict()`` change nothing else."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators of `random`, numpy, torch, and the accelerator if it is initialized."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state(),
        }
        kind = compat.current_accelerator()
        device = None if kind is None else compat.initialized_device_module(kind)
        if kind is not None and device is not None and hasattr(device, "get_rng_state"):
            state[kind] = device.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to ``state``, which `state_dict` returned; those that it doesn't have stay as they are."""
        if "python" in state:
            version, internal, gauss = state["python"]
            random.setstate((version, tuple(internal), gauss))
        if "numpy" in state:
            np.random.set_state(state["numpy"])
        if "torch" in state:
            torch.set_rng_state(state["torch"].cpu())
        kind = compat.current_accelerator()
        # A run that has moved to another kind of accelerator keeps that one's present state: the two aren't related.
        if kind is not None and kind in state:
            torch.get_device_module(kind).set_rng_state(state[kind].cpu())

    def reshard_state_dict(self, states: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Return a state for ``rank`` of ``world`` ranks, derived from the first of ``states``."""
        seed = _seed_from(states[0], rank, world)
        fresh: dict[str, Any] = {
            "python": random.Random(seed).getstate(),  # noqa: S311
            "numpy": np.random.RandomState(seed % 2**32).get_state(),
            "torch": torch.Generator().manual_seed(seed).get_state(),
        }
        kind = compat.current_accelerator()
        if kind is not None and kind in states[0]:
            fresh[kind] = torch.Generator(device=kind).manual_seed(seed).get_state()
        return fresh


def _numpy_state() -> Any:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":
        return state
    inner = state["state"]
    return ("MT19937", inner["key"], inner["pos"], state["has_gauss"], state["gauss"])


def _seed_from(state: Mapping[str, Any], rank: int, world: int) -> int:
    digest = hashlib.sha256(f"{rank} of {world}: {state.get('python')!r}".encode())
    if "torch" in state:
        digest.update(state["torch"].cpu().numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 1
