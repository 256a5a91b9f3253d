"""What `transformers` models say of their own files: which names may be absent or too many, and which are tied.

Assumes: nothing of `transformers` is imported; models of it are told by what they carry.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast import _torch_compat as compat
from holdfast.export.hf_default import bare

if TYPE_CHECKING:
    from torch import nn

_COMPUTED = ("rotary_emb.inv_freq", "position_ids")
"""Buffers that older versions stored, and that present ones compute."""


class LoadRules(NamedTuple):
    """Rules of one model, which may be a part of a module."""

    prefix: str
    """Of the part's names."""
    tied: Mapping[str, str]
    """Name of a parameter -> name of the one it is tied to, by the model's configuration; both with the prefix."""
    lack: tuple[re.Pattern[str], ...]
    have: tuple[re.Pattern[str], ...]

    def may_lack(self, name: str) -> bool:
        """Whether the model does without ``name`` being stored."""
        return self._matches(self.lack, name)

    def may_have(self, name: str) -> bool:
        """Whether ``name`` may be stored although the model has nothing of that name."""
        return self._matches(self.have, name)

    def _matches(self, patterns: tuple[re.Pattern[str], ...], name: str) -> bool:
        below = name[len(self.prefix) :]
        return name.startswith(self.prefix) and any(pattern.search(below) for pattern in patterns)


def load_rules(module: nn.Module) -> list[LoadRules]:
    """The rules of ``module``, or of what in it are models with rules; wrappers and ``fully_shard`` don't matter."""
    return [_rules_of(prefix, model) for prefix, model in _models_in(bare(module), "")]


def _models_in(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if any(hasattr(module, name) for name in (compat.HF_TIED, compat.HF_MAY_LACK, compat.HF_MAY_HAVE)):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _models_in(child, f"{prefix}{name}.")


def _rules_of(prefix: str, model: nn.Module) -> LoadRules:
    tied: Any = getattr(model, compat.HF_TIED, None)
    lack, have = (_patterns(getattr(model, name, None)) for name in (compat.HF_MAY_LACK, compat.HF_MAY_HAVE))
    buffers = [name for name, _ in model.named_buffers()]
    computed = (end for end in _COMPUTED if any(name.endswith(end) for name in buffers))
    have += tuple(re.compile(rf"(^|\.){re.escape(end)}$") for end in computed)
    names = tied.items() if isinstance(tied, Mapping) else ()
    return LoadRules(prefix, {prefix + one: prefix + other for one, other in names}, lack, have)


def _patterns(given: object) -> tuple[re.Pattern[str], ...]:
    if not isinstance(given, Collection) or isinstance(given, str):
        return ()
    return tuple(re.compile(pattern) for pattern in given if isinstance(pattern, str))
