"""Modules as named tensors: the names stock ``get_model_state_dict`` gives, without running anything of the user's.

Guarantees: parameters and persistent buffers by fully qualified name; wrappers of ``torch.compile``, DDP and
activation checkpointing leave no trace; a tensor registered under two names (tied weights) has both. A second look at
an unchanged module costs some tens of nanoseconds a tensor and finds every replaced, added, removed or renamed one.
Parameters of FSDP2 are always the *sharded* ones: a module left gathered (as the root is after a forward without
backward) is resharded first, which is what its own next use would do.

Does not: run ``state_dict`` overrides or hooks. A module of the user's that has some is saved by its parameters and
buffers, with one warning in the log. Does not support FSDP1, nor modules of ``torch.jit`` (`ConfigError`).
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.state.entries import Path, TensorEntry, TensorGuard, check_tensor, joined, same_objects

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger("holdfast.state")
_warned: set[type] = set()

_TABLES = (compat.parameters_of, compat.buffers_of, compat.children_of)


class _Seen(NamedTuple):
    """All that a walk depended on, flat, so that comparing it again runs at C speed."""

    tables: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    transient: list[set[str]]


class ModuleSource:
    """The tensors of the module, or the pipeline stages, at one path of the state."""

    def __init__(self, path: Path, modules: Sequence[nn.Module], *, staged: bool = False) -> None:
        self.path = path
        self.modules = tuple(modules)
        self.staged = staged
        """They came as a list: other ranks may hold other stages of the same model."""
        self.tensors: list[TensorEntry] = []
        self.extra_states: list[tuple[Path, nn.Module]] = []
        self.fqn_of: dict[int, str] = {}
        """The first name of each parameter, by ``id``: what an optimizer's state is named after."""
        self._owners: list[nn.Module] = []
        self._fsdp: list[nn.Module] = []
        self._seen: _Seen | None = None
        self._guard = TensorGuard(())

    def refresh(self, *, look_closer: bool = True) -> bool:
        """Bring `tensors` up to date; True if nothing had changed since the last call.

        look_closer: whether tensors that are the same objects have stayed of their kinds, too.
        """
        if self._seen is not None:
            if self._stands(look_closer=look_closer):
                return True
            if self._fsdp:
                # Gathered parameters look like replaced ones: put the sharded ones back before believing it.
                self._reshard()
                if self._stands(look_closer=look_closer):
                    return True
        self._walk()
        return False

    def _stands(self, *, look_closer: bool) -> bool:
        seen, now = self._seen, _look(self._owners)
        assert seen is not None
        return (
            same_objects(now.tables, seen.tables)
            and now.keys == seen.keys
            and same_objects(now.values, seen.values)
            and now.transient == seen.transient
            and (not look_closer or self._guard.stands())
        )

    def _reshard(self) -> None:
        for module in self._fsdp:
            module.reshard()  # type: ignore[operator]
            if not compat.fsdp2_is_sharded(module):
                raise ConfigError(
                    f"{joined(self.path)}: parameters of an FSDP module ({type(module).__name__}) are gathered; "
                    "save between steps, not inside a forward",
                    field=joined(self.path),
                )

    def _walk(self) -> None:
        self._owners = list(_unique(self.modules))
        self._fsdp = [module for module in self._owners if compat.is_fsdp2_module(module)]
        self._reshard()
        tensors: dict[str, TensorEntry] = {}
        self.extra_states, self.fqn_of = [], {}
        collisions: list[str] = []
        for module in self.modules:
            for fqn, tensor, is_parameter in self._named(module, ""):
                path = (*self.path, fqn)
                name = joined(path)
                if name in tensors:
                    collisions.append(name)
                    continue
                check_tensor(name, tensor)
                tensors[name] = TensorEntry(name, path, tensor, is_parameter)
                if is_parameter:
                    self.fqn_of.setdefault(id(tensor), fqn)
        if collisions:
            shown = ", ".join(collisions[:3])
            raise ConfigError(
                f"the modules in the list {joined(self.path)!r} have {len(collisions)} names in common ({shown}, ...): "
                "stages merge into one namespace; give each module a key of its own",
                field=joined(self.path),
            )
        self.tensors = list(tensors.values())
        self._seen = _look(self._owners)
        self._guard = TensorGuard([entry.tensor for entry in self.tensors])

    def _named(self, module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor, bool]]:
        if compat.is_fsdp1_module(module):
            raise ConfigError(
                f"{joined(self.path)}: {prefix or 'the module'} is wrapped by FSDP1 "
                "(FullyShardedDataParallel), which is not supported; use fully_shard (FSDP2)",
                field=joined(self.path),
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{joined(self.path) or 'into'}: {prefix or 'the module'} was made by torch.jit, whose modules don't "
                "have their tensors as others do; give the module that it was made of, or a dictionary of its tensors",
                field=joined(self.path),
            )
        if type(module) not in _warned and compat.overrides_state_dict(module):
            _warn_of_overrides(type(module), joined((*self.path, prefix.rstrip("."))))
        for name, parameter in compat.parameters_of(module).items():
            if parameter is not None:
                yield prefix + name, parameter, True
        for name, buffer in compat.buffers_of(module).items():
            if buffer is not None and name not in compat.transient_buffers_of(module):
                yield prefix + name, buffer, False
        if compat.has_extra_state(module):
            self.extra_states.append(((*self.path, prefix + compat.EXTRA_STATE), module))
        children = compat.children_of(module)
        unnamed = _unnamed_children(module) if children else set()
        for name, child in children.items():
            if child is not None:
                yield from self._named(child, prefix if name in unnamed else f"{prefix}{name}.")


def _unique(modules: Sequence[nn.Module]) -> Iterator[nn.Module]:
    seen: set[int] = set()
    for module in chain.from_iterable(root.modules() for root in modules):
        if id(module) not in seen:
            seen.add(id(module))
            yield module


def _look(owners: list[nn.Module]) -> _Seen:
    tables = list(chain.from_iterable(map(table, owners) for table in _TABLES))
    return _Seen(
        tables=tables,
        keys=list(chain.from_iterable(tables)),
        values=list(chain.from_iterable(map(dict.values, tables))),
        transient=[set(names) for names in map(compat.transient_buffers_of, owners) if names],
    )


def _unnamed_children(module: nn.Module) -> set[str]:
    """Children whose attribute name isn't part of names: what wrappers keep their module under."""
    unnamed = {compat.CHECKPOINT_WRAPPED}
    if isinstance(module, nn.parallel.DistributedDataParallel):
        unnamed.add("module")
    elif compat.is_compiled_module(module):
        unnamed.add(compat.COMPILED_MODULE)
    modifiers = getattr(module, compat.FQN_MODIFIERS, None)
    if callable(modifiers):
        unnamed.update(modifiers().values())
    return unnamed


def _warn_of_overrides(kind: type[nn.Module], name: str) -> None:
    _warned.add(kind)
    _log.warning(
        "%s: %s changes its state_dict by an override or a hook, which saving doesn't run: what is saved are its "
        "parameters, buffers and extra state under their own names",
        name,
        kind.__qualname__,
    )
