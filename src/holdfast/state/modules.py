"""Collect modules as named tensors: the names and values of their ``state_dict()``.

    ModuleSource          the modules at one path of the state: collected, asked again, and how a load fills them
    changes_state_dict    tell whether a module has hooks or overrides that decide what its state dict is
    Hooked                the topmost of such modules: `Hooked.load` hands it back what was stored
    ask                   runs ``state_dict()`` of those, and of no other module: names and values in stock's order
    Matcher               which of the values are a module's own tensors, or views of them

Guarantees: parameters and persistent buffers by fully qualified name; wrappers of ``torch.compile``, DDP and activation
checkpointing leave no trace; a tensor registered under two names (tied weights) has both. A second look at an unchanged
module costs some tens of nanoseconds a tensor and finds every replaced, added, removed or renamed one. Parameters of
FSDP2 are always the *sharded* ones: a module left gathered (as the root is after a forward without backward) is
resharded first, which is what its own next use would do.

Of a module with hooks or overrides of its state dict that are not torch's, and of FSDP1's (sharded, whatever it is set
to), ``state_dict()`` is called; of all others nothing is run. Its values are *own* (a parameter or buffer, under
whatever name), *a view* of a parameter (stands still like it), *computed* (made anew at each look, and let go after
it), or no tensors. A value is a parameter, or a view of one, only if it lies in that parameter's memory, and fresh only
if nobody else holds it.
Assumes: all ranks that share DTensors ask at the same point, since hooks may gather them.
Does not: support modules of ``torch.jit`` (`ConfigError`); hide what a hook raises (`ConfigError`, with its name).
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError, HoldfastError
from holdfast.state.entries import Path, TensorEntry, TensorGuard, check_tensor, joined, same_objects
from holdfast.state.shards import LocalPart, entries_of, is_sharded
from holdfast.state.subclasses import Unfolded, unfolds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from operator import attrgetter
    from types import TracebackType

_TABLES = (compat.parameters_of, compat.buffers_of, compat.children_of)
_HOOKS = (compat.save_hooks_of, compat.save_pre_hooks_of)
_LOAD_HOOKS = (compat.load_hooks_of, compat.load_pre_hooks_of)


@dataclass(eq=False, slots=True)
class Hooked:
    """A module whose state dict has to be asked for. Names of its own tensors and extra states carry ``prefix``."""

    module: nn.Module
    shown: str
    """Its name in messages."""
    prefix: str
    """Of its names, with the dot; empty where it is all of the state's module, wrappers aside."""
    saves: bool
    """``state_dict()`` of it may give other names or values."""
    loads: bool
    """``load_state_dict()`` of it may do something else than to fill them."""
    own: dict[str, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    """Parameters (True) and persistent buffers (False)."""
    extra_states: list[tuple[Path, nn.Module]] = field(default_factory=list)
    """Extra states by full path in the state."""
    _public: dict[str, str] = field(default_factory=dict)

    def run(self, destination: Any) -> None:
        """Add what ``state_dict()`` gives to ``destination``. Raises `ConfigError` for what that raises."""
        try:
            with torch.no_grad(), compat.fsdp1_sharded(self.module):
                if self.prefix:
                    self.module.state_dict(destination=destination, prefix=self.prefix, keep_vars=False)
                    return
                given = self.module.state_dict()
        except HoldfastError:
            raise
        except Exception as error:
            raise self._failed("state_dict()", error) from error
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{self.shown}: state_dict() of {type(self.module).__qualname__} returned a {type(given).__name__}; "
                "expected a dictionary",
                field=self.shown,
            )
        destination.update(given)
        compat.set_metadata(destination, compat.metadata_of(given))

    def public(self, key: str) -> str:
        """The name for ``key`` of the module's own state dict: without what wrappers inside the module add."""
        known = self._public.get(key)
        if known is None:
            known = self._public[key] = self.prefix + ".".join(_without_wrappers(self.module, key.split(".")))
        return known

    def load(self, given: Mapping[str, Any], metadata: Any, *, strict: bool) -> Any:
        """Hand ``given`` to ``load_state_dict``; returns what that says of missing and unexpected keys.

        Raises `ConfigError` for what a hook raises, `NotTaken` for what ``load_state_dict`` itself finds wrong.
        """
        state_dict: OrderedDict[str, Any] = OrderedDict(given)
        compat.set_metadata(state_dict, metadata)
        options = {"strict": strict and self.judges_itself} if self._takes_strict else {}
        try:
            with torch.no_grad(), compat.fsdp1_sharded(self.module):
                return self.module.load_state_dict(state_dict, **options)
        except HoldfastError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and (self.judges_itself or _raised_by_torch(error.__traceback__)):
                raise NotTaken(str(error)) from error
            raise self._failed("load_state_dict()", error) from error

    @property
    def judges_itself(self) -> bool:
        """Return True if an override of ``load_state_dict`` decides which keys may be missing."""
        return compat.overrides_load_state_dict(self.module)

    @property
    def _takes_strict(self) -> bool:
        taken = inspect.signature(self.module.load_state_dict).parameters
        return "strict" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())

    def _failed(self, what: str, error: Exception) -> ConfigError:
        by = _hook_in(error.__traceback__)
        where = f" in {by}" if by else ""
        return ConfigError(
            f"{self.shown}: {what} of {type(self.module).__qualname__} raised {type(error).__name__}{where}: {error}. "
            "Its hooks and overrides decide what is saved and loaded; fix the one that raised",
            field=self.shown,
        )


class NotTaken(Exception):
    """``load_state_dict`` says that what it was given doesn't fit the module."""


Step = tuple[str, torch.Tensor] | Hooked
"""In the order of ``state_dict()``: a tensor by name, or what has to be asked for."""


class Part(NamedTuple):
    """State dict of one `Hooked` module."""

    hooked: Hooked
    keys: dict[str, str]
    """Key in its own state dict → name."""
    metadata: OrderedDict[str, Any]
    """Versions of its modules, by prefix; for loading."""


class Asked(NamedTuple):
    """State dicts of a source's modules at one moment."""

    values: dict[str, Any]
    """Values by name; for modules without hooks their own tensors."""
    parts: Sequence[Part]


NOTHING: Final = Asked({}, ())


def changes_state_dict(module: nn.Module) -> bool:
    """Return True if ``state_dict()`` of ``module`` may return something other than its parameters and buffers."""
    return any(map(compat.changes_saving, module.modules()))


def state_dict_of(module: nn.Module, *, shown: str) -> dict[str, Any]:
    """Call ``state_dict()`` of ``module``; names are those of `ask`."""
    return _ask_one([Hooked(module, shown, "", saves=True, loads=False)], loading=False)[0]


def ask(plans: Iterable[Sequence[Step]], *, shown: str, loading: bool) -> Asked:
    """Run the state dicts in ``plans``, one plan a module. loading: also of modules that only change loading.

    Raises `ConfigError` for what hooks raise, and for names that come twice.
    """
    values: dict[str, Any] = {}
    parts: list[Part] = []
    for plan in plans:
        count = len(values)
        given, found = _ask_one(plan, loading=loading)
        values.update(given)
        parts += found
        if len(values) != count + len(given):
            raise _twice(shown, "modules in the list have names in common: give each a key of its own")
    return Asked(values, parts)


def _ask_one(plan: Sequence[Step], *, loading: bool) -> tuple[dict[str, Any], list[Part]]:
    destination: Any = OrderedDict()
    compat.set_metadata(destination, OrderedDict())
    own: dict[str, torch.Tensor] = {}
    asked: dict[str, Part] = {}
    for step in plan:
        if not isinstance(step, Hooked):
            destination[step[0]] = own[step[0]] = step[1]
        elif step.saves or loading:
            step.run(destination)
            asked[step.prefix] = Part(step, {}, OrderedDict())
        else:
            for name, (tensor, _) in step.own.items():
                destination[name] = own[name] = tensor
    values: dict[str, Any] = {}
    for key, value in destination.items():
        if own.get(key) is value:
            values[key] = value
            continue
        part = _part_of(key, asked)
        name = key
        if part is not None:
            below = key[len(part.hooked.prefix) :]
            name = part.keys[below] = part.hooked.public(below)
        if name in values:
            shown = next(iter(asked.values())).hooked.shown
            raise _twice(shown, f"state_dict() gives {name!r} twice, once with and once without a wrapper's prefix")
        values[name] = value
    if loading:
        for key, version in compat.metadata_of(destination).items():
            part = asked.get("") or _part_of(f"{key}.", asked)
            if part is not None:
                part.metadata[key[len(part.hooked.prefix) :]] = version
    return values, list(asked.values())


def _part_of(key: object, asked: Mapping[str, Part]) -> Part | None:
    if not isinstance(key, str) or not key:
        shown = next(iter(asked.values())).hooked.shown
        raise ConfigError(f"{shown}: state_dict() has the key {key!r}; keys are non-empty strings", field=shown)
    if "" in asked:
        return asked[""]
    at = key.find(".") + 1
    while at:
        if key[:at] in asked:
            return asked[key[:at]]
        at = key.find(".", at) + 1
    return None


def _twice(shown: str, why: str) -> ConfigError:
    return ConfigError(f"{shown}: {why}", field=shown)


# names ---------------------------------------------------------------------------------------------------------


def unnamed_children(module: nn.Module) -> set[str]:
    """Children whose attribute name isn't part of names: what wrappers keep their module under."""
    unnamed = {compat.CHECKPOINT_WRAPPED}
    if isinstance(module, nn.parallel.DistributedDataParallel):
        unnamed.add("module")
    elif compat.is_compiled_module(module):
        unnamed.add(compat.COMPILED_MODULE)
    elif compat.is_fsdp1_module(module):
        unnamed.add(compat.FSDP1_WRAPPED)
    modifiers = getattr(module, compat.FQN_MODIFIERS, None)
    if callable(modifiers):
        unnamed.update(modifiers().values())
    return unnamed


def _without_wrappers(module: nn.Module, items: Sequence[str]) -> Iterator[str]:
    """The items of a key, but for names of wrapped modules. Hooks may have made up the end of it, or all."""
    inside: nn.Module | None = module
    for item in items:
        child = None if inside is None else compat.children_of(inside).get(item)
        if inside is None or child is None or item not in unnamed_children(inside):
            yield item
        inside = child


def _hook_in(trace: TracebackType | None) -> str:
    """The function of the user's that torch called where an exception came through; empty if it was torch itself."""
    while trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "")
        if module != __name__ and not module.startswith("torch."):
            return f"{module}.{getattr(code, 'co_qualname', code.co_name)}"
        trace = trace.tb_next
    return ""


def _raised_by_torch(trace: TracebackType | None) -> bool:
    """Return True if torch's ``load_state_dict`` raised the error itself, not a function that it called."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    code = trace.tb_frame.f_code
    return code.co_name == "load_state_dict" and trace.tb_frame.f_globals.get("__name__") == nn.Module.__module__


# what values are -----------------------------------------------------------------------------------------------


class Matcher:
    """Match values with the memory they are in; created anew each time, since ``tensor.data = other`` moves it."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._own: dict[str, tuple[torch.Tensor, bool]] = {}
        for part in parts:
            self._own.update(part.hooked.own)
        self._by_address: dict[int, list[tuple[torch.Tensor, bool]]] = {}
        self._by_storage: dict[int, list[tuple[int, int, bool]]] | None = None
        for own in self._own.values():
            address = _address(own[0])
            if address:
                self._by_address.setdefault(address, []).append(own)

    def is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return True if both are the same elements of the same memory."""
        return _address(one) == _address(other) and _memory(one) == _memory(other)

    def whole(self, name: str, value: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
        """The parameter (True) or buffer (False) that ``value`` is all of, if there is one."""
        address = _address(value)
        if address:
            there = self._by_address.get(address, ())
            return next((own for own in there if _memory(own[0]) == _memory(value)), None)
        # This rank has no element of it: only its name can tell.
        own = self._own.get(name)
        return own if own is not None and not _address(own[0]) and _looks(own[0]) == _looks(value) else None

    def is_view(self, value: torch.Tensor) -> bool | None:
        """Return True if ``value`` is a view of a parameter, False if of a buffer, None otherwise."""
        if not _address(value):
            return None
        if self._by_storage is None:
            self._by_storage = {}
            for same in self._by_address.values():
                for tensor, is_parameter in same:
                    storage, start, stop = _span(tensor)
                    self._by_storage.setdefault(storage, []).append((start, stop, is_parameter))
        storage, start, stop = _span(value)
        rows = self._by_storage.get(storage, ())
        kinds = {kind for first, last, kind in rows if first < stop and start < last}
        if not kinds:
            return None
        return kinds == {True} and any(first <= start and stop <= last for first, last, _ in rows)


def fresh_among(values: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the tensors whose memory nobody else holds, so that nothing can change it.

    values: all of those that were made together, which only this and the dictionary that they came in hold.
    """
    plain = {name: value for name, value in values.items() if _is_ordinary(value)}
    locals_of = {name: compat.dtensor_local(value) for name, value in plain.items() if compat.is_dtensor(value)}
    counts = dict(zip(plain, _references(plain), strict=True))
    local_counts = dict(zip(locals_of, _references(locals_of), strict=True))
    held = {name: locals_of.get(name, value) for name, value in plain.items()}
    sharing = Counter(
        tensor.untyped_storage().data_ptr() for tensor in {id(one): one for one in held.values()}.values()
    )
    fresh = set()
    for name, tensor in held.items():
        owners = compat.owners_of_storage(tensor)
        if (
            owners is not None
            and owners <= sharing[tensor.untyped_storage().data_ptr()]
            and counts[name] <= _REFERENCES + 2
            and local_counts.get(name, 0) <= _REFERENCES + 1
        ):
            fresh.add(name)
    return fresh


def _is_ordinary(tensor: torch.Tensor) -> bool:
    if compat.is_dtensor(tensor):
        tensor = compat.dtensor_local(tensor)
    return compat.is_plain(tensor) and tensor.layout is torch.strided and tensor.numel() > 0


def _references(values: Mapping[str, object]) -> list[int]:
    return [sys.getrefcount(value) for value in values.values()]


_REFERENCES = _references({"": object()})[0]
"""To what only a dictionary holds, counted so: interpreters count differently."""


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the first element of this rank's part; 0 if it is empty or unknown."""
    if compat.is_uninitialized(tensor):
        return 0
    local = compat.local_tensor(tensor)
    if not compat.is_storable_type(local) or local.layout is not torch.strided:
        return 0
    return local.data_ptr() if local.numel() else 0


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key for the memory layout of this rank's part: address, sizes, strides."""
    local = compat.local_tensor(tensor)
    return local.device, local.data_ptr(), local.stride(), local.is_conj(), local.is_neg(), _looks(tensor)


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    if compat.is_dtensor(tensor):
        return tensor.shape, tensor.dtype, id(tensor.device_mesh), tuple(tensor.placements)  # type: ignore[attr-defined]
    return tensor.shape, tensor.dtype


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Its storage, and the addresses from its first byte to past its last."""
    local = compat.local_tensor(tensor)
    last = sum((size - 1) * step for size, step in zip(local.shape, local.stride(), strict=True))
    start = local.data_ptr()
    return local.untyped_storage().data_ptr(), start, start + (last + 1) * local.element_size()


class _Seen(NamedTuple):
    """All that a walk depended on, flat, so that comparing it again runs at C speed."""

    tables: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    transient: list[set[str]]


class Given(NamedTuple):
    """One value of a state dict, as a load has to treat it."""

    name: str
    value: Any
    """Of a tensor what is to be filled: a parameter or buffer itself, or what ``state_dict()`` made."""
    in_place: bool
    """To fill it is to fill the module: it lies in a parameter or buffer."""
    required: bool
    """It is not just a buffer."""

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def as_modules(value: object) -> tuple[nn.Module, ...] | None:
    """The modules that ``value`` stands for: one, or a list of them (pipeline stages), whose names are merged."""
    if isinstance(value, nn.Module):
        return (value,)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, nn.Module) for item in value):
        return tuple(value)
    return None


class ModuleSource:
    """The tensors of the module, or the pipeline stages, at one path of the state."""

    def __init__(
        self,
        path: Path,
        modules: Sequence[nn.Module],
        *,
        staged: bool = False,
        skips_frozen: bool = False,
        unprefixed: bool = False,
    ) -> None:
        self.path = path
        self.unprefixed = unprefixed
        self._above: Path = () if unprefixed else path  # before names in a checkpoint
        self.skips_frozen = skips_frozen
        self.modules = tuple(modules)
        self.staged = staged
        """The modules were given as a list: other ranks may hold other stages of the same model."""
        self.tensors: list[TensorEntry] = []
        """Those that stay the same objects as long as nothing changes."""
        self.computed: list[TensorEntry] = []
        self.values: list[tuple[Path, Any]] = []
        """Values from hooks, kept until `let_go`: temporary tensors, and values that aren't tensors."""
        self.given: dict[str, Given] = {}
        self.asked = NOTHING
        self.is_hooked = False
        """Saving must call ``state_dict()``."""
        self.extra_states: list[tuple[Path, nn.Module]] = []
        """Extra states of modules without hooks."""
        self.unfolded: list[Unfolded] = []
        self.fqn_of: dict[int, str] = {}
        """The first name of each parameter, by ``id``: what an optimizer's state is named after, as stock names it."""
        self._names: list[str] | None = None
        self._own: list[TensorEntry] = []
        self._own_extra_states: list[tuple[Path, nn.Module]] = []
        self._plans: list[list[Step]] = []
        self._hooked: list[Hooked] = []
        self._owners: list[nn.Module] = []
        self._hooks: list[int] = []
        self._load_hooks: list[int] = []
        self._hooks_registered: int | None = None
        self._known_patched: list[bool] = []
        self._fsdp: list[nn.Module] = []
        self._seen: _Seen | None = None
        self._outer: dict[str, TensorEntry] = {}
        """By the name of an inner tensor, the parameter or buffer that it is of."""
        self._parts: dict[str, LocalPart] = {}
        self._guard = TensorGuard(())

    def refresh(self, *, look_closer: bool = True, asked: Asked | None = None) -> bool:
        """Bring `tensors` up to date; True if nothing had changed since the last call.

        look_closer: whether tensors that are the same objects have stayed of their kinds, too. asked: what `ask` has
        given a moment ago; without it state dicts of modules with hooks are asked for now.
        """
        stands = self._refresh_own(look_closer=look_closer)
        self.let_go()
        if self.is_hooked or asked is not None:
            self.asked = self._ask(loading=False) if asked is None else asked
        if not self.asked.parts:
            self.extra_states = self._own_extra_states + [row for hooked in self._hooked for row in hooked.extra_states]
            tensors, self._names = self._own, None
            if self.skips_frozen:
                tensors = [entry for entry in self._own if not self._is_frozen(entry)]
                tensors = self.tensors if same_objects(tensors, self.tensors) else tensors
        else:
            answered = {id(part.hooked.module) for part in self.asked.parts}
            unasked = [hooked for hooked in self._hooked if id(hooked.module) not in answered]
            self.extra_states = self._own_extra_states + [row for hooked in unasked for row in hooked.extra_states]
            tensors = self._take(self.asked)
        if tensors is self.tensors:
            return stands
        same = [entry.name for entry in tensors] == [entry.name for entry in self.tensors] and same_objects(
            [entry.tensor for entry in tensors], [entry.tensor for entry in self.tensors]
        )
        self.tensors = tensors
        return stands and same

    def ask_for_load(self) -> Asked:
        """Call the state-dict hooks that a load needs, for `refresh`: of modules with hooks of saving or loading."""
        stands = self._refresh_own(look_closer=True)
        if stands and _hooks_of(self._owners, _LOAD_HOOKS) != self._load_hooks:
            self._walk()  # who saves doesn't look out for these
        return self._ask(loading=True)

    def _ask(self, *, loading: bool) -> Asked:
        if not self._hooked:
            return NOTHING
        return ask(self._plans, shown=joined(self.path) or "into", loading=loading)

    @property
    def names(self) -> list[str]:
        """Names of all tensors as of the last `refresh`."""
        return self._names if self._names is not None else [entry.name for entry in self.tensors]

    @property
    def own(self) -> Sequence[TensorEntry]:
        """Parameters and buffers under their own names, whatever hooks make of them."""
        return self._own

    def wanted(self) -> list[tuple[str, Any, bool]]:
        """List the tensors that a load fills, and whether each must be stored."""
        if self.given:
            return [(name, one.value, one.required) for name, one in self.given.items() if one.is_tensor]
        return [(str(entry.path[-1]), self._parts.get(entry.name, entry.tensor), entry.lazy) for entry in self.tensors]

    def left_out(self) -> list[str]:
        """List the names of parameters that are not stored as they are frozen."""
        if not self.skips_frozen:
            return []
        names = [str(note.path[-1]) for one in self.unfolded if _is_frozen(one.entry) for note in one.notes()]
        return [*(str(entry.path[-1]) for entry in self._own if self._is_frozen(entry)), *names]

    def noted(self) -> list[Unfolded]:
        """List the tensors that are stored as inner tensors with a note."""
        return [one for one in self.unfolded if not (self.skips_frozen and _is_frozen(one.entry))]

    def _is_frozen(self, entry: TensorEntry) -> bool:
        return _is_frozen(self._outer.get(entry.name, entry))

    def let_go(self) -> None:
        """Hold nothing of what was made for one look."""
        self.computed, self.values, self.given = [], [], {}
        self.asked = NOTHING

    def _take(self, asked: Asked) -> list[TensorEntry]:
        """Tell apart what the state dicts gave; returns the entries that stay."""
        matcher = Matcher(asked.parts)
        own = {entry.name: entry for entry in self._own}
        known = {entry.name: entry for entry in self.tensors}
        stay: list[TensorEntry] = []
        made: dict[str, torch.Tensor] = {}
        for fqn, value in asked.values.items():
            path = (*self._above, fqn)
            if not isinstance(value, torch.Tensor):
                self.values.append((path, value))
                self.given[fqn] = Given(fqn, value, in_place=False, required=True)
                continue
            if is_sharded(value):
                self.computed += entries_of(joined(path), path, value, lazy=False)
                self.given[fqn] = Given(fqn, value, in_place=False, required=True)
                continue
            if unfolds(value) and not self.is_hooked:  # a load, which knows where its inner tensors are
                self.given[fqn] = Given(fqn, value, in_place=True, required=True)
                continue
            name = joined(path)
            entry = own.get(name)
            if self.skips_frozen and entry is not None and self._is_frozen(entry):
                continue
            if entry is None or entry.tensor is not value:
                entry = self._stands_still(known.get(name), path, value, matcher)
            if entry is None:
                check_tensor(name, value)
                made[fqn] = value
            else:
                stay.append(entry)
                self.given[fqn] = Given(fqn, entry.tensor, in_place=True, required=entry.lazy)
        value = None
        self._take_made(made, fresh_among(made), matcher)
        self._names = [entry.name for entry in (*stay, *self.computed)]
        return stay

    def _take_made(self, made: Mapping[str, torch.Tensor], fresh: set[str], matcher: Matcher) -> None:
        for fqn, value in made.items():
            path = (*self._above, fqn)
            self.computed.append(TensorEntry(joined(path), path, value, lazy=False, fresh=fqn in fresh))
            of_buffer = matcher.is_view(value) is not None
            self.given[fqn] = Given(fqn, value, in_place=of_buffer, required=not of_buffer)

    def _stands_still(
        self, known: TensorEntry | None, path: Path, value: torch.Tensor, matcher: Matcher
    ) -> TensorEntry | None:
        """An entry for what lies in a parameter, or is a buffer; None for all else."""
        name = joined(path)
        whole = matcher.whole(str(path[-1]), value)
        tensor, lazy = whole if whole is not None else (value, True)
        if whole is None:
            if not matcher.is_view(value):
                return None
            if known is not None and matcher.is_same(known.tensor, value):
                tensor = known.tensor  # the view that was taken last time
        if known is not None and known.tensor is tensor and known.lazy == lazy:
            return known
        check_tensor(name, tensor)
        return TensorEntry(name, path, tensor, lazy)

    def _refresh_own(self, *, look_closer: bool) -> bool:
        """Bring parameters and buffers up to date; True if nothing had changed."""
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
            and all(one.stands for one in self.unfolded)
            and self._hooks_stand()
            and (not look_closer or self._guard.stands())
        )

    def _hooks_stand(self) -> bool:
        """Return True if the modules have the same save hooks as before; hook ids are never reused."""
        count = compat.hooks_registered()
        if self._patched() != self._known_patched:
            return False
        if not self.is_hooked and count is not None and count == self._hooks_registered:
            return True  # nobody has registered any since, and there was none to remove
        self._hooks_registered = count
        return _hooks_of(self._owners, _HOOKS) == self._hooks

    def _patched(self) -> list[bool]:
        """Return for each module whether its ``state_dict`` attribute was replaced, as old adapter recipes do."""
        return ["state_dict" in module.__dict__ for module in self.modules]

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
        self._owners = list({id(one): one for root in self.modules for one in root.modules()}.values())
        self._fsdp = [module for module in self._owners if compat.is_fsdp2_module(module)]
        self._reshard()
        tensors: dict[str, TensorEntry] = {}
        self._own_extra_states, self.fqn_of, self._plans = [], {}, []
        self.unfolded, self._outer, self._parts = [], {}, {}
        collisions: list[str] = []
        for module in self.modules:
            self._plans.append([])
            for fqn, tensor, is_parameter in self._named(module, "", None):
                path = (*self._above, fqn)
                name = joined(path)
                if name in tensors:
                    collisions.append(name)
                    continue
                tensors |= self._entries_of(TensorEntry(name, path, tensor, is_parameter))
                if is_parameter:
                    self.fqn_of.setdefault(id(tensor), fqn)
        if collisions:
            shown = ", ".join(collisions[:3])
            raise ConfigError(
                f"the modules in the list {joined(self.path)!r} have {len(collisions)} names in common ({shown}, ...): "
                "the names of stages are merged; give each module its own key",
                field=joined(self.path),
            )
        self._own = list(tensors.values())
        self._hooked = [step for plan in self._plans for step in plan if isinstance(step, Hooked)]
        self.is_hooked = any(hooked.saves for hooked in self._hooked)
        # Of what hooks decide about, only what they give has to be storable.
        decided = {name for hooked in self._hooked if hooked.saves for name in hooked.own}
        direct = [entry for entry in self._own if entry.path[-1] not in decided] if decided else self._own
        for entry in direct:
            check_tensor(entry.name, entry.tensor)
        self._seen = _look(self._owners)
        self._hooks, self._load_hooks = _hooks_of(self._owners, _HOOKS), _hooks_of(self._owners, _LOAD_HOOKS)
        self._hooks_registered, self._known_patched = compat.hooks_registered(), self._patched()
        self._guard = TensorGuard([entry.tensor for entry in direct])

    def _entries_of(self, entry: TensorEntry) -> dict[str, TensorEntry]:
        """Return ``entry`` by name, or those of its inner tensors."""
        if not unfolds(entry.tensor):
            return {entry.name: entry}
        self.unfolded.append(Unfolded(entry))
        found = {inner.name: inner for inner in self.unfolded[-1].entries()}
        self._outer |= dict.fromkeys(found, entry)
        self._parts |= {name: LocalPart(one.tensor, one.place) for name, one in found.items() if one.place is not None}
        return found

    def _named(self, module: nn.Module, prefix: str, within: Hooked | None) -> Iterator[tuple[str, torch.Tensor, bool]]:
        self._check_kind(module, prefix)
        plan = self._plans[-1]
        if within is None and (compat.changes_saving(module) or compat.changes_loading(module)):
            shown = joined((*self.path, prefix.rstrip("."))) if prefix else joined(self.path) or "into"
            saves = any(map(compat.changes_saving, module.modules()))
            within = Hooked(
                module, shown, prefix, saves=saves, loads=any(map(compat.changes_loading, module.modules()))
            )
            plan.append(within)
        transient = compat.transient_buffers_of(module)
        own = [(name, one, True) for name, one in compat.parameters_of(module).items()]
        own += [(name, one, False) for name, one in compat.buffers_of(module).items() if name not in transient]
        for name, tensor, is_parameter in own:
            if tensor is None:
                continue
            if within is None:
                plan.append((prefix + name, tensor))
            else:
                within.own[prefix + name] = tensor, is_parameter
            yield prefix + name, tensor, is_parameter
        if compat.has_extra_state(module):
            name = prefix + compat.EXTRA_STATE
            if within is None:
                self._own_extra_states.append(((*self._above, name), module))
            else:
                within.extra_states.append(((*self._above, name), module))
        children = compat.children_of(module)
        unnamed = unnamed_children(module) if children else set()
        for name, child in children.items():
            if child is not None:
                yield from self._named(child, prefix if name in unnamed else f"{prefix}{name}.", within)

    def _check_kind(self, module: nn.Module, prefix: str) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{joined(self.path) or 'into'}: {prefix or 'the module'} was made by torch.jit, which "
                "is not supported; pass the module that it was made from, or a dictionary of its "
                "tensors",
                field=joined(self.path),
            )


def _is_frozen(entry: TensorEntry) -> bool:
    """Return True for a parameter of a module, under its own name, that no optimizer trains."""
    return entry.lazy and not entry.tensor.requires_grad


def _look(owners: list[nn.Module]) -> _Seen:
    tables = list(chain.from_iterable(map(table, owners) for table in _TABLES))
    return _Seen(
        tables=tables,
        keys=list(chain.from_iterable(tables)),
        values=list(chain.from_iterable(map(dict.values, tables))),
        transient=[set(names) for names in map(compat.transient_buffers_of, owners) if names],
    )


def _hooks_of(owners: list[nn.Module], tables: tuple[attrgetter[Any], ...]) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(map(table, owners) for table in tables)))
