"""Wrap every private or version-dependent name of torch that Holdfast uses.

Guarantees: works with torch 2.7 and later; imports no heavy part of torch that the program hasn't imported itself (no
DTensor exists before ``torch.distributed.tensor`` is imported, no compiled module before ``torch._dynamo``), so checks
such as "is this a DTensor?" cost nothing in programs without any.
Does not: contain logic of Holdfast. If torch moves a name, fix it here and nowhere else.
"""

# ruff: noqa: SLF001 - the purpose of this module is to use private names

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its own hook comes first: see `before_threads_end`
import contextlib
import copy
import sys
import threading
import warnings
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta
    from types import FrameType

CHECKPOINT_WRAPPED: Final = "_checkpoint_wrapped_module"
"""The attribute under which an activation-checkpoint wrapper keeps its module."""

FSDP1_WRAPPED: Final = "_fsdp_wrapped_module"
"""The attribute under which an FSDP1 module keeps the one that it wraps."""

COMPILED_MODULE: Final = "_orig_mod"
"""The attribute under which ``torch.compile`` keeps the module it wraps."""

FQN_MODIFIERS: Final = "_fqn_modifiers"
"""A module method naming children that its own state_dict hooks leave out of names (torch 2.6 and later)."""

EXTRA_STATE: Final = "_extra_state"

HF_TIED: Final = "all_tied_weights_keys"
HF_MAY_LACK: Final = "_keys_to_ignore_on_load_missing"
HF_MAY_HAVE: Final = "_keys_to_ignore_on_load_unexpected"
"""Attributes of ``transformers`` models: tied names, and patterns of names that may be missing or unexpected in
files.
"""

_PLAIN_TYPES: Final = (torch.Tensor, nn.Parameter)

dtensor_spec = attrgetter("_spec")
"""A DTensor's mesh, placements and global metadata: one object, replaced whenever any of them changes."""


def before_threads_end(function: Callable[[], None]) -> None:
    """Call ``function`` when the interpreter begins to exit, while threads can be started and executors take work.

    Python's own executors are ended by the same hook (of `threading`, called in reverse order of registration).
    `atexit` callbacks come later: since Python 3.12 they can start no thread. On a Python without the hook this does
    nothing.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # it exits already, and waits for the thread that got here
            register(function)


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its prefix: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


# tensors -------------------------------------------------------------------------------------------------------


def is_dtensor(value: object) -> bool:
    if type(value) in _PLAIN_TYPES:
        return False
    dtensor = _loaded("torch.distributed.tensor", "DTensor")
    return dtensor is not None and isinstance(value, dtensor)


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of a functional collective's result, once that is complete; else ``tensor``."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    pending = _loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if pending is not None and isinstance(tensor, pending):
        done: torch.Tensor = tensor.wait()
        return done
    return tensor


def dtensor_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor object of a DTensor, without autograd and without waiting."""
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def is_storable_type(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` consists of its bytes only: subclasses with their own dispatch have inner tensors."""
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        return True
    plain: object = torch.Tensor.__torch_dispatch__
    return kind.__torch_dispatch__ is plain


def has_inner_tensors(value: object) -> bool:
    """Return True for a tensor of a class that is made of inner tensors, and says which, and for a DTensor whose local
    part is one; not for other DTensors, nested tensors, or the result of a functional collective.
    """
    kind = type(value)
    if kind in _PLAIN_TYPES or not isinstance(value, torch.Tensor) or not hasattr(kind, "__tensor_flatten__"):
        return False
    if is_dtensor(value):
        return has_inner_tensors(dtensor_local(value))
    pending = _loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if value.is_nested or (pending is not None and isinstance(value, pending)):
        return False
    return hasattr(kind, "__tensor_unflatten__")


def inner_names(tensor: torch.Tensor) -> list[str]:
    """Return the attributes of a subclass that are its inner tensors."""
    return list(flatten_subclass(tensor)[0])


def flatten_subclass(tensor: torch.Tensor) -> tuple[list[str], Any]:
    """Return the names of the inner tensors of a subclass, and the rest of what makes it."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [name for name in names if name not in DERIVED], context


DERIVED: Final = ("_precomputed_scale",)
"""Inner tensors that are computed from others where there are none: of torchao's float8 weights, after each step."""


def forget_derived(tensor: torch.Tensor) -> None:
    """Let a subclass compute anew what it has computed from inner tensors that are others now."""
    for name in DERIVED:
        if getattr(tensor, name, None) is not None:
            setattr(tensor, name, None)


def unflatten_subclass(
    kind: type[torch.Tensor], inner: dict[str, torch.Tensor], context: Any, like: torch.Tensor
) -> torch.Tensor:
    """Make a tensor of class ``kind`` of its inner tensors, with the shape and strides of ``like``."""
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, like.size(), like.stride())  # type: ignore[attr-defined]
    return made


def empty_dtensor(shape: Sequence[int], mesh: Any, placements: Any) -> torch.Tensor:
    """Return a DTensor of bytes; of its local part, the shape is of interest."""
    from torch.distributed.tensor import empty

    made: torch.Tensor = empty(*shape, dtype=torch.uint8, device_mesh=mesh, placements=placements)
    return made


def is_uninitialized(tensor: torch.Tensor) -> bool:
    return nn.parameter.is_lazy(tensor)


def is_sharded_tensor(value: object) -> bool:
    """Return True for a `ShardedTensor`: what state dicts of FSDP1 and of TorchRec consist of."""
    if type(value) in _PLAIN_TYPES:
        return False
    sharded = _loaded("torch.distributed._shard.sharded_tensor", "ShardedTensor")
    return sharded is not None and isinstance(value, sharded)


def sharded_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a `ShardedTensor`: its own methods warn that it is deprecated."""
    return tuple(tensor.metadata().size)


def shards_of(tensor: Any) -> list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]]:
    """Return what this process holds of a `ShardedTensor`: tensors, each with its offsets and sizes in the whole."""
    return [
        (shard.tensor, tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        for shard in tensor.local_shards()
    ]


def empty_sharded_like(tensor: Any, dtype: torch.dtype) -> Any:
    """Return a `ShardedTensor` like ``tensor`` with new memory, of another dtype. Doesn't communicate."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard

    shards = [Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in tensor.local_shards()]
    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.dtype = dtype
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=tensor._process_group
    )


def strided_shard_split(placement: object) -> int | None:
    """Return the split factor of a strided-shard placement; None for any other placement."""
    strided = _loaded("torch.distributed.tensor.placement_types", "_StridedShard")
    if strided is not None and isinstance(placement, strided):
        return int(placement.split_factor)
    return None


def make_placement(kind: str, dim: int, split: int) -> Any:
    """Return the placement that `strided_shard_split` and the public names say: ``"strided"``, ``"shard"``, others."""
    from torch.distributed.tensor import placement_types

    if kind == "strided":
        return placement_types._StridedShard(dim, split_factor=split)
    return placement_types.Shard(dim) if kind == "shard" else placement_types.Replicate()


def mesh_groups(mesh: Any) -> list[str]:
    """Return the names of a mesh's process groups, one a dimension; none if torch keeps them otherwise."""
    return [str(name) for name in getattr(mesh, "_dim_group_names", ())]


def make_mesh(kind: str, ranks: torch.Tensor, names: tuple[str, ...] | None, groups: list[str]) -> Any:
    """Return a mesh that equals another one, without making process groups or communicating.

    It uses those of ``groups`` that this process has with the same names, so that what communicates over it does so as
    over the other. Without them it can be compared and copied over: all that loading a state dict needs.
    """
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = DeviceMesh(kind, ranks, mesh_dim_names=names, _init_backend=False)
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        found = {name: resolve(name) for name in groups}
    except RuntimeError:  # none is called so here
        found = {}
    if found and hasattr(mesh, "_pg_registry"):
        mesh._dim_group_names = list(groups)
        mesh._pg_registry = found
    return mesh


def make_dtensor(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a DTensor of these parts; ``local`` stays where it is, on another device too. Doesn't communicate.

    The public `DTensor.from_local` would move it to the mesh's device. If the constructor goes, use that.
    """
    from torch.distributed.tensor import DTensor, _dtensor_spec

    meta = _dtensor_spec.TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = _dtensor_spec.DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    made: Any = DTensor
    result: torch.Tensor = made(local, spec, requires_grad=False)
    return result


# modules -------------------------------------------------------------------------------------------------------


# The tables of every module, as `nn.Module.__setattr__` fills them: read by identity on each save, for which their
# public views (`named_parameters` and the like) are too slow. If the tables move, use those views.
parameters_of = attrgetter("_parameters")
buffers_of = attrgetter("_buffers")
children_of = attrgetter("_modules")
transient_buffers_of = attrgetter("_non_persistent_buffers_set")


def is_compiled_module(module: nn.Module) -> bool:
    compiled = _loaded("torch._dynamo.eval_frame", "OptimizedModule")
    return compiled is not None and isinstance(module, compiled)


def is_fsdp1_module(module: nn.Module) -> bool:
    fsdp1 = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    return fsdp1 is not None and isinstance(module, fsdp1)


@contextlib.contextmanager
def fsdp1_sharded(module: nn.Module) -> Iterator[None]:
    """While in it, state dicts of ``module``, if it has FSDP1 modules in it, consist of `ShardedTensor` or DTensors.

    All of it is public. Its warnings are for those who write such code today.
    """
    if not any(map(is_fsdp1_module, module.modules())):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for message in ("When using ``NO_SHARD``", "`_get_pg_default_device` will", "Multiple backends are registered"):
            warnings.filterwarnings("ignore", message, UserWarning)
        with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            yield


def is_fsdp1_parameter(tensor: torch.Tensor) -> bool:
    """Return True for a flat parameter of FSDP1, and for a parameter that is part of one."""
    return bool(getattr(tensor, "_fsdp_flattened", False))


def fsdp1_parameters(module: nn.Module) -> set[int]:
    """Return the ``id`` of what an optimizer may have as parameters of ``module``, which has FSDP1 modules in it."""
    found = set(map(id, module.parameters()))
    for one in filter(is_fsdp1_module, module.modules()):
        flat = getattr(one._handle, "flat_param", None)
        if flat is not None:
            found |= {id(flat), *map(id, flat._params or ())}
    return found


def is_fsdp2_module(module: nn.Module) -> bool:
    fsdp2 = _loaded("torch.distributed.fsdp", "FSDPModule")
    return fsdp2 is not None and isinstance(module, fsdp2)


def class_without_fsdp2(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` before ``fully_shard`` replaced it."""
    fsdp2 = _loaded("torch.distributed.fsdp", "FSDPModule")
    kinds = type(module).__mro__
    return next(kind for kind in kinds if fsdp2 is None or not issubclass(kind, fsdp2))


def twin(module: nn.Module, kind: type[nn.Module], children: dict[str, nn.Module | None]) -> nn.Module:
    """Return a module of class ``kind`` with other children, sharing all other attributes of ``module``."""
    made: nn.Module = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    made.__dict__["_modules"] = children
    return made


def fsdp2_is_sharded(module: nn.Module) -> bool:
    """Return True if an FSDP2 module has its sharded parameters registered: those that the optimizer holds and saves
    use.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return all(group is None or group.is_sharded for group in groups)


save_hooks_of = attrgetter("_state_dict_hooks")
save_pre_hooks_of = attrgetter("_state_dict_pre_hooks")
load_hooks_of = attrgetter("_load_state_dict_post_hooks")
load_pre_hooks_of = attrgetter("_load_state_dict_pre_hooks")


def hooks_registered() -> int | None:
    """Return the number of hooks of any kind registered in this process; None if this torch doesn't count them."""
    count = getattr(torch.utils.hooks.RemovableHandle, "next_id", None)
    return count if isinstance(count, int) else None


_KEEPS_NAMES: Final = (
    "torch.nn.",
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "torch.distributed.algorithms._checkpoint.",
)
"""Modules of torch whose overrides and hooks change no names and tensors, apart from wrappers' prefixes.

FSDP2 reshards, normalization layers upgrade old versions, ``spectral_norm`` and lazy modules add metadata. All other
modules of torch are treated like users' modules: ``torch.ao``, for example, adds entries that are no parameters. A
missing entry here costs time; a wrong one loses what that module adds.
"""


def changes_saving(module: nn.Module) -> bool:
    """Return True if ``module.state_dict()`` may return something other than the module's parameters and buffers."""
    if is_fsdp1_module(module):
        return True
    if _overrides(module, "state_dict") or _overrides(module, "_save_to_state_dict"):
        return True
    hooks = [*save_hooks_of(module).values(), *save_pre_hooks_of(module).values()]
    return not all(map(_keeps_names, hooks))


def changes_loading(module: nn.Module) -> bool:
    """Return True if ``module.load_state_dict()`` may do something other than filling parameters and buffers."""
    if is_fsdp1_module(module):
        return True
    if _overrides(module, "load_state_dict") or _overrides(module, "_load_from_state_dict"):
        return True
    hooks = [*load_hooks_of(module).values(), *load_pre_hooks_of(module).values()]
    return not all(map(_keeps_names, hooks))


def overrides_load_state_dict(module: nn.Module) -> bool:
    """Return True if ``module`` overrides ``load_state_dict``, and so decides itself what ``strict`` means."""
    return _overrides(module, "load_state_dict")


def _overrides(module: nn.Module, name: str) -> bool:
    if name in module.__dict__:  # an attribute of this object
        return True
    method = getattr(type(module), name)
    return method is not getattr(nn.Module, name) and not _keeps_names(method)


def _keeps_names(function: object) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(_KEEPS_NAMES)


def set_metadata(state_dict: Any, metadata: Any) -> None:
    """Give a state dict the modules' versions, which ``load_state_dict`` looks for in this attribute."""
    state_dict._metadata = metadata


def metadata_of(state_dict: Any) -> Any:
    """Return the modules' versions stored by ``state_dict()``, by prefix; empty if an override stored none."""
    return getattr(state_dict, "_metadata", None) or {}


def owners_of_storage(tensor: torch.Tensor) -> int | None:
    """Return the number of tensors that share ``tensor``'s storage; None if unknown, or if others may know its
    address.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    if count is None or not storage.resizable():  # a view of memory that numpy or another library owns
        return None
    return int(count(storage._cdata)) - 1  # `storage` is one of them


def has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


# devices -------------------------------------------------------------------------------------------------------


def current_accelerator() -> str | None:
    """Return ``"cuda"``, ``"xpu"``, ... if this build of torch has an accelerator that is present; else None."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def initialized_device_module(kind: str) -> Any | None:
    """Return torch's module for a device type if it is in use: querying an unused one would create a device context."""
    module = torch.get_device_module(kind)
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is None or is_initialized() else None


# the pickles of torch's own formats ----------------------------------------------------------------------------

# Functions that a stored pickle of a tensor names: part of the format of every .pt file, so torch has to keep them.
# Needed as objects because pickle writes a function by reference. If one moves, emit its opcodes as torch_record does.
rebuild_tensor_v2 = torch._utils._rebuild_tensor_v2
rebuild_tensor_v3 = torch._utils._rebuild_tensor_v3
rebuild_parameter = torch._utils._rebuild_parameter


def storage_info_type() -> Any:
    """Return the type of stock DCP's row "this entry is at these bytes of this file", as named in every ``.metadata``.

    Imported on demand: it imports most of ``torch.distributed``. If torch moves it, an alias must remain for existing
    checkpoints; use that.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def storage_prefix(rank: int) -> Any:
    """Return the value that stock's writer puts into ``SavePlan.storage_data``: the prefix of a rank's file names.

    Planners that cache plans keep it for the next save by any writer, so ours puts there what stock's needs. If torch
    moves or drops it, our plans may carry anything.
    """
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(f"__{rank}_")


def is_in_dcp_load() -> bool:
    """Return True if the caller was called, directly or indirectly, by stock's ``dcp.load``.

    ``dcp.load`` replaces any error of ``read_metadata`` by an `AssertionError` (torch 2.10 and later), so the original
    error has to be reported in another way. If the module moves, users see that `AssertionError` again.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_loader":
            return True
        frame = frame.f_back
    return False


def memory_format_encoding_type() -> Any:
    """Return the enumeration that represents a memory format in every ``.metadata``, as those can't be pickled.

    On demand for the same reason; existing pickles name it, so torch can only rename it with an alias.
    """
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING


# tensors that hold no data -------------------------------------------------------------------------------------

# Base of DTensor and of every quantized tensor: private by name, unchanged since torch 1.12. If it goes, use a tensor
# of the meta device under a dispatch mode; user code may then notice the device.
no_torch_function: Any = torch._C._disabled_torch_function_impl
"""As a class's ``__torch_function__``: calls reach only its ``__torch_dispatch__``, as aten operations."""

_DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode


class DispatchMode(_DispatchMode):  # type: ignore[misc]
    """Base of context managers whose ``__torch_dispatch__`` sees every aten operation on this thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping it would import torch's compiler at the first operation, which takes two seconds; nothing is compiled
        # here.
        return False


def without_data(kind: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Return a ``kind`` tensor with ``like``'s sizes and strides but without memory; it claims to be on the CPU."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=torch.device("cpu"),
        requires_grad=False,
    )


# checking many tensors -----------------------------------------------------------------------------------------


def same_kind_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function of these tensors that is true only while shape, strides, dtype and device are unchanged.

    It may be false nevertheless (for another `requires_grad`, or in another autograd mode): false means "check in
    detail". None if this torch has no such function: ``torch.compile``'s guards take a tenth of the time of reading the
    same attributes.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make = getattr(guards, "TensorGuards", None)
    if make is None or not tensors:
        return None
    try:
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except Exception:  # noqa: BLE001 - any failure: there is another way
        return None


# copying -------------------------------------------------------------------------------------------------------
#
# `Tensor._version` and `torch._foreach_copy_` are private by name only: autograd's documentation and the optimizers
# rely on them. Without the counter, staging loses its race detection and must fall back on samples; without the foreach
# copy, a loop over `Tensor.copy_` does the same and holds the GIL between tensors.

SAME_SIZE_INT: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size, for moving bits of dtypes without a copy kernel."""

_NUMPY: Final = frozenset({torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64})
"""Common dtypes that numpy has too."""

_ORDINARY: Final = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def version_of(tensor: torch.Tensor) -> int:
    """Return the counter that every in-place write to ``tensor`` increments; of the outer tensor for a DTensor."""
    return 0 if tensor.is_inference() else int(tensor._version)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor of this rank's part: a DTensor's local tensor, or the tensor itself."""
    return wait_for_collective(dtensor_local(tensor)) if is_dtensor(tensor) else wait_for_collective(tensor)


def same_values(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if two tensors of one shape are equal on this rank; unlike comparing DTensors, it does not
    communicate.
    """
    return torch.equal(local_tensor(left), local_tensor(right))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` has a type without dispatch overrides, so that its memory is its own."""
    return type(tensor) in _PLAIN_TYPES


def has_copy_kernel(dtype: torch.dtype) -> bool:
    """Return True if tensors of ``dtype`` can be copied as they are, on every device and version."""
    return dtype in _ORDINARY


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in a form that every kernel accepts: itself, or for fp8 and such its bits as integers.

    For a conjugate or negated view without its own kernel, these are the bits of a resolved copy: read-only.
    """
    if tensor.dtype in _ORDINARY:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        return _resolved_bits(tensor)
    return tensor.view(SAME_SIZE_INT[tensor.element_size()])


def _resolved_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a conjugate or negated view to new memory; complex32 has no kernel for both at once."""
    if tensor.dtype != torch.complex32:
        return tensor.resolve_neg().view(SAME_SIZE_INT[tensor.element_size()])
    memory = _same_memory(tensor, like=tensor)
    halves = torch.view_as_real(memory).view(torch.int16).contiguous()
    if tensor.is_neg():
        halves = halves ^ torch.iinfo(torch.int16).min
    if tensor.is_conj():
        halves = torch.stack((halves[..., 0], halves[..., 1] ^ torch.iinfo(torch.int16).min), -1)
    return halves.view(torch.int32).squeeze(-1)


def _same_memory(tensor: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` conjugated and negated as ``like`` is: doing that twice restores the values."""
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


def copy_(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Do ``target.copy_(source)`` for every dtype: bit for bit if the dtypes are equal, converted otherwise."""
    if target.dtype == source.dtype:
        # Apply the target's view to both: then its memory gets the right values.
        target, source = bits(_same_memory(target, like=target)), bits(_same_memory(source, like=target))
    target.copy_(source, non_blocking=non_blocking)


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target, in one call that doesn't take the GIL between tensors."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of the value, for every dtype."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_(out, tensor.detach())
    return out


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as one-dimensional uint8."""
    # Not `reshape`: a dimension of size 1 may have any stride, which a view as bytes would refuse.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def host_memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous host tensor's memory, to read and write as bytes; keeps the tensor alive."""
    array: Any
    if tensor.dtype in _NUMPY and tensor.ndim and tensor.numel():  # a faster way, for loads of many tensors
        array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return memoryview(array).cast("B")
    array = as_bytes(tensor).numpy()
    return memoryview(array)


def untraced(function: Any) -> Any:
    """Keep ``torch.compile`` from tracing into ``function``, which then runs as it is between compiled regions.

    Like `torch.compiler.disable`, but imports the compiler at the first call, not at once. torch's own optimizers are
    wrapped by it. If it goes, wrap where the hook is registered, which takes a second.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)


def cudart() -> Any:
    """Return the CUDA runtime as loaded by torch."""
    runtime: Any = torch.cuda.cudart
    return runtime()


# optimizers ------------------------------------------------------------------------------------------------------


def zero_class() -> type[Any] | None:
    """Return torch's `ZeroRedundancyOptimizer`, if the program has imported it."""
    found: type[Any] | None = _loaded("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    return found


def is_zero_optimizer(optimizer: object) -> bool:
    zero = zero_class()
    return zero is not None and isinstance(optimizer, zero)


def zero_local_optimizer(optimizer: Any) -> Any:
    """Return the inner optimizer of a `ZeroRedundancyOptimizer`; None if it steps within DDP's communication.

    The optimizer is public (``optim``), the flag is not; if the flag goes, find out how `step` then becomes a no-op.
    """
    return None if optimizer._overlap_with_ddp else optimizer.optim


def step_calls_hooks(optimizer: object) -> bool:
    """Return True if `step` was wrapped to call the hooks of `register_optimizer_step_pre_hook`.

    `Optimizer.__init__` marks the function it wraps. If the mark goes, this is False: such optimizers are staged
    eagerly, which is slow but correct.
    """
    return bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))


def made_state(optimizer: Any, param: torch.Tensor) -> torch.Tensor | None:
    """Return what torchao's quantizing optimizers would make at the first step, without memory; None for all others.

    Their method is private; if it goes, plain state loaded into such an optimizer is stepped as it is, unquantized.
    """
    make = getattr(optimizer, "_new_buffer", None)
    if not callable(make):
        return None
    local = dtensor_local(param) if is_dtensor(param) else param
    try:
        found: object = make(torch.empty(local.shape, dtype=local.dtype, device="meta"), True)  # noqa: FBT003
    except Exception:  # noqa: BLE001 - another optimizer's method of that name
        return None
    return found if isinstance(found, torch.Tensor) else None


# stores --------------------------------------------------------------------------------------------------------


def store_of(process_group: Any) -> Any:
    """Return the Store a process group was made with, which is its own key space.

    Private, since torch has no public way from a group to its store. If this moves, look for what
    `torch.distributed.distributed_c10d.new_group` keeps beside the backend.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[process_group][1]


def tcp_store(host: str, port: int, *, hosting: bool, timeout: timedelta) -> Any:
    """Return a TCPStore, which is public but not exported for type checkers. Doesn't wait for clients."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, None, hosting, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


# groups ----------------------------------------------------------------------------------------------------------


def make_backend(name: str, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """Return a group of the backend ``name`` that torch doesn't register, so that two jobs may share it.

    NCCL's class is public. Others that were registered (such as torch_npu's HCCL) are in a private table; if that goes,
    look where `torch.distributed.Backend.register_backend` puts its function.
    """
    import torch.distributed as dist

    if name == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise RuntimeError(f"torch has no backend called {name!r}")
    return plugin.creator_fn(store, rank, world, timeout)


def is_mapped_by_deepspeed(param: torch.Tensor) -> bool:
    """Return True if DeepSpeed ZeRO steps partitions in place of ``param``, a parameter of a model."""
    return getattr(param, "_hp_mapping", None) is not None
