"""Every private or version-dependent name of torch that Holdfast uses, in one place.

Guarantees: works with torch 2.7 and later; nothing here imports a heavy part of torch that the program hasn't
imported itself (no DTensor exists before ``torch.distributed.tensor`` is imported, no compiled module before
``torch._dynamo``), so asking "is this a DTensor?" is free for programs that have none.

Does not: hold any logic of Holdfast's own. A name that torch moves is mended here and nowhere else.
"""

# ruff: noqa: SLF001 - private names are what this module is for

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

CHECKPOINT_WRAPPED: Final = "_checkpoint_wrapped_module"
"""The attribute under which an activation-checkpoint wrapper keeps its module."""

COMPILED_MODULE: Final = "_orig_mod"
"""The attribute under which ``torch.compile`` keeps the module it wraps."""

FQN_MODIFIERS: Final = "_fqn_modifiers"
"""A module method naming children that its own state_dict hooks leave out of names (torch 2.6 and later)."""

EXTRA_STATE: Final = "_extra_state"

HF_TIED: Final = "all_tied_weights_keys"
HF_MAY_LACK: Final = "_keys_to_ignore_on_load_missing"
HF_MAY_HAVE: Final = "_keys_to_ignore_on_load_unexpected"
"""Of a ``transformers`` model: what is tied to what, and patterns of names that it doesn't miss in its files, and
doesn't mind there."""

_PLAIN_TYPES: Final = (torch.Tensor, nn.Parameter)

dtensor_spec = attrgetter("_spec")
"""A DTensor's mesh, placements and global metadata: one object, replaced whenever any of them changes."""


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


# tensors -------------------------------------------------------------------------------------------------------


def is_dtensor(value: object) -> bool:
    if type(value) in _PLAIN_TYPES:
        return False
    dtensor = _loaded("torch.distributed.tensor", "DTensor")
    return dtensor is not None and isinstance(value, dtensor)


def wait_for_collective(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a functional collective's result, once the collective is complete; else ``tensor``."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    pending = _loaded("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if pending is not None and isinstance(tensor, pending):
        done: torch.Tensor = tensor.wait()
        return done
    return tensor


def dtensor_local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor object a DTensor holds, without autograd and without waiting."""
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def is_storable_type(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``'s bytes are all there is to it: a subclass with its own dispatch has inner tensors we miss."""
    kind = type(tensor)
    if kind in _PLAIN_TYPES:
        return True
    plain: object = torch.Tensor.__torch_dispatch__
    return kind.__torch_dispatch__ is plain


def is_uninitialized(tensor: torch.Tensor) -> bool:
    return nn.parameter.is_lazy(tensor)


def strided_shard_split(placement: object) -> int | None:
    """The split factor of a strided-shard placement; None for any other placement."""
    strided = _loaded("torch.distributed.tensor.placement_types", "_StridedShard")
    if strided is not None and isinstance(placement, strided):
        return int(placement.split_factor)
    return None


# modules -------------------------------------------------------------------------------------------------------


# The tables every module keeps, as `nn.Module.__setattr__` does: read by identity on each save, which their public
# views (`named_parameters` and the like) are too slow for. If they move, those views still give the same, later.
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


def is_fsdp2_module(module: nn.Module) -> bool:
    fsdp2 = _loaded("torch.distributed.fsdp", "FSDPModule")
    return fsdp2 is not None and isinstance(module, fsdp2)


def class_without_fsdp2(module: nn.Module) -> type[nn.Module]:
    """The class ``module`` had before ``fully_shard`` replaced it by one of its own making."""
    fsdp2 = _loaded("torch.distributed.fsdp", "FSDPModule")
    kinds = type(module).__mro__
    return next(kind for kind in kinds if fsdp2 is None or not issubclass(kind, fsdp2))


def twin(module: nn.Module, kind: type[nn.Module], children: dict[str, nn.Module | None]) -> nn.Module:
    """A module of class ``kind`` with other children, and else with all that ``module`` has: the same, no copies."""
    made: nn.Module = kind.__new__(kind)
    made.__dict__.update(module.__dict__)
    made.__dict__["_modules"] = children
    return made


def fsdp2_is_sharded(module: nn.Module) -> bool:
    """Whether an FSDP2 module has its sharded parameters registered: what is saved and what the optimizer holds."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return all(group is None or group.is_sharded for group in groups)


def overrides_state_dict(module: nn.Module) -> bool:
    """Whether code outside torch changes what ``module.state_dict()`` returns: an override or a hook."""
    kind = type(module)
    for name in ("state_dict", "_save_to_state_dict"):
        method = getattr(kind, name)
        if method is not getattr(nn.Module, name) and not _is_torchs_own(method):
            return True
    hooks: dict[int, Any] = module._state_dict_hooks
    return any(not _is_torchs_own(hook) for hook in hooks.values())


def _is_torchs_own(function: object) -> bool:
    name = getattr(function, "__module__", None) or ""
    return bool(name == "torch" or name.startswith("torch."))


def has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


# devices -------------------------------------------------------------------------------------------------------


def current_accelerator() -> str | None:
    """``"cuda"``, ``"xpu"``, ... where this build of torch has an accelerator that is present; else None."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else device.type


def initialized_device_module(kind: str) -> Any | None:
    """torch's module for a device type, if it is in use: asking one that isn't would make a context on the device."""
    module = torch.get_device_module(kind)
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is None or is_initialized() else None


# the pickles of torch's own formats ----------------------------------------------------------------------------

# What a stored pickle of a tensor calls by name: part of the format of every .pt file, so they can't go. Needed as
# objects because pickle writes a function by reference. If one moves, emit its opcodes as format/torch_record.py does.
rebuild_tensor_v2 = torch._utils._rebuild_tensor_v2
rebuild_tensor_v3 = torch._utils._rebuild_tensor_v3
rebuild_parameter = torch._utils._rebuild_parameter


def storage_info_type() -> Any:
    """Stock DCP's row "this entry is at these bytes of this file", which every ``.metadata`` holds under this path.

    Imported on demand: it brings in most of ``torch.distributed``. If torch moves it, it must keep an alias for the
    checkpoints there are; take that.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def memory_format_encoding_type() -> Any:
    """The enumeration that stands for a memory format in every ``.metadata``, since those can't be pickled.

    On demand for the same reason; it belongs to the pickles there are, so torch can only rename it with an alias.
    """
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING


# tensors that hold no data -------------------------------------------------------------------------------------

# What DTensor and every quantized tensor are made with: private by name, kept since torch 1.12. If it goes, a tensor of
# the meta device under a dispatch mode can stand in, at the price of a device that user code may ask for.
no_torch_function: Any = torch._C._disabled_torch_function_impl
"""As a class's ``__torch_function__``: calls reach its ``__torch_dispatch__`` as operations of aten, and only there."""

_DispatchMode: Any = torch.utils._python_dispatch.TorchDispatchMode


class DispatchMode(_DispatchMode):  # type: ignore[misc]
    """The base of context managers whose ``__torch_dispatch__`` sees every operation of aten on this thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To be skipped, torch imports its compiler with the first operation: two seconds, and nothing is compiled here.
        return False


def without_data(kind: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of the subclass ``kind``, on the CPU by its looks, with ``like``'s sizes and strides and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=torch.device("cpu"),
        requires_grad=False,
    )


# looking at many tensors ---------------------------------------------------------------------------------------


def same_kind_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function of these tensors that is true as long as shape, strides, dtype and device of each stand.

    It may be false where they do (for another `requires_grad`, or in another autograd mode), so false means "look
    closer". None where this torch has nothing of the kind: what ``torch.compile`` guards its graphs with takes a tenth
    of what reading the same attributes takes.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make = getattr(guards, "TensorGuards", None)
    if make is None or not tensors:
        return None
    try:
        check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return check if check(*tensors) is True else None
    except Exception:  # noqa: BLE001 - whatever another torch makes of it, there is another way
        return None


# copying -------------------------------------------------------------------------------------------------------
#
# `Tensor._version` and `torch._foreach_copy_` are private by name only: autograd's documentation and the optimizers
# lean on them. If the counter goes, staging loses its race detection and must fall back on samples; if the foreach
# copy goes, a loop over `Tensor.copy_` does the same and holds the GIL between tensors.

SAME_SIZE_INT: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer dtype of the same element size, for moving bits that have no copy kernel of their own."""

_NUMPY: Final = frozenset({torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64})
"""Of what numpy has too: those that most tensors are of."""

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
    """The counter that every in-place write to ``tensor`` bumps; of the outer tensor, as a DTensor's local has none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds this rank's part: a DTensor's local one, the tensor itself otherwise."""
    return wait_for_collective(dtensor_local(tensor)) if is_dtensor(tensor) else wait_for_collective(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a type that torch handles without asking anyone: its memory is its own."""
    return type(tensor) in _PLAIN_TYPES


def has_copy_kernel(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can be copied as they are, on every device and version."""
    return dtype in _ORDINARY


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as one every kernel takes: itself, or for fp8 and the like its bits as integers of the same size.

    Of a conjugate or negated view without a kernel of its own these are the bits of a resolved copy: for reading only.
    """
    if tensor.dtype in _ORDINARY:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        return _resolved_bits(tensor)
    return tensor.view(SAME_SIZE_INT[tensor.element_size()])


def _resolved_bits(tensor: torch.Tensor) -> torch.Tensor:
    """What a conjugate or negated view shows, in new memory; complex32 has no kernel for both at once."""
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
    """``tensor`` seen through what ``like`` is seen through once more: conjugating and negating undo themselves."""
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


def copy_(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for every dtype: bit for bit where the dtypes are equal, converted otherwise."""
    if target.dtype == source.dtype:
        # The memory under a view takes the source seen through the same view.
        target, source = bits(_same_memory(target, like=target)), bits(_same_memory(source, like=target))
    target.copy_(source)


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target, in one call that doesn't take the GIL between tensors."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of the value, for every dtype."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy_(out, tensor.detach())
    return out


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as one-dimensional uint8."""
    # Not by `reshape`: a dimension of size 1 may have any stride, which a view as bytes would refuse.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def host_memory(tensor: torch.Tensor) -> memoryview:
    """A contiguous host tensor's memory, to read and write as bytes; keeps the tensor alive."""
    array: Any
    if tensor.dtype in _NUMPY and tensor.ndim and tensor.numel():  # the same by fewer steps, for loads of many tensors
        array = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return memoryview(array).cast("B")
    array = as_bytes(tensor).numpy()
    return memoryview(array)


def untraced(function: Any) -> Any:
    """Keep ``torch.compile`` from tracing into ``function``: it is run as it is, between compiled regions.

    `torch.compiler.disable`, but for when the compiler is imported: with the first call, not at once. torch's own
    optimizers are wrapped by it. If it goes, wrap where the hook is registered and pay the second it takes.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return disable(function)


def cudart() -> Any:
    """The CUDA runtime as torch has loaded it."""
    runtime: Any = torch.cuda.cudart
    return runtime()


# stores --------------------------------------------------------------------------------------------------------


def store_of(process_group: Any) -> Any:
    """The Store a process group was made with, which is its own key space.

    Private since torch has no public way from a group to its store. If this moves, look for what
    `torch.distributed.distributed_c10d.new_group` keeps beside the backend.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._world.pg_map[process_group][1]


def tcp_store(host: str, port: int, *, hosting: bool, timeout: timedelta) -> Any:
    """A TCPStore, which is public but not exported as type checkers would have it. Doesn't wait for clients."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, None, hosting, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


# groups ----------------------------------------------------------------------------------------------------------


def make_backend(name: str, store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    """A group of the backend ``name`` that torch keeps no list of, so that two jobs may share it.

    NCCL's class is public. What others have registered (torch_npu's HCCL, say) is found in a private table; if that
    goes, look where `torch.distributed.Backend.register_backend` puts its function.
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
