"""What a function over a state dict does to its tensors, as moves: found by running it on tensors without data.

Each tensor of the state is replaced by a stand-in, which has sizes, strides, a dtype and, of each element, where it
comes from. So reshapes, transposes and slices cost nothing by themselves, whatever their order, and a torchtitan
adapter, `transformers`' own conversion table and a user's function are all read by one means.

Guarantees: nothing of the size of a tensor is allocated or enumerated; the function's own code decides names, order and
shapes; the moves of a tensor cover each element exactly once. What computes, or asks for a value, is a `ConfigError`
that names the tensor and the operation. So is a cast that loses bits before another cast: one cast straight to the last
dtype, which is what an export makes, would give another result.
Assumes: the function treats tensors by names, shapes and dtypes only, and the same way every time. It runs on this
thread; memory it makes with ``torch.empty`` on another thread is real, and can't be filled from stand-ins.
Does not: know safetensors, transformers, or what may be dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from holdfast import _torch_compat as compat
from holdfast.errors import ConfigError
from holdfast.export.moves import coalesced, with_source
from holdfast.export.operations import made_without_data
from holdfast.export.stand_ins import SUPPORTED, StandIn, copied, dispatch, origin, read, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.export.moves import Move

    StateDict = dict[str, torch.Tensor]
    Sources = Mapping[str, tuple[Sequence[int], str | torch.dtype]]

_SMALL: Final = frozenset({"int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"})
_EXACT_IN: Final = {
    "float8_e4m3fn": frozenset({"float16", "bfloat16", "float32", "float64"}),
    "float8_e5m2": frozenset({"float16", "bfloat16", "float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "bfloat16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
    "uint8": _SMALL,
    "int8": _SMALL,
    "int16": frozenset({"int32", "int64", "float32", "float64"}),
    "int32": frozenset({"int64", "float64"}),
}
"""By dtype, those that hold each of its values: a cast through them on the way to another changes nothing."""


class TracedTensor(NamedTuple):
    """One tensor that a traced function returned."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    moves: tuple[Move, ...]
    """From tensors of the state, in target order: each element once."""


def trace(function: Callable[[StateDict], Any], sources: Sources) -> list[TracedTensor]:
    """What ``function`` makes of a state dict with tensors of these shapes and dtypes, in the order it returns them.

    Raises:
        ConfigError: it computes or reads values, raises, or returns anything but tensors made of the state's elements.
    """
    state: StateDict = {name: stand_in(name, shape, dtype) for name, (shape, dtype) in sources.items()}
    return [traced(name, value) for name, value in run_on_stand_ins(function, state).items()]


def run_on_stand_ins(function: Callable[[StateDict], Any], state: StateDict, shown: str = "") -> StateDict:
    """What ``function``, called ``shown`` in errors, returns for a dict of stand-ins, checked to be a dict of them."""
    shown = shown or getattr(function, "__qualname__", None) or type(function).__name__
    try:
        with torch.no_grad(), _Factories():
            result = function(dict(state))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"key_map: `{shown}` failed with {type(error).__name__}: {error}. {SUPPORTED}", field="key_map"
        ) from error
    if not hasattr(result, "items"):
        raise ConfigError(
            f"key_map: `{shown}` returned {type(result).__name__}; return a state dict: names -> tensors",
            field="key_map",
        )
    for name, value in result.items():
        if not isinstance(name, str) or not isinstance(value, StandIn):
            raise ConfigError(
                f"key_map: `{shown}` returned {type(value).__name__} for {name!r}, not a tensor made of tensors of "
                f"the state. {SUPPORTED}",
                field="key_map",
            )
    return dict(result)


class _Factories(compat.DispatchMode):
    """While entered, ``torch.empty`` and the like make stand-ins that can be filled from stand-ins."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, StandIn) for kind in types):
            return dispatch(func, tuple(args), dict(kwargs or {}))
        made = made_without_data(func, tuple(args), dict(kwargs or {}))
        return func(*args, **(kwargs or {})) if made is None else made


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor``, a stand-in, in ``dtype`` because a rule says so: no general dtype replaces it."""
    assert isinstance(tensor, StandIn)
    made = copied(tensor, torch.empty(tensor.shape, dtype=dtype, device="meta"))
    made.memory.is_pinned = True
    return made


def is_cast_by_rule(tensor: torch.Tensor) -> bool:
    """Whether `cast` made it, or made all of what it was made of."""
    assert isinstance(tensor, StandIn)
    return tensor.memory.is_pinned


def traced(name: str, tensor: torch.Tensor, dtype: str | None = None) -> TracedTensor:
    """What became of ``tensor``, a stand-in, checked: every element from a source, casts that can be made at once.

    dtype: cast it to this in the end.
    """
    assert isinstance(tensor, StandIn)
    marked = coalesced(read(tensor))
    filled = sum(move.volume for move in marked)
    if filled != tensor.numel():
        raise ConfigError(
            f"key_map: {tensor.numel() - filled} of the {tensor.numel()} elements of `{name}` come from no tensor of "
            f"the state: they are constants, or memory that `torch.empty` made and nothing was written to; the others "
            f"come from {tensor.memory.shown()}",
            field="key_map",
        )
    own = tensor.memory.dtype
    for source in dict.fromkeys(move.source for move in marked):
        _check_casts(name, source, own if dtype is None else dtype)
    moves = tuple(with_source(move, origin(move.source)[0]) for move in marked)
    return TracedTensor(name, tuple(tensor.shape), own if dtype is None else dtype, moves)


def _check_casts(name: str, marked: str, final: str) -> None:
    source, dtypes = origin(marked)
    if dtypes[-1] != final:
        dtypes = [*dtypes, final]
    for between in dtypes[1:-1]:
        if between != dtypes[0] and between not in _EXACT_IN.get(dtypes[0], ()):
            raise ConfigError(
                f"key_map: `{source}` is cast from {' to '.join(dtypes)} on its way to `{name}`: {between} loses bits "
                "that the last cast can't bring back, and an export casts once. Cast straight to the last",
                field="key_map",
            )
